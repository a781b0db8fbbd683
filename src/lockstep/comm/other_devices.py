"""Tensors that aren't on the CPU, in a group that was created as ``"cpu:shm,cuda:nccl"``.

What torch.distributed gets from a backend that is written in Python, it takes for the whole
group, and doesn't create the other backends that were asked for. So it is done here, when the
first such tensor comes. That is the same moment on all ranks, as every collective is.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import BackendUnavailable


class OtherDevices:
    """The backends of a group for devices other than the CPU.

    Args:
        group: The group, as registered with torch.distributed.
        store: What its ranks meet through.
        timeout: How long they wait for each other.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store | None, timeout: timedelta
    ) -> None:
        self._group = group
        self._store = store
        self._timeout = timeout
        self._groups: dict[str, dist.ProcessGroup] = {}

    def backends(self) -> dict[str, str]:
        """For each type of device, the backend asked for; none if the group isn't registered."""
        try:
            config = dist.get_backend_config(self._group)
        except TypeError:  # torch's way to say that it doesn't know the group
            return {}
        return dict(dist.BackendConfig(dist.Backend(str(config))).get_device_backend_map())

    def group(self, device_type: str) -> dist.ProcessGroup:
        """The group for tensors of this type of device.

        Raises:
            BackendUnavailable: If none was asked for, or torch has no such backend.
        """
        if device_type not in self._groups:
            self._groups[device_type] = self._create(device_type)
        return self._groups[device_type]

    def _create(self, device_type: str) -> dist.ProcessGroup:
        name = self.backends().get(device_type)
        own = self._group.name()
        if name is None or self._store is None:
            raise BackendUnavailable(
                f"The backend {own!r} is for tensors on the CPU, and this one is on "
                f"{device_type!r}. Create the group with a backend for both, such as "
                f"'cpu:{own},{device_type}:nccl'."
            )
        store = dist.PrefixStore(f"{device_type}/", self._store)
        rank, size = self._group.rank(), self._group.size()
        backend: Any
        if name == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            raise BackendUnavailable(
                f"The backend {name!r} can't be used beside {own!r}: torch doesn't have it here, "
                "or it isn't 'nccl' or 'gloo'."
            )
        backend._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device_type), kind, backend)
        group._set_group_name(
            dist.distributed_c10d.GroupName(f"{self._group.group_name}/{device_type}")
        )
        return group

    def shutdown(self) -> None:
        """Leave all of them."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.shutdown()
