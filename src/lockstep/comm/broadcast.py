"""Broadcasts of many tensors, through a process group of any kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.arguments import flattened, without_repeats
from lockstep.comm.started import Started
from lockstep.errors import CollectiveFailed

# Large enough to hide the latency of a transfer, small enough as a second copy of the tensors.
_CHUNK_BYTES = 25 * 1024 * 1024


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
