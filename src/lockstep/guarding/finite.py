"""Whether gradients are finite: those of a rank before they are summed, and those of an update."""

from __future__ import annotations

import cmath
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from lockstep.comm import bytes_of
from lockstep.grad import Contents, UnsummedBucket, bucket_of, gradient_of, unsummed_bucket_of
from lockstep.world import parameters_of

# The most elements of unsummed gradients that are summed at a time: they stay in the caches.
_NUMEL = 64 * 1024


class Found(NamedTuple):
    """Parameters by whether their gradient is finite, in the order in which gradients came.

    Attributes:
        nonfinite: Those whose gradient isn't.
        finite: Those whose gradient is.
        is_part: Whether other ranks have looked at other parts of what isn't finite.
    """

    nonfinite: list[torch.Tensor]
    finite: list[torch.Tensor]
    is_part: bool = False


class GradientFinding(IntEnum):
    """What a rank tells of gradients before an update."""

    FINITE = 0
    NONFINITE = 1
    IN_DOUBT = 2  # so large on this rank, before they are summed, that the sums may not be finite


class LocalGradients:
    """Looks at the gradients of this rank before they are summed over the ranks.

    A reducer calls it with each bucket that it has filled.

    Args:
        measures: Whether their norm is wanted.
        digests: Whether a digest of their bits is wanted.

    Attributes:
        found: What was found.
        filled: What is in these buckets.
        digests: As given.
    """

    def __init__(self, *, measures: bool = False, digests: bool = False) -> None:
        self.found, self.filled = Found([], []), list[Contents]()
        self._measures, self._squares = measures, 0.0
        self._norms: dict[int, float] = {}  # of the gradients in contents, by id()
        self.digests = digests
        self._by_parameter: dict[int, bytes] = {}

    def __call__(self, contents: Contents, rows: torch.Tensor | None = None) -> None:
        """Look at the gradients in ``contents``, or at the ``rows`` that its only one has."""
        parameters = contents.parameters
        gradients = contents.gradients if rows is None else rows
        # Of what stays unsummed, the norm tells of the means, too: see look_at().
        norm: float | None = None
        if self._measures or (parameters and bucket_of(parameters[0]) is not None):
            norm = _norm(gradients)
            self._squares += norm**2
        if self.digests:
            views = contents.memory.views if rows is None else [rows]
            for parameter, view in zip(parameters, views, strict=True):
                self._by_parameter[id(parameter)] = _digest_of(view)
        if rows is not None:
            found = self.found.finite if _is_finite(rows) else self.found.nonfinite
            found.extend(parameters)
            return
        self.filled.append(contents)
        if norm is not None:
            self._norms[id(contents)] = norm
        is_finite = _is_surely_finite([gradients]) if norm is None else math.isfinite(norm)
        if is_finite:
            self.found.finite.extend(parameters)
            return
        for parameter, view in zip(parameters, contents.memory.views, strict=True):
            found = self.found.finite if _is_finite(view) else self.found.nonfinite
            found.append(parameter)

    def digest(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """Return a digest of the bits of this rank's own gradients of ``parameters``, so far.

        Without buckets, as on one rank, of ``parameter.grad``. None if some are sparse, of which
        the rank's own are gone. In this order: that of the buckets changes after a first backward.
        """
        whole = blake2b(digest_size=16)
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                return None
            if id(parameter) in self._by_parameter:
                whole.update(self._by_parameter[id(parameter)])
            elif gradient is not None and not self.filled:
                whole.update(_digest_of(gradient))
        return whole.hexdigest()

    def norm_in(self, contents: Contents) -> float:
        """Return the norm of this rank's own gradients in ``contents``; infinity if unknown."""
        return self._norms.get(id(contents), math.inf)

    def norm_for(self, optimizer: Optimizer, scale: float) -> float:
        """Return the norm of this rank's own gradients since the last call, as if not scaled.

        Without buckets, as on one rank, that of what ``optimizer`` is to step by.
        """
        if self.filled:
            squares, self._squares = self._squares, 0.0
            return math.sqrt(squares) / scale
        gradients = [g for p in parameters_of(optimizer) if (g := p.grad) is not None]
        left = getattr(optimizer, "grad_scale", None)  # of a fused one, which unscales by itself
        return math.sqrt(_sum_of_squares(gradients)) / (1.0 if left is None else float(left))


def _digest_of(tensor: torch.Tensor) -> bytes:
    return blake2b(bytes_of(tensor.detach().cpu().contiguous()), digest_size=16).digest()


def look_at(
    parameters: Collection[torch.Tensor], local: LocalGradients, *, sums: bool
) -> tuple[Found, bool]:
    """Look at gradients of ``parameters`` before an update; of unsummed ones, at this rank's part.

    Most of them are in the buckets that were filled, where one sum tells of all.

    Args:
        parameters: The parameters.
        local: The gradients of this rank before they were summed.
        sums: Whether to sum unsummed ones here, which the update does again: it takes as long as
            a fifth of the update. Otherwise they are taken to be finite.

    Returns:
        What was found, and whether unsummed gradients would be finite if the other ranks were all
        like this one: of those whose norm is small on all ranks the sums are.
    """
    wanted, seen = {*map(id, parameters)}, set[int]()
    found, are_small = Found([], []), True
    for contents in local.filled:
        if wanted.isdisjoint(map(id, contents.parameters)):
            continue
        bucket, _ = unsummed_bucket_of(contents.parameters[0]) or (None, 0)
        if bucket is not None and bucket.contents is contents and bucket.are_all_unsummed():
            seen.update(map(id, contents.parameters))
            if sums:
                found = found._replace(is_part=_look_at_part(bucket, found) or found.is_part)
            else:
                found.finite.extend(contents.parameters)
                are_small = are_small and _is_small(bucket, local.norm_in(contents))
        elif _are_in(contents) and _is_surely_finite([contents.gradients]):
            seen.update(map(id, contents.parameters))
            found.finite.extend(contents.parameters)
    others = [p for p in parameters if id(p) not in seen]
    gradients = [(p, g) for p in others if (g := p.grad) is not None]
    if _is_surely_finite([gradient for _, gradient in gradients]):
        found.finite.extend(parameter for parameter, _ in gradients)
        return found, are_small
    for parameter, gradient in gradients:
        (found.finite if _is_finite(gradient) else found.nonfinite).append(parameter)
    return found, are_small


def _is_small(bucket: UnsummedBucket, norm: float) -> bool:
    """Whether means can't be infinite if no rank's gradients have a larger norm."""
    limit = torch.finfo(bucket.contents.plan.dtype).max / (4 * bucket.group.size())
    return norm < limit and bucket.are_means_of_parts()


def _are_in(contents: Contents) -> bool:
    """Whether all gradients are those in the memory; what has none may be anything there."""
    memory = contents.memory
    if [*map(torch.Tensor.data_ptr, memory.views)] != memory.pointers:
        return False  # p.grad.data = ... has moved the view
    pairs = zip(map(gradient_of, contents.parameters), memory.views, strict=True)
    return all(gradient is None or gradient is view for gradient, view in pairs)


def _look_at_part(bucket: UnsummedBucket, found: Found) -> bool:
    """Look at the means that this rank sums for all; return whether any isn't finite."""
    contents = bucket.contents
    first, last = bucket.local_range()
    bad: list[tuple[int, int]] = []
    for start in range(first, last, _NUMEL):
        stop = min(start + _NUMEL, last)
        part = bucket.new_sum(start, stop)
        if not _is_surely_finite([part]):
            places = part.isfinite().logical_not().nonzero().flatten() + start
            bad += [(int(places[0]), int(places[-1]) + 1)]
    for index, parameter in enumerate(contents.parameters):
        begin, end = contents.offsets[index : index + 2]
        if any(start < end and begin < stop for start, stop in bad):
            exact = bucket.new_sum(max(begin, first), min(end, last))
            if not _is_finite(exact):
                found.nonfinite.append(parameter)
                continue
        found.finite.append(parameter)
    return bool(bad)


def _sum_of_squares(tensors: Iterable[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements."""
    return sum(_norm(tensor) ** 2 for tensor in tensors)


def _norm(tensor: torch.Tensor) -> float:
    values = _values(tensor)
    dtype = torch.float32 if values.element_size() < 4 else None
    return float(torch.linalg.vector_norm(values, dtype=dtype))


def _is_surely_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the sums of all tensors are finite, so that their elements are.

    One pass over the memory, which takes a fortieth of the time of ``isfinite()``. Large elements
    may add up to infinity though each is finite.
    """
    sums = [total for tensor in tensors for total in _sums(tensor)]
    # The host waits once for each device, and for a CPU's it does not.
    devices = {total.device for total in sums if total.device.type != "cpu"}
    return all(
        cmath.isfinite(total.item()) for total in sums if total.device.type == "cpu"
    ) and all(
        bool(torch.stack([each.isfinite() for each in sums if each.device == device]).all())
        for device in devices
    )


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    values = _values(tensor)
    if values.numel() and (values.is_floating_point() or values.is_complex()):
        yield values.sum(dtype=torch.float32) if values.element_size() < 4 else values.sum()


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(_values(tensor).isfinite().all())


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that a tensor of any layout has."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.values()
