"""What ranks tell each other at the end of a step in shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from lockstep.comm import all_gather_json, global_rank
from lockstep.errors import CollectiveFailed, ModelMismatch
from lockstep.same_bits.between_steps import difference

# What a rank tells, of values that JSON has; None if the step has failed there.
ToldByRank = Mapping[str, Any] | None


class ShardFacts(NamedTuple):
    """What a rank tells of a shard that had a backward.

    Attributes:
        shard: Its number.
        weight: That of its samples in :func:`lockstep.mean`; None if the backward was of no mean.
        total: The weighted sum of the values of its first mean.
    """

    shard: int
    weight: float | None
    total: float


def exchanged(group: dist.ProcessGroup | None, told: ToldByRank) -> list[ToldByRank]:
    """Return what each rank has told. Every rank must call it; it blocks."""
    if group is None:
        return [told]
    by_rank: list[ToldByRank] = all_gather_json(group, told)
    return by_rank


def as_digits(flags: Sequence[bool]) -> str:
    """Return ``flags`` as digits, 0 and 1."""
    return "".join("1" if flag else "0" for flag in flags)


def _on_any(digits: Sequence[str]) -> list[bool]:
    """Return for each place whether any of several ranks has set its flag."""
    return ["1" in its for its in zip(*digits, strict=True)]


class FactsOfStep:
    """What all ranks have told of a step.

    Attributes:
        used: For each parameter, whether any rank has a gradient of it.
        changed: For each buffer, whether it is to be exchanged.
        again: For each chunk of gradients that was sent early, whether it is to be sent once more.
        shards: For each rank, the numbers of its shards that had samples.
        divisor: What gradients are divided by: the weights of all shards, added in their order.
        loss: The mean of the values of the shards' first means, if they had some.

    Raises:
        CollectiveFailed: If the step has failed on a rank.
        ModelMismatch: If ranks differ in what the bits of the step depend on.
        ValueError: If some shards used :func:`lockstep.mean` and others didn't.
    """

    def __init__(self, by_rank: Sequence[ToldByRank], group: dist.ProcessGroup | None) -> None:
        failed = [rank for rank, told in enumerate(by_rank) if told is None]
        if failed and group is not None:
            ranks = [global_rank(group, rank) for rank in failed]
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
            raise CollectiveFailed(
                f"The step failed on {who}, in its loop over shards(), so that the gradients of "
                "the other shards are dropped too. Look at what that rank wrote. To go on without "
                "the step, catch the error on every rank.",
                ranks,
                "shards",
            )
        told = [each for each in by_rank if each is not None]
        _check_same(told, group)
        self.used = _on_any([each["used"] for each in told])
        self.changed = _on_any([each["changed"] for each in told])
        self.again = _on_any([each["again"] for each in told])
        self.shards: list[list[int]] = [each["shards"] for each in told]
        in_order = [ShardFacts(*of_shard) for each in told for of_shard in each["told"]]
        means = [each for each in in_order if each.weight is not None]
        others = [each for each in in_order if each.weight is None]
        if means and others:
            raise ValueError(
                f"Shard {means[0].shard} had the backward of a lockstep.mean(), and shard "
                f"{others[0].shard} one of another loss, so that their gradients have no common "
                "weight. Take lockstep.mean() in all shards, or in none."
            )
        total = sum((1.0 if each.weight is None else each.weight) for each in in_order)
        if not math.isfinite(total):
            raise ValueError(f"The weights of all shards add up to {total}: give finite weights.")
        self.divisor = total or 1.0
        self.loss = None
        if means:
            self.loss = sum(each.total for each in means) / total if total else math.nan


def _check_same(told: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None) -> None:
    """Raise ModelMismatch if ranks have computed shards of different steps."""
    for rank, each in enumerate(told[1:], 1):
        name = difference(each["fingerprint"], told[0]["fingerprint"])
        pairs = [each["fingerprint"].get(name), told[0]["fingerprint"].get(name)]
        cure = "Give the same to all ranks."
        if name is None and each["place"] != told[0]["place"]:
            name, pairs = "seed and step", [each["place"], told[0]["place"]]
            cure = (
                "Call lockstep.seed() on every rank before the model is made parallel, and "
                "shards() equally often."
            )
        if name is None and each["buffers"] != told[0]["buffers"]:
            name, pairs = "digest of the buffers", [each["buffers"], told[0]["buffers"]]
            cure = (
                "They differ before the step, as after an evaluation in training mode: change them "
                "on every rank alike, or send rank 0's with lockstep.broadcast()."
            )
        if name is None and len(each["used"]) != len(told[0]["used"]):
            name, pairs = "number of parameters", [len(each["used"]), len(told[0]["used"])]
        if name is not None and group is not None:
            here, there = global_rank(group, rank), global_rank(group, 0)
            raise ModelMismatch(
                f"The ranks' steps in shards differ: {name} is {pairs[0]!r} on rank {here} and "
                f"{pairs[1]!r} on rank {there}, so that their sum would have other bits at another "
                f"number of ranks. {cure}"
            )
