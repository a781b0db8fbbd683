"""The process group 'threads': ranks that are threads meet, or learn why they don't."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from lockstep.comm import SharedMemoryGroup, Signature
from lockstep.comm.threads.transport import ThreadTransport, ThreadTransportState
from lockstep.deadline import Deadline
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed, PeerLost
from tests.comm.thread_groups import LATER, SOON, all_reduce, outcomes
from tests.waiting import until

LARGE = 300_000  # elements, more than a rank puts into a slot for all to sum


@pytest.mark.parametrize("numel", [0, 1, LARGE])
@pytest.mark.parametrize("born", ["anywhere", "in the group"])
def test_all_reduce_sums_in_place(numel: int, born: str) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> torch.Tensor:
        tensor = group.empty(numel) if born == "in the group" else torch.empty(numel)
        tensor.fill_(2.0**rank)
        group.allreduce([tensor]).wait()
        return tensor

    for tensor in outcomes(3, body):
        assert torch.equal(tensor, torch.full((numel,), 7.0))


def test_all_ranks_hold_the_same_bits_and_in_every_run() -> None:
    inputs = torch.randn(4, LARGE) * torch.logspace(-6, 6, 4).unsqueeze(1)

    def body(rank: int, group: SharedMemoryGroup) -> torch.Tensor:
        tensor = inputs[rank].clone()
        group.allreduce([tensor]).wait()
        return tensor

    in_rank_order = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    for tensor in [*outcomes(4, body), *outcomes(4, body)]:
        assert torch.equal(tensor, in_rank_order)


def test_an_all_reduce_is_no_change_that_autograd_counts() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> int:
        tensor = torch.ones(LARGE)
        before = tensor._version
        group.allreduce([tensor]).wait()
        return tensor._version - before

    assert outcomes(3, body) == [0, 0, 0]


def test_successive_meetings_dont_mix() -> None:
    """A rank that is fast comes to the next meeting before the slow have woken from the last."""

    def body(rank: int, room: ThreadTransportState, wrong: list[object]) -> None:
        for number in range(2000):
            mine = torch.tensor([rank, number])
            places = room.exchange(rank, Signature("test", root=number), mine, Deadline(LATER), {})
            seen = [place.tolist() for place in places]
            if seen != [[peer, number] for peer in range(room.size)]:
                wrong.append((rank, number, seen))

    room, wrong = ThreadTransportState(4), []
    threads = [threading.Thread(target=body, args=(rank, room, wrong)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_waiting_rank_sleeps() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> float:
        if rank == 1:
            time.sleep(1)
        start = time.thread_time()
        all_reduce(group)
        return time.thread_time() - start

    assert outcomes(2, body)[0] < 0.1


def test_mismatch_on_every_rank_with_both_sides() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> None:
        if rank == 2:
            time.sleep(0.2)  # finds the other two at odds already
        all_reduce(group, 4 if rank == 1 else 3)

    for rank, error in enumerate(outcomes(3, body)):
        assert isinstance(error, CollectiveMismatch)
        other = 0 if rank == 1 else 1
        assert other in error.ranks
        assert f"Rank {rank} called all_reduce(SUM) of ({4 if rank == 1 else 3},)" in str(error)
        assert f"rank {other} called all_reduce(SUM) of ({3 if rank == 1 else 4},)" in str(error)


def test_timeout_names_who_did_not_come_on_every_rank() -> None:
    told = threading.Barrier(3)

    def body(rank: int, group: SharedMemoryGroup) -> None:
        if rank == 1:
            told.wait(LATER)
        try:
            all_reduce(group)
        finally:
            if rank != 1:
                told.wait(LATER)

    for error in outcomes(3, body, SOON):
        assert isinstance(error, CollectiveTimeout), error
        assert error.ranks == (1,)
        text = "Rank 1 did not come to all_reduce(SUM) of (1,) float32 within the timeout of 1 s"
        assert text in str(error)


def test_late_rank_within_the_timeout_is_waited_for() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> float:
        if rank == 1:
            time.sleep(0.1)
        return all_reduce(group).item()

    assert outcomes(2, body) == [2.0, 2.0]


def raise_here() -> None:
    raise KeyError("gone")


@pytest.mark.parametrize("end", [lambda: None, raise_here], ids=["returns", "raises"])
@pytest.mark.parametrize("kept", [True, False], ids=["group kept", "group dropped"])
def test_thread_that_ends_is_lost_at_once(end: Callable[[], None], kept: bool) -> None:
    groups: list[SharedMemoryGroup] = []

    def body(rank: int, group: SharedMemoryGroup) -> float:
        all_reduce(group)
        if kept:
            groups.append(group)
        if rank == 1:
            del group
            end()
            return 0.0
        start = time.monotonic()
        with pytest.raises(PeerLost, match="Rank 1 ") as caught:
            all_reduce(group)
        assert caught.value.ranks == (1,)
        assert caught.value.operation == "all_reduce"
        with pytest.raises(PeerLost, match="Rank 1 "):
            all_reduce(group)
        return time.monotonic() - start

    found = outcomes(3, body)
    assert max(found[0], found[2]) < LATER / 2


def test_rank_that_left_is_named_and_what_was_begun_is_ended() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> float:
        total = all_reduce(group).item()
        if rank == 0:
            group.shutdown()
            with pytest.raises(GroupClosed, match="Rank 0 has destroyed this process group"):
                all_reduce(group)
        else:
            with pytest.raises(PeerLost, match=r"Rank 0 has left the group .*all_reduce"):
                all_reduce(group)
        return total

    for _ in range(50):
        assert outcomes(3, body) == [3.0] * 3


def test_abort_ends_the_waits_of_all_ranks() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> None:
        if rank == 1:
            time.sleep(0.1)
            group.abort()
        all_reduce(group)

    first, second, third = outcomes(3, body)
    assert isinstance(second, (PeerLost, GroupClosed))
    for error in (first, third):
        assert isinstance(error, PeerLost)
        assert "Rank 1 has aborted the group" in str(error)


def test_what_happens_after_a_meeting_does_not_undo_it() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> float:
        if rank == 1:
            time.sleep(0.02)  # so that it is the last to come, and goes on while 0 wakes up
        total = all_reduce(group).item()
        if rank == 1:
            group.abort()
        return total

    for _ in range(20):
        assert outcomes(2, body) == [2.0, 2.0]


def test_letters_come_in_order_and_before_the_news_of_their_senders_end() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> list[float]:
        if rank == 0:
            for number in range(5):
                tensor = torch.full((3,), float(number))
                group.send([tensor], 1, tag=number % 2)
                tensor.fill_(-1)  # it was copied
            return []
        tensor = torch.empty(3)
        received = []
        for tag in (1, 0, 1, 0, 0):
            group.recv([tensor], 0, tag).wait()
            received.append(tensor[0].item())
        with pytest.raises(PeerLost, match=r"Rank 0 .* rank 1 waited for it in recv"):
            group.recv([tensor], 0, 0).wait()
        return received

    assert outcomes(2, body)[1] == [1, 0, 3, 2, 4]


def test_each_of_several_waiting_threads_learns_that_its_sender_is_gone() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> list[str]:
        errors: list[str] = []

        def wait(source: int) -> None:
            with pytest.raises(PeerLost) as caught:
                group.recv([torch.empty(1)], source, 0).wait()
            errors.append(str(caught.value))

        if rank != 0:
            time.sleep(0.2 * rank)
            return []
        waiting = [threading.Thread(target=wait, args=(source,)) for source in (2, 1)]
        for thread in waiting:
            thread.start()
            time.sleep(0.05)  # so that the one that waits longer is the one that looks
        for thread in waiting:
            thread.join(LATER)
        return errors

    first, second = outcomes(3, body)[0]
    assert first.startswith("Rank 1 ")
    assert second.startswith("Rank 2 ")


def test_letter_that_does_not_come_is_overdue() -> None:
    over = threading.Event()

    def body(rank: int, group: SharedMemoryGroup) -> None:
        all_reduce(group)
        if rank == 1:
            assert over.wait(LATER)
            return
        with pytest.raises(CollectiveTimeout, match="Nothing came to rank 0 within 1 s"):
            group.recv([torch.empty(1)], 1, 0).wait()
        over.set()

    assert outcomes(2, body, SOON) == [None, None]


def test_a_rank_is_there_once() -> None:
    room = ThreadTransportState(2)
    team = ThreadTransport(room, 0)
    for rank in (0, 2, -1):
        with pytest.raises(ValueError, match=f"Rank {rank} can't join a group of 2"):
            ThreadTransport(room, rank)
    team.leave()


def test_a_late_rank_gets_no_wrong_sum_from_who_has_gone_on() -> None:
    room = ThreadTransportState(2)
    teams = [ThreadTransport(room, rank) for rank in range(2)]
    for team in teams:
        team.stage(torch.float32, 3)[1].fill_(1)
    both = [
        threading.Thread(target=t.exchange, args=(Signature("barrier"), 0, Deadline(LATER)))
        for t in teams
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    # Rank 1 is still to read what rank 0 has staged. Rank 0 goes on without it, and tries again.
    teams[0].stage(torch.float32, 3)
    with pytest.raises(CollectiveTimeout):
        teams[0].exchange(Signature("barrier"), 0, Deadline(0.1))
    with pytest.raises(CollectiveTimeout):
        teams[0].stage(torch.float32, 3)
    assert teams[1].at(0, teams[1].slot_bytes, torch.float32, 3).tolist() == [1, 1, 1]
    for team in teams:
        team.leave()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CollectiveMismatch("All differ.", [0], "barrier"), CollectiveMismatch),
        (ValueError("mine"), PeerLost),
    ],
)
def test_what_one_rank_gives_up_for_is_the_others_error(error: Exception, kind: type) -> None:
    state = ThreadTransportState(2)
    first, second = (ThreadTransport(state, rank) for rank in range(2))
    first.fail(error)
    with pytest.raises(kind, match=r"^All differ|has aborted the group.*mine"):
        second.exchange(Signature("barrier"), 0, Deadline(LATER))
    for team in (first, second):
        team.leave()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_cannot_use_the_group() -> None:
    team = ThreadTransport(ThreadTransportState(2), 0)
    child = os.fork()
    if child == 0:
        try:
            team.exchange(Signature("barrier"), 0, Deadline(1.0))
        except GroupClosed:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    team.leave()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_waits_for_no_rank() -> None:
    statuses = []

    def body(rank: int, group: SharedMemoryGroup) -> None:
        tensor = torch.ones(1)
        if rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    group.allreduce([tensor]).wait()
                except GroupClosed:
                    os._exit(0)
                os._exit(1)
            if not until(lambda: has_ended(child), seconds=LATER / 2):
                os.kill(child, signal.SIGKILL)
                assert until(lambda: has_ended(child))
        group.allreduce([tensor]).wait()

    def has_ended(child: int) -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        statuses.extend([status] if pid else [])
        return bool(pid)

    assert outcomes(2, body) == [None, None]
    assert statuses == [0]


def test_a_message_may_come_before_its_receiver() -> None:
    state = ThreadTransportState(2)
    ThreadTransport(state, 0).mailbox.send(torch.ones(1), 1, 0)
    tensor = torch.zeros(1)
    mailbox = ThreadTransport(state, 1).mailbox
    assert mailbox.receive(mailbox.expect(tensor, 0, 0), Deadline(1)) == 0
    assert tensor.item() == 1
