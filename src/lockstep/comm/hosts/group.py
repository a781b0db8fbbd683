"""The process group behind the backend ``"shm"`` where ranks are on several hosts."""

# The stubs of torch name some parameters otherwise than torch calls them by.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm.arguments import flattened
from lockstep.comm.dynamo import uncompiled
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.hosts.collectives import HostsCollectives
from lockstep.comm.hosts.transport import HostsTransport
from lockstep.comm.transport import Signature


@uncompiled
class HostsGroup(SharedMemoryGroup):
    """A group on two levels: memory within a host, Gloo between one rank of each.

    What single ranks send to single ranks goes through Gloo.
    """

    _transport: HostsTransport

    def _collectives(self, signature: Signature, timeout: float) -> HostsCollectives:
        return HostsCollectives(self._transport, signature, timeout)

    def _send(self, tensor: torch.Tensor, destination: int, tag: int) -> dist.Work:
        seconds = self._queue.timeout.total_seconds()
        return self._transport.mailbox.send(flattened(tensor), destination, tag, seconds)
