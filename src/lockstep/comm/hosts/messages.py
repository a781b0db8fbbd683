"""Messages between single ranks of several hosts: Gloo's, each with a head that says what it is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.comm.hosts.network import Network
from lockstep.comm.mail import Expected
from lockstep.comm.transport import Signature
from lockstep.errors import CollectiveMismatch

_HEAD = struct.Struct("<q24s")  # how many bytes follow, and the dtype


class _Posted(Expected):
    """What is expected, and the room for it that Gloo knows of."""

    work: dist.Work
    message: torch.Tensor


class _Sending(dist.Work):
    """A message that Gloo has yet to take, which it does when the other side expects it.

    Args:
        finish: Waits for that.
        message: What is to be kept until then.
    """

    def __init__(self, finish: Callable[[], None], message: torch.Tensor) -> None:
        super().__init__()
        self._finish = finish
        self._message: torch.Tensor | None = message

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it has been taken.

        Raises:
            CollectiveFailed: If the other side doesn't come, or is gone.
        """
        if self._message is not None:
            self._finish()
            self._message = None
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited for it; Gloo tells no sooner."""
        return self._message is None

    def result(self) -> list[torch.Tensor]:
        """Nothing, when it has been taken."""
        self.wait()
        return []


class NetworkMailbox:
    """As a :class:`~lockstep.comm.mail.Mailbox`, for ranks on any host.

    Gloo itself matches senders with receivers, by rank and tag and in order. It carries bytes, and
    takes fewer than are expected for a whole message.

    Args:
        network: All ranks of the group.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    def send(self, tensor: torch.Tensor, destination: int, tag: int, timeout: float) -> dist.Work:
        """Start sending a flat tensor; it is copied, and may be written to again."""
        head = _HEAD.pack(tensor.nbytes, str(tensor.dtype).encode())
        told = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        message = torch.cat([told, tensor.view(torch.uint8)])
        work = self._network.group.send([message], destination, tag)
        call = Signature("send", tensor.dtype, tensor.shape)
        return _Sending(
            lambda: self._network.finish(lambda: work, call, timeout, [destination]), message
        )

    def expect(self, tensor: torch.Tensor, source: int | None, tag: int) -> Expected:
        """Say that the next message of ``source`` (None: of anyone) is for ``tensor``."""
        network = self._network
        sender = "any rank" if source is None else f"rank {network.name_of(source)}"
        posted = _Posted(tensor, source, tag, sender)
        num_bytes = _HEAD.size + tensor.nbytes
        posted.message = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if source is None:
            posted.work = network.group.recv_anysource([posted.message], tag)
        else:
            posted.work = network.group.recv([posted.message], source, tag)
        return posted

    def has(self, expected: Expected) -> bool:
        """Whether that message has come, as far as Gloo tells without waiting."""
        assert isinstance(expected, _Posted)
        return expected.work.is_completed()

    def receive(self, expected: Expected, timeout: float) -> int:
        """Wait for that message, write it to its tensor, and return who sent it.

        Raises:
            CollectiveMismatch: If it is of another size or dtype.
            CollectiveTimeout: If it doesn't come within ``timeout`` seconds.
            PeerLost: If its sender is gone.
        """
        assert isinstance(expected, _Posted)
        tensor, network = expected.tensor, self._network
        network.finish(
            lambda: expected.work,
            Signature("recv", tensor.dtype, tensor.shape),
            timeout,
            None if expected.source is None else [expected.source],
        )
        source = expected.work._source_rank() if expected.source is None else expected.source
        head = bytes(expected.message[: _HEAD.size].tolist())
        num_bytes, dtype = _HEAD.unpack(head)
        if num_bytes != tensor.nbytes or dtype.rstrip(b"\0").decode() != str(tensor.dtype):
            name = network.name_of(source)
            raise CollectiveMismatch(
                f"Rank {name} sent {num_bytes} bytes of {dtype.rstrip(bytes(1)).decode()} with "
                f"tag {expected.tag}, but here {tensor.nbytes} bytes of {tensor.dtype} are "
                "expected. Send and receive tensors of one size and dtype.",
                [name],
                "recv",
            )
        tensor.view(torch.uint8).copy_(expected.message[_HEAD.size :])
        return int(source)
