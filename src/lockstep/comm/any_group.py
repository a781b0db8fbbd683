"""Collectives through a process group of any kind.

All of them raise CollectiveFailed if a rank is lost, or doesn't come in time. They call the group's
own methods, not the functions of ``torch.distributed``: a group need not be in torch's registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from lockstep.comm.arguments import flattened, without_repeats
from lockstep.comm.collectives import sum_sparse
from lockstep.comm.failures import explained, global_rank
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.shm.memory import Segment, bytes_of
from lockstep.comm.shm.one_copy import OneCopy, name_of
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.transport import Transport
from lockstep.errors import CollectiveFailed, CollectiveMismatch, LockstepError, SharedMemoryFull
from lockstep.spans import span
from lockstep.torch_private import AllgatherOptions

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# Large enough to hide the latency of a transfer, small enough as a second copy of the tensors.
_CHUNK_BYTES = 25 * 1024 * 1024


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
        _wait(self._group, self._operation, self._num_bytes, self._work.wait)


def _wait(
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
        _wait(group, operation, tensor.nbytes, lambda: group.sum_at(operation, tensor))
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


def can_exchange_buffers(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of ``group`` reach each other's memory, of tensors on ``device``."""
    return isinstance(getattr(group, "transport", None), Transport) and device.type == "cpu"


def can_overlap(group: ProcessGroup) -> bool:
    """Whether collectives of ``group`` go on while the program computes: they are other code's."""
    return group.size() > 1 and not isinstance(group, SharedMemoryGroup)


def exchange_buffers(group: ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Return each rank's flat ``tensor``, by rank, once all have come.

    Every rank must call it, with a tensor of :func:`zero_buffer`, where ``group`` is one that
    :func:`can_exchange_buffers`; it blocks. The list is empty if any rank's isn't in shared memory.
    """
    return _wait(group, "exchange", tensor.nbytes, lambda: group.exchange_buffers(tensor))  # type: ignore[attr-defined]


def device_of_facts(group: ProcessGroup) -> torch.device:
    """The device of small tensors that ``group`` can carry and that are read at once."""
    # The CPU if the group carries CPU tensors: reading a GPU tensor waits for the GPU.
    device = torch.device("cpu")
    if not can_average(group, device) and device not in group._device_types:
        device = group._device_types[0]
    return device


def without_wait(values: Tensor, device: torch.device) -> Tensor:
    """Return ``values``, of the CPU, on ``device``, for which the host doesn't wait.

    It waits for a GPU in copies from memory that isn't pinned.
    """
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):  # not every kind of accelerator pins memory
            values = values.pin_memory()
    return values.to(device, non_blocking=True)


def any_rank(group: ProcessGroup, facts: Sequence[bool]) -> list[bool]:
    """Return which of ``facts`` hold on any rank. All ranks must call it; it blocks."""
    counts = torch.tensor(facts, dtype=torch.int32, device=device_of_facts(group))
    start_all_reduce(group, counts).wait()
    return [count > 0 for count in counts.tolist()]


def have_same(group: ProcessGroup, payload: bytes, device: torch.device) -> bool:
    """Return, on every rank, whether all ranks have the same ``payload``.

    All ranks must call it; it blocks. ``device`` is one whose tensors the group can carry.
    """
    # Not one of OpenSSL's, whose library is a megabyte.
    digest = hashlib.blake2b(payload, digest_size=32).digest()
    # Equal maxima of the digest and of its complement mean equal maximum and minimum.
    mine = [*digest, *(255 - byte for byte in digest)]
    maxima = torch.tensor(mine, dtype=torch.uint8, device=device)
    start_all_reduce(group, maxima, ReduceOp.MAX).wait()
    return maxima.tolist() == mine


def differing_facts(
    group: ProcessGroup, facts: object, device: torch.device | None = None
) -> list[Any]:
    """Return every rank's ``facts``, in rank order, if they differ, and else an empty list.

    All ranks must call it; it blocks. If nothing differs, it costs one all-reduce of 64 bytes.

    Args:
        group: The ranks.
        facts: What JSON can keep; dictionaries differ if their order does.
        device: One whose tensors the group can carry.
    """
    device = device or device_of_facts(group)
    if have_same(group, json.dumps(facts).encode(), device):
        return []
    found: list[Any] = all_gather_json(group, facts, device)
    return found


def check_same_facts(
    group: ProcessGroup,
    call: str,
    by_rank: Sequence[Mapping[str, Any]],
    cure: str = "Give the same on all.",
) -> None:
    """Raise CollectiveMismatch, naming both, if a rank told ``call`` other facts than rank 0."""
    for rank, facts in enumerate(by_rank):
        for name in [*by_rank[0], *facts]:
            first, other = by_rank[0].get(name, "missing"), facts.get(name, "missing")
            if other != first:
                here, there = global_rank(group, rank), global_rank(group, 0)
                text = f"{name} is {other} on rank {here} and {first} on rank {there}."
                raise CollectiveMismatch(f"{call}: {text} {cure}", [here], call)


def all_gather(group: ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Return every rank's ``tensor``, of one shape and dtype, in rank order, on every rank.

    All ranks must call it; it blocks, or on a GPU the current stream does.
    """
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    start = partial(group.allgather, [gathered], [tensor])
    Started(group, "all_gather", start, tensor.nbytes).wait()
    return gathered


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


def all_gather_bytes(group: ProcessGroup, payload: bytes, device: torch.device) -> Sequence[bytes]:
    """Return every rank's ``payload``, in rank order, on every rank; nothing is unpickled.

    All ranks must call it; it blocks. ``device`` is one whose tensors the group can carry.
    """
    lengths = all_gather(group, torch.tensor([len(payload)], device=device))
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = [part.cpu() for part in all_gather(group, padded.to(device))]
    pairs = zip(gathered, lengths, strict=True)
    return [bytes(bytes_of(part)[: int(length)]) for part, length in pairs]


def all_gather_json(group: ProcessGroup, value: object, device: torch.device | None = None) -> Any:
    """Return a list of every rank's ``value``, which JSON can keep, in rank order.

    All ranks must call it; it blocks. The group can carry tensors of ``device``.
    """
    payload = json.dumps(value).encode()
    by_rank = all_gather_bytes(group, payload, device or device_of_facts(group))
    return [*map(json.loads, by_rank)]


def all_gather_rows(group: ProcessGroup, *tensors: Tensor) -> list[list[Tensor]]:
    """Return every rank's ``tensors``, in rank order, all of which have as many rows on a rank.

    All ranks must call it, and one must have rows at least; it blocks.
    """
    counts = all_gather(group, torch.tensor([len(tensors[0])], device=tensors[0].device))
    most = max(map(int, counts))
    padded = (torch.cat([t, t.new_zeros(most - len(t), *t.shape[1:])]) for t in tensors)
    gathered = [all_gather(group, each) for each in padded]
    return [[each[rank][: int(count)] for each in gathered] for rank, count in enumerate(counts)]


def all_to_all(
    group: ProcessGroup,
    received: Tensor,
    incoming: Sequence[int],
    sent: Tensor,
    outgoing: Sequence[int],
) -> None:
    """Send part ``r`` of ``sent`` to rank ``r``, and receive one of each rank, in rank order.

    Every rank must call it; it blocks. Both tensors have one dimension; ``incoming`` and
    ``outgoing`` are the sizes of their parts.
    """
    options = dist.AllToAllOptions()
    start = partial(group.alltoall_base, received, sent, [*incoming], [*outgoing], options)
    Started(group, "all_to_all", start, sent.nbytes).wait()


def send_and_receive(
    group: ProcessGroup,
    sent: torch.Tensor,
    destination: int,
    received: torch.Tensor,
    source: int,
    tag: int,
) -> None:
    """Send a tensor to one rank, and receive one of another rank; an empty one isn't sent.

    The other ranks have to do their parts of it at the same time; it blocks.
    """
    works = []
    if received.numel():
        start = partial(group.recv, [received], source, tag)
        works.append(Started(group, "recv", start, received.nbytes))
    if sent.numel():
        start = partial(group.send, [sent], destination, tag)
        works.append(Started(group, "send", start, sent.nbytes))
    for work in works:
        work.wait()


def sum_rows(group: ProcessGroup, mine: Tensor, scale: float) -> tuple[Tensor, int]:
    """Return the sum of the ranks' sparse tensors times ``scale``, and the bytes this rank gave.

    See :func:`sum_sparse`.
    """
    num_bytes = 0

    def gathered(rows: Tensor) -> list[Tensor]:
        nonlocal num_bytes
        num_bytes += rows.nbytes
        return all_gather(group, rows)

    size = group.size()
    scaled = mine / size if scale == 1 / size else mine * scale  # with the bits of torch's DDP
    with span("rows"):
        return sum_sparse(gathered, scaled.coalesce()), num_bytes


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


def named_barrier(group: ProcessGroup, operation: str) -> None:
    """Wait until all ranks of a :class:`SharedMemoryGroup` are at this ``operation``."""
    _wait(group, operation, 0, lambda: group.named_barrier(operation))  # type: ignore[attr-defined]


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


class TensorBroadcast:
    """A broadcast of many tensors of any dtypes in few transfers of bytes.

    Every rank of ``group`` creates it with tensors of the same shapes and dtypes, and then calls
    :meth:`finish`. Meanwhile the tensors may be read and written; the other ranks get the values
    that rank ``source`` held at the start.
    """

    def __init__(self, group: ProcessGroup, tensors: Iterable[Tensor], source: int = 0) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group, self._source = group, source
        self._transfers: list[tuple[list[Tensor], Tensor, Started]] = []
        for chunk in _chunks(tensors):
            flats = [flattened(without_repeats(tensor.detach())) for tensor in chunk]
            wire = torch.cat([flat.view(torch.uint8) for flat in flats])
            start = partial(group.broadcast, [wire], options)
            work = Started(group, "broadcast", start, wire.nbytes)
            self._transfers.append((chunk, wire, work))

    def finish(self, may_write: Callable[[Tensor], bool] = lambda _: True) -> None:
        """Wait, and write the received values to the tensors, on every rank but the source.

        Tensors that ``may_write`` refuses stay as they are, and so do all version counters:
        BatchNorm's statistics are saved for a backward that may still come, which reads nothing of
        them that this could falsify. Shown by test_two_forwards_with_batch_norm_then_two_backwards.

        Raises:
            CollectiveFailed: If a rank is lost, or doesn't come in time.
        """
        for chunk, wire, work in self._transfers:
            try:
                work.wait()
            except CollectiveFailed as error:
                error.add_note(f"It was to bring what rank {self._source} holds to all ranks.")
                raise
            if self._group.rank() == self._source:
                continue
            stored = [without_repeats(tensor.data) for tensor in chunk]
            parts = wire.split([tensor.nbytes for tensor in stored])
            for tensor, dense, part in zip(chunk, stored, parts, strict=True):
                if may_write(tensor):
                    dense.copy_(part.view(dense.dtype).view(dense.shape))


def broadcast_tensors(group: ProcessGroup, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Copy equally shaped ``tensors`` from rank ``source`` to all. All must call it; it blocks."""
    TensorBroadcast(group, tensors, source).finish()


def _chunks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can travel together: on one device, and of a bounded size."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            by_device[tensor.device].append(tensor)
    chunks: list[list[Tensor]] = []
    for together in by_device.values():
        room = 0
        # Wide elements first: then each tensor begins at a multiple of its element size.
        for tensor in sorted(together, key=Tensor.element_size, reverse=True):
            if room <= 0:
                chunks.append([])
                room = _CHUNK_BYTES
            chunks[-1].append(tensor)
            room -= tensor.nbytes
    return chunks
