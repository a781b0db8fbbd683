"""What the World has for the main rank: is_main, print() and main_first()."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import CollectiveFailed, CollectiveMismatch, CollectiveTimeout, PeerLost
from lockstep.world import Starter
from tests.ranks import BACKENDS, run_ranks

every_group = pytest.mark.parametrize("backend", [*BACKENDS, "shm"])


def fail_inside(world: lockstep.World, error: Exception, ranks: set[int], **options: Any) -> None:
    """Go through the context; ``ranks`` raise in it."""
    with world.main_first(**options):
        if world.rank in ranks:
            raise error


def world_of(group: dist.ProcessGroup, ranks_of_a_host: int = 99) -> lockstep.World:
    rank, size = group.rank(), group.size()
    local = rank % ranks_of_a_host, min(ranks_of_a_host, size)
    return lockstep.World(rank, size, *local, torch.device("cpu"), group, Starter.PROCESS_GROUP)


def on_ranks(num: int, body: Callable[[lockstep.World], Any], **options: Any) -> list[Any]:
    ranks_of_a_host = options.pop("ranks_of_a_host", 99)
    return run_ranks(num, lambda _, group: body(world_of(group, ranks_of_a_host)), **options)


def test_the_main_rank_alone_prints_and_flushes() -> None:
    class File(io.StringIO):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    def body(world: lockstep.World) -> tuple[bool, str, int]:
        file = File()
        world.print("a", 1, sep="-", end="!", file=file)
        world.print(file=file, flush=False)
        return world.is_main, file.getvalue(), file.flushes

    assert on_ranks(2, body) == [(True, "a-1!\n", 1), (False, "", 0)]


def test_print_prints_to_the_output_at_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    lockstep.init().print("loss", 0.5)
    assert capsys.readouterr().out == "loss 0.5\n"


@every_group
@pytest.mark.parametrize(("ranks_of_a_host", "local"), [(99, False), (2, False), (2, True)])
def test_main_ranks_go_first(backend: str, ranks_of_a_host: int, local: bool) -> None:
    lock, order = threading.Lock(), []
    mains = {0, 2} if local else {0}

    def body(world: lockstep.World) -> str:
        with world.main_first(local=local):
            with lock:
                order.append(world.rank)
            return "left by a return"

    results = on_ranks(4, body, backend=backend, ranks_of_a_host=ranks_of_a_host)
    assert results == ["left by a return"] * 4
    assert set(order[: len(mains)]) == mains
    assert sorted(order) == [0, 1, 2, 3]


@every_group
def test_others_are_told_that_the_main_rank_failed_inside(backend: str) -> None:
    def body(world: lockstep.World) -> bool:
        kind = FileNotFoundError if world.is_main else CollectiveFailed
        with pytest.raises(kind, match="no data") as caught:
            fail_inside(world, FileNotFoundError("no data"), {0, 1, 2})  # others don't begin
        if isinstance(caught.value, CollectiveFailed):
            assert caught.value.ranks == (0,)
            assert str(caught.value).startswith(
                "Rank 0 failed inside of main_first(), for which the others waited: "
                "FileNotFoundError: no data"
            )
        # The group works on. An error of another rank inside is its own.
        with pytest.raises(ZeroDivisionError) if world.rank == 1 else contextlib.nullcontext():
            fail_inside(world, ZeroDivisionError(), {1})
        return lockstep.any(False, process_group=world.process_group)

    assert on_ranks(3, body, backend=backend) == [False] * 3


def test_all_ranks_stop_if_the_first_of_one_host_failed() -> None:
    def body(world: lockstep.World) -> str:
        with pytest.raises((OSError, CollectiveFailed)) as caught:
            fail_inside(world, OSError("disk full"), {2}, local=True)
        return str(caught.value)

    *others, last = on_ranks(4, body, ranks_of_a_host=2)
    assert others.pop(2) == "disk full"
    assert {*others, last} == {
        "Rank 2 failed inside of main_first(), for which the others waited: OSError: disk full"
    }


@every_group
def test_a_main_rank_that_does_not_come_is_named(backend: str) -> None:
    def body(world: lockstep.World) -> None:
        if not world.is_main:
            with pytest.raises((CollectiveTimeout, PeerLost)) as caught, world.main_first():
                pass
            assert backend == "gloo" or caught.value.ranks == (0,)

    on_ranks(2, body, backend=backend, group_timeout_seconds=1)


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_another_call_is_named(backend: str) -> None:
    def body(world: lockstep.World) -> None:
        with pytest.raises(CollectiveMismatch, match="main_first"):
            another_call(world)

    on_ranks(2, body, backend=backend)


def another_call(world: lockstep.World) -> None:
    if world.is_main:
        lockstep.any(True, process_group=world.process_group)
    with world.main_first():
        pass


def test_main_first_is_refused_in_join() -> None:
    def body(world: lockstep.World) -> None:
        group = world.process_group
        model = lockstep.parallelize(torch.nn.Linear(1, 1), process_group=group)
        with pytest.raises(CollectiveFailed, match="inside of join"), lockstep.join(model):
            fail_inside(world, ValueError(), set())

    on_ranks(2, body)


def test_one_rank_goes_at_once_and_keeps_its_error() -> None:
    with lockstep.init().main_first(local=True):
        pass
    with pytest.raises(KeyError), lockstep.init().main_first():
        raise KeyError


def cache(world: lockstep.World, folder: str) -> bool:
    """Whether this rank has made the file."""
    path = Path(folder, "cache")
    with world.main_first():
        is_new = not path.exists()
        if is_new:
            path.touch()
    return is_new


@pytest.mark.forks
@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_a_cache_is_filled_once(tmp_path: Path, ranks: Any) -> None:
    found = lockstep.launch(cache, 3, (str(tmp_path),), ranks=ranks)
    assert found == [True, False, False]
