"""What a process group of lockstep's is to torch.distributed, apart from its operations."""

# The stubs of torch name some parameters otherwise than torch calls them by.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.comm.other_devices import OtherDevices
from lockstep.comm.transport import Ranks
from lockstep.comm.uncompiled import uncompiled
from lockstep.comm.work import GroupWork, Run, WorkQueue

_groups: weakref.WeakSet[NamedGroup] = weakref.WeakSet()


class _Options(Protocol):
    """What the options of all operations have in common."""

    asyncOp: bool  # noqa: N815
    timeout: timedelta


@uncompiled
class NamedGroup(dist.ProcessGroup):
    """A group with a name, a queue of what it was called for, and an end.

    Args:
        team: The ranks, connected.
        backend: The name that it is registered by.
        timeout: How long to wait for the other ranks, in each call.
        store: What the ranks met through, if others may want it.
    """

    def __init__(
        self, team: Ranks, backend: str, timeout: timedelta, store: dist.Store | None = None
    ) -> None:
        super().__init__(team.rank, team.size)  # type: ignore[call-arg]
        self._team = team
        self._backend = backend
        self._store = store
        self._queue = WorkQueue(timeout, lambda error: team.abort(f" It met with {error!r}."))
        self._name = ""
        self._description = ""
        self._others = OtherDevices(self, store, timeout)
        # Whoever drops a group without destroying it leaves nothing open, at exit either.
        self._finalizer = weakref.finalize(self, _let_go, self._queue, team)
        _groups.add(self)

    def getBackendName(self) -> str:  # noqa: N802
        """The name that it is registered by."""
        return self._backend

    def name(self) -> str:
        """The name that it is registered by."""
        return self._backend

    @property
    def group_name(self) -> str:
        """What torch.distributed calls this group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """As :attr:`group_name`."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set :attr:`group_name`."""
        self._name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the user calls this group."""
        return self._description

    def getGroupDesc(self) -> str:  # noqa: N802
        """As :attr:`group_desc`."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set :attr:`group_desc`."""
        self._description = description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> dist.Store | None:
        """What the ranks met through."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        # None before torch has registered the group: to one that has some already, torch 2.15
        # would attach its flight recorder, which fails for a group that is written in Python.
        return [torch.device(device_type) for device_type in self._others.backends()]

    def _get_backend(self, device: torch.device) -> dist.Backend:
        if device.type == "cpu":
            return self  # type: ignore[return-value]
        return self._others.group(device.type)._get_backend(device)  # type: ignore[return-value]

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: collectives are counted from the group's first one."""

    def _get_sequence_number_for_group(self) -> int:
        return self._queue.num_submitted

    def set_timeout(self, timeout: timedelta) -> None:
        """How long calls that are made from now on wait for other ranks."""
        self._queue.timeout = timeout

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Make every wait of this group end with an error, on all ranks."""
        self._team.abort()
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group, when what was called is done: each call waits for its own timeout.

        The others' collectives raise PeerLost from now on.
        """
        self._queue.carry_out_all()
        self._queue.close()
        self._finalizer()
        # Whoever called meanwhile is to be told.
        self._queue.carry_out_all()
        self._others.shutdown()

    def _submit(
        self,
        run: Run,
        results: list[torch.Tensor],
        opts: _Options,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        # An option that isn't set holds -1 ms.
        return self._queue.submit(
            run,
            results,
            is_async=opts.asyncOp,
            timeout=timeout if timeout is not None else opts.timeout,
        )


def _renew_in_child() -> None:
    # Another thread may have been in a collective when the process forked: in the child its lock
    # is never released, and whoever calls the group there is to be told that, not to wait.
    for group in list(_groups):
        group._queue = WorkQueue(group._queue.timeout)


os.register_at_fork(after_in_child=_renew_in_child)


@uncompiled
def _let_go(queue: WorkQueue, team: Ranks) -> None:
    queue.let_go()
    team.leave()
