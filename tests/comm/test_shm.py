"""The ranks' lines and memory, with ranks as threads: who is let in, told, blamed and freed."""

import errno
import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import Segment, SharedMemoryGroup
from lockstep.comm.shm.connect import _Handshake
from lockstep.comm.shm.memory import send_message
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.transport import encoded
from lockstep.deadline import Deadline
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
    RendezvousFailed,
    SharedMemoryFull,
)
from tests.comm.transports import A, B, die, joined, meet_all, run_each

# Who is let in.


def _address(store: dist.Store, rank: int) -> str:
    store.wait([f"address/{rank}"])
    return "\0" + store.get(f"address/{rank}").decode()


def _stranger(address: str, message: bytes, descriptors: int = 0) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    line.bind("")  # to a name that the kernel chooses, so that it could be answered
    send_message(line, message, [0] * descriptors, 0, address)
    return line


def test_strangers_are_turned_away_and_the_ranks_meet_at_once():
    store, before = dist.HashStore(), len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ShmTransport, store, 0, 2, 20)
        address = _address(store, 0)
        strangers = [
            _stranger(address, b"[" * 4096),
            _stranger(address, b""),
            _stranger(address, bytes(40), 3),
            _stranger(address, bytes(32) + (1).to_bytes(8, "little"), 3),
            _stranger(address, b'{"secret": 1}', 10),
            *(_stranger(address, b"") for _ in range(30)),
        ]
        began = time.monotonic()
        second = pool.submit(ShmTransport, store, 1, 2, 20)
        teams = [first.result(), second.result()]
    assert time.monotonic() - began < 10
    assert meet_all(teams) == [[0, 0], [0, 0]]
    # None was answered, nor told the secret, and the descriptors that they sent were closed.
    for line in strangers:
        with pytest.raises(BlockingIOError):
            line.recv(100, socket.MSG_DONTWAIT)
        line.close()
    for team in teams:
        team.leave()
    del team, teams, first, second
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_strangers_than_a_rank_listens_to_only_delay():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ShmTransport, store, 0, 2, 20)
        address = _address(store, 0)
        strangers = [_stranger(address, b"") for _ in range(150)]
        second = pool.submit(ShmTransport, store, 1, 2, 20)
        for team in (first.result(), second.result()):
            team.leave()
    for line in strangers:
        line.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_turned_away_although_it_knows_the_secret():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ShmTransport, store, 0, 2, 20)
        address, secret = _address(store, 0), bytes.fromhex(store.get("secret").decode())
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            line.bind("")
            line.settimeout(1)
            try:
                introduction = secret + (1).to_bytes(8, "little")
                send_message(line, introduction, [0, 0, 0, 0], 0, address)
                line.recv(100)
                os._exit(1)
            except TimeoutError:
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        # Had it been taken for rank 1, this one would not be answered.
        second = pool.submit(ShmTransport, store, 1, 2, 20)
        for team in (first.result(), second.result()):
            team.leave()


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(RendezvousFailed, match="for rank 1 to share memory"):
        ShmTransport(dist.HashStore(), 0, 2, 0.2)
    gc.collect()


def test_a_rank_that_is_killed_while_it_connects_is_noticed_before_the_timeout(tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    child = os.fork()
    if child == 0:
        _Handshake._offer = lambda self: os._exit(0)  # its address is in the store by then
        ShmTransport(dist.FileStore(str(tmp_path / "store"), 2), 1, 2, 60)
    began = time.monotonic()
    with pytest.raises(RendezvousFailed, match="Rank 1 can't be reached from rank 0"):
        ShmTransport(store, 0, 2, 60)
    assert time.monotonic() - began < 20
    os.waitpid(child, 0)


# Who is told, and who is blamed.


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_join_keeps_nobody_waiting(
    failing: int, monkeypatch: pytest.MonkeyPatch
):
    store = dist.HashStore()
    introduce = _Handshake._introduce

    def run_out_of_descriptors(self: _Handshake, *args: object) -> bool:
        if self._rank == failing:
            raise OSError(errno.EMFILE, "Too many open files")
        return introduce(self, *args)

    monkeypatch.setattr(_Handshake, "_introduce", run_out_of_descriptors)
    began = time.monotonic()
    errors = run_each(*(lambda rank=rank: ShmTransport(store, rank, 3, 60) for rank in range(3)))
    assert time.monotonic() - began < 10
    assert all(isinstance(error, RendezvousFailed) for error in errors), errors
    assert "ulimit -n" in str(errors[failing])
    assert any(f"rank {failing} could not join" in str(error) for error in errors)


def test_a_rank_that_has_no_memory_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch):
    store, create = dist.HashStore(), Segment.create

    def run_out(num_bytes: int, **options: object) -> object:
        if threading.current_thread() is first:
            raise SharedMemoryFull("There is no room.")
        return create(num_bytes, **options)

    monkeypatch.setattr(Segment, "create", run_out)
    first = threading.current_thread()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ShmTransport, store, 1, 2, 60)
        with pytest.raises(SharedMemoryFull):
            ShmTransport(store, 0, 2, 60)
        with pytest.raises(RendezvousFailed, match="rank 0 could not join: There is no room"):
            other.result(10)


def test_who_is_told_of_a_death_and_leaves_is_not_blamed_for_it():
    with joined(4) as teams:
        die(teams[3])
        told = [meet_all(teams[2:3]), meet_all(teams[1:2])]
        # Both are gone when rank 0 comes, and it looks at rank 1's line first.
        teams[1].leave()
        teams[2].leave()
        told.append(meet_all(teams[:1]))
        for (error,) in told:
            assert isinstance(error, PeerLost)
            assert error.ranks == (3,)
            assert error.operation == "all_reduce"


def test_what_a_rank_said_last_is_heard_although_it_left_without_reading():
    with joined(3) as teams, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(teams[0].exchange, A, 0, Deadline(20))
        time.sleep(0.1)
        # The kernel resets a line whose other end is closed with something unread.
        teams[1].break_off(PeerLost("Rank 2 is gone.", [2], "all_reduce"))
        teams[1].leave()
        error = waiting.exception(10)
        assert isinstance(error, PeerLost)
        assert error.ranks == (2,)


def test_a_death_is_told_while_a_third_rank_is_late():
    with joined(3) as teams, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(team.exchange, A, 0, Deadline(20)) for team in teams[:2]]
        time.sleep(0.1)
        began = time.monotonic()
        # It had arrived, so nothing more is expected from it at this meeting.
        for connection in teams[1]._barrier._sockets.values():
            connection.shutdown(socket.SHUT_RDWR)
        error = waiting[0].exception()
        assert isinstance(error, PeerLost)
        assert error.ranks == (1,)
        assert time.monotonic() - began < 10


def test_who_leaves_after_the_last_meeting_disturbs_nobody():
    with joined(3) as teams, ThreadPoolExecutor(2) as pool:
        slow = pool.submit(teams[0].exchange, A, 0, Deadline(10))
        # Rank 1's arrival, and its farewell, are there before rank 2's arrival.
        for line in teams[1]._barrier._sockets.values():
            line.send(encoded(A)[0] + bytes(8))
        teams[1].leave()
        time.sleep(0.5)
        assert not slow.done()
        pool.submit(teams[2].exchange, A, 0, Deadline(10))
        assert slow.result() == [0, 0, 0]


def test_everyone_is_told_of_a_mismatch_the_late_one_after_the_others_have_gone():
    with joined(3) as teams:
        errors = run_each(
            lambda: teams[0].exchange(A, 0, Deadline(1)),
            lambda: teams[1].exchange(B, 0, Deadline(1)),
        )
        teams[0].leave()
        teams[1].leave()
        errors += meet_all(teams[2:])
        assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
        assert all(str(A) in str(error) and str(B) in str(error) for error in errors)


def test_a_rank_that_was_stopped_gets_no_wrong_sum():
    with joined(2) as teams:
        slot = teams[0].stage(torch.float32, 3)[1]
        slot.fill_(1)
        assert meet_all(teams) == [[0, 0], [0, 0]]
        # Rank 1 is still to read that slot. Rank 0 goes on without it, and tries again.
        teams[0].stage(torch.float32, 3)[1].fill_(2)
        with pytest.raises(CollectiveTimeout, match="Rank 1 did not come"):
            teams[0].exchange(A, 0, Deadline(0.1))
        with pytest.raises(CollectiveTimeout):
            teams[0].stage(torch.float32, 3)
        assert slot.tolist() == [1, 1, 1]


def test_an_interrupted_meeting_ends_the_group(monkeypatch: pytest.MonkeyPatch):
    with joined(2) as teams:

        def interrupted(*args: object) -> list[int]:
            raise KeyboardInterrupt

        monkeypatch.setattr(teams[0], "_arrive", interrupted)
        group = SharedMemoryGroup(teams[0], "shm", timedelta(seconds=5))
        with pytest.raises(KeyboardInterrupt):
            group.barrier().wait()
        (error,) = meet_all(teams[1:])
        assert isinstance(error, PeerLost)
        assert "KeyboardInterrupt" in str(error)
        assert error.ranks == (0,)


def test_abort_ends_the_waits_of_all_threads_and_ranks():
    with joined(2) as teams, ThreadPoolExecutor(3) as pool:
        meeting = pool.submit(teams[0].exchange, A, 0, Deadline(20))
        mailbox = teams[0].mailbox
        receiving = pool.submit(mailbox.receive, mailbox.expect(torch.empty(1), 1, 0), Deadline(20))
        time.sleep(0.1)
        teams[0].abort()
        assert "has aborted" in str(meeting.exception(10))
        assert "has aborted" in str(receiving.exception(10))
        # Rank 0 had come to this meeting; to the next one it doesn't.
        assert meet_all(teams[1:]) == [[0, 0]]
        (error,) = meet_all(teams[1:])
        assert "Rank 0 has aborted" in str(error)


def test_leaving_ends_the_waits_of_other_threads():
    with joined(2) as teams, ThreadPoolExecutor(2) as pool:
        meeting = pool.submit(teams[0].exchange, A, 0, Deadline(20))
        mailbox = teams[0].mailbox
        receiving = pool.submit(mailbox.receive, mailbox.expect(torch.empty(1), 1, 0), Deadline(20))
        time.sleep(0.1)
        teams[0].leave()
        assert isinstance(meeting.exception(10), GroupClosed)
        assert isinstance(receiving.exception(10), GroupClosed)


# Letters.


def test_two_threads_that_wait_for_letters_both_learn_that_their_senders_are_gone():
    with joined(3) as teams, ThreadPoolExecutor(2) as pool:
        mailbox = teams[0].mailbox
        expected = [mailbox.expect(torch.empty(1), source, 0) for source in (1, 2)]
        waiting = [pool.submit(mailbox.receive, each, Deadline(20)) for each in expected]
        time.sleep(0.1)
        die(teams[2])
        errors = [each.exception(10) for each in waiting]
        assert [(type(error), error.ranks) for error in errors] == [(PeerLost, (2,))] * 2


def test_a_rank_that_waits_for_a_survivors_letter_is_told_who_died():
    with joined(3) as teams, ThreadPoolExecutor(2) as pool:
        mailbox = teams[0].mailbox
        waiting = pool.submit(mailbox.receive, mailbox.expect(torch.empty(1), 1, 0), Deadline(20))
        die(teams[2])
        meet_all(teams[1:2])
        error = waiting.exception(10)
        assert isinstance(error, PeerLost)
        assert error.ranks == (2,)


def test_letters_that_were_on_their_way_come_although_the_sender_leaves_or_dies():
    with joined(2) as teams:
        for value in range(40):
            teams[0].mailbox.send(torch.full((200_000,), float(value)), 1, 0)
        # A letter that nobody has read makes the kernel reset the line.
        teams[1].mailbox.send(torch.ones(1), 0, 0)
        leaving = threading.Thread(target=teams[0].leave)
        leaving.start()
        mailbox = teams[1].mailbox
        for value in range(40):
            tensor = torch.empty(200_000)
            mailbox.receive(mailbox.expect(tensor, 0, 0), Deadline(5))
            assert tensor[-1] == value
        leaving.join()
        with pytest.raises(PeerLost, match="good order"):
            mailbox.receive(mailbox.expect(torch.empty(1), 0, 0), Deadline(5))


def test_many_threads_get_each_the_letter_that_is_for_it():
    with joined(3) as teams:
        mailbox, got = teams[0].mailbox, {}

        def receive(source: int, tag: int) -> None:
            for _ in range(20):
                tensor = torch.empty(2)
                mailbox.receive(mailbox.expect(tensor, source, tag), Deadline(10))
                got.setdefault((source, tag), []).append(tensor.tolist())

        def send(source: int) -> None:
            for number in range(20):
                for tag in range(4):
                    teams[source].mailbox.send(torch.tensor([tag, float(number)]), 0, tag)

        done = run_each(
            *(lambda s=s, t=t: receive(s, t) for s in (1, 2) for t in range(4)),
            *(lambda s=s: send(s) for s in (1, 2)),
        )
        assert done == [None] * 10
        for (_, tag), values in got.items():
            assert values == [[tag, number] for number in range(20)]
        assert not mailbox._unclaimed
        assert not mailbox._expected


def test_a_letter_that_does_not_come_ends_the_group():
    # It might come later, and be taken for the next one.
    with joined(2) as teams:
        mailbox = teams[0].mailbox
        with pytest.raises(CollectiveTimeout, match="rank 1 with tag 3") as caught:
            mailbox.receive(mailbox.expect(torch.empty(1), 1, 3), Deadline(0.1))
        assert caught.value.ranks == (1,)
        (error,) = meet_all(teams[1:])
        assert isinstance(error, CollectiveTimeout)
