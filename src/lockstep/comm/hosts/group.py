"""The process group behind the backend ``"shm"`` where ranks are on several hosts."""

# The stubs of torch name some parameters otherwise than torch calls them by.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from lockstep.comm.call import Call
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.hosts.collectives import HostsCollectives
from lockstep.comm.hosts.transport import HostsTransport
from lockstep.comm.uncompiled import uncompiled


@uncompiled
class HostsGroup(SharedMemoryGroup):
    """A group on two levels: memory within a host, Gloo between one rank of each."""

    _team: HostsTransport

    def _collectives(self, call: Call, timeout: float) -> HostsCollectives:
        return HostsCollectives(self._team, call, timeout)
