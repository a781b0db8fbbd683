"""A few things said through a process group, in terms of tensors and bytes.

They call the group's own methods and not the functions of ``torch.distributed``: those look
groups up in a registry, and a group need not be in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import add

import torch
import torch.distributed as dist

from lockstep.comm.failures import Pending
from lockstep.errors import CollectiveFailed, SharedMemoryFull

_log = logging.getLogger(__name__)

# Large enough that latency is nothing beside the transfer, small enough as a second copy.
_CHUNK_BYTES = 25 * 1024 * 1024


def can_average(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` divides sums of tensors on ``device`` itself, as it writes them."""
    return device.type == "cpu" and hasattr(group, "empty")


def start_all_reduce(
    group: dist.ProcessGroup, tensor: torch.Tensor, *, average: bool = False
) -> Pending:
    """Start summing ``tensor`` over the ranks, in place, and return at once.

    Every rank of ``group`` must call it, in the same order; ``tensor`` may be read or written
    again after the ``wait()`` of what is returned. ``average`` only where the group
    :func:`can_average`.
    """
    options = dist.AllreduceOptions()
    if average:
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor]
    return Pending(group, "all_reduce", lambda: group.allreduce(tensors, options))


def any_rank(group: dist.ProcessGroup, facts: Sequence[bool]) -> list[bool]:
    """Return which of ``facts`` hold on any rank. All ranks must call it; it blocks.

    They travel on CPUs if the group can carry that: a GPU would have to be waited for.
    """
    device = torch.device("cpu")
    if not hasattr(group, "empty") and device not in group._device_types:
        device = group._device_types[0]
    counts = torch.tensor(facts, dtype=torch.int32, device=device)
    start_all_reduce(group, counts).wait()
    return [count > 0 for count in counts.tolist()]


def have_same(group: dist.ProcessGroup, payload: bytes, device: torch.device) -> bool:
    """Return, on every rank, whether all ranks have the same ``payload``.

    All ranks must call it; it blocks. ``device`` is one that the group can carry tensors of.
    """
    # Not one of OpenSSL's, whose library is a megabyte.
    digest = hashlib.blake2b(payload, digest_size=32).digest()
    # The largest of all, and of all turned over: the smallest.
    mine = digest + bytes(255 - byte for byte in digest)
    extremes = bytearray(mine)
    here = torch.frombuffer(extremes, dtype=torch.int64)
    there = here.to(device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    Pending(group, "all_reduce", lambda: group.allreduce([there], options)).wait()
    here.copy_(there)
    return extremes == mine


def zero_buffer(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros that ``group`` sums with the least copying, from its own memory if it has any.

    Only this rank need call it.
    """
    if device.type == "cpu" and hasattr(group, "empty"):
        try:
            buffer: torch.Tensor = group.empty(numel, dtype=dtype)
            return buffer.zero_()
        except SharedMemoryFull as error:
            _log.warning("Gradients are copied to be reduced, which takes longer. %s", error)
    if device.type == "cpu" and numel and hasattr(mmap, "MAP_ANONYMOUS"):
        # Not from the C library's heap: what is there for long, other memory can't be joined across
        # as it comes and goes. See "Memory" in benchmarks/RESULTS.md.
        with contextlib.suppress(OSError):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
            return torch.frombuffer(memory, dtype=dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


class TensorBroadcast:
    """A broadcast of many tensors in few transfers, started now and taken over later.

    What travels is bytes, so tensors of all dtypes travel together. Every rank of ``group``
    creates it with tensors of the same shapes and dtypes, and then calls :meth:`finish`. In
    between the tensors may be read and written; what the others get is what rank ``source``
    held at the start.
    """

    def __init__(
        self, group: dist.ProcessGroup, tensors: Iterable[torch.Tensor], source: int = 0
    ) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group = group
        self._source = source
        self._transfers: list[tuple[list[torch.Tensor], torch.Tensor, Pending]] = []
        for chunk in _chunks(tensors):
            wire = torch.cat([_bytes_of(tensor) for tensor in chunk])
            start = partial(group.broadcast, [wire], options)
            self._transfers.append((chunk, wire, Pending(group, "broadcast", start)))

    def finish(self, may_write: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Wait, and write what came into the tensors, on every rank but the source.

        Those that ``may_write`` refuses stay as they are.

        The tensors' version counters stay as they are: BatchNorm's statistics are saved for a
        backward that may still come, which reads nothing of them that this could falsify.
        Shown by test_two_forwards_with_batch_norm_then_two_backwards.

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
            parts = wire.split([tensor.numel() * tensor.element_size() for tensor in stored])
            for tensor, own, part in zip(chunk, stored, parts, strict=True):
                if may_write(tensor):
                    own.copy_(part.view(own.dtype).view(own.shape))


def broadcast_tensors(
    group: dist.ProcessGroup, tensors: Iterable[torch.Tensor], source: int = 0
) -> None:
    """Give every rank the values that ``tensors`` have on rank ``source``, and wait for it."""
    TensorBroadcast(group, tensors, source).finish()


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """A view of an expanded tensor that has each number in its memory once."""
    if tensor.layout is torch.strided:
        for dim in reversed(range(tensor.dim())):
            if not tensor.stride(dim) and tensor.shape[dim] > 1:
                tensor = tensor.select(dim, 0)
    return tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = without_repeats(tensor.detach()).resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _chunks(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that can travel together: on one device, and of a bounded size."""
    devices: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            devices[tensor.device].append(tensor)
    chunks: list[list[torch.Tensor]] = []
    for together in devices.values():
        room = 0
        # Wide elements first: then each begins at a multiple of its own size.
        for tensor in sorted(together, key=torch.Tensor.element_size, reverse=True):
            if room <= 0:
                chunks.append([])
                room = _CHUNK_BYTES
            chunks[-1].append(tensor)
            room -= tensor.numel() * tensor.element_size()
    return chunks


def all_gather_bytes(
    group: dist.ProcessGroup, payload: bytes, device: torch.device
) -> Sequence[bytes]:
    """Return every rank's ``payload``, in rank order, on every rank.

    Bytes and not objects: nothing that a peer sends is unpickled. All ranks must call it; it
    blocks. ``device`` is one that the group can carry tensors of.
    """
    lengths = all_gather(group, torch.tensor([len(payload)], device=device))
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = all_gather(group, padded.to(device))
    return [
        bytes(part[: int(length)].tolist()) for part, length in zip(gathered, lengths, strict=True)
    ]


def all_gather(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's ``tensor``, of one shape and dtype, in rank order, on every rank.

    All ranks must call it; it blocks, or on a GPU the current stream does.
    """
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    Pending(group, "all_gather", lambda: group.allgather([gathered], [tensor])).wait()
    return gathered


def sum_rows(group: dist.ProcessGroup, mine: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' coalesced sparse tensors, of which whole rows are there.

    It is taken in rank order, so that all ranks have the same bits. All ranks must call it; it
    blocks. A group need not be able to add up sparse tensors, which NCCL's can't.

    Args:
        group: The ranks.
        mine: This rank's tensor: in COO layout, with one sparse dimension.
    """
    places, rows = mine.indices()[0], mine.values()
    counts = [int(n) for n in all_gather(group, torch.tensor([len(rows)], device=rows.device))]
    room = max(counts) - len(rows)
    if group.size() == 1 or not max(counts):
        return mine
    all_places = all_gather(group, torch.cat([places, places.new_zeros(room)]))
    all_rows = all_gather(group, torch.cat([rows, rows.new_zeros(room, *rows.shape[1:])]))
    parts = [
        torch.sparse_coo_tensor(
            p[None, :n], r[:n], mine.shape, is_coalesced=True, check_invariants=False
        )
        for p, r, n in zip(all_places, all_rows, counts, strict=True)
    ]
    # Two at a time: how more than two values for one place are associated is not ours to say.
    return reduce(add, parts).coalesce()
