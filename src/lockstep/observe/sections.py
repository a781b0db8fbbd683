"""What the report shows besides the paragraph, the timeline and the table of ranks."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.observe.analysis import StepTimes
from lockstep.observe.columns import Chosen
from lockstep.observe.predict import Links, PredictedStep, Prediction
from lockstep.observe.quantities import duration, in_three_digits
from lockstep.observe.records import LoaderUse, RankSpans, StepEnd, loader_uses
from lockstep.observe.summary import length

_MAX_POINTS = 500  # of a curve
_MAX_COLUMNS = 8  # of ranks that are waited for

Lines = dict[str, list[tuple[int, float]]]


class Section(NamedTuple):
    """A table or curves over steps, or both, with a title and what to know about them."""

    title: str
    note: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    curves: Lines = {}  # noqa: RUF012  by label, steps and values
    texts: Sequence[int] = (0,)  # the columns of the table that have no numbers


class Rate(NamedTuple):
    """How fast the ranks get on together, and in which unit."""

    unit: str
    mean: float
    by_step: list[tuple[int, float]]


def rate(ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]) -> Rate:
    """Return the samples a second, or the steps a second if a step's samples aren't known."""
    samples = _samples_by_step(ranks)
    unit, lengths = "samples/s", [length(together) / 1e9 for together in steps]
    amounts = [samples[together[0].step] for together in steps]
    if not all(amounts):
        unit, amounts = "steps/s", [1] * len(steps)
    each = -(-len(steps) // _MAX_POINTS)
    points = [
        (steps[at][0].step, sum(amounts[at : at + each]) / sum(lengths[at : at + each]))
        for at in range(0, len(steps), each)
    ]
    return Rate(unit, sum(amounts) / sum(lengths), points)


def global_batch(ranks: Sequence[RankSpans]) -> int | None:
    """Return the samples of a typical step, which all ranks have together, if it is known."""
    samples = [number for number in _samples_by_step(ranks).values() if number]
    return statistics.median_high(samples) if samples else None


def _samples_by_step(ranks: Sequence[RankSpans]) -> Counter[int]:
    samples: Counter[int] = Counter()
    for found in ranks:
        for end in found.step_ends:
            samples[end.step] += end.num_samples
    return samples


def throughput(found: Rate) -> Section:
    """Return the curve of the rate."""
    values = [value for _, value in found.by_step]
    points = "steps" if len(values) < _MAX_POINTS else "points of the curve"
    note = (
        f"{found.unit} of all ranks together, step by step: {found.mean:,.1f} on average, and "
        f"{min(values):,.1f} to {max(values):,.1f} in single {points}."
    )
    return Section("Throughput", note, curves={found.unit: found.by_step})


def waiting(steps: Sequence[Sequence[StepTimes]]) -> Section | None:
    """Return which rank waits for which, if there are several."""
    waits: dict[int, Counter[int]] = defaultdict(Counter)
    for together in steps:
        for times in together:
            waits[times.rank].update(times.waits_for)
            del waits[times.rank][times.rank]
    in_all: Counter[int] = sum(waits.values(), Counter())
    awaited = sorted(rank for rank, _ in in_all.most_common(_MAX_COLUMNS))
    if not awaited:
        return None
    note = "Milliseconds a step that each rank waits for each other one to come."
    if len(in_all) > len(awaited):
        note += f" Shown are the {len(awaited)} ranks that are waited for longest."
    rows = [
        [
            str(rank),
            *(
                "-" if rank == other else f"{waits[rank][other] / len(steps) / 1e6:,.2f}"
                for other in awaited
            ),
        ]
        for rank in (times.rank for times in steps[0])
    ]
    return Section(
        "Who waits for whom", note, ("rank", *(f"for rank {each}" for each in awaited)), rows
    )


def loaders(ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]) -> Section | None:
    """Return what the ranks' programs spent on each loader, as means over the ranks."""
    numbers = {together[0].step for together in steps}
    by_number: dict[int, list[LoaderUse]] = defaultdict(list)
    for found in ranks:
        for use in loader_uses(found, numbers):
            by_number[use.number].append(use)
    rows = []
    for number, uses in sorted(by_number.items()):
        one = uses[0]
        workers = f"{one.workers}" + ", kept" * (one.workers > 0 and one.persistent)
        number_of = statistics.fmean(u.num_firsts + u.num_others for u in uses)
        times = [
            (sum(u.firsts for u in uses), sum(u.num_firsts for u in uses)),
            (sum(u.others for u in uses), sum(u.num_others for u in uses)),
        ]
        rows.append(
            [
                f"{one.dataset} ({number})",
                "training" if any(u.trains for u in uses) else "evaluation",
                workers,
                f"{number_of:,.0f}",
                *(f"{1e3 * seconds / count:,.2f}" if count else "-" for seconds, count in times),
            ]
        )
    if not rows:
        return None
    note = (
        "What the program waited for on average, in ms for a batch that was the first of an epoch, "
        "and for the others. A loader is of an evaluation if no gradients are computed from its "
        "batches. Workers are those of each rank; kept are those of persistent_workers."
    )
    return Section("Loaders", note, _LOADERS, rows, texts=(0, 1))


_LOADERS = ("dataset", "used for", "workers", "batches of a rank", "first, ms", "others, ms")
_KINDS_OF_MEMORY = {
    "resident": "most resident, MB",
    "device": "most allocated on the device, MB",
    "device_peak": "peak of the device, MB",
}


def memory(ranks: Sequence[RankSpans]) -> Section | None:
    """Return each rank's most memory and its course, if the trace has it."""
    noted = [_noted(found.step_ends) for found in ranks]
    kinds = [kind for kind in _KINDS_OF_MEMORY if any(kind in e.memory for r in noted for e in r)]
    if not kinds:
        return None
    drawn = "device" if "device" in kinds else "resident"
    rows, curves = [], {}
    for found, ends in zip(ranks, noted, strict=True):
        most = {k: max((e.memory.get(k, 0) for e in ends), default=0) / 1e6 for k in kinds}
        rows.append([str(found.rank), *(f"{most[kind]:,.1f}" for kind in kinds)])
        each = max(1, -(-len(ends) // _MAX_POINTS))
        curves[f"rank {found.rank}"] = [
            (end.step, end.memory.get(drawn, 0) / 1e6) for end in ends[::each]
        ]
    note = (
        "As it was at the ends of steps, at most twice a second. Resident is what the process "
        "has in memory, what it shares with others included; ranks that are threads have one."
    )
    if drawn == "device":
        note += " The curves are of what is allocated on the device."
    columns = ("rank", *(_KINDS_OF_MEMORY[kind] for kind in kinds))
    return Section("Memory", note, columns, rows, curves)


def _noted(ends: Sequence[StepEnd]) -> Chosen[StepEnd]:
    return Chosen(ends, range(len(ends))).where(bool(end.memory) for end in ends)


_SCALING = (
    "ranks",
    "step, ms",
    "waiting",
    "transfer",
    "efficiency",
    "same batch, ms",
    "times one rank",
)


def scaling(
    found: Prediction | None,
    ranks: Sequence[RankSpans],
    samples: int | None,
    one_rank: float,
) -> Section | None:
    """Return the efficiency of the run, and what is predicted for other numbers of ranks.

    ``one_rank`` are the seconds of a step with the same samples on one rank.
    """
    if found is None:
        return None
    rows = [_scaled(f"{found.measured_ranks:,} measured", found.measured, one_rank)]
    modelled = [row.seconds for row in found.rows if row.num_ranks == found.measured_ranks]
    others = [row for row in found.rows if row.num_ranks != found.measured_ranks]
    rows += [_scaled(f"{row.num_ranks:,}", row, one_rank) for row in others]
    batch = "" if samples is None else f" of {samples:,} samples"
    off = modelled[0] / found.measured.seconds - 1
    note = (
        f"The first row is what was measured: an efficiency of {found.measured.efficiency:.0%} is "
        f"the part of a step of {duration(found.measured.seconds)} in which a rank neither waits "
        "nor sends. The others are what a model of the run gives; for the run's own number of "
        f"ranks it is {abs(off):.0%} too {'long' if off > 0 else 'short'}. "
        f"{_assumed(found)} Each further rank has the same batch, differs from the others as "
        f"those of the trace do, and has {_machine(ranks)} The last two columns divide the global "
        f"batch{batch} among the ranks instead, beside one rank's {duration(one_rank)}. They are "
        "the best case, in which data, forward and backward take a time in proportion to the "
        "samples of a rank."
    )
    return Section("Scaling", note, _SCALING, rows)


def _scaled(label: str, row: PredictedStep, one_rank: float) -> list[str]:
    same = row.same_batch_seconds
    return [
        label,
        *(in_three_digits(1e3 * each) for each in (row.seconds, row.waiting, row.transfer)),
        f"{row.efficiency:.0%}",
        "-" if same is None else in_three_digits(1e3 * same),
        "-" if same is None else in_three_digits(one_rank / same),
    ]


def _assumed(found: Prediction) -> str:
    if found.is_given:
        return f"The prediction is for the given network: {_in_words(found.network)}."
    when = "also while ranks compute" if found.network.in_background else "only while ranks wait"
    return (
        f"The prediction assumes a network as between the ranks of this run: "
        f"{_in_words(found.network)}, {when}; {found.num_samples:,} collectives fit that with a "
        f"mean error of {duration(found.fit_error)}. For another network: --network."
    )


def _in_words(network: Links) -> str:
    speed = f"{network.bandwidth * 8 / 1e9:,.4g} Gbit/s"
    if not math.isfinite(network.bandwidth) or network.bandwidth > 1e12:
        speed = "a bandwidth that doesn't matter here"
    return f"{duration(network.latency)} a message and {speed}"


def _machine(ranks: Sequence[RankSpans]) -> str:
    """Say what a rank has of its machine, and what the prediction isn't for."""
    facts = ranks[0].facts
    if not facts.get("device", "cpu").startswith("cpu"):
        return "a device of its own, such as these have."
    cores, num_ranks = facts.get("cores"), facts.get("local_world_size", len(ranks))
    if cores is None:
        return "as many cores as they had."
    each = "one core" if cores == num_ranks else f"{cores / num_ranks:.2g} cores"
    has = f"{each}, as they had"
    if cores < num_ranks:
        return f"{has}: {num_ranks} ranks shared {cores}. More ranks on this host would be slower."
    return f"{has}. More than {max(cores, num_ranks)} ranks on this host would be slower."
