"""The step in which the runs of a program part, and the likely cause, from their records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lockstep.check.records import Records, Step

# A difference counts if it is this many times what one more rounding error in each step makes.
_FACTOR = 64
# How exactly gradients have to be multiples of others.
_SAME_RATIO = 1e-3
_OUR_LOADER = "lockstep.DataLoader(dataset, batch_size=...), whose batch_size is the global one"


class Finding(NamedTuple):
    """What a check has found; ``cause`` is None if nothing."""

    num_steps: int
    difference: float
    tolerance: float
    where: str = ""
    cause: str | None = None
    remedy: str = ""
    is_even: bool = False  # whether all ranks had equally many samples in each step


class Verdict(NamedTuple):
    """A likely cause, and what to do."""

    cause: str
    remedy: str


_PADDED = Verdict(
    "the sampler isn't lockstep's: torch's DistributedSampler gives some samples twice, so that "
    "all ranks have equally many.",
    f"Use {_OUR_LOADER}.",
)


class Parting(NamedTuple):
    """The largest difference between runs after a step, in proportion to its tolerance."""

    name: str  # of the tensor that differs
    difference: float
    tolerance: float  # how much rounding explains
    rank: int | None  # that differs from rank 0; None if all ranks differ from one process


class Facts(NamedTuple):
    """What is known of the step in which runs part."""

    parting: Parting
    ranks: Sequence[Step]
    alone: Step
    pads: bool  # whether a loader's sampler gives samples twice
    repeated: int  # how many samples of a batch several ranks had
    num_rows: int  # the samples of that batch over all ranks


def is_divided_by_program(ranks: Sequence[Records]) -> bool:
    """Whether loaders give all ranks the same batches, of which the program takes parts."""
    rows = [records.rows() for records in ranks]
    if not rows[0] or any(each != rows[0] for each in rows):
        return False
    steps = [records.step(1) for records in ranks]
    inputs = [[back.rows for back in step.backwards] for step in steps if step is not None]
    return any(each != inputs[0] for each in inputs)


def finding(ranks: Sequence[Records], alone: Records, with_rounding: Records) -> Finding:
    """Compare all steps that the runs have taken."""
    ends = [records.end() for records in [*ranks, alone]]
    num_steps = [end.num_steps if end else 0 for end in ends]
    largest = tolerance = 0.0
    are_even = True
    are_same = True  # whether all ranks have trained on the same samples
    for number in range(1, min(num_steps) + 1):
        steps = [records.step(number) for records in ranks]
        one, rounded = alone.step(number), with_rounding.step(number)
        if one is None or None in steps:
            break
        together = [step for step in steps if step is not None]
        parting = _parting(together, one, rounded)
        inputs = [[(back.rows, back.num_rows) for back in step.backwards] for step in together]
        are_same &= any(num for _, num in inputs[0]) and all(each == inputs[0] for each in inputs)
        counts = [[num for _, num in each] for each in inputs]
        are_even &= any(counts[0]) and all(each == counts[0] for each in counts)
        largest, tolerance = max(largest, parting.difference), max(tolerance, parting.tolerance)
        if parting.difference > parting.tolerance:
            verdict = likely_cause(_facts(parting, ranks, together, one))
            others = "one process" if parting.rank is None else f"rank {parting.rank}"
            who = "All ranks" if parting.rank is None else "Rank 0"
            where = (
                f"{who} and {others} part in step {number}, in {parting.name!r}: by "
                f"{parting.difference:.1e}, where rounding explains {parting.tolerance:.1e}."
            )
            return Finding(number, parting.difference, parting.tolerance, where, *verdict)
        if name := _not_finite(one):
            return Finding(
                number,
                largest,
                tolerance,
                f"After step {number}, {name!r} isn't finite on the ranks and in one process, so "
                "that later steps can't be compared.",
                "the training diverges by itself, in one process too.",
                "See which value is the first that isn't finite: torch.autograd.detect_anomaly(), "
                "a smaller learning rate, --float64.",
            )
    alike = Finding(min(num_steps), largest, tolerance, is_even=are_even)
    if any(pads for each in ranks[0].rows().values() for _, pads in each):
        where = "Some samples are given to two ranks, and so count twice."
        return alike._replace(where=where, cause=_PADDED.cause, remedy=_PADDED.remedy)
    if are_same and min(num_steps):
        return alike._replace(
            where="All ranks train on the same samples, so that each does the work of all.",
            cause="the loader's sampler doesn't divide the samples among the ranks.",
            remedy=f"Use {_OUR_LOADER}.",
        )
    if len(set(num_steps[:-1])) > 1:
        told = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(num_steps[:-1]))
        return alike._replace(
            where=f"The ranks take different numbers of steps ({told}).",
            cause="a rank leaves out steps, or has fewer batches than others.",
            remedy=f"Let every rank take each step; {_OUR_LOADER}, gives all ranks equally many "
            "batches.",
        )
    return alike


def _not_finite(step: Step) -> str | None:
    """Return the first trained tensor that has a NaN or an infinity; buffers may have them."""
    trained = ((name, step.tensors[name]) for name in step.trained)
    return next((name for name, value in trained if not value.isfinite().all()), None)


def _parting(ranks: Sequence[Step], alone: Step, rounded: Step | None) -> Parting:
    """Return the largest difference, in proportion to what rounding explains."""
    found = Parting("", 0.0, 0.0, None)
    first = ranks[0].tensors
    pairs = [(rank, step.tensors) for rank, step in enumerate(ranks[1:], 1)]
    for rank, tensors in [*pairs, (None, alone.tensors)]:
        for name, value in tensors.items():
            other = first.get(name)
            if other is None or other.shape != value.shape:
                continue
            difference = _distance(value, other)
            reference = alone.tensors.get(name, value)
            moved = 0.0
            if rounded is not None and name in rounded.tensors:
                moved = _distance(rounded.tensors[name], reference)
            scale = float(reference.double().abs().max()) if reference.numel() else 0.0
            eps = max(alone.eps, torch.finfo(value.dtype).eps) if value.is_floating_point() else 0
            limit = _FACTOR * moved + 8 * eps * scale
            if difference * max(found.tolerance, 1e-300) > found.difference * max(limit, 1e-300):
                found = Parting(name, difference, limit, rank)
        # Where ranks differ from each other, they needn't be compared with one process.
        if rank is not None and found.difference > found.tolerance:
            return found
    return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float((one != other).any())
    both = (one.isnan() & other.isnan()) | (one == other)
    difference = (one.to(torch.complex128) - other.to(torch.complex128)).abs()
    difference = torch.where(both, torch.zeros_like(difference), difference)
    return float(difference.nan_to_num(nan=torch.inf).max())


def _facts(parting: Parting, ranks: Sequence[Records], steps: Sequence[Step], alone: Step) -> Facts:
    rows = [records.rows() for records in ranks]
    repeated = num_rows = 0
    pads = False
    for name, batches in rows[0].items():
        for number, (_, is_padded) in enumerate(batches):
            pads |= is_padded
            counts: Counter[int] = Counter()
            for each in rows:
                if len(each.get(name, ())) > number:
                    counts.update(each[name][number][0])
            again = sum(count - 1 for count in counts.values())
            if again > repeated:
                repeated, num_rows = again, sum(counts.values())
    return Facts(parting, steps, alone, pads, repeated, num_rows)


def likely_cause(facts: Facts) -> Verdict:
    """Return the likely cause of a difference."""
    return _from_one_process(facts) if facts.parting.rank is None else _between_ranks(facts)


def _between_ranks(facts: Facts) -> Verdict:
    """Why ranks differ from each other."""
    name, rank = facts.parting.name, facts.parting.rank or 0
    first, other = facts.ranks[0], facts.ranks[rank]
    if first.trained != other.trained:
        return Verdict(
            f"the optimizer of rank {rank} has other parameters than that of rank 0.",
            "Make the optimizer of the same parameters on every rank.",
        )
    if told := _other_options(first.options, other.options):
        return Verdict(
            f"the optimizer's options differ: {told} on rank 0 and rank {rank}.",
            "Give every rank the same; let a scheduler that looks at a metric have "
            "lockstep.reduce(metric).",
        )
    if name not in first.trained:
        return Verdict(
            f"{name!r} is a buffer, or a parameter that no optimizer has, and each rank updates it "
            "by itself.",
            "Update it on every rank from what all ranks have in common, such as the parameters or "
            "lockstep.reduce(value); lockstep.SyncBatchNorm.convert_sync_batchnorm(model) for "
            "BatchNorm.",
        )
    if name in {*first.changed, *other.changed}:
        return Verdict(
            f"{name!r} was changed between two steps, on one rank in another way.",
            "Change parameters on every rank alike.",
        )
    if _differ(first.start.get(name), other.start.get(name)):
        return Verdict(
            "the ranks' models start from different parameters.",
            "Call lockstep.parallelize(model), which lets all start from rank 0's, before the "
            "optimizer is made; or seed every rank alike before the model is made.",
        )
    gradients = first.gradients.get(name), other.gradients.get(name)
    if (gradients[0] is None) != (gradients[1] is None) or _differ(*gradients):
        if not first.is_parallel:
            return Verdict(
                "a collective is forgotten: no gradient is averaged, as the model isn't parallel.",
                "Call model = lockstep.parallelize(model) before training.",
            )
        return Verdict(
            f"a collective is forgotten: the gradient of {name!r} is each rank's own, as it is "
            "outside of the parallel model, or its backward ran under no_sync(); or a rank changed "
            "it after it had been averaged, as in clipping it by a norm of its own.",
            "Give the whole model to lockstep.parallelize(), and step only after a backward "
            "outside of no_sync().",
        )
    return Verdict(
        f"the ranks had the same gradient of {name!r}, and updated it otherwise: a rank left a "
        "step out, or its optimizer's state is another.",
        "Let every rank take each step, and load the same state on each.",
    )


def _from_one_process(facts: Facts) -> Verdict:
    """Why all ranks agree, and differ from one process on the same samples."""
    ranks, alone = facts.ranks, facts.alone
    num_ranks = len(ranks)
    if facts.pads:
        return _PADDED
    if facts.repeated:
        return Verdict(
            f"the ranks train on the same samples: {facts.repeated} of {facts.num_rows} in a batch "
            "came several times, as the loader's sampler doesn't divide them.",
            f"Use {_OUR_LOADER}.",
        )
    if told := _other_options(ranks[0].options, alone.options):
        return Verdict(
            f"the optimizer's options depend on the number of ranks: {told} on {num_ranks} ranks "
            "and on one.",
            "Where the global batch is the same, so are learning rate and other options.",
        )
    if ranks[0].batch_norms and not facts.parting.name.startswith("param_groups"):
        return Verdict(
            f"{ranks[0].batch_norms[0]} (BatchNorm) normalises by the statistics of each rank's "
            "own samples.",
            "Convert the model by lockstep.SyncBatchNorm.convert_sync_batchnorm(model).",
        )
    if any(step.draws for step in ranks):
        return Verdict(
            "random numbers are drawn in the model or the loss, on each rank others than in one "
            "process.",
            "Draw them in the dataset, where lockstep.DataLoader seeds each sample; or from a "
            "generator of the sample. For the check alone, leave the noise out.",
        )
    numbers = [sum(back.num_rows for back in step.backwards) for step in ranks]
    ratio = _ratio(ranks[0].gradients, alone.gradients)
    if ratio is not None and abs(ratio - 1) > _SAME_RATIO:
        more = ""
        if abs(ratio - num_ranks) < _SAME_RATIO * num_ranks:
            more = ": they are summed over the ranks, not averaged"
        elif abs(ratio * num_ranks - 1) < _SAME_RATIO:
            more = ": they are averaged twice, or the loss is divided by the number of ranks too"
        return Verdict(
            f"all gradients are {ratio:.4g} times those of one process{more}.",
            "Take the loss as lockstep.mean(losses), of the single samples' losses, and leave out "
            "scaling by the number of ranks or of accumulated batches.",
        )
    if len(set(numbers)) > 1:
        return Verdict(
            "a mean of means: the ranks have "
            f"{' and '.join(map(str, sorted(set(numbers))))} samples, and each takes the mean of "
            "its own.",
            'Take loss = lockstep.mean(F.cross_entropy(y, target, reduction="none")).',
        )
    if ratio is not None:
        return Verdict(
            "the gradients are the same, but not what the optimizer does with them.",
            "See whether the program changes parameters or options by the number of ranks.",
        )
    return Verdict(
        "the loss or the gradients of a rank depend on its other samples: a mean over tokens or "
        "classes that ranks have different numbers of, a loss that compares samples, or gradients "
        "clipped before they are averaged.",
        "Take lockstep.mean(losses, weight=...) with the weights of single losses; gather what is "
        "compared; and clip after backward, by lockstep.clip_grad_norm_.",
    )


def _other_options(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    named = (
        f"{name} is {one[name]} and {other[name]}"
        for name in one
        if name in other
        if one[name] != other[name]
    )
    return ", ".join(named)


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.shape != other.shape or not torch.equal(one, other)


def _ratio(
    gradients: Mapping[str, torch.Tensor], alone: Mapping[str, torch.Tensor]
) -> float | None:
    """Return the ratio of all gradients to those of one process, if it is the same for all."""
    pairs = [
        (gradients[k].double(), alone[k].double())
        for k in gradients
        if k in alone
        if not gradients[k].is_complex()
    ]
    norms = [(float((one * other).sum()), float((other * other).sum())) for one, other in pairs]
    ratios = [product / square for product, square in norms if square > 0]
    if not ratios:
        return None
    ratio = statistics.median(ratios)
    largest = max(float(other.abs().max()) for _, other in pairs if other.numel())
    for one, other in pairs:
        if other.numel() and float((one - ratio * other).abs().max()) > _SAME_RATIO * largest:
            return None
    return ratio
