"""Point-to-point messages: the mailbox that matches them with receives, and their works."""

from __future__ import annotations

import itertools
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch import Tensor
from torch.distributed import Work

from lockstep.comm.arguments import flattened, put_back
from lockstep.comm.dynamo import uncompiled
from lockstep.comm.work import DEAF_SECONDS, NEVER, BaseWork, start_thread, unheard
from lockstep.deadline import LOOK_SECONDS, Deadline
from lockstep.errors import CollectiveFailed, CollectiveMismatch, CollectiveTimeout

# The header of a message between processes: tag, number of bytes, dtype. Its size is a multiple of
# every element's size, so the contents that follow are aligned.
HEADER = struct.Struct("<qq32s")


@dataclass(eq=False)
class Message:
    """A message that has arrived."""

    source: int  # the rank that sent it
    tag: int
    dtype: str  # that of the tensor that was sent
    contents: Tensor  # as bytes

    def copy_to(self, tensor: Tensor, sender: int, operation: str) -> None:
        """Write the contents to ``tensor``; errors name ``sender`` and ``operation``.

        Raises:
            CollectiveMismatch: If ``tensor`` is of another size or dtype.
        """
        if str(tensor.dtype) != self.dtype or tensor.nbytes != self.contents.numel():
            raise CollectiveMismatch(
                f"Rank {sender} sent {self.contents.numel()} bytes of {self.dtype} with "
                f"tag {self.tag}, but here {tensor.nbytes} bytes of {tensor.dtype} are expected. "
                "Send and receive tensors of one size and dtype.",
                [sender],
                operation,
            )
        put_back(self.contents.view(tensor.dtype), tensor)


def header_of(tensor: Tensor, tag: int) -> bytes:
    """Return the header of a message with the contents of ``tensor``."""
    return HEADER.pack(tag, tensor.nbytes, str(tensor.dtype).encode())


@uncompiled
class MessageWork(BaseWork):
    """A send or receive that has been started; ``wait()`` completes it.

    ``finish`` waits for the other rank up to a deadline, and returns that rank;
    ``is_ready`` returns whether it would return at once. ``timeout`` is the default of ``wait()``.
    """

    def __init__(
        self,
        finish: Callable[[Deadline], int],
        is_ready: Callable[[], bool],
        tensors: list[Tensor],
        timeout: timedelta,
    ) -> None:
        super().__init__(tensors, timeout)
        self._finish, self._is_ready = finish, is_ready
        self._rank: int

    def _carry_out(self, deadline: Deadline) -> None:
        self._rank = self._finish(deadline)
        del self._finish  # and with it the memory of the message

    def _complete(self, end: Deadline) -> None:
        is_held = False
        try:
            while not is_held:
                limit = min(end.left() or LOOK_SECONDS, threading.TIMEOUT_MAX)
                if is_held := self._lock.acquire(timeout=limit):
                    break
                self._deadline.bring_forward(end)  # another thread completes it
                if end.passed() > DEAF_SECONDS:
                    raise unheard(end)
            if not self._is_done:
                self._seconds = self._seconds if end is NEVER else end.seconds
                self.carry_out(end)
        finally:
            if is_held:
                self._lock.release()

    def is_completed(self) -> bool:
        """Whether the message was received or taken, or never will be."""
        if not self._is_done:
            with suppress(Exception):  # a failure, too, completes it
                if not self._is_ready():
                    return False
            self._complete(NEVER)
        return True

    def source_rank(self) -> int:
        """The rank that sent the message."""
        self.wait()
        return self._rank

    _source_rank = source_rank

    def _hurry(self) -> None:
        def complete() -> None:
            self._complete(NEVER)
            self._tell()

        start_thread(complete, "lockstep-message")


@dataclass(eq=False)
class Expected:
    """A receive: the tensor to write the message to, and the message when it has arrived."""

    tensor: Tensor
    source: int | None
    tag: int
    message: Message | None = None


class Mailbox(ABC):
    """The messages to this rank, and the receives of this rank that wait for them.

    Messages of one source and tag are matched in the order in which they were sent, with
    receives in the order in which those were started. Several threads may wait at once: one of
    them polls, for all. ``members`` are the group's ranks as the whole run numbers them.
    """

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self._rank, self._members = rank, members
        self._changed = threading.Condition()
        self._expected: list[Expected] = []
        self._unclaimed: list[Message] = []
        self._is_polled = False
        self._is_closed = False
        # The ranks that send nothing more, whose messages have all been delivered. A receive from
        # any rank goes on waiting for the others if the value is true.
        self._ended: Mapping[int, object] = {}

    @abstractmethod
    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; when this returns, it may be written to again."""

    def _poll(self, seconds: float) -> None:  # noqa: B027 - nothing is to be done for threads
        """Wait for messages, or ranks that end; deliver those and put these into ``_ended``.

        Never called where senders deliver their messages themselves, and ``_is_polled`` stays set.
        """

    @abstractmethod
    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        """The error of waiting for ``rank``, which has ended; if it is this one, of closing."""

    def _overdue(self, error: CollectiveTimeout) -> CollectiveFailed:
        return error

    def start_send(self, tensor: Tensor, destination: int, tag: int, timeout: timedelta) -> Work:
        """Send ``tensor``, which may be written to again at once."""
        self.send(flattened(tensor), destination, tag)
        return MessageWork(lambda _: destination, lambda: True, [], timeout)

    def start_receive(
        self, tensor: Tensor, source: int | None, tag: int, timeout: timedelta
    ) -> Work:
        """Receive the next message of ``source``, or of any rank, into ``tensor``."""
        expected = self.expect(tensor, source, tag)
        finish = partial(self.receive, expected)
        is_ready = partial(self._collect, expected, Deadline(0))
        return MessageWork(finish, is_ready, [tensor], timeout)

    def expect(self, tensor: Tensor, source: int | None, tag: int) -> Expected:
        """Have the next message of ``source`` (None: of any rank) be for ``tensor``."""
        expected = Expected(tensor, source, tag)
        with self._changed:
            self._expected.append(expected)
            self._match([expected], self._unclaimed)
        return expected

    def _deliver(self, message: Message) -> None:
        """Hand a message that has arrived to the receive that waits for it, or keep it."""
        with self._changed:
            self._unclaimed.append(message)
            self._match(self._expected, [message])
            self._changed.notify_all()

    def _match(self, receives: Sequence[Expected], messages: Sequence[Message]) -> None:
        """Match one receive with one message, if any of these belong together."""
        for receive, message in itertools.product(receives, messages):
            if receive.tag == message.tag and receive.source in (None, message.source):
                receive.message = message
                self._expected.remove(receive)
                self._unclaimed.remove(message)
                return

    def receive(self, expected: Expected, deadline: Deadline) -> int:
        """Wait for its message, write it to its tensor, and return the sender.

        Raises:
            CollectiveMismatch: If the message is of another size or dtype.
            CollectiveTimeout: If it doesn't arrive before the deadline.
            PeerLost: If its sender is gone.
        """
        try:
            self._collect(expected, deadline)
        finally:
            # Another thread may have delivered it since.
            with self._changed:
                if expected.message is None:
                    self._expected.remove(expected)
        names, message, source = self._members, expected.message, expected.source
        sender = "any rank" if source is None else f"rank {names[source]}"
        operation = f"recv from {sender} with tag {expected.tag}"
        if message is None:
            text = (
                f"Nothing came to rank {names[self._rank]} within {deadline.seconds:g} s in "
                f"{operation}. See what the sender does, and whether it sends with this tag."
            )
            absent = [names[rank] for rank in self._sources(expected)]
            raise self._overdue(CollectiveTimeout(text, absent, "recv"))
        message.copy_to(expected.tensor, names[message.source], operation)
        return message.source

    def _sources(self, expected: Expected) -> Sequence[int]:
        sources = range(len(self._members)) if expected.source is None else [expected.source]
        return [rank for rank in sources if rank != self._rank]

    def _collect(self, expected: Expected, deadline: Deadline) -> bool:
        """Poll until its message has arrived; return whether it has before the deadline."""
        sources = self._sources(expected)
        while True:
            left = deadline.left()
            with self._changed:
                if expected.message is not None:
                    return True
                self._check_sources(expected)
                # This rank's messages to itself end no transport's wait.
                if is_polled := self._is_polled or not sources:
                    self._wait(min(left, LOOK_SECONDS))
                else:
                    self._is_polled = True
            if not is_polled:
                try:
                    self._poll(min(left, LOOK_SECONDS))
                finally:
                    with self._changed:
                        self._is_polled = False
                        self._changed.notify_all()
            if not left and expected.message is None:
                self._check_sources(expected)
                return False

    def _wait(self, seconds: float) -> None:
        """Wait for a change, with the lock held."""
        self._changed.wait(seconds)

    def _check_sources(self, expected: Expected) -> None:
        """Raise if the message can't arrive any more."""
        if self._is_closed:
            raise self._lost(self._rank, "recv")
        sources = self._sources(expected)
        ended = [rank for rank in sources if rank in self._ended]
        lost = [rank for rank in ended if not self._ended[rank]]
        if lost or (ended and len(ended) == len(sources)):
            raise self._lost([*lost, *ended][0], "recv")
