"""Who made a step fail, where and why, as every rank is told."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from lockstep.errors import CollectiveFailed, StepSkipped
from lockstep.guarding.finite import Found

Kind = Literal["exception", "memory", "nonfinite", "spike", "wrong"]
Verdict = Literal["samples", "device", "rank", "unreproducible", "unknown"]
# How torch's allocators begin the errors that are plain RuntimeErrors.
_OUT_OF_MEMORY = ("DefaultCPUAllocator: ", "out of memory", "can't allocate memory")


class StepOutcome(IntEnum):
    """How a step's body has ended on a rank."""

    GOOD = 0
    TO_BLAME = 1
    CAUSED_ELSEWHERE = 2
    MISUSED = 3  # the program is wrong: everything is put back, and every rank raises


@dataclass(frozen=True)
class Blame:
    """Who made a guarded step fail, where and why; equal on all ranks. ::

        with lockstep.guard(model, optimizer) as step:
            criterion(model(x), y).backward()
            optimizer.step()
        if step.skipped and step.blame.kind == "nonfinite":
            print(step.blame.rank, step.blame.nonfinite)

    Attributes:
        rank: The rank, by its number in the whole run. None if no rank alone is to blame, as where
            gradients that are finite add up to infinity.
        step: The number of the guarded step, from 0.
        kind: ``"exception"``; ``"memory"``, if an allocation failed; ``"nonfinite"``, if gradients
            have NaN or infinity; ``"spike"``, if the rank's gradients, or its loss, are larger than
            ``guard(spike=)`` lets them be; ``"wrong"``, if ``guard(verify_every=)`` has found that
            another rank computes others of the same samples.
        error: What happened, in one line.
        traceback: The traceback of the exception on that rank, as text.
        parameter: Of the parameters in ``nonfinite`` the one whose gradient was computed first.
        nonfinite: The names of parameters whose gradient isn't finite: that of the rank itself or,
            where it isn't known any more, the mean.
        finite: The names of the parameters with a finite gradient, which bracket the layer.
        origin: With ``guard(trace_nonfinite=True)``: in which module values began not to be finite,
            such as ``"in the forward of 'layers.3' (Attention)"``; "" if it isn't known.
        verdict: With ``guard(on_skip="verify")``: ``"samples"``, ``"device"``, ``"rank"``,
            ``"unreproducible"`` or ``"unknown"``.
        reason: What repeats of the step have shown, in words.
    """

    rank: int | None
    step: int
    kind: Kind
    error: str
    traceback: str = ""
    parameter: str | None = None
    nonfinite: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    origin: str = ""
    verdict: Verdict | None = None
    reason: str = ""

    def __str__(self) -> str:
        """In one line."""
        who = "no single rank" if self.rank is None else f"rank {self.rank}"
        where = f"; they come from {self.origin}" if self.origin else ""
        why = f"; {self.verdict}: {self.reason}" if self.verdict else ""
        return f"{who}, in guarded step {self.step}: {self.error}{where}{why}"


def blame_of(error: Exception, rank: int, step: int) -> Blame:
    """Return the blame of ``rank``, which raised ``error``."""
    kind: Kind = "memory" if _is_of_memory(error) else "exception"
    lines = traceback.format_exception_only(error)
    text = "".join(traceback.format_exception(error))
    return Blame(rank, step, kind, lines[0].strip(), text)


def blame_of_gradients(found: Found, models: Sequence[nn.Module], rank: int, step: int) -> Blame:
    """Return the blame of ``rank``, some of whose gradients aren't finite."""
    names = {
        id(parameter): name if len(models) == 1 else f"models[{number}].{name}"
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }
    nonfinite, finite = (
        tuple(names.get(id(p), f"a parameter of shape {[*p.shape]}") for p in each)
        for each in found[:2]
    )
    error = f"gradients aren't finite: of {len(nonfinite)} of its parameters"
    error += f", first of {nonfinite[0]!r}" if nonfinite else ""
    first = next(iter(nonfinite), None)
    return Blame(
        rank, step, "nonfinite", error, parameter=first, nonfinite=nonfinite, finite=finite
    )


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _OUT_OF_MEMORY)


def is_caused_elsewhere(error: BaseException, around: BaseException | None) -> bool:
    """Whether ``error`` was raised because another rank has left the step."""
    return any(isinstance(each, CollectiveFailed | StepSkipped) for each in _chain(error, around))


def _chain(error: BaseException | None, around: BaseException | None) -> Iterator[BaseException]:
    """What ``error`` was raised from, up to the exception that was handled ``around`` the guard."""
    seen: set[int] = set()
    while error is not None and error is not around and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def release(error: BaseException | None, around: BaseException | None) -> None:
    """Drop what the frames of ``error`` hold, which is dealt with: graphs and their memory.

    Shown by test_no_graph_of_a_skipped_step_is_left.
    """
    for each in _chain(error, around):
        traceback.clear_frames(each.__traceback__)


class FailureFacts(NamedTuple):
    """What a rank tells the others of a step that has failed.

    Attributes:
        outcome: How its body has ended.
        blame: What happened, if the rank may be to blame.
        is_local: Whether gradients were not finite before they were summed over the ranks.
        is_part: Whether this rank has looked at a part of the sums, and others at other parts.
        is_of_scaler: Whether a GradScaler skips the step.
        has_updated: Whether an update has begun.
    """

    outcome: StepOutcome
    blame: Blame | None = None
    is_local: bool = False
    is_part: bool = False
    is_of_scaler: bool = False
    has_updated: bool = False

    def encoded(self) -> list[Any]:
        """Return it as JSON can keep it."""
        blame = None if self.blame is None else asdict(self.blame)
        return [self.outcome, blame, *self[2:]]

    @classmethod
    def decoded(cls, encoded: Sequence[Any]) -> FailureFacts:
        """Return what :meth:`encoded` was called of."""
        told = cls(*encoded)
        blame: Any = told.blame
        if blame is not None:
            names = {name: tuple(blame[name]) for name in ("nonfinite", "finite")}
            blame = Blame(**{**blame, **names})
        return told._replace(outcome=StepOutcome(told.outcome), blame=blame)


def to_blame(told: Sequence[FailureFacts]) -> FailureFacts:
    """Return what a rank told, in rank order, that has made the step fail.

    A rank that raised comes before one whose gradients weren't finite; and of these, one where they
    weren't before they were summed. If all ranks have the same sums that aren't finite, the blame
    has no rank. If every rank was only told that another one failed, as after a mismatch of calls,
    it is the first rank's.
    """
    for outcome in StepOutcome.MISUSED, StepOutcome.TO_BLAME:
        found = [one for one in told if one.outcome is outcome and one.blame is not None]
        raised = [one for one in found if one.blame.kind != "nonfinite"]  # type: ignore[union-attr]
        local = [one for one in found if one.is_local]
        if raised or local:
            return (raised or local)[0]
        if found:
            first = found[0]
            is_of_all = len(told) > 1 and (first.is_part or len(found) == len(told))
            blame = replace(first.blame, rank=None) if is_of_all else first.blame  # type: ignore[type-var]
            return first._replace(blame=blame)
    return next(one for one in told if one.blame is not None)
