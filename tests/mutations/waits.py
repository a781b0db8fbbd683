"""Waits of streams that are missing, which the tests on simulated devices notice."""

from __future__ import annotations

from tests.mutations import Mutation, mutation

_COLLECTIVES = "tests/simulated/test_collectives.py::"
_BUFFERS = _COLLECTIVES + "test_buffers_are_there_after_a_backward"
_SHARDED = _COLLECTIVES + "test_sharded_steps_are_those_of_one_process"
_OVERLAP = "tests/simulated/test_overlap.py::"
_REPLICAS = "tests/simulated/test_replicas.py::"


def _wait(test: str, path: str, *texts: str, delay: str = "lazy") -> Mutation:
    return mutation(test, path, *texts, delay=delay)


WAITS = [
    # A bucket isn't waited for.
    _wait(
        _SHARDED,
        "grad/bucket.py",
        "            self.contents.now.work = None\n            work.wait()\n",
        "            self.contents.now.work = None\n",
    ),
    # A communication hook isn't waited for.
    _wait(
        _COLLECTIVES + "test_gradients_that_a_hook_reduces_are_there_after_a_backward",
        "grad/comm_hook.py",
        "value: Any = future.wait()",
        "value: Any = future.value()",
    ),
    # A broadcast of buffers isn't waited for.
    _wait(
        _BUFFERS,
        "comm/broadcast.py",
        "                work.wait()\n            except",
        "                pass\n            except",
    ),
    # Means of buffers aren't waited for.
    _wait(_BUFFERS, "nn/buffers.py", "                work.wait()\n", ""),
    # A hook of buffers isn't waited for.
    _wait(_BUFFERS, "nn/buffers.py", "        future.wait()\n", "        pass\n"),
    # Gathered gradients and parameters aren't waited for.
    _wait(
        _SHARDED,
        "comm/started.py",
        "    start_all_gather_in_place(group, memory).wait()",
        "    start_all_gather_in_place(group, memory)",
    ),
    # Sums of norms aren't waited for.
    _wait(
        _SHARDED,
        "optim/clip.py",
        "start_all_reduce(group, total, op).wait()",
        "start_all_reduce(group, total, op)",
    ),
    # Sums of losses aren't waited for.
    _wait(
        "tests/simulated/test_sums.py",
        "comm/join_state.py",
        "start_all_reduce(group, tensor.view(-1)).wait()",
        "start_all_reduce(group, tensor.view(-1))",
    ),
    # No stream waits for an update.
    _wait(
        _SHARDED,
        "optim/arriving.py",
        "            collective.wait()\n            self._streams",
        "            self._streams",
    ),
    # A view of a parameter is had before its update.
    _wait(
        _OVERLAP + "test_what_a_stream_gets_from_a_parameter_may_be_read_by_another",
        "optim/arriving.py",
        "            self._event.synchronize()\n",
        "            pass\n",
    ),
    # Replaced memory is free before it is read.
    _wait(
        _OVERLAP + "test_data_of_another_stream_is_copied_before_its_memory_is_used_again",
        "optim/flat.py",
        "data.record_stream(torch.accelerator.current_stream(data.device))",
        "pass",
    ),
    # Replicas aren't on the caller's stream.
    _wait(
        _REPLICAS + "test_replicas_work_on_the_stream_of_the_caller",
        "nn/replicas/devices.py",
        "device_index(device.index), stream:",
        "device_index(device.index):",
    ),
    # An output is copied to the CPU without a wait.
    _wait(
        "tests/gpu/test_data_parallel.py::TestResults::test_outputs_and_gradients",
        "nn/replicas/devices.py",
        'non_blocking=device.type != "cpu")',
        "non_blocking=True)",
    ),
    # A parameter is copied to the CPU without a wait.
    _wait(
        _REPLICAS + "test_a_copy_of_a_parameter_on_the_cpu_is_complete_when_its_replica_reads_it",
        "nn/replicas/kept_replica.py",
        'non_blocking=leaf.device.type != "cpu")',
        "non_blocking=True)",
    ),
    # Groups launch in the order of their gradients.
    _wait(
        "tests/simulated/test_launch_order.py",
        "nn/backward.py",
        "earlier, later = self._sharing_gpus()\n        for sync in earlier:",
        "earlier, later = [], []\n        for sync in earlier:",
    ),
    # A gradient is accumulated on the stream that is current.
    _wait(
        "tests/simulated/test_streams.py",
        "nn/autograd.py",
        "    if not leaves:\n        return []\n    with torch.enable_grad():\n        uses",
        "    return []\n    with torch.enable_grad():\n        uses",
        delay="2,7",
    ),
    # So is one of a model that was moved, by torch or by hand.
    _wait(
        "tests/simulated/test_streams.py::test_gradients_of_branches_on_two_streams",
        "nn/engine.py",
        "        if self._tracked.have_other_forms():\n",
        "        if False:\n",
        delay="2,7",
    ),
    # The engine isn't told that its model has been moved to the device.
    _wait(
        "tests/simulated/test_devices.py::"
        "test_a_model_that_is_moved_before_a_backward_has_its_means_there",
        "nn/moves.py",
        "                engine.take_move()",
        "                pass",
    ),
    # Random programs on random streams notice a bucket that isn't waited for, too.
    _wait(
        "tests/simulated/test_random_programs.py",
        "grad/bucket.py",
        "            self.contents.now.work = None\n            work.wait()\n",
        "            self.contents.now.work = None\n",
    ),
]
