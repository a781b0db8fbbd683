"""Decides whether the steps of an optimizer can be divided among the ranks."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.arguments import refusal
from lockstep.comm import all_gather_json
from lockstep.errors import ModelError
from lockstep.optim.blocks import in_order, keep_whole, owners_of
from lockstep.optim.known import KNOWN, known_base
from lockstep.optim.methods import names_used
from lockstep.optim.probe import Treatment, Verdict, probe

# Functions of torch.distributed by which ranks give each other what one of them has computed.
_DIVIDING = {
    name
    for name in dir(dist)
    if name.startswith(("all_gather", "all_to_all", "broadcast", "reduce_scatter"))
}

# What to do where an optimizer can't be divided: leave it undivided, with a warning, or raise an
# error. "always" divides none.
Undivided = Literal["warn", "error", "always"]


def judge(
    optimizer: Optimizer, groups: Sequence[dist.ProcessGroup], undivided: Undivided = "warn"
) -> Verdict:
    """Return whether to divide ``optimizer``, whose parameters have replicas on ``groups``.

    An optimizer of a class that isn't known is tried, by rank 0 of each group; one that calls the
    step of a known class only with all parameters, since what it does besides isn't divided. Rank 0
    gives the warning. Every rank must call it; it blocks.

    Raises:
        ModelError: If it can't be used in either way, or can't be divided and that is an error.
    """
    if undivided not in get_args(Undivided):
        raise ValueError(refusal("undivided", undivided, '"warn", "error" or "always"'))
    if undivided == "always":
        return Verdict(Treatment.UNDIVIDED, may_draw=type(optimizer) not in KNOWN)
    if type(optimizer) in KNOWN:
        return Verdict(Treatment.DIVIDE)
    verdict, kind = _tried(optimizer, groups), type(optimizer).__name__
    told = f"{kind} can't be divided among the ranks: {verdict.reason}."
    if verdict.treatment is Treatment.REFUSE or (verdict.reason and undivided == "error"):
        raise ModelError(told)
    if verdict.reason and groups[0].rank() == 0:
        warnings.warn(
            f"{told} So each rank updates all parameters and has all of the state, as without "
            'shard_optimizer(). With undivided="error" this is an error, and with '
            'undivided="always" it is as you wish.',
            stacklevel=3,
        )
    return verdict


def _tried(optimizer: Optimizer, groups: Sequence[dist.ProcessGroup]) -> Verdict:
    if calls := sorted(_DIVIDING & names_used(type(optimizer), "step")):
        # In a trial by one rank, it would wait for the others.
        reason = (
            f"its steps may call {calls[0]}(), by which they divide work among ranks themselves"
        )
        return Verdict(Treatment.UNDIVIDED, reason, may_draw=True)
    verdict = None
    if any(group.rank() == 0 for group in groups):
        groups_by_rank = {has for each in groups for has in _groups_by_rank(optimizer, each.size())}
        in_parts = known_base(type(optimizer)) is None
        verdict = probe(optimizer, groups_by_rank, in_parts=in_parts)
    found = [Verdict(*all_gather_json(group, verdict)[0]) for group in groups]
    found = [each._replace(treatment=Treatment(each.treatment)) for each in found]
    return max(found, key=lambda each: [*Treatment].index(each.treatment))


def _groups_by_rank(optimizer: Optimizer, num_ranks: int) -> list[frozenset[int]]:
    """Return for each rank the indices of the groups of which it would have whole parameters."""
    found: list[set[int]] = [set() for _ in range(num_ranks)]
    number = in_order(optimizer.param_groups)
    together: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in number:
        together[parameter.dtype, parameter.device].append(parameter)
    for alike in together.values():
        owners = owners_of(keep_whole([parameter.numel() for parameter in alike], num_ranks))
        for parameter, owner in zip(alike, owners, strict=True):
            found[owner].add(number[parameter])
    return [*map(frozenset, found)]
