"""The ranks of a group that are threads of one process, which share their memory anyway.

A rank is the thread that creates its transport: when that thread ends without having left, its
peers lose it, as they lose a process.
"""

from __future__ import annotations

import math
import os
import threading
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.failures import loss, named
from lockstep.comm.messages import Mailbox, Message
from lockstep.comm.threads.ranks import RankThreads, changed, passed_on, rank_context
from lockstep.comm.transport import MISMATCH_SECONDS, Address, Failure, Signature, Transport
from lockstep.deadline import LOOK_SECONDS, Deadline
from lockstep.errors import CollectiveFailed, PeerLost, RendezvousFailed

# By the key that the first rank leaves in the store, the state that the others find by it.
_states: weakref.WeakValueDictionary[str, ThreadTransportState] = weakref.WeakValueDictionary()

_LEFT = (
    "has left the group (destroy_process_group). Make all ranks take equally many steps, or put "
    "their loops into 'with lockstep.join(model):', and leave after the last step. If it stopped "
    "by itself, let all decide together when to stop: if lockstep.reduce(stop, 'max'): break."
)
_ABORTED = "has aborted the group. See what it raised before."

Arrivals = dict[int, tuple[Signature, Address]]


class ThreadTransportState:
    """The state that the ranks of one group share; ``changed`` guards it.

    Errors name ranks by ``members``, their numbers in the whole run.
    """

    def __init__(self, size: int, members: Sequence[int] | None = None) -> None:
        self.size, self.members = size, list(members or range(size))
        self.slots: dict[int, Tensor] = {}
        # By receiver, the messages that no receive has taken, also before its mailbox is there.
        self.unclaimed: defaultdict[int, list[Message]] = defaultdict(list)
        # Weak, as a mailbox refers to the others by this.
        self.mailboxes: weakref.WeakValueDictionary[int, ThreadMailbox] = (
            weakref.WeakValueDictionary()
        )
        # The ranks that take no further part, each with an error for all to raise, or with what
        # follows its name in errors. The later ranks may have ended because of the first.
        self.gone: dict[int, str | Failure] = {}
        self.has_left: dict[int, bool] = {}  # of each of these, whether in good order
        # The exchange in progress; a new object for each, so that a rank in the next exchange
        # doesn't disturb one that hasn't woken from the last.
        self._arrivals: Arrivals = {}

    def add(self, rank: int, slots: Tensor, mailbox: ThreadMailbox) -> None:
        """Add ``rank``, which is the current thread.

        Raises:
            ValueError: If there is no such rank, or it has joined.
        """
        with changed:
            if not 0 <= rank < self.size or rank in self.slots:
                taken = "there is already one" if rank in self.slots else "there is no such rank"
                raise ValueError(
                    f"Rank {rank} can't join a group of {self.size}: {taken}. Number the ranks "
                    f"from 0 to {self.size - 1}, each once."
                )
            self.slots[rank], self.mailboxes[rank] = slots, mailbox
            changed.notify_all()

    def wait_for_all(self, rank: int, timeout: float, launch: RankThreads) -> None:
        """Return when every rank has joined.

        Raises:
            RendezvousFailed: If that takes longer than ``timeout`` seconds, or ``launch`` fails.
        """
        with changed:
            with passed_on():
                changed.wait_for(
                    lambda: len(self.slots) == self.size or launch.failure is not None,
                    min(timeout, threading.TIMEOUT_MAX),
                )
            if absent := self._absent(self.slots):
                raise RendezvousFailed(
                    f"Rank {self.members[rank]} waited up to {timeout:g} s for "
                    f"{named(absent).lower()} to join its group. "
                    f"{launch.failure or 'See whether their threads started.'}"
                )

    def exchange(
        self,
        rank: int,
        signature: Signature,
        address: Address,
        deadline: Deadline,
        others: dict[int, object],
    ) -> list[Address]:
        """As :meth:`Transport.exchange`, but put other ranks' differing calls into ``others``."""
        sooner = Deadline(math.inf)
        deadline.restart()
        with changed:
            arrivals = self._arrivals
            arrivals[rank] = signature, address
            try:
                while self._arrivals is arrivals:  # what fails later concerns the next exchange
                    self._check(rank, signature, arrivals)
                    calls = {call for call, _ in arrivals.values()}
                    if len(calls) > 1 and not signature.is_guarded(calls):
                        sooner.bring_forward(Deadline(MISMATCH_SECONDS))
                    if len(arrivals) == self.size:
                        self._arrivals = {}
                        changed.notify_all()
                    elif left := min(deadline.left(), sooner.left()):
                        with passed_on(deadline, sooner):
                            changed.wait(min(left, LOOK_SECONDS))
                    else:
                        absent, seconds = self._absent(arrivals), deadline.seconds
                        raise signature.overdue(absent, seconds, "busy with something else")
            finally:
                for peer, (call, _) in sorted(arrivals.items()):
                    if call != signature:
                        others[self.members[peer]] = call
            return [arrivals[peer][1] for peer in range(self.size)]

    def _check(self, rank: int, signature: Signature, arrivals: Arrivals) -> None:
        """Raise the error that keeps an exchange from being completed, if there is one."""
        operation = signature.operation
        for peer, how in self.gone.items():
            if isinstance(how, Failure):
                text = f"{how} (Rank {self.members[peer]} said so.)"
                raise type(how)(text, how.ranks, operation)
        for peer in self.gone:
            if peer not in arrivals:
                raise self.loss(peer, rank, str(signature), operation)

    def lose(self, rank: int, how: str | Failure) -> None:
        """Take ``rank`` for gone; ``how`` is the error that all raise, or words for theirs."""
        with changed:
            self.gone.setdefault(rank, how)
            self.has_left.setdefault(rank, how is _LEFT)
            changed.notify_all()

    def loss(self, peer: int, rank: int, waited_in: str, operation: str) -> PeerLost:
        """Return the error of ``rank``, which waited for ``peer``, which is gone."""
        gone = self.gone[peer]
        how, advice = (gone if isinstance(gone, str) else _ABORTED).split(". ", 1)
        return loss([self.members[peer]], self.members[rank], operation, advice, how, waited_in)

    def _absent(self, present: Iterable[int]) -> list[int]:
        return [self.members[rank] for rank in sorted(set(range(self.size)).difference(present))]


class ThreadMailbox(Mailbox):
    """The mailbox of a rank that is a thread. The senders put messages into it themselves."""

    def __init__(self, state: ThreadTransportState, rank: int) -> None:
        super().__init__(rank, state.members)
        self._changed, self._ended = changed, state.has_left
        self._state, self._unclaimed = state, state.unclaimed[rank]
        self._is_polled = True  # no thread polls: each change is notified of

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; it is copied, and may be written to again."""
        message = Message(self._rank, tag, str(tensor.dtype), tensor.view(torch.uint8).clone())
        with changed:
            if destination in self._state.gone:
                raise self._lost(destination, f"send to rank {self._members[destination]}")
            if (receiver := self._state.mailboxes.get(destination)) is not None:
                receiver._deliver(message)
            else:
                self._state.unclaimed[destination].append(message)

    def _wait(self, seconds: float) -> None:
        with passed_on():
            super()._wait(seconds)

    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        return self._state.loss(rank, self._rank, operation, operation)

    def close(self) -> None:
        """Make current and later receives of this rank fail."""
        with changed:
            self._is_closed = True
            changed.notify_all()


class ThreadTransport(Transport):
    """A rank that is a thread, among others of this process, with which it shares ``state``."""

    mailbox: ThreadMailbox
    _INHERITED = (
        "This process group's ranks are threads of process {}, which process {} doesn't have: it "
        "was forked. Create a group there."
    )

    def __init__(self, state: ThreadTransportState, rank: int) -> None:
        self._state, self.mailbox = state, ThreadMailbox(state, rank)
        state.add(rank, self.empty(2 * self.slot_bytes), self.mailbox)
        super().__init__(rank, state.members, partial(state.exchange, rank))
        rank_context().add(self)

    def at(self, rank: int, address: Address, dtype: torch.dtype, numel: int) -> Tensor:
        """Return, as a flat tensor, the data that ``rank`` announced at ``address``."""
        if isinstance(address, int):
            return self._state.slots[rank][address:][: numel * dtype.itemsize].view(dtype)
        return address[:numel]

    def find(self, tensor: Tensor) -> Address | None:
        """Return ``tensor`` itself: every thread reaches it."""
        return tensor.data

    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory, as uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def _report(self, failure: Failure) -> None:
        self.die(failure)

    def leave(self) -> None:
        """Tell the others that this rank takes no further part."""
        if self._is_in():
            self.die(_LEFT)
            self._is_closed = self._is_broken = True

    def die(self, how: str | Failure) -> None:
        """As :meth:`ThreadTransportState.lose`, unless this rank has left; end its mailbox, too."""
        if self._is_in():
            self._state.lose(self.rank, how)
            self.mailbox.close()

    def _is_in(self) -> bool:
        return self._process == os.getpid() and not self._is_closed


def join(
    store: dist.Store, rank: int, size: int, timeout: float, members: Sequence[int] | None = None
) -> ThreadTransport:
    """Join the other ranks of a group, which are other threads; every one of them calls it.

    ``store`` is this group's alone, and ``timeout`` in seconds; errors name ranks by ``members``.

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
    found.wait_for_all(rank, timeout, rank_context().launch)
    return transport
