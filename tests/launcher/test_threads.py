"""``launch(fn, ranks="threads")``: ranks that are threads of the caller's process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import BadLaunch, ContradictoryInit, LaunchError, PeerLost, RankFailed
from lockstep.launcher import launch, threads
from lockstep.world import Starter, World
from tests.training import train
from tests.waiting import until


def test_each_rank_has_its_own_world_and_group() -> None:
    caller = threading.get_ident()

    def body(world: World) -> tuple[World, float]:
        assert threading.get_ident() != caller
        assert lockstep.init() is world
        assert lockstep.init(backend="threads", device="cpu") is world
        assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.world_size)
        assert dist.group.WORLD is world.process_group
        total = torch.tensor(float(world.rank))
        dist.all_reduce(total)
        return world, total.item()

    for rank, (world, total) in enumerate(launch(body, 4, ranks="threads")):
        assert (world.rank, world.world_size) == (rank, 4)
        assert (world.local_rank, world.local_world_size) == (rank, 4)
        assert (world.device, world.starter) == (torch.device("cpu"), Starter.THREADS)
        assert total == 6.0
    assert not dist.is_initialized()


def test_results_and_arguments_are_the_callers_own_objects() -> None:
    lock, seen = threading.Lock(), []  # a lock can't be pickled

    def body(world: World, given: threading.Lock) -> threading.Lock:
        with given:
            seen.append(world.rank)
        return given

    assert launch(body, 3, (lock,), ranks="threads") == [lock] * 3
    assert sorted(seen) == [0, 1, 2]


def test_one_rank() -> None:
    def body(world: World) -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert launch(body, 1, ranks="threads") == [1.0]


def test_init_asked_for_something_else() -> None:
    def body(world: World) -> None:
        with pytest.raises(ContradictoryInit, match="rank 1, but its process group already uses"):
            lockstep.init(backend="gloo")

    launch(lambda world: body(world) if world.rank == 1 else None, ranks="threads")


def test_init_again_after_destroying_joins_again() -> None:
    def body(world: World) -> float:
        dist.destroy_process_group()
        again = lockstep.init()
        assert again is not world
        assert again.rank == world.rank
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert launch(body, 3, ranks="threads") == [3.0] * 3


def test_training_equals_one_process_on_the_whole_batch() -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(12, 4), torch.randn(12, 2)
    start = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).state_dict()

    def trained(world: World | None) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        model.load_state_dict(start)
        part = slice(None)
        if world is not None:
            lockstep.parallelize(model)
            part = slice(world.rank, None, world.world_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(inputs[part], targets[part])] * 5
        train(model, optimizer, batches, lambda net, batch: F.mse_loss(net(batch[0]), batch[1]))
        return model.state_dict()

    alone = trained(None)
    for together in launch(trained, 4, ranks="threads"):
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("inside", [True, False])
def test_modes_are_each_ranks_own_and_start_from_torchs_defaults(inside: bool) -> None:
    """One rank changes every mode there is; then all look, at the same time."""

    def modes() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.empty(1).device.type,
        )

    defaults = modes()

    def body(world: World) -> tuple[Any, ...]:
        assert modes() == defaults
        dist.barrier()
        if world.rank != 0:
            dist.barrier()
            found = modes()
            weight = torch.ones(2, requires_grad=True)
            product = torch.ones(2, 2) @ weight
            assert product.dtype == torch.float32
            product.sum().backward()
            assert weight.grad is not None
            dist.barrier()
            return found
        with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
            dist.barrier()
            changed = modes()
            dist.barrier()
        return changed

    if inside:
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            results = launch(body, 3, ranks="threads")
    else:
        results = launch(body, 3, ranks="threads")
    assert results[0] != defaults
    assert results[1:] == [defaults, defaults]
    assert modes() == defaults


def test_number_of_threads_is_each_ranks_and_the_callers_stays() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    assert launch(lambda world: torch.get_num_threads(), num_threads=3, ranks="threads") == [3, 3]
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == before
    assert found == [before]


def test_first_failure_with_its_traceback_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []

    def body(world: World) -> None:
        dist.barrier()
        if world.rank == 1:
            raise KeyError("no such column")
        try:
            dist.all_reduce(torch.ones(1))
        except PeerLost as error:
            lost.append(str(error))
            raise

    monkeypatch.setattr(threads, "_TO_FOLLOW_SECONDS", 110.0)
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 3 failed first") as caught:
        launch(body, 3, ranks="threads")
    assert time.monotonic() - start < 100  # less than a rank that hangs is waited for
    assert (caught.value.rank, caught.value.exit_code, caught.value.signal) == (1, 1, None)
    assert caught.value.traceback is not None
    assert caught.value.traceback.startswith("Traceback (most recent call last):\n")
    assert "in body\n" in caught.value.traceback
    assert caught.value.traceback.endswith("KeyError: 'no such column'\n")
    assert "lockstep/launcher" not in caught.value.traceback
    assert "failed ranks 0, 2" in str(caught.value)
    assert len(lost) == 2
    assert all("Rank 1 is gone" in text for text in lost)


def test_rank_that_aborts_its_group_first_is_to_blame_all_the_same() -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            assert world.process_group is not None
            world.process_group.abort()
            time.sleep(0.3)  # the others' PeerLost comes earlier
            raise KeyError("the reason")
        dist.barrier()

    with pytest.raises(RankFailed, match="rank 1 of 2 failed first"):
        launch(body, ranks="threads")


def test_failure_ends_the_wait_for_a_new_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> None:
        if world.rank == 2:
            raise KeyError("before the new group")
        dist.new_group([0, 1, 2], backend="threads")

    monkeypatch.setattr(threads, "_TO_FOLLOW_SECONDS", 110.0)
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 2 of 3 failed first"):
        launch(body, 3, ranks="threads")
    assert time.monotonic() - start < 100  # less than a rank that hangs is waited for


def test_rank_that_returns_early_is_lost_to_the_others() -> None:
    def body(world: World) -> None:
        if world.rank == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailed, match=r"PeerLost: Rank 1 has left the group"):
        launch(body, ranks="threads")


@pytest.mark.parametrize(("value", "code"), [(0, 1), (3, 3), ("words", 1), (None, 1), (256, 1)])
def test_exit_is_a_failure(value: object, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(world: World) -> None:
        sys.exit(value)  # type: ignore[arg-type]

    with pytest.raises(RankFailed, match="rank 0 of 1 failed first") as caught:
        launch(leave, 1, ranks="threads")
    assert caught.value.exit_code == code
    assert ("words" in capsys.readouterr().err) == (value == "words")


def test_thread_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_TO_FOLLOW_SECONDS", 0.5)
    end = threading.Event()

    def body(world: World) -> None:
        if world.rank == 0:
            raise KeyError("first")
        end.wait()

    world_before = dist.distributed_c10d._world
    with pytest.raises(RankFailed, match=r"Still running 0\.5 s later: rank 1") as caught:
        launch(body, ranks="threads")
    assert caught.value.rank == 0
    end.set()
    assert until(lambda: dist.distributed_c10d._world is world_before)


@pytest.mark.parametrize("takes_itself", [False, True])
def test_interrupt_ends_the_ranks_waits(
    takes_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the system gives the signal to a rank's thread, not to the one that waits."""
    interrupt = signal.raise_signal if takes_itself else partial(os.kill, os.getpid())

    def body(world: World) -> None:
        if world.rank == 0:
            interrupt(signal.SIGINT)  # as Ctrl-C does
        dist.barrier() if world.rank == 0 else dist.new_group([0, 1], backend="threads")

    monkeypatch.setattr(threads, "_TO_FOLLOW_SECONDS", 110.0)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(body, ranks="threads")
    assert time.monotonic() - start < 100  # less than a rank that hangs is waited for


def test_nothing_of_torchs_is_changed_afterwards() -> None:
    world, hook = dist.distributed_c10d._world, sys.excepthook
    launch(lambda world: dist.barrier(), ranks="threads")
    with pytest.raises(RankFailed):
        launch(lambda world: 1 / 0, ranks="threads")
    assert dist.distributed_c10d._world is world
    assert sys.excepthook is hook
    # By name, the process's own groups are found again.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert dist.distributed_c10d._resolve_process_group(group.group_name) is not None
    finally:
        dist.destroy_process_group()


def test_launches_at_once_and_within_a_rank() -> None:
    def inner(world: World, tens: int) -> float:
        total = torch.tensor(float(world.rank + tens))
        dist.all_reduce(total)
        return total.item()

    def outer(world: World) -> list[float]:
        found = launch(inner, 2, (10 * world.rank,), ranks="threads")
        assert dist.get_world_size() == 3
        dist.barrier()
        return found

    assert launch(outer, 3, ranks="threads") == [[1.0] * 2, [21.0] * 2, [41.0] * 2]


def test_one_rank_at_a_time_starts_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries do around a fork may refuse another one meanwhile."""
    start, now = BaseProcess.start, threading.Semaphore(1)
    together: list[bool] = []

    def watched(process: BaseProcess) -> None:
        together.append(not now.acquire(timeout=0.05))
        start(process)
        if not together[-1]:
            now.release()

    monkeypatch.setattr(BaseProcess, "start", watched)

    def body(_: World) -> int:
        loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=2)
        return sum(map(len, loader))

    assert launch(body, nprocs=3, ranks="threads") == [8] * 3
    assert len(together) == 6
    assert not any(together)
    assert BaseProcess.start is watched


def test_torchs_own_ddp_runs_over_it() -> None:
    inputs = torch.randn(6, 3)

    def body(world: World) -> torch.Tensor:
        torch_model = nn.Linear(3, 1)
        with torch.no_grad():
            torch_model.weight.fill_(1.0)
        ddp = nn.parallel.DistributedDataParallel(torch_model)
        ddp(inputs[world.rank :: 3]).mean().backward()
        assert torch_model.weight.grad is not None
        return torch_model.weight.grad

    for gradient in launch(body, 3, ranks="threads"):
        torch.testing.assert_close(gradient, inputs.mean(0, keepdim=True))


def good(world: World) -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fn": "train"}, "given a str to call"),
        ({"nprocs": 0}, "number of ranks is 0"),
        ({"num_threads": 0}, "threads per rank is 0"),
        ({"log_dir": "logs"}, "can't be kept in log_dir"),
        ({"ranks": "fibres"}, "ranks is 'fibres'"),
    ],
)
def test_launch_refuses(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BadLaunch, match=said) as caught:
        launch(**{"fn": good, "ranks": "threads", **arguments})
    assert isinstance(caught.value, LaunchError)
