"""What holds a run back, and what to do, in a paragraph: nothing that the trace doesn't show."""

from __future__ import annotations

from typing import Any

from lockstep.observe.ladder import Ladder
from lockstep.observe.quantities import duration, in_three_digits
from lockstep.observe.summary import Evaluations, Late, Summary

_MUCH = 0.15  # of the time
_IN = {
    "data": "making its data",
    "forward": "the forward",
    "backward": "the backward",
    "collectives": "starting its collectives",
    "optimizer": "the optimizer",
    "save": "saving",
    "other": "the program's own code outside of these",
}
_ADVICE_FOR_LATE = {
    "forward": "It may have larger inputs, a slower device, or work that the others don't have.",
    "backward": "It may have larger inputs or a slower device.",
    "collectives": "Its communication hooks, or its start of collectives, take longer.",
    "optimizer": "Hooks on its optimizer, or an average of weights, may take that.",
    "save": "lockstep.save(async_=True) doesn't hold the others up.",
    "other": "It does something that the others don't: logging, say, or a wait of its own.",
}
_AROUND = {
    "data": "the loader",
    "forward": "the forward",
    "backward": "the backward",
    "average": "average_gradients()",
    "rows": "the backward",
    "launch": "a collective",
    "wait": "a collective",
    "optimizer": "the optimizer's step",
    "evaluation": "an evaluation",
    "save": "a save",
}


def in_words(found: Summary, steps_as: Ladder | None = None) -> str:
    """Return what takes most of the time besides computing, and what to do about it."""
    words = [] if steps_as is None or steps_as.num_ranks == 1 else [_of_speed(steps_as)]
    words.append(f"A step takes {duration(found.seconds_per_step)}.")
    words += _of_steps(found) if found.late is None else _of_late(found, found.late)
    if steps_as is not None and steps_as.is_measured:
        words += _of_computing(steps_as)
    words += _of_evaluations(found.evaluations, found.num_steps * found.seconds_per_step)
    return " ".join(words)


def _of_speed(found: Ladder) -> str:
    how = "by measurement" if found.is_measured else "by an estimate"
    return (
        f"{found.num_ranks} ranks are {in_three_digits(found.speed_up)} times as fast as one rank, "
        f"{how}."
    )


def _of_computing(found: Ladder) -> list[str]:
    """Say it if ranks compute for longer than one rank has made them expect."""
    beyond = sum(rung.seconds for rung in found.rungs if rung.kind == "computing")
    if beyond <= _MUCH * found.seconds:
        return []
    return [
        f"Forward, backward and optimizer take a rank {duration(found.ideal + beyond)}, where one "
        f"rank's computing divided by {found.num_ranks} is {duration(found.ideal)}."
    ]


def _of_steps(found: Summary) -> list[str]:
    parts = {
        "data": found.phases["data"],
        "waiting": found.waiting,
        "transfer": found.transfer,
        "other": found.phases["other"],
    }
    largest = max(parts, key=lambda name: parts[name])
    if parts[largest] > _MUCH:
        return [f"{parts[largest]:.0%} of the time {_TOLD[largest](found)}"]
    computing = sum(found.phases[phase] for phase in ("forward", "backward", "optimizer"))
    return [
        f"{computing:.0%} of the time is spent in forward, backward and optimizer, and no more "
        f"than {_MUCH:.0%} in data, waiting, sending or anything else."
    ]


def _of_evaluations(found: Evaluations, of_steps: float) -> list[str]:
    words = []
    if (part := found.seconds / (of_steps + found.seconds + found.awaited)) > _MUCH:
        words.append(
            f"Besides the steps a rank evaluates for {duration(found.seconds)}, {part:.0%} of the "
            "time: evaluate less often, or with larger batches."
        )
    if found.awaited > _MUCH * (of_steps + found.seconds + found.awaited):
        words.append(
            f"Besides the steps a rank waits for {duration(found.awaited)} while another one "
            f"evaluates, mostly rank {found.rank}. Let all ranks evaluate, each a part: "
            "lockstep.DataLoader and lockstep.reduce()."
        )
    return words


def _of_late(found: Summary, late: Late) -> list[str]:
    words = [f"The others wait for rank {late.rank} for {late.part:.0%} of their time."]
    if late.excess < late.waited / 2:
        words.append("On average no phase of its steps takes that much longer than the others'.")
        return words
    words.append(
        f"It spends {duration(late.seconds)} of a step in {_IN[late.phase]}, "
        f"{duration(late.excess)} more than the others."
    )
    words.append(_of_loader(found) if late.phase == "data" else _ADVICE_FOR_LATE[late.phase])
    return words


def _of_data(found: Summary) -> str:
    return f"the ranks wait for data. {_of_loader(found)}"


def _of_loader(found: Summary) -> str:
    loader = found.loader
    if loader is None:
        return "Do less for each sample, or load batches ahead."
    name = f"The loader of {loader.dataset}"
    if not loader.workers:
        return f"{name} has no workers: give it some (num_workers), or do less for each sample."
    number = f"{loader.workers} worker" + "s" * (loader.workers > 1)
    ranks, cores = found.num_ranks_of_host, found.num_cores
    words = f"{name} has {number} on each rank: give it more, or do less for each sample."
    if cores is not None and ranks * (loader.workers + 1) > cores:
        words = (
            f"{name} has {number} on each rank: {ranks} ranks and {ranks * loader.workers} workers "
            f"share {cores} cores. Do less for each sample."
        )
    if not loader.persistent and loader.longer > _MUCH * loader.seconds:
        first = duration(loader.firsts / loader.num_firsts)
        other = duration(loader.others / max(1, loader.num_others))
        words += (
            f" The first batch of an epoch, which starts workers anew, takes {first}, and another "
            f"one {other}: persistent_workers=True keeps the workers."
        )
    return words


def _of_waiting(found: Summary) -> str:
    ranks, cores = found.num_ranks_of_host, found.num_cores
    if cores is not None and cores < ranks:
        return (
            f"ranks wait for each other: {ranks} ranks share {cores} cores, and no more than "
            f"{cores} compute at once. Take at most one rank for each core."
        )
    return (
        "ranks wait for each other, now for one and now for another. Their work may differ from "
        "step to step, or other programs may take their cores."
    )


def _of_transfer(found: Summary) -> str:
    if 2 * found.num_unmatched > found.num_steps:
        return (
            "goes into collectives. The ranks waited in different operations, so that waits for "
            "other ranks aren't told from sending."
        )
    if found.of_gradients < found.transfer / 2:
        return (
            "goes into collectives outside of the backward: means of losses, reductions or others "
            "that the program calls, or the parameters of a sharded optimizer. Fewer calls, of "
            "more at once, take less."
        )
    words = (
        "goes into sending gradients with nothing to compute meanwhile. A larger batch on each "
        "rank, or several micro-batches in a step (lockstep.accumulate), sends less often"
    )
    if not found.is_sharded:
        words += "; lockstep.shard_optimizer sends less on one host"
    if not found.is_hooked:
        words += "; a communication hook in half precision sends half"
    return words + "."


def _of_other(found: Summary) -> str:
    before, after = (_AROUND[name] for name in found.between)
    return (
        "goes into the program's own code outside of loader, forward, backward, optimizer and "
        f"save, most of it between {before} and {after}."
    )


_TOLD = {
    "data": _of_data,
    "waiting": _of_waiting,
    "transfer": _of_transfer,
    "other": _of_other,
}


def overlap_of(buckets: list[dict[str, Any]], is_early: bool, row_bytes: int) -> str:
    """Say how much of what is sent is so while the backward goes on."""
    if not buckets:
        return "Nothing is sent, and nothing overlaps."
    early = sum(bucket["bytes"] for bucket in buckets[:-1])
    if not is_early:
        return (
            "In the first backward nothing is sent before its end: it shows in which order "
            "gradients come. From the second one on, full buckets are sent while it goes on."
        )
    if len(buckets) == 1:
        also = ", as rows are" if row_bytes else ""
        return f"All gradients are one bucket, which is sent when the backward is over{also}."
    total = early + buckets[-1]["bytes"] + row_bytes
    return (
        f"{early:,} of {total:,} bytes of gradients are sent while the backward goes on, and the "
        "rest when it is over."
    )
