"""Repeats of a step that was skipped: where it goes wrong, and whether its device is to blame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from traceback import walk_tb
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lockstep.errors import CollectiveMismatch, ReplicasDiffer
from lockstep.generators import Generators
from lockstep.guarding.blame import Blame, Verdict
from lockstep.guarding.meeting import RanksOfStep
from lockstep.guarding.origin import Origin
from lockstep.guarding.replicas import check_replicas
from lockstep.torch_private import tree_leaves
from lockstep.values import broadcast

_RAISED = "raised "
_NOT_HANDED_ON = "the batch can't be handed to another rank: broadcast() refuses it"
_IN_PLACE = "the body changes its batch in place, so it can't be repeated"


class Repeatable(Protocol):
    """A guard, as far as its step can be repeated."""

    meeting: RanksOfStep
    # What this rank has computed in the last step, if it was whole: a digest of its gradients, or
    # the exception that it raised.
    evidence: str | None

    def repeated(self, body: Callable[[], Any], prepare: Callable[[], None]) -> Blame:
        """Take the step again without its update, after ``prepare()``, and return the blame."""


class Work(NamedTuple):
    """What a rank has to do in a step.

    Attributes:
        body: The function that takes the step.
        args: What it is called with, as are ``options``.
        generators: The generators of random numbers that it may draw from.
        versions: How often the tensors among these were changed, before.
    """

    body: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    generators: Generators
    versions: Sequence[int]

    def is_changed(self) -> bool:
        """Whether the body has changed what it is called with."""
        return versions_in(self.args, self.options) != self.versions

    def take(self) -> Any:
        """Take the step."""
        return self.body(*self.args, **self.options)


def versions_in(*values: Any) -> list[int]:
    """Return how often each tensor in ``values`` was changed in place."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def in_words(error: Exception) -> str:
    """Return what is compared of an exception: its class and line, as words may have numbers."""
    *_, (frame, line) = walk_tb(error.__traceback__)
    return f"{_RAISED}{type(error).__qualname__} at {frame.f_code.co_filename}:{line}"


def traced(guard: Repeatable, models: Sequence[nn.Module], blame: Blame, work: Work) -> Blame:
    """Repeat the step, look where values begin not to be finite, and return that, too."""
    if any(guard.meeting.gathered(work.is_changed())):
        return replace(blame, origin=f"no module that is known: {_IN_PLACE}")
    origin = Origin(models)
    with origin.watching():
        again = guard.repeated(work.take, lambda: None)
    if again.kind != "nonfinite":
        return replace(blame, origin=f"no module again: {again.error}")
    texts: list[str] = guard.meeting.gathered(origin.text)
    if again.rank is not None:
        return replace(blame, origin=texts[guard.meeting.ranks.index(again.rank)])
    return replace(blame, origin=next(filter(None, texts), ""))


def verified(guard: Repeatable, models: Sequence[nn.Module], blame: Blame, work: Work) -> Blame:
    """Repeat the step here, and then each rank's part on the next rank; return what that shows."""
    if any(guard.meeting.gathered(work.is_changed())):
        return replace(blame, verdict="unknown", reason=_IN_PLACE)
    first = guard.meeting.gathered(guard.evidence)
    guard.repeated(work.take, lambda: None)
    again = guard.meeting.gathered(guard.evidence)
    culprit = guard.meeting.ranks.index(blame.rank) if blame.rank is not None else None
    if culprit is None:
        verdict, reason = judge_sums(first, again)
    else:
        moved: list[Any] | None = []
        if len(first) > 1 and not _changed(first, again):
            moved = _moved(guard, work)
        if moved is None:
            return replace(blame, verdict="unknown", reason=_NOT_HANDED_ON)
        verdict, reason = judge(culprit, first, again, moved, guard.meeting.ranks)
    return _unless_replicas_differ(models, replace(blame, verdict=verdict, reason=reason))


def _unless_replicas_differ(models: Sequence[nn.Module], blame: Blame) -> Blame:
    """Return ``blame``, which accuses no device if the model isn't the same on all ranks."""
    try:
        for model in models if blame.verdict == "device" else ():
            check_replicas(model)
    except ReplicasDiffer as error:
        reason = f"the ranks don't have the same model: {error.differences[0]}"
        return replace(blame, verdict="rank", reason=reason)
    return blame


def compared(guard: Repeatable, models: Sequence[nn.Module], work: Work, step: int) -> Blame | None:
    """Compare what each rank computes with what the next one computes of the same.

    Returns:
        Who is to blame, if they aren't the same; None, too, if the step fails anyhow.
    """
    if len(guard.meeting.ranks) == 1:
        return None
    guard.repeated(work.take, lambda: None)
    first, ranks = guard.meeting.gathered(guard.evidence), guard.meeting.ranks
    moved, size = _moved(guard, work), len(ranks)
    if moved is None:
        return Blame(None, step, "wrong", "gradients", verdict="unknown", reason=_NOT_HANDED_ON)
    parted = [rank for rank in range(size) if _differ(first[rank], moved[(rank + 1) % size])]
    if not parted:
        return None
    guard.repeated(work.take, lambda: None)
    if changed := _changed(first, guard.meeting.gathered(guard.evidence)):
        reason = f"a repeat had other bits on rank {ranks[changed[0]]}"
        return Blame(None, step, "wrong", "gradients", verdict="unreproducible", reason=reason)
    # A device that computes something else does so with its own part and with the one moved to it.
    suspects = [rank for rank in parted if (rank - 1) % size in parted]
    rank = ranks[suspects[0]] if len(suspects) == 1 and size > 2 else None
    pairs = ", ".join(f"{ranks[each]} and {ranks[(each + 1) % size]}" for each in parted)
    error = f"of the same samples and random numbers, these ranks compute other gradients: {pairs}"
    reason = "repeats on the same ranks had the same bits"
    verdict: Verdict = "rank" if rank is None else "device"
    blame = Blame(rank, step, "wrong", error, verdict=verdict, reason=reason)
    return _unless_replicas_differ(models, blame)


def judge_sums(first: Sequence[str | None], again: Sequence[str | None]) -> tuple[Verdict, str]:
    """Return the verdict of a step of which no rank alone is to blame."""
    if changed := _changed(first, again):
        return "unreproducible", f"a repeat had other bits on {len(changed)} of the ranks"
    return "unknown", "no rank alone is to blame; a repeat on the same ranks had the same bits"


def judge(
    culprit: int,
    first: Sequence[str | None],
    again: Sequence[str | None],
    moved: Sequence[str | None],
    ranks: Sequence[int],
) -> tuple[Verdict, str]:
    """Return what is to blame, and why, given what each rank of a group has computed.

    Args:
        culprit: Who is to blame so far.
        first: In the step; None where a rank was stopped before it was through.
        again: In its repeat.
        moved: In another, in which each had the samples and random numbers of the rank before.
        ranks: Their numbers in the whole run.
    """
    name = ranks[culprit]
    if changed := _changed(first, again):
        who = ", ".join(str(ranks[each]) for each in changed)
        text = f"called again with the same, the body came to something else on rank {who}"
        return "unreproducible", text
    if first[culprit] is None or again[culprit] is None:
        text = "can't be compared: it failed in its update, was stopped, or has sparse gradients"
        return "unknown", f"what rank {name} did {text}"
    if not moved:
        return "unknown", "a repeat had the same bits, and there is no other rank to repeat it on"
    size = len(ranks)
    after = (culprit + 1) % size
    if moved[after] == again[culprit]:
        return "samples", f"rank {ranks[after]} came to the same with the samples of rank {name}"
    # One that is stopped hasn't raised: it has come as far as the one that has.
    fails_alike = moved[culprit] == again[culprit]
    if moved[after] is None and not fails_alike:
        return "unknown", f"rank {ranks[after]} was stopped while it repeated rank {name}'s part"
    others = [r for r in range(size) if culprit not in (r, (r + 1) % size)]
    pairs = [(ranks[r], again[r], moved[(r + 1) % size]) for r in others]
    if parted := [rank for rank, here, there in pairs if _differ(here, there)]:
        return "unreproducible", f"the part of rank {parted[0]}, too, has other bits elsewhere"
    told = f"rank {ranks[after]} came to something else with the samples of rank {name}"
    is_raised = str(again[culprit]).startswith(_RAISED)
    if not is_raised and any(None not in pair and pair[1] == pair[2] for pair in pairs):
        return "device", f"{told}, and parts of other ranks had the same bits elsewhere"
    if fails_alike or any(first[rank] is not None for rank in range(size) if rank != culprit):
        text = f"it stays on rank {name}: its device, or what the program has there alone"
        return "rank", f"{told}; {text}"
    return "unknown", f"{told}, but no rank was through with a good part that could be compared"


def _changed(first: Sequence[str | None], again: Sequence[str | None]) -> list[int]:
    pairs = enumerate(zip(first, again, strict=True))
    return [rank for rank, (a, b) in pairs if _differ(a, b)]


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _moved(guard: Repeatable, work: Work) -> list[Any] | None:
    """Repeat each rank's part on the next rank; return what came of it, by that rank.

    None, on all ranks alike, if a rank's samples can't be handed on.
    """
    try:
        given, states = _from_the_rank_before(guard, work)
    except (TypeError, CollectiveMismatch):
        return None
    guard.repeated(given.take, lambda: work.generators.write(states))
    return guard.meeting.gathered(guard.evidence)


def _from_the_rank_before(guard: Repeatable, work: Work) -> tuple[Work, dict[str, Any]]:
    """Return what the rank before has to do, and the states of its generators."""
    group = guard.meeting.group
    assert group is not None
    own = work.args, dict(work.options), work.generators.read()
    found = own
    for source in range(group.size()):
        theirs = broadcast(own, source, process_group=group)
        if (source + 1) % group.size() == group.rank():
            found = theirs
    args, options, states = found
    return work._replace(args=tuple(args), options=options), states
