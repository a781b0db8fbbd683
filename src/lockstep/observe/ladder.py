"""Why N ranks aren't N times as fast as one: from the ideal step to the real one, rung by rung.

The ideal is what one rank computes for a step, divided by the number of ranks. Each rung adds what
a rank spends on something else, as a mean over ranks and steps; they add up to the real step.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import TraceError
from lockstep.observe.analysis import PHASES, StepTimes, step_times
from lockstep.observe.records import RankSpans
from lockstep.observe.sections import global_batch
from lockstep.observe.summary import counted_of, length
from lockstep.observe.trace_files import read_folder

COMPUTING = ("forward", "backward", "optimizer")
_DIVIDED = ("data", "forward", "backward")  # what takes a rank as long as its samples are many
_MOST_AWAITED = 4  # ranks with a rung of their own
# By phase, what its rung is called, and what is in it.
_RUNGS = {
    "data": ("data", "the program waits for its loader"),
    "transfer": (
        "transfer",
        "in collectives, after the last rank has come: sending and summing that nothing hides",
    ),
    "collectives": (
        "overhead",
        "starting collectives, communication hooks and average_gradients(), without the waits",
    ),
    "save": ("saving", "lockstep.save(), before training goes on"),
    "other": ("other", "the program's own code outside of all these"),
}


class Baseline(NamedTuple):
    """A step on one rank, as it was measured."""

    seconds: float
    computing: float
    samples: int | None
    num_steps: int
    num_threads: int | None


class Rung(NamedTuple):
    """What takes a part of a step besides the ideal."""

    kind: str  # a phase, "wait", "transfer" or "computing"
    name: str
    what: str
    seconds: float
    gives_back: float | None  # by how much a step would be shorter without it; None: unknown


class Ladder(NamedTuple):
    """From the ideal step to the real one, in seconds."""

    num_ranks: int
    ideal: float
    rungs: list[Rung]
    seconds: float  # of a real step: the ideal and all rungs
    one_rank: float  # of a step with the same samples on one rank
    basis: str  # how that is known, in words
    is_measured: bool
    by_rank: dict[int, list[tuple[str, str, float]]]  # kinds, names and seconds of a step

    @property
    def ideal_name(self) -> str:
        """What the ideal is."""
        if self.num_ranks == 1:
            return "computing"
        return f"ideal: one rank's computing, divided by {self.num_ranks}"

    @property
    def speed_up(self) -> float:
        """How many times as fast as one rank the ranks are."""
        return self.one_rank / self.seconds


def baseline_of(folder: Path) -> Baseline | None:
    """Return what ``lockstep run --baseline`` has measured beside a trace, if it has.

    Raises:
        TraceError: If it isn't of one rank, or can't be read.
    """
    if not (folder / "baseline").is_dir():
        return None
    ranks = read_folder(folder / "baseline")
    num_ranks = max(len(ranks), *(found.facts.get("world_size", 1) for found in ranks))
    if num_ranks > 1:
        raise TraceError(f"{folder}/baseline has a trace of {num_ranks} ranks, and one is needed.")
    steps = counted_of(ranks, step_times(ranks))
    computing = statistics.fmean(sum(each.phases[p] for p in COMPUTING) for [each] in steps)
    seconds = statistics.fmean(map(length, steps)) / 1e9
    threads = ranks[0].facts.get("threads")
    return Baseline(seconds, computing / 1e9, global_batch(ranks), len(steps), threads)


def ladder(
    ranks: Sequence[RankSpans],
    steps: Sequence[Sequence[StepTimes]],
    samples: int | None,
    baseline: Baseline | None = None,
) -> Ladder:
    """Return where the time of ``steps`` goes, of which a typical one has ``samples``."""
    cells = [Counter[str]() for _ in ranks]  # by rank, nanoseconds of all steps
    saved, num_matched = Counter[str](), 0
    for together in steps:
        num_matched += together[0].is_matched
        for times, sums in zip(together, cells, strict=True):
            sums.update(times.phases)
            sums.update({f"wait {other}": ns for other, ns in times.waits_for.items() if ns})
            sums["transfer"] += times.transfer
            saved.update(times.saved)
    everything: Counter[str] = sum(cells, Counter())
    per_step = 1e9 * len(steps) * len(ranks)
    mean = {name: ns / per_step for name, ns in everything.items()}
    real = everything.total() / per_step
    computing = sum(mean.get(phase, 0.0) for phase in COMPUTING)
    one_rank, ideal, basis, is_measured = _alone(ranks, mean, samples, baseline)

    def back(name: str) -> float | None:
        return max(0, saved[name]) / (1e9 * num_matched * len(ranks)) if num_matched else None

    rungs = [Rung("computing", "computing", _beyond(is_measured), computing - ideal, None)]
    rungs += [Rung("data", *_RUNGS["data"], mean.get("data", 0.0), back("data"))]
    rungs += _waits(mean)
    rungs += [Rung(k, *_RUNGS[k], mean.get(k, 0.0), back(k)) for k in [*_RUNGS][1:]]
    return Ladder(
        num_ranks=len(ranks),
        ideal=ideal,
        rungs=[rung for rung in rungs if rung.seconds],
        seconds=real,
        one_rank=one_rank,
        basis=basis,
        is_measured=is_measured,
        by_rank={
            found.rank: _cells(sums, 1e9 * len(steps))
            for found, sums in zip(ranks, cells, strict=True)
        },
    )


def _alone(
    ranks: Sequence[RankSpans],
    mean: dict[str, float],
    samples: int | None,
    baseline: Baseline | None,
) -> tuple[float, float, str, bool]:
    """Return a step's seconds on one rank, the ideal, how that is known, and if by measuring."""
    num_ranks, why_not = len(ranks), ""
    if baseline is not None:
        if samples is not None and baseline.samples is not None:
            factor = samples / baseline.samples
            threads = "" if baseline.num_threads is None else f" of {baseline.num_threads} threads"
            threads = " of one thread" if baseline.num_threads == 1 else threads
            basis = f"measured in {baseline.num_steps:,} steps on one rank{threads}"
            if factor != 1:
                basis += f" with {baseline.samples:,} samples, scaled to {samples:,}"
            one_rank, ideal = factor * baseline.seconds, factor * baseline.computing / num_ranks
            return one_rank, ideal, basis, True
        why_not = (
            " The run on one rank can't be compared, as the samples of a step aren't known: "
            "lockstep.DataLoader tells them."
        )
    is_sharded = any(each.get("deferred") for each in ranks[0].bucket_facts.values())
    divided = (*_DIVIDED, "optimizer") if is_sharded else _DIVIDED
    alone = {
        name: mean.get(name, 0.0) * (num_ranks if name in divided else 1)
        for name in PHASES
        if name != "collectives"
    }
    basis = (
        f"estimated: {', '.join(divided[:-1])} and {divided[-1]} are taken to last {num_ranks} "
        "times as long on one rank as on each of these, and all else as long as here. "
        f"lockstep run --baseline measures it.{why_not}"
    )
    return sum(alone.values()), sum(alone[p] for p in COMPUTING) / num_ranks, basis, False


def _beyond(is_measured: bool) -> str:
    if not is_measured:
        return "the optimizer's step, which each rank takes whole"
    return (
        "what a rank computes beyond its part of what one rank does: optimizer steps that each "
        "rank takes whole, and whatever slows down ranks that compute side by side"
    )


def _waits(mean: dict[str, float]) -> list[Rung]:
    """Return a rung for each of the ranks that are waited for longest, and one for the others."""
    waits = {name: seconds for name, seconds in mean.items() if name.startswith("wait ")}
    longest = sorted(waits, key=lambda name: -waits[name])
    if len(longest) > _MOST_AWAITED:
        longest, others = longest[: _MOST_AWAITED - 1], longest[_MOST_AWAITED - 1 :]
        waits["others"] = sum(waits[name] for name in others)
        longest.append("others")
    rungs = []
    for name in longest:
        whom = f"{len(others)} other ranks" if name == "others" else _rank_in(name)
        what = f"the other ranks have come to a collective, and {whom} hasn't"
        if name == "others":
            what = "the same, for each of these"
        rungs.append(Rung("wait", f"waiting for {whom}", what, waits[name], waits[name]))
    return rungs


def _rank_in(name: str) -> str:
    return f"rank {name.removeprefix('wait ')}"


def _cells(sums: Counter[str], nanoseconds: float) -> list[tuple[str, str, float]]:
    """Return where a rank's steps go, what it computes first."""
    names = [*COMPUTING, "data", *sorted(name for name in sums if name.startswith("wait "))]
    names += [*_RUNGS][1:]
    cells = []
    for name in names:
        kind, shown = (name, name)
        if name.startswith("wait "):
            kind, shown = "wait", f"waiting for {_rank_in(name)}"
        elif name in _RUNGS:
            shown = _RUNGS[name][0]
        if sums[name]:
            cells.append((kind, shown, sums[name] / nanoseconds))
    return cells
