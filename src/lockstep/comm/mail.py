"""Messages from one rank to another, matched by sender and tag to those who wait for them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lockstep.errors import CollectiveFailed, CollectiveMismatch, CollectiveTimeout

# How often a thread that lets another one look for it asks whether its sender still is there.
_CHECK_SECONDS = 0.2


class Letter(NamedTuple):
    """A message that has come.

    Attributes:
        source: The rank that sent it.
        tag: The tag that it was sent with.
        dtype: The dtype of the tensor, as text.
        contents: Its bytes.
        error: Why they aren't there, if they could not be had.
    """

    source: int
    tag: int
    dtype: str
    contents: torch.Tensor
    error: Exception | None = None


class Expected:
    """A tensor that a message is to be written to, and whether it has come."""

    def __init__(self, tensor: torch.Tensor, source: int | None, tag: int, sender: str) -> None:
        self.tensor = tensor
        self.source = source
        self.tag = tag
        self._sender = sender
        self.letter: Letter | None = None

    def wants(self, letter: Letter) -> bool:
        """Whether it waits for this one."""
        return (
            self.letter is None and self.tag == letter.tag and self.source in (None, letter.source)
        )

    def __str__(self) -> str:
        return f"recv from {self._sender} with tag {self.tag}"


class Mailbox(ABC):
    """What others have sent to this rank, and what this rank waits for.

    Letters of one sender and tag are taken in the order in which they were sent, by those who
    expect them in the order in which they began to. Several threads may wait at once: one of
    them looks at what comes, for all.

    Args:
        rank: Which rank this is.
        members: What the group's ranks are called in the whole run, by which errors name them.
    """

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self._rank = rank
        self._members = members
        self._changed = threading.Condition()
        self._expected: list[Expected] = []
        self._unclaimed: dict[tuple[int, int], deque[Letter]] = defaultdict(deque)
        self._somebody_looks = False

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; when this returns, it may be written to again."""

    @abstractmethod
    def _look(self, sources: Sequence[int], seconds: float) -> list[Letter]:
        """Return what has come from anyone; if nothing has, wait for it.

        Raises:
            PeerLost: If one of ``sources`` is gone, and nothing has come.
        """

    def _check_sources(self, sources: Sequence[int]) -> None:  # noqa: B027
        """Raise PeerLost if nothing more can come from ``sources``, as far as was seen."""

    @abstractmethod
    def _sources(self, expected: Expected) -> Sequence[int]:
        """Those whose message ``expected`` may be."""

    def _overdue(self, expected: Expected, seconds: float) -> CollectiveFailed:
        """What to raise when nothing came for ``seconds``."""
        return CollectiveTimeout(
            f"Nothing came to rank {self._members[self._rank]} within {seconds:g} s in {expected}. "
            "See what the sender does, and whether it sends with this tag.",
            [self._members[rank] for rank in self._sources(expected)],
            "recv",
        )

    @abstractmethod
    def flush(self) -> None:
        """Give what is still to be sent a moment to leave."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make every wait here end as if the others had gone."""

    @abstractmethod
    def close(self) -> None:
        """Send and receive nothing more."""

    def expect(self, tensor: torch.Tensor, source: int | None, tag: int) -> Expected:
        """Say that the next message of ``source`` (None: of anyone) is for ``tensor``."""
        sender = "any rank" if source is None else f"rank {self._members[source]}"
        expected = Expected(tensor, source, tag, sender)
        with self._changed:
            for key, letters in self._unclaimed.items():
                if expected.wants(letters[0]):
                    expected.letter = letters.popleft()
                    if not letters:
                        del self._unclaimed[key]
                    break
            else:
                self._expected.append(expected)
        return expected

    def has(self, expected: Expected) -> bool:
        """Whether that message has come."""
        return self._collect(expected, lambda: 0.0)

    def receive(self, expected: Expected, timeout: float) -> int:
        """Wait for that message, write it to its tensor, and return who sent it.

        Raises:
            CollectiveMismatch: If it is of another size or dtype.
            CollectiveTimeout: If it doesn't come within ``timeout`` seconds.
            PeerLost: If its sender is gone.
        """
        deadline = time.monotonic() + timeout
        try:
            self._collect(expected, lambda: deadline - time.monotonic())
        finally:
            # Another thread may have sorted it in since.
            with self._changed:
                if expected.letter is None:
                    self._expected.remove(expected)
        if expected.letter is None:
            raise self._overdue(expected, timeout)
        letter = expected.letter
        if letter.error is not None:
            raise letter.error
        tensor = expected.tensor
        if str(tensor.dtype) != letter.dtype or tensor.nbytes != letter.contents.numel():
            sender = self._members[letter.source]
            raise CollectiveMismatch(
                f"Rank {sender} sent {letter.contents.numel()} bytes of {letter.dtype} with "
                f"tag {letter.tag}, but here {tensor.nbytes} bytes of {tensor.dtype} are expected. "
                "Send and receive tensors of one size and dtype.",
                [sender],
                str(expected),
            )
        tensor.view(torch.uint8).copy_(letter.contents)
        return letter.source

    def _collect(self, expected: Expected, seconds_left: Callable[[], float]) -> bool:
        """Sort what comes until ``expected`` has its letter; False if time runs out first."""
        sources = self._sources(expected)
        while True:
            with self._changed:
                while expected.letter is None and self._somebody_looks:
                    # Whoever looks doesn't look for the end of these sources.
                    self._check_sources(sources)
                    self._changed.wait(max(0.0, min(seconds_left(), _CHECK_SECONDS)))
                    if expected.letter is None and seconds_left() <= 0:
                        return False
                if expected.letter is not None:
                    return True
                self._somebody_looks = True
            letters: list[Letter] = []
            left = max(0.0, seconds_left())
            try:
                letters = self._look(sources, left)
            finally:
                with self._changed:
                    self._somebody_looks = False
                    for letter in letters:
                        self._sort(letter)
                    self._changed.notify_all()
            if expected.letter is None and left <= 0:
                return False

    def _sort(self, letter: Letter) -> None:
        for expected in self._expected:
            if expected.wants(letter):
                expected.letter = letter
                self._expected.remove(expected)
                return
        self._unclaimed[letter.source, letter.tag].append(letter)
