"""Memory that a process group of any kind sums with the least copying, or has one copy of."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.any_group import all_gather, any_rank
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.shm.memory import Segment
from lockstep.comm.shm.one_copy import OneCopy, name_of
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.started import can_average, timed_wait
from lockstep.comm.transport import Transport
from lockstep.errors import SharedMemoryFull

_log = logging.getLogger(__name__)


def can_exchange_buffers(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of ``group`` reach each other's memory, of tensors on ``device``."""
    return isinstance(getattr(group, "transport", None), Transport) and device.type == "cpu"


def exchange_buffers(group: ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Return each rank's flat ``tensor``, by rank, once all have come.

    Every rank must call it, with a tensor of :func:`zero_buffer`, where ``group`` is one that
    :func:`can_exchange_buffers`; it blocks. The list is empty if any rank's isn't in shared memory.
    """
    return timed_wait(group, "exchange", tensor.nbytes, lambda: group.exchange_buffers(tensor))  # type: ignore[attr-defined]


def zero_buffer(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return zeros that ``group`` sums with the least copying, in its own memory if it has any."""
    if can_average(group, device):
        try:
            buffer: Tensor = group.empty(numel, dtype=dtype)  # type: ignore[attr-defined]
            return buffer.zero_()
        except SharedMemoryFull as error:
            _log.warning("Gradients are copied to be reduced, which takes longer. %s", error)
    if device.type == "cpu" and numel:
        # A long-lived block fragments malloc's heap. See "Memory" in benchmarks/RESULTS.md.
        with contextlib.suppress(OSError):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
            return torch.frombuffer(memory, dtype=dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


def ranks_with_one_copy(group: ProcessGroup, device: torch.device) -> tuple[ProcessGroup, bool]:
    """Return the ranks of this host, if it suffices that these have one copy of parameters.

    If all hosts have equally many ranks, they divide the parameters alike, and the updates have the
    same bits on each host. Otherwise it is ``group``. All ranks must call it; it blocks.

    Returns:
        The ranks, and whether the first of all is among them.
    """
    if device.type != "cpu" or not isinstance(group, SharedMemoryGroup):
        return group, True
    host_group = group.of_this_host()
    return host_group, host_group is group or group.transport.host == 0  # type: ignore[attr-defined]


def even_hosts(group: ProcessGroup) -> Sequence[Sequence[int]]:
    """Return the ranks of each host, if these are several and have equally many ranks each.

    Else it is empty. The ranks of :func:`ranks_with_one_copy` are those of one host then.
    """
    transport: Any = getattr(group, "transport", None)
    return transport.hosts if getattr(transport, "is_even", False) else []


def one_copy(group: ProcessGroup, num_bytes: int) -> OneCopy | None:
    """Return memory of which the ranks have one copy; None if they are no processes of one host.

    All ranks must call it; it blocks. The memory stays for as long as any rank uses it.
    """
    if not isinstance(getattr(group, "transport", None), ShmTransport):
        return None
    segment = found = None
    if group.rank() == 0:
        with contextlib.suppress(SharedMemoryFull):
            segment, _ = Segment.create(num_bytes)
    name = [0, 0, 0] if segment is None else name_of(segment.descriptor)
    name = all_gather(group, torch.tensor(name, device="cpu"))[0].tolist()
    with contextlib.suppress(SharedMemoryFull, OSError):
        found = OneCopy(name, num_bytes)
    is_missing = any_rank(group, [found is None])[0]  # all have opened it by then
    if segment is not None:
        segment.close()
    return None if is_missing else found
