"""Collectives of a process group of any kind that have been started, and waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from lockstep.comm.agreed_calls import agree
from lockstep.comm.failures import explained
from lockstep.comm.group import SharedMemoryGroup
from lockstep.errors import LockstepError
from lockstep.spans import span
from lockstep.torch_private import AllgatherOptions

_Result = TypeVar("_Result")


class _Waited(threading.local):
    seconds = 0.0


_waited = _Waited()


def waited_seconds() -> float:
    """Return for how long this thread has waited for collectives of lockstep's."""
    return _waited.seconds


class Started:
    """A collective that ``start`` starts, whose errors name ``operation`` and ranks to blame."""

    def __init__(
        self, group: ProcessGroup, operation: str, start: Callable[[], Work], num_bytes: int = 0
    ) -> None:
        self._group, self._operation, self._num_bytes = group, operation, num_bytes
        agree(group, operation)
        try:
            with span("launch", operation, num_bytes):
                self._work = start()
        except RuntimeError as error:
            raise explained(group, operation, error) from error

    def wait(self) -> None:
        """Wait until the result is there, on this device's stream if it is a GPU.

        Raises:
            CollectiveFailed: If a rank is lost, or doesn't come in time.
        """
        timed_wait(self._group, self._operation, self._num_bytes, self._work.wait)


def timed_wait(
    group: ProcessGroup, operation: str, num_bytes: int, wait: Callable[[], _Result]
) -> _Result:
    """Return ``wait()``, whose time counts; its errors name ``operation`` and ranks to blame."""
    began = time.perf_counter()
    try:
        with span("wait", operation, num_bytes):
            return wait()
    except LockstepError:
        raise
    except RuntimeError as error:
        raise explained(group, operation, error) from error
    finally:
        _waited.seconds += time.perf_counter() - began


def can_average(group: ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` divides sums of tensors on ``device`` itself, as it writes them."""
    return device.type == "cpu" and hasattr(group, "empty")


def can_overlap(group: ProcessGroup) -> bool:
    """Whether collectives of ``group`` go on while the program computes: they are other code's."""
    return group.size() > 1 and not isinstance(group, SharedMemoryGroup)


def start_all_reduce(
    group: ProcessGroup, tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM
) -> Started:
    """Start combining ``tensor`` over the ranks, in place, and return at once.

    Every rank must call it; ``tensor`` may be read or written again after the ``wait()`` of the
    return value. ``AVG`` only where the group :func:`can_average`.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor]
    start = partial(group.allreduce, tensors, options)
    return Started(group, "all_reduce", start, tensor.nbytes)


def sum_at(group: ProcessGroup, operation: str, tensor: Tensor) -> None:
    """Sum the ranks' ``tensor``, in place, at an ``operation`` that errors name.

    Every rank must call it; it blocks.
    """
    if isinstance(group, SharedMemoryGroup):
        agree(group, operation)
        timed_wait(group, operation, tensor.nbytes, lambda: group.sum_at(operation, tensor))
    else:
        start = partial(group.allreduce, [tensor], dist.AllreduceOptions())  # which sums
        Started(group, operation, start, tensor.nbytes).wait()


def start_reduce_scatter(group: ProcessGroup, memory: Tensor) -> Started:
    """Start summing the ranks' ``memory``, of equal parts, and return at once.

    Every rank must call it. After the ``wait()`` of the return value, part ``r`` on rank ``r`` is
    the sum; all other parts are undefined.
    """
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(ReduceOp.SUM)
    memory = torch.view_as_real(memory) if memory.is_complex() else memory
    local_part = memory.view(group.size(), -1)[group.rank()]
    start = partial(group._reduce_scatter_base, local_part, memory.view(-1), options)
    return Started(group, "reduce_scatter", start, memory.nbytes)


def start_all_gather_in_place(group: ProcessGroup, memory: Tensor) -> Started:
    """Start copying each rank's part of ``memory``, of equal ones in rank order, to all ranks.

    Every rank must call it; it returns at once.
    """
    memory = torch.view_as_real(memory) if memory.is_complex() else memory
    local_part = memory.view(group.size(), -1)[group.rank()]
    # Of a list of outputs, NCCL would make one tensor first, as large as all of them.
    start = partial(group._allgather_base, memory.view(-1), local_part, AllgatherOptions())
    return Started(group, "all_gather", start, local_part.nbytes)


def all_gather_in_place(group: ProcessGroup, memory: Tensor) -> None:
    """Gather as :func:`start_all_gather_in_place` does, and block; on a GPU, its stream does."""
    start_all_gather_in_place(group, memory).wait()


def named_barrier(group: ProcessGroup, operation: str) -> None:
    """Wait until all ranks of a :class:`SharedMemoryGroup` are at this ``operation``."""
    agree(group, operation)
    timed_wait(group, operation, 0, lambda: group.named_barrier(operation))  # type: ignore[attr-defined]
