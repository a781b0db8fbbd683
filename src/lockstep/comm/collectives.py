"""The collectives, as algorithms on staged data: stage, exchange addresses, read the others' data.

Values are always combined in rank order, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.arguments import Tensors
from lockstep.comm.transport import Address, Signature, Transport
from lockstep.deadline import Deadline
from lockstep.errors import CollectiveMismatch

# Up to this size every rank sums everything itself: a second exchange costs more than the sum.
_ONE_EXCHANGE_BYTES = 64 * 1024
# The size of a block, all sources together, which stays in the core's own cache until the result is
# written. Half of it costs 2 to 40 % more time, twice as much up to 10 %.
_BLOCKS_BYTES = 1024 * 1024

# In place of the address of a tensor that has none.
_OUT_OF_REACH = -1

_Combine = Callable[..., Tensor]

_COMBINE: dict[str, _Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Reduction(NamedTuple):
    """A reduction of ``torch.distributed`` for tensors of one dtype."""

    name: str  # its name there, such as "SUM"
    combine: _Combine  # the function of two tensors and ``out``
    accumulate_in: torch.dtype | None  # the dtype to combine in; None: the tensors' own
    factor: float | Tensor | None = None  # by which each rank's values are multiplied first

    def into(self, target: Tensor, sources: Tensors, copies: Tensors = ()) -> None:
        """Combine ``sources``, in their order, into ``target``, and copy the result to ``copies``.

        All are flat and of one length. Only the first source may share memory with ``target``;
        the others may share memory with ``copies``.
        """
        wide, size = None, max(1, _BLOCKS_BYTES // (len(sources) * target.element_size()))
        if self.accumulate_in is not None:
            size = _BLOCKS_BYTES // 16
            shape = 2, min(size, target.numel())
            wide = torch.empty(shape, dtype=self.accumulate_in, device=target.device)
        if target.numel() <= size:
            self._combine_block(target, sources, copies, wide)
            return
        tensors = (target, *sources, *copies)
        # Most tensors are among these several times, and cutting one up takes time.
        cut = {id(tensor): tensor.split(size) for tensor in tensors}
        stop = 1 + len(sources)
        for block in zip(*(cut[id(tensor)] for tensor in tensors), strict=True):
            self._combine_block(block[0], block[1:stop], block[stop:], wide)

    def divide(self, total: Tensor, count: int) -> None:
        """Divide a sum of ``count`` values, in place; integers are rounded towards zero."""
        if total.is_complex():
            # As pairs: torch's division of complex numbers depends on their place in memory.
            torch.view_as_real(total).div_(count)
        elif total.is_floating_point():
            total.div_(count)
        else:
            total.div_(count, rounding_mode="trunc")

    def _combine_block(
        self, target: Tensor, sources: Tensors, copies: Tensors, wide: Tensor | None
    ) -> None:
        """Combine one block; ``wide``, if given, has room for the total and a source."""
        first, *rest = sources
        if wide is not None:
            total, addend = wide[:, : target.numel()]
            total.copy_(first)
            for source in rest:
                self.combine(total, addend.copy_(source), out=total)
            copies = (target, *copies)
        else:
            total = target.copy_(first) if not rest else self.combine(first, rest[0], out=target)
            for source in rest[1:]:
                self.combine(total, source, out=total)
        if self.name == "AVG":
            self.divide(total, len(sources))
        for copy in copies:
            copy.copy_(total)


def reduction_for(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """Return the reduction ``op`` for tensors of ``dtype``.

    Raises:
        TypeError: If torch has no such reduction for this dtype, such as BAND of floats.
    """
    if op == dist.ReduceOp.SUM:  # these two are frequent, and the code below is slower
        return _reduction("SUM", dtype)
    if op == dist.ReduceOp.AVG:
        return _reduction("AVG", dtype)
    if isinstance(op, dist.ReduceOp.RedOpType):
        op = dist.ReduceOp(op)
    kind, factor = cast(tuple[dist.ReduceOp.RedOpType, float | None], op.__getstate__())
    reduction = _reduction(kind.name, dtype)
    if reduction.name != "PREMUL_SUM":
        return reduction
    try:
        torch.ones(1, dtype=dtype, device="cpu").mul_(0.5)
    except RuntimeError as error:
        raise TypeError(
            f"PREMUL_SUM multiplies by a fraction, which {dtype} tensors can't be: {error}"
        ) from error
    return reduction._replace(factor=1.0 if factor is None else factor)


@lru_cache(maxsize=256)
def _reduction(kind: str, dtype: torch.dtype) -> Reduction:
    combine = _COMBINE.get(kind)
    if combine is None:
        raise TypeError(f"There is no reduction {kind}; there are {', '.join(_COMBINE)}.")
    if kind == "AVG" and dtype is torch.bool:
        raise TypeError("There is no average of bool tensors; use SUM, MIN or MAX.")
    # Sums in a narrow dtype would be rounded once per rank.
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    accumulate_in = torch.float32 if is_narrow else None
    probe = torch.ones(1, dtype=torch.float32 if accumulate_in else dtype, device="cpu")
    try:
        combine(probe, probe, out=probe)
        probe.to(dtype)
    except RuntimeError as error:
        raise TypeError(f"torch can't combine {dtype} tensors by {kind}: {error}") from error
    return Reduction(kind, combine, accumulate_in)


class Collectives:
    """The collectives among ranks that reach each other's memory, for one call.

    Tensors here are flat and contiguous, and lengths are in elements. Every rank calls a method
    with an equal :class:`Signature`; it returns when this rank's result is complete and its input
    may be reused. Data larger than a slot goes in pieces. See Note [Two slots] in transport.py.

    All of them raise CollectiveFailed if the ranks don't make the same call in time:
    ``deadline`` starts again with each wait for the others.
    """

    def __init__(self, transport: Transport, signature: Signature, deadline: Deadline) -> None:
        self._transport, self._signature, self._deadline = transport, signature, deadline

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._exchange()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Combine all ranks' tensors in rank order; every rank gets the result, in place."""
        if reduction.factor is not None:
            tensor.mul_(reduction.factor)
        transport, numel, dtype = self._transport, tensor.numel(), tensor.dtype
        if tensor.nbytes <= _ONE_EXCHANGE_BYTES:
            local_address, slot = transport.stage(dtype, numel)
            slot.copy_(tensor)
            addresses = transport.exchange(self._signature, local_address, self._deadline)
            sources = [transport.at(r, each, dtype, numel) for r, each in enumerate(addresses)]
            reduction.into(tensor, sources)
            return
        # Each rank combines its part of the elements for all; a second exchange ends it.
        address = transport.find(tensor)
        length = self._slot_numel(dtype)
        addresses = self._announce([tensor[:length]], address)
        if not any(map(transport.is_staged, addresses)):
            length = numel
        for start in range(0, numel, length):
            part = tensor[start : start + length]
            if start:
                address = None if address is None else transport.find(part)
                addresses = self._announce([part], address)
            self._reduce_slice(part, addresses, reduction, None)

    def _reduce_slice(
        self, part: Tensor, addresses: Sequence[Address], reduction: Reduction, root: int | None
    ) -> None:
        """Combine a piece; all ranks get the result, or, where all have staged, ``root`` alone."""
        transport = self._transport
        everyone, local = self._everyone(addresses, part), self._local_slice(part.numel())
        mine = [whole[local] for whole in everyone]
        all_staged = all(map(transport.is_staged, addresses))
        # If all ranks have staged, the result stays in the first one's slot, and each rank copies
        # it from there. A rank whose own tensor is in reach may change it after this call, so
        # nobody may read there then, and the result is written to every rank's memory instead.
        reduction.into(mine[0], mine, () if all_staged else mine[1:])
        self._exchange()
        if all_staged:
            if root in (None, transport.rank):
                part.copy_(everyone[0])
        elif transport.is_staged(addresses[transport.rank]):
            part.copy_(everyone[transport.rank])

    def exchange_buffers(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, each in memory of its own rank.

        It is empty if any rank's tensor is where the others don't reach it.
        """
        address = self._transport.lend(tensor)
        addresses = self._exchange(_OUT_OF_REACH if address is None else address)
        if any(isinstance(each, int) and each == _OUT_OF_REACH for each in addresses):
            return []
        return self._everyone(addresses, tensor)

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        """Combine all ranks' tensors in rank order; rank ``root`` gets the result, in place."""
        source = tensor if reduction.factor is None else tensor.clone().mul_(reduction.factor)
        for piece in self._pieces(tensor):
            addresses = self._announce([source[piece]])
            self._reduce_slice(tensor[piece], addresses, reduction, root)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the tensor of rank ``root`` to every rank."""
        transport = self._transport
        for piece in self._pieces(tensor):
            part = tensor[piece]
            if transport.rank == root:
                self._announce([part])
            else:
                address = self._exchange()[root]
                part.copy_(transport.at(root, address, part.dtype, part.numel()))

    def scatter(self, output: Tensor, inputs: Tensors, root: int) -> None:
        """Copy the i-th input of rank ``root``, all of one length, to rank i's output."""
        ranks = range(self._transport.size)
        parts = inputs if self._transport.rank == root else [output[:0] for _ in ranks]
        lengths = [[output.numel() if rank == root else 0 for _ in ranks] for rank in ranks]
        for piece, received in self._exchange_parts(parts, lengths):
            output[piece].copy_(received[root])

    def all_gather(self, outputs: Tensors, tensor: Tensor) -> None:
        """Copy rank i's tensor, all of one length, to every rank's i-th output."""
        self.gather(outputs, tensor)

    def gather(self, outputs: Tensors, tensor: Tensor) -> None:
        """As :meth:`all_gather`, on the ranks that give ``outputs``; others give none."""
        for piece in self._pieces(tensor, *outputs):
            addresses = self._announce([tensor[piece]])
            for rank, output in enumerate(outputs):
                part = output[piece]
                part.copy_(self._transport.at(rank, addresses[rank], part.dtype, part.numel()))

    def all_gather_uneven(self, outputs: Tensors, tensor: Tensor) -> None:
        """As :meth:`all_gather`, for tensors of different lengths.

        Raises:
            CollectiveMismatch: On every rank, if one expects another length than is sent.
        """
        self._check_lengths([tensor] * len(outputs), outputs)
        self.gather(outputs, tensor)

    def reduce_scatter(self, output: Tensor, inputs: Tensors, reduction: Reduction) -> None:
        """Combine all ranks' i-th inputs, which differ in length by i, into rank i's output."""
        if reduction.factor is not None:
            inputs = [part.clone().mul_(reduction.factor) for part in inputs]
        lengths = [[part.numel() for part in inputs]] * self._transport.size
        for piece, received in self._exchange_parts(inputs, lengths):
            reduction.into(output[piece], received)

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> None:
        """Copy rank i's j-th input to rank j's i-th output; lengths may differ.

        Raises:
            CollectiveMismatch: On every rank, if one expects another length than is sent.
        """
        for piece, received in self._exchange_parts(inputs, self._check_lengths(inputs, outputs)):
            for output, part in zip(outputs, received, strict=True):
                output[piece].copy_(part)

    def _exchange_parts(
        self, inputs: Tensors, lengths: Sequence[Sequence[int]]
    ) -> Iterator[tuple[slice, Tensors]]:
        """Yield each piece, and that piece of every rank's input for this rank.

        ``inputs`` are one for each rank; ``lengths`` has, by rank, the lengths of its inputs.
        """
        transport, dtype = self._transport, inputs[0].dtype
        size, here = transport.size, transport.rank
        for piece in pieces(max(map(max, lengths)), self._slot_numel(dtype) // size):
            addresses = self._announce([part[piece] for part in inputs])
            received = []
            for rank, (address, theirs) in enumerate(zip(addresses, lengths, strict=True)):
                staged = [len(range(length)[piece]) for length in theirs]
                start = sum(staged[:here])
                slot = transport.at(rank, address, dtype, sum(staged))
                received.append(slot[start : start + staged[here]])
            yield piece, received

    def _check_lengths(self, inputs: Tensors, outputs: Tensors) -> list[list[int]]:
        """Return, by rank, the lengths of its inputs; raise unless the outputs have the same."""
        size = len(outputs)
        local_lengths = torch.tensor([*map(len, inputs), *map(len, outputs)], device="cpu")
        tables = local_lengths.new_empty(size, 2 * size)
        self.all_gather(list(tables), local_lengths)
        rows = tables.tolist()
        for rank, row in enumerate(rows):
            expected, sent = row[size:], [other[rank] for other in rows]
            if expected != sent:
                operation = self._signature.operation
                raise CollectiveMismatch(
                    f"In {operation}, rank {rank} expects {expected} elements from ranks 0 to "
                    f"{size - 1}, but {sent} are sent to it. Make the sizes of outputs and inputs "
                    "agree.",
                    [rank],
                    operation,
                )
        return [row[:size] for row in rows]

    def _exchange(self, address: Address = 0) -> Sequence[Address]:
        return self._transport.exchange(self._signature, address, self._deadline)

    def _announce(self, parts: Tensors, address: Address | None = None) -> Sequence[Address]:
        """Exchange addresses; without one, stage ``parts``, one after the other."""
        if address is None:
            numel = sum(map(Tensor.numel, parts))
            address, slot = self._transport.stage(parts[0].dtype, numel)
            if len(parts) == 1:
                slot.copy_(parts[0])
            else:
                torch.cat(list(parts), out=slot)
        return self._exchange(address)

    def _everyone(self, addresses: Sequence[Address], local: Tensor) -> list[Tensor]:
        """Return every rank's data, of the length and dtype of ``local``, this rank's."""
        transport = self._transport
        return [
            local
            if rank == transport.rank and not transport.is_staged(address)
            else transport.at(rank, address, local.dtype, local.numel())
            for rank, address in enumerate(addresses)
        ]

    def _slot_numel(self, dtype: torch.dtype) -> int:
        return self._transport.slot_bytes // dtype.itemsize

    def _local_slice(self, numel: int) -> slice:
        """Return which of ``numel`` elements this rank combines, cut at cache lines."""
        rank, each = self._transport.rank, -(-numel // self._transport.size)
        each += -each % 64
        return slice(min(rank * each, numel), min((rank + 1) * each, numel))

    def _pieces(self, *tensors: Tensor) -> Iterator[slice]:
        longest = max(map(Tensor.numel, tensors))
        return pieces(longest, self._slot_numel(tensors[0].dtype))


def pieces(numel: int, size: int) -> Iterator[slice]:
    """Cut up ``numel`` elements; even if there are none there is one piece, and one exchange."""
    for start in range(0, max(numel, 1), size):
        yield slice(start, min(start + size, numel))


def sum_sparse(all_gather: Callable[[Tensor], list[Tensor]], mine: Tensor) -> Tensor:
    """Return the sum of the ranks' sparse tensors, taken in rank order, so that bits are equal.

    Only elements that are there travel. All ranks must call it; it blocks.

    Args:
        all_gather: Returns every rank's tensor, of one shape and dtype, in rank order.
        mine: This rank's tensor: coalesced, in COO layout. Ranks may hold different elements.
    """
    indices, values = mine.indices().T, mine.values()
    counts = [int(n) for n in all_gather(torch.tensor([len(values)], device=values.device))]
    if len(counts) == 1 or not max(counts):
        return mine
    padding = max(counts) - len(values)
    all_indices, all_values = (
        all_gather(torch.cat([each, each.new_zeros(padding, *each.shape[1:])]))
        for each in (indices, values)
    )
    parts = (
        torch.sparse_coo_tensor(
            i[:n].T, v[:n], mine.shape, is_coalesced=True, check_invariants=False
        )
        for i, v, n in zip(all_indices, all_values, counts, strict=True)
    )
    # Two at a time: torch doesn't say in which order it sums more than two values of one element.
    return reduce(add, parts).coalesce()
