"""How the ranks' values are combined: always in rank order, whatever the timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

# What passes through a core at a time, of all sources together: it stays in the core's own cache
# while it is summed and written back. Half of it costs 2 to 40 % more, and twice up to 10.
_BLOCKS_BYTES = 1024 * 1024

_Combine = Callable[..., torch.Tensor]

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

# Summed in their own precision, these would be rounded once for every rank.
_NARROW = frozenset(
    getattr(torch, name)
    for name in (
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)


class Reduction(NamedTuple):
    """A reduction of ``torch.distributed`` for tensors of one dtype.

    Attributes:
        name: Its name there, such as ``"SUM"``.
        combine: Takes two tensors and ``out``.
        accumulate_in: The dtype to combine in, if not the tensors' own.
        factor: What each rank's own values are multiplied by first (PREMUL_SUM), or None.
    """

    name: str
    combine: _Combine
    accumulate_in: torch.dtype | None
    factor: float | torch.Tensor | None = None

    def into(
        self,
        target: torch.Tensor,
        sources: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor] = (),
    ) -> None:
        """Combine ``sources``, in their order, into ``target``, and copy that to ``copies``.

        All are flat and of one size. Only the first source may share memory with ``target``,
        as it has been read when that is written; the others may with ``copies``. It goes block
        by block: what was read is still in the cache when results are written.
        """
        if self.accumulate_in is not None:
            self._into_through_wider(target, sources, copies)
            return
        size = max(1, _BLOCKS_BYTES // (len(sources) * target.element_size()))
        if target.numel() <= size:
            self._combine_block(target, sources, copies)
            return
        tensors = (target, *sources, *copies)
        # Mostly a tensor is several of these, and cutting it up takes time.
        cut = {id(tensor): tensor.split(size) for tensor in tensors}
        stop = 1 + len(sources)
        for block in zip(*(cut[id(tensor)] for tensor in tensors), strict=True):
            self._combine_block(block[0], block[1:stop], block[stop:])

    def divide(self, total: torch.Tensor, count: int) -> None:
        """Make the average of ``count`` values from their sum, in place."""
        if total.is_complex():
            # As pairs: how torch divides complex numbers depends on where in memory they are.
            torch.view_as_real(total).div_(count)
        elif total.is_floating_point():
            total.div_(count)
        else:
            total.div_(count, rounding_mode="trunc")

    def _combine_block(
        self,
        target: torch.Tensor,
        sources: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
    ) -> None:
        if len(sources) == 1:
            target.copy_(sources[0])
        else:
            self.combine(sources[0], sources[1], out=target)
        for source in sources[2:]:
            self.combine(target, source, out=target)
        if self.name == "AVG":
            self.divide(target, len(sources))
        for copy in copies:
            copy.copy_(target)

    def _into_through_wider(
        self,
        target: torch.Tensor,
        sources: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
    ) -> None:
        size = _BLOCKS_BYTES // 16
        numel = min(size, target.numel())
        result = torch.empty(numel, dtype=self.accumulate_in, device=target.device)
        other = torch.empty_like(result)
        for start in range(0, target.numel(), size):
            block = slice(start, min(start + size, target.numel()))
            mine, theirs = result[: block.stop - start], other[: block.stop - start]
            mine.copy_(sources[0][block])
            for source in sources[1:]:
                theirs.copy_(source[block])
                self.combine(mine, theirs, out=mine)
            if self.name == "AVG":
                self.divide(mine, len(sources))
            for written in (target, *copies):
                written[block].copy_(mine)


def reduction_for(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """Return the reduction ``op`` for tensors of ``dtype``.

    Raises:
        TypeError: If torch has no such reduction for this dtype, as BAND of floats.
    """
    if op == dist.ReduceOp.SUM:  # by far the most, and seven times as fast as what follows
        return _reduction("SUM", dtype)
    kind, factor = _kind_and_factor(op)
    reduction = _reduction(kind, dtype)
    if kind != "PREMUL_SUM":
        return reduction
    try:
        torch.ones(1, dtype=dtype, device="cpu").mul_(0.5)
    except RuntimeError as error:
        raise TypeError(
            f"PREMUL_SUM multiplies by a fraction, which {dtype} tensors can't be: {error}"
        ) from error
    return reduction._replace(factor=factor)


def _kind_and_factor(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> tuple[str, float]:
    if isinstance(op, dist.ReduceOp.RedOpType):
        return op.name, 1.0
    kind, factor = cast(tuple[dist.ReduceOp.RedOpType, float | None], op.__getstate__())
    return kind.name, 1.0 if factor is None else factor


@lru_cache(maxsize=256)
def _reduction(kind: str, dtype: torch.dtype) -> Reduction:
    combine = _COMBINE.get(kind)
    if combine is None:
        raise TypeError(f"There is no reduction {kind}; there are {', '.join(_COMBINE)}.")
    if kind == "AVG" and dtype is torch.bool:
        raise TypeError("There is no average of bool tensors; use SUM, MIN or MAX.")
    accumulate_in = torch.float32 if dtype in _NARROW else None
    probe = torch.ones(1, dtype=torch.float32 if accumulate_in else dtype, device="cpu")
    try:
        combine(probe, probe, out=probe)
        probe.to(dtype)
    except RuntimeError as error:
        raise TypeError(f"torch can't combine {dtype} tensors by {kind}: {error}") from error
    return Reduction(kind, combine, accumulate_in)
