"""The ranks of a group that are threads of one process, which share their memory anyway.

A rank is the thread that creates its transport: when that thread ends without having left, its
peers lose it, as they lose a process.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.failures import Deadline, named
from lockstep.comm.messages import Mailbox, Message
from lockstep.comm.threads.ranks import rank_context
from lockstep.comm.transport import Address, Signature, Transport
from lockstep.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    RendezvousFailed,
)

_SLOT_BYTES = 1024 * 1024

# One lock for the states of all groups: a group that is collected leaves its own, in whichever
# thread the collector runs, and that thread may hold the lock of another state, or of this one.
_lock = threading.RLock()

# By the key that the first rank leaves in the store, the state that the others find by it.
_states: weakref.WeakValueDictionary[str, ThreadTransportState] = weakref.WeakValueDictionary()


class _Exchange:
    """One exchange: the ranks that have arrived, with their calls and addresses."""

    def __init__(self) -> None:
        self.arrivals: dict[int, tuple[Signature, Address]] = {}
        self.is_over = False


class ThreadTransportState:
    """What the ranks of one group share: slots, messages, and the exchange in progress.

    Args:
        size: The number of ranks.
        members: Their numbers in the whole run, by which errors name them.
    """

    def __init__(self, size: int, members: Sequence[int] | None = None) -> None:
        self.size = size
        self.members = list(members or range(size))
        self.slots: dict[int, Tensor] = {}
        self.messages: dict[int, deque[Message]] = {rank: deque() for rank in range(size)}
        # Notified of every change to this object.
        self.changed = threading.Condition(_lock)
        # A new object for each exchange, so that a rank that comes to the next one before another
        # has woken from the last doesn't disturb it.
        self._exchange = _Exchange()
        # In the order in which they went: the later ones may have gone because of the first.
        self._gone: dict[int, str] = {}
        # An error for all to raise, and the rank that has reported it.
        self._fault: tuple[PeerLost | CollectiveTimeout, int | None] | None = None
        self._given_up: str | None = None

    def come_in(self, rank: int, slots: Tensor) -> None:
        """Join as ``rank``.

        Raises:
            ValueError: If there is no such rank, or it has joined.
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
        """Return when every rank has joined.

        Raises:
            RendezvousFailed: If that takes longer than ``timeout`` seconds, or won't happen.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: len(self.slots) == self.size or self._given_up is not None,
                min(timeout, threading.TIMEOUT_MAX),
            )
            absent = self._names(set(range(self.size)) - set(self.slots))
            if absent:
                why = self._given_up or "See whether their threads started."
                raise RendezvousFailed(
                    f"Rank {self.members[rank]} waited up to {timeout:g} s for "
                    f"{named(absent).lower()} to join its group. {why}"
                )

    def give_up(self, reason: str) -> None:
        """End all waits for ranks to join."""
        with self.changed:
            self._given_up = reason
            self.changed.notify_all()

    def exchange(
        self, rank: int, signature: Signature, address: Address, timeout: float
    ) -> list[Address]:
        """As :meth:`Transport.exchange`, for ``rank``."""
        deadline = Deadline(timeout)
        with self.changed:
            current = self._exchange
            current.arrivals[rank] = signature, address
            self._check(rank, signature, current)
            if len(current.arrivals) == self.size:
                current.is_over = True
                self._exchange = _Exchange()
                self.changed.notify_all()
            while not current.is_over:
                left = deadline.left()
                if not left:
                    self._raise_overdue(rank, signature, current, timeout)
                self.changed.wait(min(left, threading.TIMEOUT_MAX))
                # Faults after its end concern the next exchange.
                if not current.is_over:
                    self._check(rank, signature, current)
            return [current.arrivals[peer][1] for peer in range(self.size)]

    def _check(self, rank: int, signature: Signature, current: _Exchange) -> None:
        """Raise the error for which ``current`` will never be over, if there is one."""
        name, operation = self.members[rank], signature.operation
        others = {r: theirs for r, (theirs, _) in current.arrivals.items() if theirs != signature}
        if others:
            # The ranks that wait already have to check this as well.
            self.changed.notify_all()
            accounts = "; ".join(
                f"rank {self.members[peer]} called {others[peer]}" for peer in sorted(others)
            )
            accounts = f"Rank {name} called {signature}; {accounts}"
            raise signature.mismatch(accounts, self._names(others))
        if self._fault is not None:
            error, reporter = self._fault
            source = f" (Rank {reporter} said so.)" if reporter not in (None, name) else ""
            raise type(error)(f"{error}{source}", error.ranks, operation)
        for peer in self._gone:
            if peer not in current.arrivals:
                raise self.loss(peer, rank, str(signature), operation)

    def _raise_overdue(
        self, rank: int, signature: Signature, current: _Exchange, timeout: float
    ) -> None:
        absent = self._names(set(range(self.size)) - set(current.arrivals))
        error = signature.overdue(absent, timeout, "busy with something else")
        # Not the one that is raised, whose traceback holds the group.
        self.break_off(CollectiveTimeout(str(error), absent), self.members[rank])
        raise error

    def break_off(self, error: PeerLost | CollectiveTimeout, reporter: int | None = None) -> None:
        """Have all ranks raise ``error`` from now on, unless they raise another already."""
        with self.changed:
            self._fault = self._fault or (error, reporter)
            self.changed.notify_all()

    def close(self, reason: str) -> None:
        """End all waits of ranks for each other."""
        self.break_off(PeerLost(reason))
        for rank in range(self.size):
            self.lose(rank, f"is no longer waited for. {reason}")

    def lose(self, rank: int, how: str) -> None:
        """Take ``rank`` for gone; ``how`` follows its name in errors."""
        with self.changed:
            self._gone.setdefault(rank, how)
            self.changed.notify_all()

    def is_gone(self, rank: int) -> bool:
        """Whether ``rank`` takes no further part."""
        return rank in self._gone

    def loss(self, peer: int, rank: int, what: str, operation: str) -> PeerLost:
        """Return the error of ``rank``, which waits in ``what`` for ``peer``, which is gone."""
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
        state: What the ranks share, with the messages that are yet to be delivered.
        rank: This rank.
    """

    def __init__(self, state: ThreadTransportState, rank: int) -> None:
        super().__init__(rank, state.members)
        self._state = state

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; it is copied, and may be written to again."""
        message = Message(self._rank, tag, str(tensor.dtype), tensor.view(torch.uint8).clone())
        with self._state.changed:
            if self._state.is_gone(destination):
                raise self._lost(destination, f"send to rank {self._members[destination]}")
            self._state.messages[destination].append(message)
            self._state.changed.notify_all()

    def _poll(self, seconds: float) -> None:
        state, mine = self._state, self._state.messages[self._rank]

        def gone() -> dict[int, bool]:
            return {rank: True for rank in range(state.size) if state.is_gone(rank)}

        with state.changed:
            state.changed.wait_for(
                lambda: mine or self._is_closed or gone() != self._ended,
                min(seconds, threading.TIMEOUT_MAX),
            )
            messages, ended = list(mine), gone()
            mine.clear()
        # Without the state's lock: a thread that has the mailbox's may collect a group, which takes
        # the state's.
        for message in messages:
            self._deliver(message)
        self._ended = ended

    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        return self._state.loss(rank, self._rank, operation, operation)

    def close(self) -> None:
        """Make current and later receives of this rank fail."""
        with self._state.changed:
            self._is_closed = True
            self._state.changed.notify_all()


class ThreadTransport(Transport):
    """A rank that is a thread, among others of this process.

    Args:
        state: The state that it shares with the others.
        rank: This rank.
    """

    mailbox: ThreadMailbox
    _INHERITED = (
        "This process group's ranks are threads of process {}, which process {} doesn't have: it "
        "was forked. Create a group there."
    )

    def __init__(self, state: ThreadTransportState, rank: int) -> None:
        state.come_in(rank, torch.empty(2, _SLOT_BYTES, dtype=torch.uint8, device="cpu"))
        self.rank = rank
        self.size = state.size
        self.slot_bytes = _SLOT_BYTES
        self.mailbox = ThreadMailbox(state, rank)
        self._state = state
        self._name = state.members[rank]
        self._process = os.getpid()
        self._turn = 0
        rank_context().memberships.add(self)

    def stage(self, dtype: torch.dtype, numel: int) -> tuple[Address, Tensor]:
        """Return the next slot's address, which is its number, and the slot as a flat tensor."""
        # After an exchange that failed, others may still read the slot. Shown by
        # test_a_late_rank_gets_no_wrong_sum_from_who_has_gone_on.
        self.check_open()
        self._turn = 1 - self._turn
        return self._turn, self.at(self.rank, self._turn, dtype, numel)

    def exchange(self, signature: Signature, address: Address, timeout: float) -> Sequence[Address]:
        """Wait until every rank has made the same call; return the addresses they announce."""
        self.check_open()
        try:
            return self._state.exchange(self.rank, signature, address, timeout)
        except (PeerLost, CollectiveTimeout, CollectiveMismatch) as error:
            self._failure = self._failure or error
            raise

    def at(self, rank: int, address: Address, dtype: torch.dtype, numel: int) -> Tensor:
        """Return, as a flat tensor, the data that ``rank`` announced at ``address``."""
        if isinstance(address, int):
            return self._state.slots[rank][address, : numel * dtype.itemsize].view(dtype)
        return address[:numel]

    def find(self, tensor: Tensor) -> Address | None:
        """Return ``tensor`` itself: every thread reaches it."""
        return tensor.data

    def is_staged(self, address: Address) -> bool:
        """Whether ``address``, of any rank, is in a slot."""
        return isinstance(address, int)

    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory, as uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def abort(self, why: str = "") -> None:
        """Make every wait of this rank, and of the others, end with an error."""
        if self._is_in():
            text = f"Rank {self._name} has aborted the group.{why}"
            error = PeerLost(text, [self._name], "abort")
            self._failure = self._failure or error
            self._state.break_off(error, self._name)
            self._go(_ABORTED)

    def leave(self) -> None:
        """Tell the others that this rank takes no further part."""
        if self._is_in():
            self._is_closed = True
            self._go(_LEFT)

    def die(self) -> None:
        """Have the others lose this rank, whose thread ends, unless it has left."""
        if self._is_in():
            self._go(_ENDED)

    def _is_in(self) -> bool:
        return self._process == os.getpid() and not self._is_closed

    def _go(self, how: str) -> None:
        self._state.lose(self.rank, how)
        self.mailbox.close()


def join(
    store: dist.Store, rank: int, size: int, timeout: float, members: Sequence[int] | None = None
) -> ThreadTransport:
    """Join the other ranks of a group, which are other threads; every one of them calls it.

    Args:
        store: A store that is this group's alone.
        rank: The rank of this thread.
        size: The number of ranks.
        timeout: How many seconds to wait for the others.
        members: The ranks' numbers in the whole run, by which errors name them.

    Raises:
        RendezvousFailed: If they don't all come, or one is in another process.
    """
    state = ThreadTransportState(size, members)
    # The key of the first rank stays in the store, and leads all others to its state.
    key = f"{os.getpid()}/{uuid.uuid4().hex}"
    _states[key] = state
    agreed = bytes(store.compare_set("room", "", key)).decode()
    found = _states.get(agreed)
    if found is None:
        raise RendezvousFailed(
            f"Rank {rank} of {size} has not found the others: one came from process "
            f"{agreed.partition('/')[0]} and this is process {os.getpid()}, or it is gone. The "
            "ranks of the backend 'threads' are threads of one process; use 'shm' or 'gloo' for "
            "several."
        )
    transport = ThreadTransport(found, rank)
    if (launch := rank_context().launch) is not None:
        launch.watch(found)
    found.wait_for_all(rank, timeout)
    return transport
