"""Suspects that what is known of a difference gives reason for, and what is said of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lockstep.check.compare import Parting
from lockstep.check.records import Step
from lockstep.check.trials import Suspect

# How exactly gradients have to be multiples of others.
_SAME_RATIO = 1e-3
_SITES = 3  # how many lines of the program are named

_BETWEEN_RANKS = (
    *(Suspect.OPTIONS, Suspect.START, Suspect.CHANGES, Suspect.SYNC, Suspect.KEPT, Suspect.CLIP),
    *(Suspect.SEEDS, Suspect.AVERAGE, Suspect.BATCH_NORM, Suspect.STATISTICS),
    *(Suspect.DRAWS, Suspect.PERMUTATIONS),
)
_FROM_ONE_PROCESS = (
    *(Suspect.OPTIONS, Suspect.BATCH_NORM, Suspect.MEANS, Suspect.ROWS, Suspect.STATISTICS),
    *(Suspect.SUMS, Suspect.CLIP, Suspect.SYNC, Suspect.KEPT, Suspect.DRAWS),
    *(Suspect.PERMUTATIONS, Suspect.SEEDS, Suspect.WORLD_SIZE),
)


class Evidence(NamedTuple):
    """What is known of the step after which runs part."""

    parting: Parting
    ranks: Sequence[Step]
    alone: Step
    sites: Mapping[str, Sequence[str]]  # for each suspect, lines of the program

    @property
    def rank(self) -> int:
        """A rank that differs from rank 0, if any does."""
        return self.parting.rank or 0


class Mistake(NamedTuple):
    """A cause, and what to do."""

    cause: str
    remedy: str


def suspects(evidence: Evidence) -> list[Suspect]:
    """What may be the cause, in the order in which it is to be tried."""
    if evidence.parting.rank is None:
        return [each for each in _FROM_ONE_PROCESS if _may_be(each, evidence)]
    return [each for each in _BETWEEN_RANKS if _may_be(each, evidence)]


def _may_be(suspect: Suspect, evidence: Evidence) -> bool:
    first, other = evidence.ranks[0], evidence.ranks[evidence.rank]
    name = evidence.parting.name
    match suspect:
        case Suspect.OPTIONS:
            against = evidence.alone if evidence.parting.rank is None else other
            return bool(_other_options(first.options, against.options))
        case Suspect.START:
            return any(_differ(first.start.get(key), other.start.get(key)) for key in first.start)
        case Suspect.CHANGES:
            return name in {*first.changed, *other.changed}
        case Suspect.AVERAGE:
            one, another = first.gradients.get(name), other.gradients.get(name)
            return (one is None) != (another is None) or _differ(one, another)
        case Suspect.ROWS:
            return len({*_numbers_of_rows(evidence)}) > 1
        case Suspect.SEEDS | Suspect.WORLD_SIZE:
            return True
        case Suspect.DRAWS:
            return suspect in evidence.sites or any(step.draws for step in evidence.ranks)
    return suspect in evidence.sites


def mistake(suspect: Suspect, evidence: Evidence, *, drawn_alike: bool = False) -> Mistake:
    """What is to be said of a cause that a trial has shown."""
    sites = evidence.sites.get(suspect, ())
    lines = ", ".join(sites[:_SITES]) + (", ..." if len(sites) > _SITES else "")
    name, rank, num_ranks = evidence.parting.name, evidence.rank, len(evidence.ranks)
    numbers = " and ".join(map(str, _numbers_of_rows(evidence)))
    ratio = ratio_of(evidence.ranks[0].gradients, evidence.alone.gradients)
    times = ""
    if ratio is not None and abs(ratio - 1) > _SAME_RATIO:
        times = f" All gradients are {ratio:.4g} times those of one process."
    match suspect:
        case Suspect.OPTIONS if evidence.parting.rank is None:
            told = _other_options(evidence.ranks[0].options, evidence.alone.options)
            return Mistake(
                f"the optimizer's options depend on the number of ranks: {told} on {num_ranks} "
                "ranks and on one.",
                "Where the global batch is the same, so are learning rate and other options.",
            )
        case Suspect.OPTIONS:
            told = _other_options(evidence.ranks[0].options, evidence.ranks[rank].options)
            return Mistake(
                f"the optimizer's options differ: {told} on rank 0 and rank {rank}.",
                "Give every rank the same; let a scheduler that looks at a metric have "
                "lockstep.reduce(metric).",
            )
        case Suspect.START:
            return Mistake(
                "the ranks' models start from different parameters.",
                "Call lockstep.parallelize(model), which lets all start from rank 0's, before the "
                "optimizer is made; or seed every rank alike before the model is made.",
            )
        case Suspect.CHANGES if evidence.parting.number == 1:
            return Mistake(
                f"{name!r} was changed after the optimizer was made and before its first step, on "
                "one rank in another way: an initialisation from a rank's own samples, say.",
                "Compute initial values from what all ranks have in common, such as "
                "lockstep.reduce(value).",
            )
        case Suspect.CHANGES:
            return Mistake(
                f"{name!r} was changed between two steps, on one rank in another way.",
                "Change parameters on every rank alike.",
            )
        case Suspect.SYNC:
            return Mistake(
                "a collective is forgotten: gradients of backwards under no_sync() aren't reduced "
                f"when they are used: {lines}.",
                "Step, clip and log gradients only after a backward outside of no_sync().",
            )
        case Suspect.KEPT:
            return Mistake(
                "gradients are kept: before the first backward of a step there are some of earlier "
                "backwards.",
                "Call optimizer.zero_grad() on every rank after each step.",
            )
        case Suspect.CLIP:
            return Mistake(
                f"clipping: {lines} clips on the ranks what it doesn't in one process: gradients "
                "of a rank's own samples before they are averaged, or by another limit.",
                "Clip once, after the last backward of the step, which averages gradients.",
            )
        case Suspect.SEEDS:
            told = f"the ranks' seeds differ ({lines})" if lines else "nothing is seeded"
            return Mistake(
                f"{told}, and ranks draw different random numbers outside of loaders.",
                "Seed every rank alike, or draw such numbers on rank 0 and lockstep.broadcast() "
                "them.",
            )
        case Suspect.AVERAGE:
            return _not_averaged(name, evidence.ranks[0])
        case Suspect.BATCH_NORM:
            return Mistake(
                f"BatchNorm normalises by the statistics of each rank's own samples: {lines}.",
                "Convert the model by lockstep.SyncBatchNorm.convert_sync_batchnorm(model).",
            )
        case Suspect.MEANS if len({*_numbers_of_rows(evidence)}) > 1:
            return Mistake(
                f"a mean of means: {lines} takes the mean over each rank's own samples, and the "
                f"ranks, which have {numbers}, count alike.",
                'Take loss = lockstep.mean(F.cross_entropy(y, target, reduction="none")).',
            )
        case Suspect.ROWS:
            return Mistake(
                "a mean of means: each rank divides its loss by the number of its own samples, and "
                f"the ranks, which have {numbers}, count alike.",
                "Take the loss as lockstep.mean(losses), of the single samples' losses.",
            )
        case Suspect.MEANS | Suspect.STATISTICS:
            return Mistake(
                f"what {lines} gives depends on the other samples of the batch: on a rank's own, "
                "and in one process on all.",
                "Compute it of all ranks' samples, by lockstep.reduce() or lockstep.mean(); or of "
                "each sample by itself.",
            )
        case Suspect.SUMS:
            return Mistake(
                f"{lines} adds up each rank's own samples, and in one process all of them.{times}",
                "Take the loss as lockstep.mean(losses), of the single samples' losses.",
            )
        case Suspect.DRAWS:
            same = ", and all ranks draw the same ones" if drawn_alike else ""
            return Mistake(
                f"random numbers are drawn in training, by {lines or 'random or NumPy'}: others "
                f"for a sample than in one process{same}.",
                "Draw them in the dataset, where lockstep.DataLoader seeds each sample; or give "
                "each rank a seed of its own, by lockstep.seed().",
            )
        case Suspect.PERMUTATIONS:
            return Mistake(
                f"{lines} permutes the samples of each rank's own part, so that a sample meets "
                "those of its rank alone.",
                "Let the dataset give each sample its partner; or, if that is meant so, leave the "
                "permutation out for the check alone.",
            )
        case Suspect.WORLD_SIZE:
            return Mistake(
                "the program computes with the number of ranks: one process that is told of "
                f"{num_ranks} does the same.{times}",
                "Leave world_size out of losses, gradients and options: where the global batch is "
                "the same, so are they.",
            )


def _not_averaged(name: str, step: Step) -> Mistake:
    if not step.parallel:
        return Mistake(
            "a collective is forgotten: no gradient is averaged, as the model isn't parallel.",
            "Call model = lockstep.parallelize(model) before training.",
        )
    if name not in step.parallel:
        return Mistake(
            f"a collective is forgotten: {name!r} is outside of the parallel model, so that its "
            "gradient isn't averaged.",
            "Give the whole model to lockstep.parallelize().",
        )
    return Mistake(
        f"the gradient of {name!r} is each rank's own in the step: it wasn't averaged, or was "
        "changed after that, on one rank in another way.",
        "Step only after a backward that reduces gradients, and change them on every rank alike.",
    )


def known(evidence: Evidence) -> list[str]:
    """What is known of a difference whose cause isn't."""
    parting, first, other = evidence.parting, evidence.ranks[0], evidence.ranks[evidence.rank]
    name = parting.name
    if parting.in_evaluation:
        return [
            f"right after the step {name!r} is alike: it is changed between the step and the "
            "evaluation, and not on all ranks as in one process."
        ]
    if name not in first.trained:
        return [
            f"no optimizer trains {name!r}: it is a buffer, say, or in a copy of the model. Each "
            "rank updates it by itself."
        ]
    if first.trained != other.trained:
        return [f"the optimizer of rank {evidence.rank} has other parameters than that of rank 0."]
    if parting.rank is not None:
        if _differ(first.gradients.get(name), other.gradients.get(name)):
            return [f"the ranks have different gradients of {name!r} in the step."]
        return [f"the ranks have the same gradient of {name!r}, and update it in different ways."]
    found = []
    rows = sum(back.num_rows for step in evidence.ranks for back in step.backwards)
    alone = sum(back.num_rows for back in evidence.alone.backwards)
    if rows != alone and all(s.backwards and s.backwards[0].num_rows for s in evidence.ranks):
        found.append(
            f"the first modules that are called are given {rows} rows on all ranks together, and "
            f"{alone} in one process."
        )
    ratio = ratio_of(first.gradients, evidence.alone.gradients)
    if ratio is not None and abs(ratio - 1) > _SAME_RATIO:
        found.append(f"all gradients are {ratio:.4g} times those of one process.")
    elif ratio is not None:
        found.append("the gradients are those of one process, and the step isn't.")
    return found


def _numbers_of_rows(evidence: Evidence) -> list[int]:
    return [sum(back.num_rows for back in step.backwards) for step in evidence.ranks]


def _other_options(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    named = (
        f"{name} is {one[name]:g} and {other[name]:g}"
        for name in one
        if name in other
        if one[name] != other[name]
    )
    return ", ".join(named)


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.shape != other.shape or not torch.equal(one, other)


def ratio_of(
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
