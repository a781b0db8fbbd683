"""The step after which the runs of a program part, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from lockstep.check.records import Records, Step
from lockstep.comm import bytes_of

# A difference counts if it is this many times what one more rounding error in each step makes.
_FACTOR = 64
# What a mean in another order leaves of initial values, in proportion to the largest.
_SAME_START = 1e-4

Tensors = Mapping[str, torch.Tensor]


class Parting(NamedTuple):
    """The largest difference between runs, in proportion to its tolerance."""

    name: str  # of the tensor that differs
    difference: float
    tolerance: float  # how much rounding explains
    rank: int | None  # that differs from rank 0; None if all ranks differ from one process
    number: int = 0  # of the step after which it is
    in_evaluation: bool = False  # and not yet right after the step
    in_bits: bool = False  # whether rounding explains it, but not after steps in shards

    @property
    def counts(self) -> bool:
        """Whether rounding doesn't explain it."""
        return self.difference > self.tolerance


class Runs(NamedTuple):
    """The runs that are compared; ``one`` and ``rounded`` say what rounding does."""

    ranks: Sequence[Records]
    alone: Records
    one: Records
    rounded: Records
    joins: bool  # whether ranks may take different numbers of steps


class Comparison(NamedTuple):
    """What is found in the steps that all runs have taken."""

    num_steps: int
    difference: float  # the largest that doesn't count
    tolerance: float
    parting: Parting | None = None
    not_finite: str | None = None  # the first trained tensor that isn't finite in any run
    are_even: bool = False  # whether all ranks had equally many samples in each step
    are_same: bool = False  # whether all ranks have trained on the same samples
    in_shards: bool = False  # whether all steps were in shards, so that every bit is the same


def compare(runs: Runs, up_to: int | None = None) -> Comparison:
    """Compare all steps, or the first ``up_to``, until runs part."""
    largest = tolerance = 0.0
    are_even = are_same = in_shards = True
    number = 0
    while up_to is None or number < up_to:
        steps = [records.step(number + 1) for records in runs.ranks]
        together = [step for step in steps if step is not None]
        alone, one = runs.alone.step(number + 1), runs.one.step(number + 1)
        is_whole = len(together) == len(steps) or (runs.joins and bool(together))
        if not is_whole or alone is None or one is None:
            break
        number += 1
        inputs = [step.inputs for step in together]
        are_same &= len(together) > 1 and bool(inputs[0]) and len({*inputs}) == 1
        counts = [[back.num_rows for back in step.backwards] for step in together]
        are_even &= any(counts[0]) and all(each == counts[0] for each in counts)
        for parting in _partings(runs, number, together, alone, one):
            if parting.counts:
                return Comparison(number, largest, tolerance, parting)
            largest, tolerance = (
                max(largest, parting.difference),
                max(tolerance, parting.tolerance),
            )
        in_shards &= alone.in_shards and any(step.in_shards for step in together)
        if in_shards and (differing := _in_bits(number, together, alone)) is not None:
            return Comparison(number, largest, tolerance, differing)
        if name := _not_finite(one):
            return Comparison(number, largest, tolerance, not_finite=name)
    is_any = number > 0
    return Comparison(
        number,
        largest,
        tolerance,
        are_even=are_even and is_any,
        are_same=are_same and is_any,
        in_shards=in_shards and is_any,
    )


def _partings(
    runs: Runs, number: int, ranks: Sequence[Step], alone: Step, one: Step
) -> Iterable[Parting]:
    """The largest difference after a step, and that in an evaluation that follows."""
    rounded = runs.rounded.step(number)
    moved = (one.tensors, rounded.tensors if rounded else {})
    found = _parting([step.tensors for step in ranks], alone.tensors, moved, alone.eps)
    yield found._replace(number=number)
    evaluations = [e for records in runs.ranks if (e := records.evaluation(number)) is not None]
    by_alone, by_one = runs.alone.evaluation(number), runs.one.evaluation(number)
    if evaluations and by_alone is not None and by_one is not None:
        moved = (by_one, runs.rounded.evaluation(number) or {})
        found = _parting(evaluations, by_alone, moved, alone.eps)
        yield found._replace(number=number, in_evaluation=True)


def _in_bits(number: int, ranks: Sequence[Step], alone: Step) -> Parting | None:
    """The first tensor, parameters before buffers, that differs in any bit after a step."""
    first = ranks[0].tensors
    for name, value in first.items():
        for rank, step in [*enumerate(ranks[1:], 1), (None, alone)]:
            other = step.tensors.get(name, value)
            if other.dtype != value.dtype or _bits(other) != _bits(value):
                difference = _distance(value, other)
                return Parting(name, difference, 0.0, rank, number, in_bits=True)
    return None


def _bits(tensor: torch.Tensor) -> bytes:
    contiguous = tensor.contiguous()
    return bytes(bytes_of(contiguous))


def gradients_differ(runs: Runs, number: int) -> Parting:
    """The largest difference between the gradients of that step."""
    steps = [step for records in runs.ranks if (step := records.step(number)) is not None]
    alone, one, rounded = (r.step(number) for r in (runs.alone, runs.one, runs.rounded))
    if not steps or alone is None or one is None:
        return Parting("", 0.0, 0.0, None)
    moved = (one.gradients, rounded.gradients if rounded else {})
    return _parting([step.gradients for step in steps], alone.gradients, moved, alone.eps)


def other_start(runs: Runs) -> str | None:
    """The first tensor with which one process would have begun otherwise, whenever it runs.

    Where two runs of one process begin otherwise as well, random numbers are drawn without a seed.
    """
    number = 1
    while (given := runs.ranks[0].load(f"start-{number}")) is not None:
        one, rounded = (each.load(f"start-{number}") for each in (runs.alone, runs.rounded))
        for name, value in given.items() if one and rounded else ():
            first, again = one.get(name), rounded.get(name)
            if first is None or again is None or not first.shape == again.shape == value.shape:
                continue
            is_seeded = torch.equal(first, again)
            scale = float(first.double().abs().max()) if first.numel() else 0.0
            if is_seeded and _distance(first, value) > _SAME_START * scale:
                return str(name)
        number += 1
    return None


def _not_finite(step: Step) -> str | None:
    """Return the first trained tensor that has a NaN or an infinity; buffers may have them."""
    trained = ((name, step.tensors[name]) for name in step.trained)
    return next((name for name, value in trained if not value.isfinite().all()), None)


def _parting(
    ranks: Sequence[Tensors], alone: Tensors, moved: tuple[Tensors, Tensors], least_eps: float
) -> Parting:
    """The largest difference; ``moved`` are one process's tensors without and with rounding."""
    found = Parting("", 0.0, 0.0, None)
    first = ranks[0]
    pairs: list[tuple[int | None, Tensors]] = [*enumerate(ranks[1:], 1)]
    for rank, tensors in [*pairs, (None, alone)]:
        for name, value in tensors.items():
            other = first.get(name)
            if other is None or other.shape != value.shape:
                continue
            difference = _distance(value, other)
            reference = moved[0].get(name, value)
            by_rounding = _distance(moved[1].get(name, reference), reference)
            scale = float(reference.double().abs().max()) if reference.numel() else 0.0
            eps = max(least_eps, torch.finfo(value.dtype).eps) if value.is_floating_point() else 0
            limit = _FACTOR * by_rounding + 8 * eps * scale
            if difference * max(found.tolerance, 1e-300) > found.difference * max(limit, 1e-300):
                found = Parting(name, difference, limit, rank)
        # Where ranks differ from each other, they needn't be compared with one process.
        if rank is not None and rank == len(pairs) and found.counts:
            return found
    return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel() or one.shape != other.shape:
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float((one != other).any())
    both = (one.isnan() & other.isnan()) | (one == other)
    difference = (one.to(torch.complex128) - other.to(torch.complex128)).abs()
    difference = torch.where(both, torch.zeros_like(difference), difference)
    return float(difference.nan_to_num(nan=torch.inf).max())
