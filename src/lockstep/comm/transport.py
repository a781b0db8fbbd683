"""What collectives need of a group's ranks: memory that all can read, and a way to exchange."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.failures import named, without_traceback
from lockstep.comm.messages import Mailbox
from lockstep.deadline import Deadline
from lockstep.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
)

FINGERPRINT_BYTES = 16
WORDS_BYTES = 512

# How long a rank that has read another call waits for ranks that haven't arrived. If they come, the
# group stays usable.
MISMATCH_SECONDS = 5.0

# How the operations begin at which a rank waits whose step has failed: however long the others take
# to come to a call of theirs, they will go on together.
GUARDED = "guarded step"

# Where a rank has put data, for its peers: a number between processes, between threads a number
# (of a slot) or the tensor itself.
Address = int | Tensor

# The errors that all ranks of a group come to raise.
Failure = PeerLost | CollectiveTimeout | CollectiveMismatch
FAILURES = (PeerLost, CollectiveTimeout, CollectiveMismatch)


class Signature(NamedTuple):
    """One call of a collective. Ranks must make equal calls, in the same order.

    Attributes:
        operation: Its name, as in ``torch.distributed``.
        dtype: The tensors' dtype, or None if there are none.
        shape: The shape, or sizes, that must be the same on every rank.
        reduce_op: How values are combined, such as ``"SUM"``, or ``""``.
        root: The rank that sends or receives, or None.
    """

    operation: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    reduce_op: str = ""
    root: int | None = None

    def __str__(self) -> str:
        details = [self.reduce_op] if self.reduce_op else []
        if self.root is not None:
            details.append(f"root {self.root}")
        words = f"{self.operation}({', '.join(details)})"
        if self.dtype is not None:
            words += f" of {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        return words

    def mismatch(self, rank: int, others: Mapping[int, object]) -> CollectiveMismatch:
        """Return the error of ``rank``, which made this call; ``others`` are other ranks' calls."""
        calls = "".join(f"; rank {other} called {others[other]}" for other in sorted(others))
        return CollectiveMismatch(
            f"Rank {rank} called {self}{calls}. All ranks must make the same calls in the same "
            "order: look for a branch that only some of them take.",
            sorted(others),
            self.operation,
        )

    def is_guarded(self, others: Iterable[object]) -> bool:
        """Whether this call, or one of ``others``, is at the end of a guarded step."""
        return any(str(call).startswith(GUARDED) for call in (self, *others))

    def overdue(self, ranks: Sequence[int], seconds: float, causes: str) -> CollectiveTimeout:
        """Return the error of ``ranks`` that didn't come in time; ``causes`` lists likely ones."""
        return CollectiveTimeout(
            f"{named(ranks)} did not come to {self} within the timeout of {seconds:g} s: "
            f"{causes}, or ended without it. See what it does there.",
            tuple(ranks),
            self.operation,
        )


@lru_cache(maxsize=4096)
def encoded(signature: Signature) -> tuple[bytes, bytes]:
    """Return 16 bytes by which ranks compare signatures, and the signature in words, cut."""
    words = str(signature).encode()
    return blake2b(words, digest_size=FINGERPRINT_BYTES).digest(), words[:WORDS_BYTES]


# Does what Transport.exchange() does, but puts other ranks' calls that differ into a dictionary.
_Arrive = Callable[[Signature, Any, Deadline, dict[int, object]], Sequence[Address]]


class ConnectedRanks(ABC):
    """The connected ranks of a group, seen from one of them.

    Attributes:
        rank: This rank.
        size: The number of ranks.
    """

    rank: int
    size: int
    _name: int  # this rank's number in the whole run, by which errors name it

    @abstractmethod
    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory, as uint8, that is reduced with the least copying."""

    @abstractmethod
    def check_open(self) -> None:
        """Raise the error that broke this group, if one did."""

    @abstractmethod
    def break_off(self, error: CollectiveFailed) -> CollectiveFailed:
        """Take no further part because of ``error``, which all ranks are to raise.

        Returns:
            The error for this rank to raise: the first one that broke the group.
        """

    def abort(self, why: str = "") -> None:
        """Make every wait of this rank, and of the others, end with an error."""
        text = f"Rank {self._name} has aborted the group.{why}"
        self.break_off(PeerLost(text, [self._name], "abort"))

    def call_failed(self, error: BaseException) -> None:
        """Fail by ``error``, which has ended a call, unless the other ranks know it."""
        if not isinstance(error, CollectiveFailed):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Take no further part because of ``error``, which other ranks need not have met with."""
        if isinstance(error, FAILURES):
            self.break_off(error)
        else:
            self.abort(f" It met with {error!r}.")

    @abstractmethod
    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and release all resources."""

    @abstractmethod
    def after_fork(self) -> None:
        """Have later calls raise GroupClosed, in a forked child."""


class Transport(ConnectedRanks):
    """Ranks that reach each other's memory.

    Note [Two slots]: each rank has two slots of ``slot_bytes`` and stages data in them by turns.
    Staged data may be read from the exchange that announces it until the reader's next exchange
    but one: a rank stages in the same slot again only after an exchange at which all ranks had
    finished reading it. So one exchange is enough for data to go from every rank to every rank.
    An exchange of different calls counts as well: nobody reads what it announces.

    Attributes:
        slot_bytes: The size of a slot; the same on every rank.
        members: The ranks as the whole run numbers them, by which errors name them.
        mailbox: For messages between two ranks.
    """

    # Large enough that a barrier costs little beside the copy, small enough to stay in the cache.
    slot_bytes = 1024 * 1024
    mailbox: Mailbox

    # The error of using the group in a forked child, given the parent's process and the child's.
    _INHERITED: ClassVar[str]

    def __init__(self, rank: int, members: Sequence[int], arrive: _Arrive) -> None:
        self.rank, self.size = rank, len(members)
        self.members, self._name = members, members[rank]
        self._arrive = arrive
        self._process = os.getpid()
        self._turn = 0
        self._failure: Failure | None = None
        self._is_closed = False
        # Whether check_open() has something to raise: most calls ask no more than this.
        self._is_broken = False

    def error(self) -> CollectiveFailed | None:
        """Return the error that broke this group, if one did."""
        if self._process != os.getpid():
            return GroupClosed(self._INHERITED.format(self._process, os.getpid()))
        if self._is_closed:
            return GroupClosed(
                f"Rank {self._name} has destroyed this process group. Call destroy_process_group() "
                "after the last collective."
            )
        return self._failure and without_traceback(self._failure)

    def check_open(self) -> None:
        """Raise the error that broke this group, if one did."""
        if (error := self.error()) is not None:
            raise error

    def after_fork(self) -> None:
        """Have later calls raise GroupClosed, in a forked child."""
        self._is_broken = True

    def break_off(self, error: CollectiveFailed) -> CollectiveFailed:
        """Take no further part because of ``error``, which all ranks are to raise."""
        if not self._is_broken:
            loss = PeerLost(str(error), [self._name])
            self._failure = without_traceback(error) if isinstance(error, Failure) else loss
            self._is_broken = True
            self._report(self._failure)
        return self.error() or error

    @abstractmethod
    def _report(self, failure: Failure) -> None:
        """Have all ranks raise ``failure``, and end their waits for this one."""

    def stage(self, dtype: torch.dtype, numel: int) -> tuple[Address, Tensor]:
        """Return the address of the next slot, and the slot as a flat tensor to write to."""
        # After a failure, others may still be reading what a slot holds, however late they are.
        # Shown by test_a_rank_that_was_stopped_gets_no_wrong_sum.
        if self._is_broken:
            self.check_open()
        self._turn = 1 - self._turn
        address = self._turn * self.slot_bytes
        return address, self.at(self.rank, address, dtype, numel)

    def exchange(
        self, signature: Signature, address: Address, deadline: Deadline
    ) -> Sequence[Address]:
        """Wait until every rank has made the same call; return the addresses they announce.

        What a rank has written before, the others see afterwards.

        Raises:
            PeerLost: If a rank is gone.
            CollectiveTimeout: If a rank doesn't come before the deadline.
            CollectiveMismatch: If a rank makes another call. If all ranks have made a call, all
                of them raise it in this exchange, and the next one is as if it had not been.
        """
        if self._is_broken:
            self.check_open()
        others: dict[int, object] = {}
        try:
            addresses = self._arrive(signature, address, deadline, others)
        except FAILURES as error:
            failure = signature.mismatch(self._name, others) if others else error
            raise self.break_off(failure) from None
        except BaseException as error:  # such as Ctrl-C
            text = f"Rank {self._name} could not go on with {signature.operation}: {error!r}"
            self.break_off(PeerLost(text, [self._name], signature.operation))
            raise
        if others:
            raise signature.mismatch(self._name, others)
        return addresses

    @abstractmethod
    def at(self, rank: int, address: Address, dtype: torch.dtype, numel: int) -> Tensor:
        """Return, as a flat tensor, the data that ``rank`` announced at ``address``.

        Of this rank itself only slots: other memory is the caller's own tensor.
        """

    @abstractmethod
    def find(self, tensor: Tensor) -> Address | None:
        """Return the address of a contiguous ``tensor``; None if the others can't reach it."""

    def lend(self, tensor: Tensor) -> Address | None:
        """As :meth:`find`; the others may read the memory after this rank has left, too."""
        return self.find(tensor)

    def is_staged(self, address: Address) -> bool:
        """Whether ``address``, of any rank, is in a slot."""
        return isinstance(address, int) and address < 2 * self.slot_bytes
