"""Decides whether the steps of an optimizer can be divided among the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.arguments import refusal
from lockstep.errors import ModelError
from lockstep.optim.probe import Outcome, Verdict, probe
from lockstep.optim.uneven import gather_json

# Optimizers whose update of an element depends on nothing but the element's value, gradient and
# state, on options, and on the number of steps.
ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
# Those whose update of a parameter depends on nothing but the same of the parameter.
_BY_PARAMETER = {torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam}
KNOWN = ELEMENTWISE | _BY_PARAMETER

# What to do where an optimizer can't be divided: leave it undivided, with a warning, or raise an
# error. "always" divides none.
Undivided = Literal["warn", "error", "always"]


def judge(
    optimizer: Optimizer, groups: Sequence[dist.ProcessGroup], undivided: Undivided = "warn"
) -> Verdict:
    """Return whether to divide ``optimizer``, whose parameters have replicas on ``groups``.

    An optimizer of a class that isn't known is tried, by rank 0 of each group. Rank 0 gives the
    warning. Every rank must call it; it blocks.

    Raises:
        ModelError: If it can't be used in either way, or can't be divided and that is an error.
    """
    if undivided not in get_args(Undivided):
        raise ValueError(refusal("undivided", undivided, '"warn", "error" or "always"'))
    if undivided == "always":
        is_known = type(optimizer) in KNOWN
        return Verdict(Outcome.UNDIVIDED, may_draw=not is_known)
    if type(optimizer) in KNOWN:
        return Verdict(Outcome.DIVIDE)
    verdict, kind = _tried(optimizer, groups), type(optimizer).__name__
    told = f"{kind} can't be divided among the ranks: {verdict.reason}."
    if verdict.outcome is Outcome.REFUSE or (verdict.reason and undivided == "error"):
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
    own = probe(optimizer) if any(ranks.rank() == 0 for ranks in groups) else None
    found = [Verdict(*gather_json(ranks, own)[0]) for ranks in groups]
    found = [each._replace(outcome=Outcome(each.outcome)) for each in found]
    return max(found, key=lambda each: [*Outcome].index(each.outcome))
