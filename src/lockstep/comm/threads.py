"""The ranks of a group that are threads of one process: memory is everyone's, and they meet in it.

A rank is the thread that makes its team: when that thread ends without having left, its peers
lose it, as those of a process do.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.call import Call
from lockstep.comm.messages import Mailbox, Message
from lockstep.comm.rank_threads import this_crowd
from lockstep.comm.transport import Place, Transport
from lockstep.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
    RendezvousFailed,
)

_SLOT_BYTES = 1024 * 1024

# One lock for all rooms: a group that is collected leaves its room, from whichever thread the
# collector happens to run in, and that one may hold the lock of another room, or of this one.
_lock = threading.RLock()

# By the word that the first rank leaves in the store, the room in which the others find it.
_rooms: weakref.WeakValueDictionary[str, ThreadTransportState] = weakref.WeakValueDictionary()


class _Meeting:
    """One meeting: who has arrived, calling what, and whether it is over."""

    def __init__(self) -> None:
        self.arrivals: dict[int, tuple[Call, Place]] = {}
        self.is_over = False


class _Fault(NamedTuple):
    """What one rank found, and all are to raise."""

    kind: type[PeerLost | CollectiveTimeout]
    text: str
    ranks: list[int]
    by: int | None


class ThreadTransportState:
    """What the ranks of one group share: their slots, their messages, and where they meet.

    Args:
        size: How many ranks there are.
        members: What they are called in the whole run, by which errors name them.
    """

    def __init__(self, size: int, members: Sequence[int] | None = None) -> None:
        self.size = size
        self.members = list(members or range(size))
        self.slots: dict[int, torch.Tensor] = {}
        self.messages: dict[int, deque[Message]] = {rank: deque() for rank in range(size)}
        # Told of everything below, of slots and of messages.
        self.changed = threading.Condition(_lock)
        # The one that isn't over. Each is an object of its own, so a rank that comes to the next
        # one before another has woken from the last doesn't disturb it.
        self._meeting = _Meeting()
        # In the order in which they went: what the first was lost to, the others may follow.
        self._gone: dict[int, str] = {}
        self._fault: _Fault | None = None
        self._given_up: str | None = None

    def come_in(self, rank: int, slots: torch.Tensor) -> None:
        """Take ``rank``'s place.

        Raises:
            ValueError: If there is no such place, or it is taken.
        """
        with self.changed:
            if not 0 <= rank < self.size or rank in self.slots:
                taken = "there is already one" if rank in self.slots else "there is no such rank"
                raise ValueError(
                    f"Rank {rank} can't join a group of {self.size}: {taken}. Number the ranks "
                    f"from 0 to {self.size - 1}, each once."
                )
            self.slots[rank] = slots
            self.changed.notify_all()

    def wait_for_all(self, rank: int, timeout: float) -> None:
        """Return when every rank has come in.

        Raises:
            RendezvousFailed: If that takes longer than ``timeout`` seconds, or won't happen.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: len(self.slots) == self.size or self._given_up is not None,
                min(timeout, threading.TIMEOUT_MAX),
            )
            absent = sorted(set(range(self.size)) - set(self.slots))
            if absent:
                why = self._given_up or "See whether their threads started."
                raise RendezvousFailed(
                    f"Rank {self.members[rank]} waited up to {timeout:g} s for "
                    f"{_named(self._names(absent)).lower()} to join its group. {why}"
                )

    def give_up(self, reason: str) -> None:
        """Wait no longer for ranks to come in."""
        with self.changed:
            self._given_up = reason
            self.changed.notify_all()

    def meet(self, rank: int, call: Call, place: Place, timeout: float) -> list[Place]:
        """Wait until every rank has made the same call; return the places they announce.

        Raises:
            PeerLost: If a rank is gone.
            CollectiveTimeout: If one doesn't come within ``timeout`` seconds.
            CollectiveMismatch: If one makes another call.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            meeting = self._meeting
            meeting.arrivals[rank] = call, place
            self._raise_what_prevents(rank, call, meeting)
            if len(meeting.arrivals) == self.size:
                meeting.is_over = True
                self._meeting = _Meeting()
                self.changed.notify_all()
            while not meeting.is_over:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._report_overdue(rank, call, meeting, timeout)
                self.changed.wait(min(left, threading.TIMEOUT_MAX))
                # What happens after it is over is for the next one to tell.
                if not meeting.is_over:
                    self._raise_what_prevents(rank, call, meeting)
            return [meeting.arrivals[peer][1] for peer in range(self.size)]

    def _raise_what_prevents(self, rank: int, call: Call, meeting: _Meeting) -> None:
        """Raise why ``meeting`` will never be over, if it won't."""
        others = {peer: theirs for peer, (theirs, _) in meeting.arrivals.items() if theirs != call}
        if others:
            # Those who wait have to look at this as well.
            self.changed.notify_all()
            accounts = "; ".join(
                f"rank {self.members[peer]} called {others[peer]}" for peer in sorted(others)
            )
            raise CollectiveMismatch(
                f"Rank {self.members[rank]} called {call}; {accounts}. All ranks must make the "
                "same calls in the same order: look for a branch that only some of them take.",
                self._names(others),
                call.operation,
            )
        fault = self._fault
        if fault is not None:
            source = (
                f" (Rank {fault.by} said so.)" if fault.by not in (None, self.members[rank]) else ""
            )
            raise fault.kind(f"{fault.text}{source}", fault.ranks, call.operation)
        for peer in self._gone:
            if peer not in meeting.arrivals:
                raise self.loss(peer, rank, str(call), call.operation)

    def _report_overdue(self, rank: int, call: Call, meeting: _Meeting, timeout: float) -> None:
        absent = self._names(set(range(self.size)) - set(meeting.arrivals))
        text = (
            f"{_named(absent)} did not come to {call} within the timeout of {timeout:g} s: busy "
            "with something else, or ended without it. See what it does there."
        )
        self.break_off(_Fault(CollectiveTimeout, text, absent, self.members[rank]))
        raise CollectiveTimeout(text, absent, call.operation)

    def break_off(self, fault: _Fault) -> None:
        """Have all ranks raise ``fault`` from now on, unless they raise another already."""
        with self.changed:
            self._fault = self._fault or fault
            self.changed.notify_all()

    def close(self, reason: str) -> None:
        """Have all ranks stop waiting for each other."""
        self.break_off(_Fault(PeerLost, reason, [], None))
        for rank in range(self.size):
            self.lose(rank, f"is no longer waited for. {reason}")

    def lose(self, rank: int, how: str) -> None:
        """``rank`` is gone; ``how`` is to follow its name."""
        with self.changed:
            self._gone.setdefault(rank, how)
            self.changed.notify_all()

    def is_gone(self, rank: int) -> bool:
        """Whether ``rank`` takes no further part."""
        return rank in self._gone

    def loss(self, peer: int, rank: int, what: str, operation: str) -> PeerLost:
        """What ``rank`` raises as ``peer`` is gone, for which it waited in ``what``."""
        how, advice = self._gone[peer].split(". ", 1)
        lost, name = self.members[peer], self.members[rank]
        text = f"Rank {lost} {how}; rank {name} waited for it in {what}. {advice}"
        return PeerLost(text, [lost], operation)

    def _names(self, ranks: Iterable[int]) -> list[int]:
        return [self.members[rank] for rank in sorted(ranks)]


_LEFT = (
    "has left the group (destroy_process_group). Make all ranks take equally many steps, or put "
    "their loops into 'with lockstep.join(model):', and leave after the last step."
)
_ENDED = "is gone. Its thread ended: what it raised, if anything, tells why."
_ABORTED = "has aborted the group. See what it raised before."


class ThreadMailbox(Mailbox):
    """The mailbox of a rank that is a thread.

    Args:
        room: What the ranks share, with the messages that are yet to be delivered.
        rank: This rank.
    """

    def __init__(self, room: ThreadTransportState, rank: int) -> None:
        super().__init__(rank, room.members)
        self._room = room

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; it is copied, and may be written to again."""
        message = Message(self._rank, tag, str(tensor.dtype), tensor.view(torch.uint8).clone())
        with self._room.changed:
            if self._room.is_gone(destination):
                raise self._lost(destination, f"send to rank {self._members[destination]}")
            self._room.messages[destination].append(message)
            self._room.changed.notify_all()

    def _poll(self, seconds: float) -> None:
        room, mine = self._room, self._room.messages[self._rank]

        def gone() -> dict[int, bool]:
            return {rank: True for rank in range(room.size) if room.is_gone(rank)}

        with room.changed:
            room.changed.wait_for(
                lambda: mine or self._is_closed or gone() != self._ended,
                min(seconds, threading.TIMEOUT_MAX),
            )
            messages, ended = list(mine), gone()
            mine.clear()
        # Not with the room's lock: a thread that has the mailbox's may collect another group, which
        # takes the room's.
        for message in messages:
            self._deliver(message)
        self._ended = ended

    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        return self._room.loss(rank, self._rank, operation, operation)

    def close(self) -> None:
        """Make current and later receives of this rank fail."""
        with self._room.changed:
            self._is_closed = True
            self._room.changed.notify_all()


class ThreadTransport(Transport):
    """A rank that is a thread, among others of this process.

    Args:
        room: What it shares with the others.
        rank: Which of them it is.
    """

    mailbox: ThreadMailbox

    def __init__(self, room: ThreadTransportState, rank: int) -> None:
        room.come_in(rank, torch.empty(2, _SLOT_BYTES, dtype=torch.uint8, device="cpu"))
        self.rank = rank
        self.size = room.size
        self.slot_bytes = _SLOT_BYTES
        self.mailbox = ThreadMailbox(room, rank)
        self._room = room
        self._name = room.members[rank]
        self._process = os.getpid()
        self._turn = 0
        self._fault: CollectiveFailed | None = None
        self._is_closed = False
        _teams_of_this_thread().add(self)

    def stage(self, dtype: torch.dtype, numel: int) -> tuple[Place, torch.Tensor]:
        """Return the next slot's place, which is its number, and the slot as a flat tensor."""
        # After a meeting that failed others may still be reading what it holds. Shown by
        # test_a_late_rank_gets_no_wrong_sum_from_who_has_gone_on.
        self.check_open()
        self._turn = 1 - self._turn
        return self._turn, self.at(self.rank, self._turn, dtype, numel)

    def meet(self, call: Call, place: Place, timeout: float) -> Sequence[Place]:
        """Wait until every rank has made the same call; return the places they announce."""
        self.check_open()
        try:
            return self._room.meet(self.rank, call, place, timeout)
        except (PeerLost, CollectiveTimeout, CollectiveMismatch) as error:
            self._fault = self._fault or error
            raise

    def at(self, rank: int, place: Place, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return, as a flat tensor, what ``rank`` announced to have at ``place``."""
        if isinstance(place, int):
            return self._room.slots[rank][place, : numel * dtype.itemsize].view(dtype)
        return place[:numel]

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Return ``tensor`` itself: every one is in everyone's reach."""
        return tensor.data

    def is_staged(self, place: Place) -> bool:
        """Whether ``place``, of any rank, is in a slot."""
        return isinstance(place, int)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def check_open(self) -> None:
        """Raise what broke this team, if something did."""
        if self._process != os.getpid():
            raise GroupClosed(
                f"This process group's ranks are threads of process {self._process}, which "
                f"process {os.getpid()} doesn't have: it was forked. Create a group there."
            )
        if self._is_closed:
            raise GroupClosed(
                f"Rank {self._name} has destroyed this process group. Call destroy_process_group() "
                "after the last collective."
            )
        fault = self._fault
        if isinstance(fault, PeerLost | CollectiveTimeout | CollectiveMismatch):
            raise type(fault)(str(fault), fault.ranks, fault.operation)

    def abort(self, why: str = "") -> None:
        """Make every wait of this rank, and of the others, end with an error."""
        if self._process != os.getpid() or self._is_closed:
            return
        text = f"Rank {self._name} has aborted the group.{why}"
        self._fault = self._fault or PeerLost(text, [self._name], "abort")
        self._room.break_off(_Fault(PeerLost, text, [self._name], self._name))
        self._go(_ABORTED)

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and let go of everything."""
        if self._process == os.getpid() and not self._is_closed:
            self._is_closed = True
            self._go(_LEFT)

    def die(self) -> None:
        """This rank's thread is at its end; if it hasn't left, the others lose it."""
        if self._process == os.getpid() and not self._is_closed:
            self._go(_ENDED)

    def _go(self, how: str) -> None:
        self._room.lose(self.rank, how)
        self.mailbox.close()


class _TeamsOfThread:
    """The teams of the ranks that a thread is. It is collected when the thread ends."""

    def __init__(self) -> None:
        self.teams: weakref.WeakSet[ThreadTransport] = weakref.WeakSet()

    def __del__(self) -> None:
        for team in list(self.teams):
            team.die()


_of_thread = threading.local()


def _teams_of_this_thread() -> weakref.WeakSet[ThreadTransport]:
    if not hasattr(_of_thread, "own"):
        _of_thread.own = _TeamsOfThread()
    own: _TeamsOfThread = _of_thread.own
    return own.teams


def end_this_rank() -> None:
    """Have the others lose this thread now, in every group that it hasn't left."""
    for team in list(_teams_of_this_thread()):
        team.die()


def join(
    store: dist.Store, rank: int, size: int, timeout: float, members: Sequence[int] | None = None
) -> ThreadTransport:
    """Join the other ranks of a group, which are other threads; every one of them calls it.

    Args:
        store: A store that is this group's alone.
        rank: Which of the ranks this thread is.
        size: How many there are.
        timeout: How many seconds to wait for the others.
        members: What the ranks are called in the whole run, by which errors name them.

    Raises:
        RendezvousFailed: If they don't all come, or one is in another process.
    """
    room = ThreadTransportState(size, members)
    # The first one's word stays in the store, and leads all others to its room.
    word = f"{os.getpid()}/{uuid.uuid4().hex}"
    _rooms[word] = room
    agreed = bytes(store.compare_set("room", "", word)).decode()
    found = _rooms.get(agreed)
    if found is None:
        raise RendezvousFailed(
            f"Rank {rank} of {size} has not found the others: one came from process "
            f"{agreed.partition('/')[0]} and this is process {os.getpid()}, or it is gone. The "
            "ranks of the backend 'threads' are threads of one process; use 'shm' or 'gloo' for "
            "several."
        )
    team = ThreadTransport(found, rank)
    crowd = this_crowd()
    if crowd is not None:
        crowd.watch(found)
    found.wait_for_all(rank, timeout)
    return team


def _named(ranks: list[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
