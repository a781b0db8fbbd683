"""Calls that are carried out at once: the barriers of a training step."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.work import start_thread
from lockstep.errors import CollectiveMismatch
from tests.comm.groups import OURS, assert_all_are, run_on

over_ours = pytest.mark.parametrize("backend", OURS)

SMALL, LARGE = 4, 700_001


@over_ours
def test_a_named_barrier_comes_after_the_calls_before_it(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(LARGE)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        group.named_barrier("here")
        assert_all_are(group.size(), tensor)
        assert work.wait()

    run_on(backend, 3, body)


@over_ours
def test_different_names_are_a_mismatch_after_which_the_group_works(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(CollectiveMismatch, match=r"called (here|there)"):
            group.named_barrier("here" if group.rank() else "there")
        tensor = torch.ones(SMALL)
        dist.all_reduce(tensor, group=group)
        assert_all_are(group.size(), tensor)
        group.named_barrier("here")

    run_on(backend, 2, body)


@over_ours
def test_two_threads_of_a_rank_may_meet_at_once(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank():
            time.sleep(0.05)  # both threads of rank 0 have come
            group.named_barrier("here")
            group.named_barrier("here")
            return
        other = start_thread(lambda: group.named_barrier("here"), "other")
        group.named_barrier("here")
        other.join(60)
        assert not other.is_alive()

    run_on(backend, 2, body)


@over_ours
def test_a_named_barrier_in_the_handler_of_a_signal_is_refused(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        def run(deadline: object) -> None:
            with pytest.raises(RuntimeError, match="in the middle of another one"):
                group.named_barrier("inside")

        group._queue.run(run)
        group.named_barrier("afterwards")

    run_on(backend, 2, body)
