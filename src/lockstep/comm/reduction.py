"""How the ranks' values are combined: always in rank order, whatever the timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

# The size of a block, all sources together, which stays in the core's own cache until the result is
# written. Half of it costs 2 to 40 % more time, twice as much up to 10 %.
_BLOCKS_BYTES = 1024 * 1024

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

    def into(
        self, target: Tensor, sources: Sequence[Tensor], copies: Sequence[Tensor] = ()
    ) -> None:
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
        self,
        target: Tensor,
        sources: Sequence[Tensor],
        copies: Sequence[Tensor],
        wide: Tensor | None,
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
    if op == dist.ReduceOp.SUM:  # the most frequent; seven times as fast as the code below
        return _reduction("SUM", dtype)
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
        all_gather(torch.cat([own, own.new_zeros(padding, *own.shape[1:])]))
        for own in (indices, values)
    )
    parts = (
        torch.sparse_coo_tensor(
            i[:n].T, v[:n], mine.shape, is_coalesced=True, check_invariants=False
        )
        for i, v, n in zip(all_indices, all_values, counts, strict=True)
    )
    # Two at a time: torch doesn't say in which order it sums more than two values of one element.
    return reduce(add, parts).coalesce()
