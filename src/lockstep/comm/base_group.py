"""A process group as torch.distributed knows it, apart from its operations."""

# The stubs of torch name some parameters otherwise than torch calls them by.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.carriers import connect
from lockstep.comm.collectives import Collectives
from lockstep.comm.dynamo import uncompiled
from lockstep.comm.transport import ConnectedRanks, Signature
from lockstep.comm.work import WorkQueue
from lockstep.deadline import Deadline
from lockstep.errors import BackendUnavailable

_groups: weakref.WeakSet[BaseGroup] = weakref.WeakSet()


@uncompiled
class BaseGroup(dist.ProcessGroup):
    """A group with a name, a queue of calls, groups for other devices, and an end."""

    def __init__(
        self,
        transport: ConnectedRanks,
        backend: str,
        timeout: timedelta,
        store: dist.Store | None = None,
        collectives: Callable[[Any, Signature, Deadline], Collectives] = Collectives,
    ) -> None:
        super().__init__(transport.rank, transport.size)  # type: ignore[call-arg]
        self.transport, self._collectives = transport, collectives
        self._rank, self._size = transport.rank, transport.size
        self._backend, self._store = backend, store
        self._queue = WorkQueue(timeout, transport.fail, transport.call_failed)
        self._name = self._description = ""
        # By type of device. torch.distributed takes a backend that is written in Python for the
        # whole group, and creates no other one of "cpu:shm,cuda:nccl". So they are created with
        # the first tensor for each, which is in the same collective on all ranks.
        self._others: dict[str, dist.ProcessGroup] = {}
        # A group that is dropped without being destroyed leaves nothing open, at exit either.
        self._finalizer = weakref.finalize(self, _release, self._queue, transport)
        _groups.add(self)

    def name(self) -> str:
        """The name of the backend."""
        return self._backend

    getBackendName = name  # noqa: N815

    # What follows also serves torch's `group_name`, `_set_group_name` and the like.

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch.distributed has given to this group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name that torch.distributed gives to this group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The user's description of this group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the user's description of this group."""
        self._description = description

    def get_group_store(self) -> dist.Store | None:
        """The store through which the ranks have met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        # None until torch has registered the group: to a group that has devices before, torch 2.15
        # attaches its flight recorder, which fails for a group that is written in Python.
        return [torch.device(device_type) for device_type in self._backends()]

    def _backends(self) -> dict[str, str]:
        """Return the requested backend by type of device; none if the group isn't registered."""
        try:
            config = dist.get_backend_config(self)
        except TypeError:  # raised for groups that torch.distributed doesn't know
            return {}
        return dict(dist.BackendConfig(dist.Backend(str(config))).get_device_backend_map())

    def _get_backend(self, device: torch.device) -> dist.Backend:
        if device.type == "cpu":
            return self  # type: ignore[return-value]
        return self._group_for(device.type)._get_backend(device)  # type: ignore[return-value]

    def _group_for(self, device_type: str) -> dist.ProcessGroup:
        """Return the group for tensors on another type of device than the CPU.

        Raises:
            BackendUnavailable: If none was requested, or torch has no such backend.
        """
        if device_type in self._others:
            return self._others[device_type]
        name, cpu, timeout = self._backends().get(device_type), self._backend, self._queue.timeout
        if name is None or self._store is None:
            raise BackendUnavailable(
                f"The backend {cpu!r} is for tensors on the CPU, and this one is on "
                f"{device_type!r}. Create the group with a backend for both, such as "
                f"'cpu:{cpu},{device_type}:"
                f"{dist.Backend.default_device_backend_map.get(device_type, 'nccl')}'."
            )
        ranks = dist.PrefixStore(f"{device_type}/", self._store), self._rank, self._size
        backend = connect(name, device_type, *ranks, timeout)
        if name in ("gloo", "nccl"):  # as torch does
            backend._set_sequence_number_for_group()
        kind = dist.Backend.backend_type_map[name]
        group = dist.ProcessGroup(*ranks)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device_type), kind, backend)
        group._set_group_name(dist.distributed_c10d.GroupName(f"{self._name}/{device_type}"))
        self._others[device_type] = group
        return group

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: collectives are counted from the group's first one."""

    def _get_sequence_number_for_group(self) -> int:
        return self._queue.num_submitted

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long each later call waits for other ranks."""
        self._queue.timeout = timeout

    _set_default_timeout = set_timeout

    def check_open(self) -> None:
        """Raise CollectiveFailed with the error that broke this group, if one did."""
        self.transport.check_open()

    @property
    def generation(self) -> object:
        """An object that changes when a caller is told of a CollectiveMismatch."""
        return self._queue.generation

    def abort(self) -> None:
        """Make every wait of this group end with an error, on all ranks."""
        self.transport.abort()
        self.shutdown()

    def shutdown(self) -> None:
        """Carry out all submitted calls, each within its own timeout, and leave the group.

        The others' collectives raise PeerLost from now on.
        """
        self._queue.carry_out_all()
        self._queue.close()
        self._finalizer()
        # Calls that were submitted meanwhile fail at once.
        self._queue.carry_out_all()
        others, self._others = self._others, {}
        for group in others.values():
            group.shutdown()


def _renew_in_child() -> None:
    # Another thread may have been in a collective when the process forked: in the child its lock
    # is never released, and calls there are to fail, not to wait.
    for group in list(_groups):
        group._queue = WorkQueue(group._queue.timeout)
        group.transport.after_fork()


os.register_at_fork(after_in_child=_renew_in_child)


@uncompiled
def _release(queue: WorkQueue, transport: ConnectedRanks) -> None:
    queue.let_go()
    transport.leave()
