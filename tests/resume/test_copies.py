"""Copies of snapshots on other hosts: as the originals, and back when those are lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.launcher import SnapshotMemory
from lockstep.resume import copies as module
from lockstep.resume.copies import Copies, Has, steps_of_all
from lockstep.resume.snapshots import Snapshots
from tests.ranks import run_ranks


@contextmanager
def memory() -> Iterator[SnapshotMemory]:
    descriptors = SnapshotMemory.create(0)
    try:
        yield SnapshotMemory(descriptors)
    finally:
        for each in descriptors:
            os.close(each)


class Rank:
    """One of several hosts' ranks, with its snapshots and its part in the copies."""

    def __init__(self, stack: ExitStack, rank: int, group: Any, distance: int, size: int) -> None:
        self.own, self.copies = (stack.enter_context(memory()) for _ in range(2))
        self.weight = torch.full((size,), float(rank))
        self.group = SimpleNamespace(group=group, rank=rank, size=group.size())
        key = bytes([rank]) * 32
        self.snapshots = Snapshots(self.own, {"weight": self.weight}, key, rank, "")
        self.part = Copies(self.group, self.own, self.copies, distance)  # type: ignore[arg-type]

    def take(self, step: int) -> None:
        self.weight += 10
        self.snapshots.take(step, {"step": step}, None)
        self.part.update()

    def has(self) -> Has:
        key = self.snapshots.key.hex()
        return Has(self.snapshots.usable(), self.part.usable(), key, self.part.distance)

    def close(self) -> None:
        self.snapshots.close()
        self.part.close()


@pytest.mark.parametrize(("num_hosts", "distance"), [(2, 1), (3, 1), (2, 2)])
def test_what_a_host_has_lost_comes_back_from_another(
    num_hosts: int, distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    world_size, first_lost = num_hosts * distance, (num_hosts - 1) * distance
    every: dict[int, Has] = {}

    def body(rank: int, group: Any) -> tuple[list[float], list[int], list[int]]:
        with ExitStack() as stack:
            # Ranks may have parts of different sizes, as a sharded optimizer's are.
            here = Rank(stack, rank, group, distance, 300 + 100 * rank)
            for step in (3, 4, 5):
                here.take(step)
            if rank >= first_lost:
                for memory in (here.own, here.copies):
                    memory.discard(0)
                    memory.discard(1)
            every[rank] = here.has()
            group.barrier().wait()
            told = [every[each] for each in range(world_size)]
            steps = steps_of_all(told, with_copies=True)
            here.weight.zero_()
            here.part.fetch(steps[0], told)
            here.snapshots.restore(steps[0])
            here.take(6)  # it goes on
            copied = sorted(step for step, _ in here.part.usable())
            here.close()
            return here.weight.tolist(), steps, copied

    for rank, (weight, steps, copied) in enumerate(run_ranks(world_size, body, backend="gloo")):
        assert weight == [rank + 40.0] * (300 + 100 * rank)
        assert steps == [5, 4]
        assert copied == ([6] if rank >= first_lost else [5, 6])


def test_a_copy_counts_where_it_is_whole_and_of_the_same_program() -> None:
    mine, others = Has([4, 5], [(4, "b"), (5, "b")], "a", 1), Has([], [(5, "a")], "b", 1)
    assert steps_of_all([mine, others], with_copies=True) == [5, 4]
    assert steps_of_all([mine, others], with_copies=False) == []
    assert steps_of_all([mine, others._replace(key="c")], with_copies=True) == []
    # A rank that has no memory for copies can't take part in bringing them back.
    assert steps_of_all([mine, others._replace(distance=0)], with_copies=True) == []


def test_a_copy_whose_bytes_have_changed_is_none() -> None:
    def body(rank: int, group: Any) -> list[int]:
        with ExitStack() as stack:
            here = Rank(stack, rank, group, 1, 300)
            here.take(3)
            here.take(4)
            slot, _ = here.copies.of_step(4)
            here.copies.view(slot)[700] ^= 4
            found = [step for step, _ in here.part.usable()]
            here.close()
            return found

    assert run_ranks(2, body, backend="gloo") == [[3], [3]]


def test_without_room_for_copies_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: SnapshotMemory, slot: int, num_bytes: int) -> memoryview:
        if self in full:
            raise OSError("the disk is full")
        return room(self, slot, num_bytes)

    room, full = SnapshotMemory.room, list[SnapshotMemory]()
    monkeypatch.setattr(SnapshotMemory, "room", refuse)

    def body(rank: int, group: Any) -> list[int]:
        with ExitStack() as stack:
            here = Rank(stack, rank, group, 1, 300)
            full.extend([here.copies] * (rank == 0))
            here.take(3)
            here.take(4)
            found = sorted(step for step, _ in here.part.usable())
            here.close()
            return found

    assert run_ranks(2, body, backend="gloo") == [[], [3, 4]]
    (record,) = caplog.records
    assert "no room for copies of rank 1's snapshots: the disk is full" in record.message
