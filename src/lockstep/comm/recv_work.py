"""A tensor to be received from another rank, as a Work of torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.comm.dynamo import uncompiled
from lockstep.comm.mail import Expected
from lockstep.comm.threads.ranks import of_this_rank
from lockstep.comm.work import Outcome
from lockstep.torch_private import _InferenceMode


class Receiver(Protocol):
    """What messages come to, as :class:`~lockstep.comm.mail.Mailbox` defines it."""

    def expect(self, tensor: torch.Tensor, source: int | None, tag: int) -> Expected:
        """Say that the next message of ``source`` (None: of anyone) is for ``tensor``."""

    def has(self, expected: Expected) -> bool:
        """Whether that message has come."""

    def receive(self, expected: Expected, timeout: float) -> int:
        """Wait for that message, write it to its tensor, and return who sent it."""


@uncompiled
class RecvWork(dist.Work):
    """What the next message of a rank is written to; ``wait()`` waits for it.

    Args:
        mailbox: Where it comes.
        flat: What it is written to.
        deliver: Takes ``flat`` to where its elements belong.
        tensor: The tensor of the caller.
        source: The rank that sends, or None for any.
        tag: The tag that it sends with.
        timeout: How long to wait.
    """

    def __init__(
        self,
        mailbox: Receiver,
        flat: torch.Tensor,
        tensor: torch.Tensor,
        deliver: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        source: int | None,
        tag: int,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._tensor = tensor
        self._deliver = deliver
        self._timeout = timeout
        self._expected = mailbox.expect(flat, source, tag)
        self._sender: int | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the message has come and is written.

        Raises:
            CollectiveFailed: If it doesn't come, or is of another size.
        """
        with self._lock:
            if self._error is None and self._sender is None:
                self._receive(timeout or self._timeout)
        if self._error is not None:
            raise self._error
        return True

    def _receive(self, timeout: timedelta) -> None:
        seconds = (timeout if timeout > timedelta(0) else self._timeout).total_seconds()
        try:
            with _InferenceMode(True):
                sender = self._mailbox.receive(self._expected, seconds)
                self._deliver(self._expected.tensor, self._tensor)
                self._sender = sender
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        """Whether it has come, or failed to."""
        if self._sender is None and self._error is None:
            try:
                if not self._mailbox.has(self._expected):
                    return False
                self.wait()
            except Exception as error:
                self._error = error
        return True

    def is_success(self) -> bool:
        """Whether it has come."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """What made it fail, if it failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensor, when it has come."""
        self.wait()
        return [self._tensor]

    def _source_rank(self) -> int:
        self.wait()
        assert self._sender is not None
        return self._sender

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensor."""
        with self._lock:
            if self._outcome is None:
                self._outcome = Outcome()
                threading.Thread(
                    target=of_this_rank(self._tell), name="lockstep-receipt", daemon=True
                ).start()
            return self._outcome.future

    def _tell(self) -> None:
        assert self._outcome is not None
        try:
            self.wait()
        finally:
            self._outcome.tell([self._tensor], self._error)
