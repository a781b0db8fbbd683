"""Messages between ranks of several hosts, through Gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.comm.arguments import flattened
from lockstep.comm.call import Call
from lockstep.comm.hosts.network import Network
from lockstep.comm.messages import HEADER, Message, MessageWork, header_of


class NetworkMailbox:
    """As a :class:`~lockstep.comm.messages.Mailbox`, for ranks on any host.

    Gloo itself matches messages with receives, by rank and tag and in order. It carries bytes, so
    a header tells their dtype; and it delivers messages that are shorter than expected, so the
    header tells their length.

    Args:
        network: All ranks of the group.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    def start_send(
        self, tensor: torch.Tensor, destination: int, tag: int, timeout: timedelta
    ) -> dist.Work:
        """Start sending ``tensor``, which may be written to again at once.

        Gloo takes the message when the other side expects it.
        """
        flat, network = flattened(tensor), self._network
        header = torch.frombuffer(bytearray(header_of(flat, tag)), dtype=torch.uint8)
        message = torch.cat([header, flat.view(torch.uint8)])
        work = network.group.send([message], destination, tag)
        call = Call("send", flat.dtype, flat.shape)

        # Gloo reads the message until it is taken, so the work keeps it.
        def complete(seconds: float, message: torch.Tensor = message) -> int:
            network.finish(lambda: work, call, seconds, [destination])
            return destination

        return MessageWork(complete, lambda: False, [], timeout)

    def start_receive(
        self, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta
    ) -> dist.Work:
        """Receive the next message of ``source``, or of any rank, into ``tensor``."""
        network = self._network
        message = torch.empty(HEADER.size + tensor.nbytes, dtype=torch.uint8, device="cpu")
        if source is None:
            work = network.group.recv_anysource([message], tag)
        else:
            work = network.group.recv([message], source, tag)
        call = Call("recv", tensor.dtype, (tensor.numel(),))

        def complete(seconds: float) -> int:
            network.finish(lambda: work, call, seconds, None if source is None else [source])
            sender = int(work._source_rank()) if source is None else source
            _, num_bytes, dtype = HEADER.unpack(bytes(message[: HEADER.size].tolist()))
            contents = message[HEADER.size :][:num_bytes]
            received = Message(sender, tag, dtype.rstrip(b"\0").decode(), contents)
            received.copy_to(tensor, network.name_of(sender), "recv")
            return sender

        return MessageWork(complete, work.is_completed, [tensor], timeout)
