"""The memory of ranks that share it, and their descriptors: when they are made and given back."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm import leave_to_others
from lockstep.comm.shm import memory
from lockstep.deadline import Deadline
from lockstep.errors import PeerLost
from tests.comm.transports import A, die, join_all, joined, meet_all, run_each


def test_memory_that_nobody_uses_goes_back():
    def taken() -> int:
        return 512 * os.fstat(teams[0]._segment.descriptor).st_blocks

    with joined(2) as teams:
        before = taken()
        tensor = teams[0].empty(8 << 20)
        place = teams[0].find(tensor)
        run_each(
            lambda: teams[0].exchange(A, place, Deadline(5)),
            lambda: teams[1].exchange(A, 0, Deadline(5)),
        )
        other = teams[1].at(0, place, torch.uint8, 8 << 20)
        assert taken() == before + (8 << 20)
        del tensor
        assert taken() == before  # though rank 1 has mapped it yet
        del other


def test_memory_is_made_where_memory_was_given_back():
    """Or files would come to a limit on their size, and peers' address space with them."""
    with joined(2) as teams:
        first, second, third = (teams[0].empty(1 << 20) for _ in range(3))
        start, size = teams[0].find(first), os.fstat(teams[0]._segment.descriptor).st_size
        del first, second
        joined_again = teams[0].empty(2 << 20)
        assert teams[0].find(joined_again) == start
        del joined_again, third
        for num_bytes in range(1, 3 << 20, 100_001):
            tensor = teams[0].empty(num_bytes)
            assert teams[0].find(tensor) == start
            tensor.fill_(7)
            del tensor
        assert os.fstat(teams[0]._segment.descriptor).st_size == size
        assert not teams[0].empty(3 << 20).any()


class _NoOperator(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        raise AssertionError(f"{operator} is called")


def test_a_forked_child_calls_no_operator_for_its_memory():
    """Without a fork: the other rank sees no change of what this process has alone by then."""
    with joined(2) as teams:
        kept, dropped = (teams[0].empty(1 << 20).fill_(value) for value in (3, 4))
        place = teams[0].find(kept)
        with _NoOperator():
            leave_to_others(kept, keeps=True)
            leave_to_others(dropped, keeps=False)
        assert kept.eq(3).all()
        assert not dropped.any()
        kept.zero_()
        assert teams[1].at(0, place, torch.uint8, 1 << 20).eq(3).all()


def test_memory_that_outlives_its_group_goes_back_with_its_last_tensor():
    teams = join_all(2)
    descriptor = os.dup(teams[0]._segment.descriptor)
    tensors = [teams[0].empty(1 << 20) for _ in range(2)]
    for team in teams:
        team.leave()
    del teams, team
    gc.collect()
    before = os.fstat(descriptor).st_blocks
    del tensors[0]
    assert os.fstat(descriptor).st_blocks == before - (1 << 20) // 512
    tensors[0].fill_(1)
    os.close(descriptor)


def test_memory_that_others_may_read_outlives_its_tensor_and_its_group():
    teams = join_all(2)
    descriptor = os.dup(teams[0]._segment.descriptor)
    tensor = teams[0].empty(1 << 20).fill_(7)
    start = teams[0].lend(tensor)
    for team in teams:
        team.leave()
    del teams, team, tensor
    gc.collect()
    assert os.pread(descriptor, 1 << 20, start) == b"\7" * (1 << 20)
    os.close(descriptor)


def test_memory_of_a_rank_that_died_is_let_go():
    before = len(os.listdir("/proc/self/fd"))
    with joined(2) as teams:
        tensor = teams[0].empty(4096)
        assert teams[0].find(tensor) is not None
        die(teams[0])
        (error,) = meet_all(teams[1:])
        assert isinstance(error, PeerLost)
        del tensor, error
    del teams
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_sent_is_read_though_the_sender_went():
    with joined(2) as teams:
        tensors = [team.empty(16).fill_(7) for team in teams]
        places = [team.find(tensor) for team, tensor in zip(teams, tensors, strict=True)]
        run_each(
            lambda: teams[0].exchange(A, places[0], Deadline(5)),
            lambda: teams[1].exchange(A, places[1], Deadline(5)),
        )
        die(teams[0])
        assert teams[1].at(0, places[0], torch.uint8, 16).tolist() == [7] * 16
        (error,) = meet_all(teams[1:])
        assert isinstance(error, PeerLost)
        assert error.ranks == (0,)


def test_a_message_is_received_though_its_sender_left_without_reading():
    with joined(2) as teams:
        for team in teams:
            team.mailbox.send(torch.full((3,), 7.0), 1 - team.rank, 0)
        die(teams[0])
        mailbox = teams[1].mailbox
        received = torch.empty(3)
        mailbox.receive(mailbox.expect(received, 0, 0), Deadline(5))
        assert received.tolist() == [7.0] * 3


def test_tensors_are_dropped_by_any_thread_while_others_are_made():
    with joined(2) as teams:

        def make_and_drop() -> None:
            for _ in range(200):
                tensor = teams[0].empty(4096)
                assert teams[0].find(tensor) is not None

        assert run_each(*[make_and_drop] * 4) == [None] * 4
        gc.collect()
        assert not teams[0]._segment.offset_at


def test_memory_at_the_address_of_dropped_memory_is_known(monkeypatch: pytest.MonkeyPatch):
    """Another thread may get it before the one that unmaps goes on."""
    unmap, made = memory._libc.munmap, []
    with joined(1) as (team,):

        def unmap_and_make(pointer: int, num_bytes: int) -> int:
            monkeypatch.undo()
            result = unmap(pointer, num_bytes)
            made.append(team.empty(4096))
            return result

        tensor = team.empty(4096)
        address = tensor.data_ptr()
        monkeypatch.setattr(memory._libc, "munmap", unmap_and_make)
        del tensor
        assert [each.data_ptr() for each in made] == [address]
        assert team.find(made[0]) is not None
        assert memory.is_shared(made[0])
        made.clear()


def test_more_than_1024_descriptors_may_be_open():
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with joined(2) as teams, ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(teams[0].exchange, A, 0, Deadline(5))
            mailbox = teams[0].mailbox
            receiving = pool.submit(
                mailbox.receive, mailbox.expect(torch.empty(1), 1, 0), Deadline(5)
            )
            time.sleep(0.1)
            assert teams[1].exchange(A, 0, Deadline(5)) == [0, 0]
            assert waiting.result() == [0, 0]
            for _ in range(500):
                teams[1].mailbox.send(torch.ones(1), 0, 0)
            assert receiving.result() == 1
            teams[1].leave()
    finally:
        for descriptor in opened:
            os.close(descriptor)
