"""Ranks that make different calls: all are told in the same exchange, and go on from there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import CollectiveMismatch
from tests.comm.groups import OURS, assert_all_are, run_on
from tests.counts import num_examples, pairs
from tests.waiting import until

SIZES = (2, 3)
over_ours_and_sizes = pytest.mark.parametrize(
    ("backend", "size"), [(backend, size) for backend in OURS for size in SIZES]
)

# One that takes one exchange, one that takes two, and one that takes several pieces.
SMALL, LARGE, HUGE = 4, 20_000, 300_001


def all_reduce(group: dist.ProcessGroup, numel: int = SMALL) -> dist.Work:
    return dist.all_reduce(torch.ones(numel), group=group, async_op=True)


def one_calls_another(group: dist.ProcessGroup, odd: int, numel: int = SMALL) -> None:
    if group.rank() == odd:
        dist.all_reduce(torch.ones(numel), group=group)
    else:
        dist.barrier(group=group)


def assert_usable(group: dist.ProcessGroup) -> None:
    """Fail unless calls of all ranks meet each other, and no earlier ones."""
    ranks = range(group.size())
    for number, numel in enumerate([SMALL, LARGE, HUGE, SMALL], 1):
        tensor = torch.full((numel,), float(10**number * (group.rank() + 1)))
        dist.all_reduce(tensor, group=group)
        assert_all_are(10**number * sum(rank + 1 for rank in ranks), tensor)
        everyone = [torch.empty(numel) for _ in ranks]
        dist.all_gather(everyone, torch.full((numel,), number + group.rank() / 8), group=group)
        for rank, local in enumerate(everyone):
            assert_all_are(number + rank / 8, local)
    dist.barrier(group=group)


@pairs("backend, size, numel", OURS, SIZES, [SMALL, LARGE, HUGE])
def test_ranks_go_on_after_a_mismatch(backend: str, size: int, numel: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for odd in range(size):
            with pytest.raises(CollectiveMismatch) as caught:
                one_calls_another(group, odd, numel)
            others = {*range(size)} - {odd} if group.rank() == odd else {odd}
            assert set(caught.value.ranks) == others
            assert f"all_reduce(SUM) of ({numel},) float32" in str(caught.value)
            assert "called barrier()" in str(caught.value)
            assert_usable(group)

    run_on(backend, size, body)


@pairs("backend, size, waits_for, is_late", OURS, SIZES, ["first", "last"], [False, True])
def test_calls_in_flight_meet_no_later_ones(
    backend: str, size: int, waits_for: str, is_late: bool
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for odd in range(size):
            if group.rank() == odd:
                works = [all_reduce(group, numel) for numel in (LARGE, SMALL, HUGE, SMALL)]
                if is_late:  # until the queue's own thread has met the mismatch
                    assert until(works[0].is_completed)
                    works += [all_reduce(group), all_reduce(group)]
                with pytest.raises(CollectiveMismatch, match=r"called barrier\(\)"):
                    works[0 if waits_for == "first" else -1].wait()
            else:
                with pytest.raises(CollectiveMismatch):
                    dist.barrier(group=group)
            assert_usable(group)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_both_sides_have_calls_in_flight(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        numels = (SMALL, LARGE, SMALL) if group.rank() == 0 else (SMALL, SMALL, SMALL, SMALL)
        works = [all_reduce(group, numel) for numel in numels]
        assert works[0].wait()
        with pytest.raises(CollectiveMismatch, match=r"\(20000,\)"):
            works[group.rank()].wait() and works[-1].wait()
        assert_usable(group)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_a_rank_that_goes_on_call_by_call_breaks_the_group(backend: str, size: int) -> None:
    """The call that was not carried out here may be the next one of another rank."""

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            works = [all_reduce(group), all_reduce(group)]
            for work in works:
                with pytest.raises(CollectiveMismatch):
                    work.wait()
        else:
            with pytest.raises(CollectiveMismatch):
                dist.barrier(group=group)
            with pytest.raises(CollectiveMismatch):
                all_reduce(group).wait()
        with pytest.raises(CollectiveMismatch):
            all_reduce(group).wait()

    run_on(backend, size, body)


@over_ours_and_sizes
def test_a_mismatch_that_no_caller_was_told_of_fails_the_next_call(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            work = all_reduce(group)
            assert until(work.is_completed)
            del work
        with pytest.raises(CollectiveMismatch, match=r"called barrier\(\)"):
            dist.barrier(group=group)
        assert_usable(group)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_a_mismatch_that_is_read_from_the_work_is_told(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            work = all_reduce(group)
            assert until(work.is_completed)
            assert not work.is_success()
            assert isinstance(work.exception(), CollectiveMismatch)
        else:
            with pytest.raises(CollectiveMismatch):
                dist.barrier(group=group)
        assert_usable(group)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_a_mismatch_that_a_future_holds_breaks_the_group(backend: str, size: int) -> None:
    """Who waits for a future can't be seen."""

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            with pytest.raises(RuntimeError, match="CollectiveMismatch"):
                all_reduce(group).get_future().wait()
        else:
            with pytest.raises(CollectiveMismatch):
                dist.barrier(group=group)
        for _ in range(2):
            with pytest.raises(CollectiveMismatch):
                dist.barrier(group=group)

    run_on(backend, size, body)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("third", ["is late", "leaves"])
def test_a_mismatch_that_not_all_ranks_have_come_to_breaks_the_group(
    backend: str, third: str
) -> None:
    others_have_failed = threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> None:
        is_third = group.rank() == 2
        if is_third and third == "leaves":
            time.sleep(0.5)
            return
        if is_third:
            others_have_failed.wait(20)
        for number in range(2):
            with pytest.raises(CollectiveMismatch, match=r"called barrier\(\)"):
                one_calls_another(group, 0)
            if not is_third and not number and third == "is late":
                others_have_failed.wait(20)

    run_on(backend, 3, body, seconds=2)


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a mismatch be told to those who are there after a second in place of five."""
    for module in ("threads.transport", "shm.barrier"):
        monkeypatch.setattr(f"lockstep.comm.{module}.MISMATCH_SECONDS", 1.0)


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("backend", OURS)
def test_a_mismatch_does_not_wait_long_for_ranks_that_are_elsewhere(backend: str) -> None:
    told = threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() < 2:
            with pytest.raises(CollectiveMismatch, match=r"called barrier\(\)"):
                one_calls_another(group, 0)
        told.wait(20)

    run_on(backend, 3, body, seconds=60)


@pytest.mark.shortened
@pairs("backend, size, seed", OURS, SIZES, range(3))
def test_ranks_go_on_after_random_mismatches(backend: str, size: int, seed: int) -> None:
    """Each round has equal calls, then other ones on each rank, then any number in flight."""

    def body(group: dist.ProcessGroup) -> None:
        common, local = random.Random(seed), random.Random(f"{seed} {group.rank()}")
        for _ in range(num_examples(40)):
            works = [all_reduce(group, numel) for numel in common.choices([SMALL, LARGE], k=3)]
            num_equal, odd = common.randrange(3), common.randrange(size)
            for work in works[:num_equal]:
                work.wait()
            calls: list[Callable[[], object]] = [
                lambda: dist.barrier(group=group, async_op=True),
                lambda: all_reduce(group),
                lambda: all_reduce(group, LARGE),
                lambda: all_reduce(group, HUGE),
            ]
            works = [calls[0]() if group.rank() == odd else calls[local.randrange(1, 4)]()]
            works += [local.choice(calls)() for _ in range(local.randrange(4))]
            if local.random() < 0.3:
                time.sleep(0.05)
            with pytest.raises(CollectiveMismatch):
                local.choice(works).wait()
            assert_usable(group)

    run_on(backend, size, body)
