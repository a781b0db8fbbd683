"""Whether the tests on simulated devices notice that a wait is missing: in copies of the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import lockstep
from tests.simulated.build import CannotBuild, environment

SOURCE = Path(lockstep.__file__).parent


class Mutation(NamedTuple):
    """A change of the source, and tests that fail then.

    Attributes:
        file: The source file.
        there, instead: What is there, once, and what takes its place.
        tests: What pytest is to run.
        delay: Of the streams.
    """

    file: str
    there: str
    instead: str
    tests: str
    delay: str = "lazy"


_COLLECTIVES = "tests/simulated/test_collectives.py::"
_BUFFERS = _COLLECTIVES + "test_buffers_are_there_after_a_backward"
_SHARDED = _COLLECTIVES + "test_sharded_steps_are_those_of_one_process"
_OVERLAP = "tests/simulated/test_overlap.py::"
_REPLICAS = "tests/simulated/test_replicas.py::"

MUTATIONS = {
    "a bucket isn't waited for": Mutation(
        "grad/bucket.py",
        "            self.now.work = None\n            work.wait()\n",
        "            self.now.work = None\n",
        _SHARDED,
    ),
    "a communication hook isn't waited for": Mutation(
        "grad/comm_hook.py",
        "value: Any = future.wait()",
        "value: Any = future.value()",
        _COLLECTIVES + "test_gradients_that_a_hook_reduces_are_there_after_a_backward",
    ),
    "a broadcast of buffers isn't waited for": Mutation(
        "comm/any_group.py",
        "                work.wait()\n            except",
        "                pass\n            except",
        _BUFFERS,
    ),
    "means of buffers aren't waited for": Mutation(
        "nn/buffers.py",
        "                work.wait()\n",
        "",
        _BUFFERS,
    ),
    "a hook of buffers isn't waited for": Mutation(
        "nn/buffers.py",
        "        future.wait()\n",
        "        pass\n",
        _BUFFERS,
    ),
    "gathered gradients and parameters aren't waited for": Mutation(
        "comm/any_group.py",
        "    start_all_gather_in_place(group, memory).wait()",
        "    start_all_gather_in_place(group, memory)",
        _SHARDED,
    ),
    "sums of norms aren't waited for": Mutation(
        "optim/clip.py",
        "start_all_reduce(group, total, op).wait()",
        "start_all_reduce(group, total, op)",
        _SHARDED,
    ),
    "sums of losses aren't waited for": Mutation(
        "comm/join_state.py",
        "start_all_reduce(group, tensor.view(-1)).wait()",
        "start_all_reduce(group, tensor.view(-1))",
        "tests/simulated/test_sums.py",
    ),
    "no stream waits for an update": Mutation(
        "optim/arriving.py",
        "            collective.wait()\n            self._streams",
        "            self._streams",
        _SHARDED,
    ),
    "the first stream alone waits for an update": Mutation(
        "optim/arriving.py",
        "        if stream.stream_id not in self._streams:\n",
        "        if not self._streams:\n",
        _OVERLAP + "test_each_stream_that_reads_parameters_waits_for_their_update",
    ),
    "a view of a parameter is had before its update": Mutation(
        "optim/arriving.py",
        "            self._event.synchronize()\n",
        "            pass\n",
        _OVERLAP + "test_what_a_stream_gets_from_a_parameter_may_be_read_by_another",
    ),
    "replaced memory is free before it is read": Mutation(
        "optim/flat.py",
        "data.record_stream(torch.accelerator.current_stream(data.device))",
        "pass",
        _OVERLAP + "test_data_of_another_stream_is_copied_before_its_memory_is_used_again",
    ),
    "replicas aren't on the caller's stream": Mutation(
        "nn/replicas/devices.py",
        "device_index(device.index), stream:",
        "device_index(device.index):",
        _REPLICAS + "test_replicas_work_on_the_stream_of_the_caller",
    ),
    "an output is copied to the CPU without a wait": Mutation(
        "nn/replicas/devices.py",
        'non_blocking=device.type != "cpu")',
        "non_blocking=True)",
        "tests/gpu/test_data_parallel.py::TestResults::test_outputs_and_gradients",
    ),
    "a parameter is copied to the CPU without a wait": Mutation(
        "nn/replicas/kept_replica.py",
        'non_blocking=leaf.device.type != "cpu")',
        "non_blocking=True)",
        _REPLICAS + "test_a_copy_of_a_parameter_on_the_cpu_is_complete_when_its_replica_reads_it",
    ),
    "groups launch in the order of their gradients": Mutation(
        "nn/backward.py",
        "earlier, later = self._sharing_gpus()",
        "earlier, later = [], []",
        "tests/simulated/test_launch_order.py",
    ),
    "a gradient is accumulated on the stream that is current": Mutation(
        "nn/autograd.py",
        "    if not leaves:\n        return []\n    with torch.enable_grad():\n        uses",
        "    return []\n    with torch.enable_grad():\n        uses",
        "tests/simulated/test_streams.py",
        "2,7",
    ),
}


def text_of(mutation: Mutation, source: Path = SOURCE) -> str:
    """The file of the mutation, which has what is to be replaced in one place."""
    text = (source / mutation.file).read_text()
    assert text.count(mutation.there) == 1, f"mutations of {mutation.file} are of another text"
    return text


def test_mutations_are_of_the_source_as_it_is() -> None:
    for mutation in MUTATIONS.values():
        text_of(mutation)


@pytest.mark.long
@pytest.mark.parametrize("name", MUTATIONS)
def test_missing_wait_is_noticed(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    try:
        variables = environment(delay=mutation.delay, devices=3)
    except CannotBuild as error:
        pytest.skip(str(error))
    copy = shutil.copytree(SOURCE, tmp_path / "lockstep")
    text = text_of(mutation, copy)
    (copy / mutation.file).write_text(text.replace(mutation.there, mutation.instead))
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.simulated.plugin"]
    run = subprocess.run(
        [*command, *mutation.tests.split()],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-3000:]
