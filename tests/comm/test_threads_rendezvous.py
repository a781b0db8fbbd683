"""How ranks that are threads find each other through a store, and in torch.distributed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.comm import THREADS, RankThreads, SharedMemoryGroup, a_rank_of, register_backends
from lockstep.comm.threads.ranks import changed
from lockstep.comm.threads.transport import join
from lockstep.errors import RendezvousFailed
from tests.comm.thread_groups import LATER, all_reduce, outcomes


def test_ranks_find_each_other_through_a_store() -> None:
    store = dist.HashStore()

    def body(rank: int, _: SharedMemoryGroup) -> list[float]:
        sums = []
        for name in ("first", "second"):  # each prefix is a group of its own
            team = join(dist.PrefixStore(name, store), rank, 3, LATER)
            group = SharedMemoryGroup(team, THREADS, timedelta(seconds=LATER))
            sums.append(all_reduce(group).item())
            group.shutdown()
        return sums

    assert outcomes(3, body) == [[3.0, 3.0]] * 3


def test_join_says_who_did_not_come() -> None:
    with pytest.raises(RendezvousFailed, match=r"Rank 1 waited up to 0.1 s for ranks 0, 2"):
        join(dist.HashStore(), 1, 3, 0.1)


def test_join_refuses_a_rank_of_another_process() -> None:
    store = dist.HashStore()
    store.set("room", "1/of-another-process")
    with pytest.raises(RendezvousFailed, match="one came from process 1 and this is process"):
        join(store, 1, 2, LATER)


def test_nobody_waits_for_a_rank_that_failed_before_it_came() -> None:
    crowd = RankThreads()
    errors = []

    def wait() -> None:
        with a_rank_of(crowd), pytest.raises(RendezvousFailed, match="Rank 1 broke") as caught:
            join(dist.HashStore(), 0, 2, LATER)
        errors.append(caught.value)

    waits = threading.Thread(target=wait)
    waits.start()
    time.sleep(0.1)
    crowd.fail("Rank 1 broke.")
    waits.join(LATER)
    comes_later = threading.Thread(target=wait)
    comes_later.start()
    comes_later.join(LATER)
    assert len(errors) == 2


def test_rooms_are_forgotten() -> None:
    from lockstep.comm.threads import transport

    before = set(transport._states)  # which a failure in another test may have left
    store = dist.HashStore()
    outcomes(2, lambda rank, _: join(store, rank, 2, LATER).leave())
    gc.collect()
    assert set(transport._states) <= before


# As a backend of torch.distributed.


def test_torch_distributed_knows_each_ranks_groups_only_in_its_thread() -> None:
    register_backends()
    store, crowd = dist.HashStore(), RankThreads()
    worlds_before = dist.distributed_c10d._world

    def body(rank: int, _: SharedMemoryGroup) -> tuple[Any, ...]:
        with a_rank_of(crowd):
            assert not dist.is_initialized()
            dist.init_process_group(THREADS, store=store, rank=rank, world_size=4)
            evens, odds = (dist.new_group(part, backend=THREADS) for part in ([0, 2], [1, 3]))
            mine = odds if rank % 2 else evens
            tensor = torch.tensor(float(rank))
            dist.all_reduce(tensor, group=mine)
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, rank)
            found = (
                dist.get_rank(),
                dist.get_backend(),
                dist.get_rank(mine),
                tensor.item(),
                everyone,
            )
            dist.barrier()
            dist.destroy_process_group()
            assert not dist.is_initialized()
            return found

    for rank, found in enumerate(outcomes(4, body)):
        assert found == (rank, "threads", rank // 2, 2.0 + 2 * (rank % 2), [0, 1, 2, 3])
    assert dist.distributed_c10d._world is worlds_before
    assert not dist.is_initialized()


def test_functional_collectives_find_each_ranks_group_by_name() -> None:
    from torch.distributed import _functional_collectives as functional

    register_backends()
    store, crowd = dist.HashStore(), RankThreads()

    def body(rank: int, _: SharedMemoryGroup) -> float:
        with a_rank_of(crowd):
            dist.init_process_group(THREADS, store=store, rank=rank, world_size=2)
            total = functional.all_reduce(torch.tensor(rank + 1.0), "sum", dist.group.WORLD)
            value = functional.wait_tensor(total).item()
            dist.destroy_process_group()
            return value

    assert outcomes(2, body) == [3.0, 3.0]


def test_the_process_keeps_its_own_group_meanwhile() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        of_process = dist.group.WORLD

        def body(rank: int, _: SharedMemoryGroup) -> bool:
            with a_rank_of(RankThreads()):
                return dist.is_initialized()

        with_rank = threading.Event(), threading.Event()

        def stay() -> None:
            with a_rank_of(RankThreads()):
                with_rank[0].set()
                with_rank[1].wait(10)

        thread = threading.Thread(target=stay)
        thread.start()
        with_rank[0].wait(10)
        assert dist.group.WORLD is of_process
        with_rank[1].set()
        thread.join()
        assert outcomes(2, body) == [False, False]
        assert dist.group.WORLD is of_process
    finally:
        dist.destroy_process_group()


def test_a_callback_knows_its_rank() -> None:
    def body(world: lockstep.World) -> int:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        return work.get_future().then(lambda _: dist.get_rank()).wait()

    assert lockstep.launch(body, 3, ranks="threads") == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_what_another_rank_was_doing() -> None:
    has_come, is_held, has_forked = (threading.Event() for _ in range(3))

    def body(rank: int, _: SharedMemoryGroup) -> bool:
        if rank == 1:
            assert has_come.wait(LATER)  # which takes the lock as well
            with changed:
                is_held.set()
                return has_forked.wait(LATER)
        has_come.set()
        assert is_held.wait(LATER)
        child = os.fork()
        if not child:
            os._exit(0)
        ended = False
        for _ in range(500):
            ended = ended or os.waitpid(child, os.WNOHANG)[0] == child
            if ended:
                break
            time.sleep(0.01)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        has_forked.set()
        return ended

    assert outcomes(2, body) == [True, True]
