"""The context of a guarded step: its beginning, what comes before its update, and its end."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.comm import GUARDED, uncompiled
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupClosed,
    ModelError,
    PeerLost,
    ReplicasDiffer,
    StepSkipped,
)
from lockstep.grad import lacks_gradient
from lockstep.guarding.blame import (
    Blame,
    FailureFacts,
    StepOutcome,
    blame_of,
    blame_of_gradients,
    is_caused_elsewhere,
    release,
    to_blame,
)
from lockstep.guarding.entry import check_batch, check_repeats, fingerprint
from lockstep.guarding.finite import Found, GradientFinding, LocalGradients, look_at
from lockstep.guarding.kept import StateBefore
from lockstep.guarding.meeting import RanksOfStep
from lockstep.guarding.repeats import Work, compared, in_words, traced, verified, versions_in
from lockstep.guarding.spikes import Judge, Spike, as_int
from lockstep.guarding.step import (
    Common,
    GuardedStep,
    GuardOptions,
    Misused,
    StepEntry,
    common_of,
    load_commons,
    state_of_commons,
)
from lockstep.guarding.update import check_update, is_nested, is_skipped_by, skips_itself
from lockstep.nn import note_step, state_of
from lockstep.optim import inner_optimizer, sharding_of
from lockstep.world import parameters_of

_log = logging.getLogger("lockstep")

# How often ranks go on to meet though others called something else meanwhile.
_MOST_MEETINGS = 16
_FINITE = "a repeat of the step, with the same random numbers, was finite"


class _CurrentGuard(threading.local):
    guard: Guard | None = None


_current = _CurrentGuard()


class Guard:
    """What :func:`lockstep.guard` returns: a context manager around a step."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        others: Sequence[Any],
        options: GuardOptions,
    ) -> None:
        # What it guards, and how.
        self._models = models
        self._optimizers = [inner_optimizer(optimizer) for optimizer in optimizers]
        self._others, self._options, self._entry = others, options, StepEntry.WITH
        # The step that runs.
        self._common, self._step = Common(), GuardedStep(0)
        self._kept: StateBefore | None = None
        self._states = [state_of(model) for model in models]
        self.meeting = RanksOfStep(self._states)
        self._local = LocalGradients()
        self._handles: list[Any] = []
        self._stepped: list[Optimizer] = []  # that have begun to
        self._around: BaseException | None = None  # which the program handles around the guard
        self._found: Found | None = None  # in gradients, before the update
        self._judge = Judge()
        self.evidence: str | None = None  # what this rank came to, as repeats compare it
        self._scales: list[float] = []

    def run(self, body: Callable[..., Any], *args: Any, **options: Any) -> GuardedStep:
        """Call ``body``, which takes the step; and again, with ``on_skip="retry"``. ::

            def body():
                lockstep.mean(loss_of(model(x), y)).backward()
                optimizer.step()

            step = lockstep.guard(model, optimizer, on_skip="retry").run(body)

        Returns the last of the steps; ``result`` is what the body has returned.
        """
        if not callable(body):
            raise TypeError(
                f"run() takes a function that takes the step, and got a {type(body).__name__}. Put "
                "forward, backward and update into one, so that it can be called again."
            )
        check_batch(self._options, args, options)
        self._entry = StepEntry.RUN
        common = self._common = common_of(self._optimizers[0])
        work = Work(body, args, options, common.generators, versions_in(args, options))
        try:
            return self._taken(work)
        finally:
            self._entry = StepEntry.WITH

    def _taken(self, work: Work) -> GuardedStep:
        common = self._common
        while True:
            if self._options.verify_every and common.is_to_compare(self._options.verify_every):
                blame = compared(self, self._models, work, common.num_steps)
                if blame is not None and common.is_to_leave_out(blame):
                    return self._left_out(blame)
                common.note_alike(blame)
            with self as step:
                step.result = work.take()
            if step.blame is not None:
                step.blame = self._examined(step.blame, work)
                if callable(self._options.on_skip):
                    self._options.on_skip(step)
            if not step.skipped or self._options.on_skip != "retry":
                return step

    def _left_out(self, blame: Blame) -> GuardedStep:
        """Skip the step that comes next because of what repeats of it have shown."""
        self._step = GuardedStep(self._common.num_steps)
        self._common.num_steps += 1
        self._skip(FailureFacts(StepOutcome.TO_BLAME, blame), [], None)
        if callable(self._options.on_skip):
            self._options.on_skip(self._step)
        return self._step

    def _examined(self, blame: Blame, work: Work) -> Blame:
        """Repeat the step, as far as that is asked for, and return what is known then."""
        # That a GradScaler's scale is too large is no fault.
        if blame.kind == "nonfinite" and any(s.get_scale() > 1 for s in self._scalers):
            return blame
        if self._options.on_skip == "verify":
            blame = verified(self, self._models, blame, work)
        if self._options.traces and blame.kind == "nonfinite":
            blame = traced(self, self._models, blame, work)
        return blame

    def repeated(self, body: Callable[[], Any], prepare: Callable[[], None]) -> Blame:
        """Take the step again without its update, after ``prepare()``, and return the blame."""
        self._entry = StepEntry.REPEAT
        try:
            with self as again:
                prepare()
                body()
        finally:
            self._entry = StepEntry.RUN
        assert again.blame is not None
        return again.blame

    def watch(self, loss: torch.Tensor | float) -> None:
        """Give the loss to ``spike=``, as :meth:`GuardedStep.watch` does, in a body of run()."""
        self._step.watch(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what later guards of the same optimizers know of the steps before.

        Given to :func:`lockstep.steps` as one of its things, it is part of what a run goes on from.
        """
        return state_of_commons(self._optimizers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` has returned."""
        load_commons(self._optimizers, state)

    @uncompiled
    def __enter__(self) -> GuardedStep:
        """Begin a step."""
        self._check()
        common = self._common = common_of(self._optimizers[0])
        self._step = GuardedStep(common.num_steps)
        self._stepped, self._found, self._around = [], None, sys.exception()
        self._judge, self.evidence = Judge(), None
        for each in map(common_of, self._optimizers):
            each.num_updates_before = each.num_updates
        self._kept = StateBefore(
            self._models,
            self._optimizers,
            self._others,
            common.copies,
            common.generators,
            undoes=self._options.undoes,
        )
        self._scales = [scaler.get_scale() for scaler in self._scalers]
        self._local = LocalGradients(
            measures=self._options.spike is not None,
            digests=self._options.on_skip == "verify" or self._options.verify_every is not None,
        )
        for engine in self.meeting.engines:
            engine.reducer.inspect = self._local
        self.meeting.begin()
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))
        _current.guard = self
        return self._step

    def _check(self) -> None:
        if _current.guard is not None:
            raise ModelError(
                "A guard is entered in another guard. One guard is around one step: around its "
                "forward, backward and update, of all models and optimizers that step together."
            )
        check_repeats(self._options, self._states, is_with=self._entry is StepEntry.WITH)

    @property
    def _scalers(self) -> list[GradScaler]:
        return [each for each in self._others if isinstance(each, GradScaler)]

    # Before and after the update.

    @uncompiled
    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Let all ranks go on to the update, or none."""
        if is_nested(optimizer):
            return  # a class's step calls that of its base class
        check_update(optimizer, [*args[1:], *options.values()], self._stepped)
        number = self._optimizers.index(optimizer)
        operation = f"{GUARDED}, before its update {len(self._stepped)}, by optimizer {number}"
        finding = self._look_before(optimizer, sums=False)
        if self._local.digests:
            self.evidence = self._local.digest(p for m in self._models for p in m.parameters())
        deviations, facts = self._options.spike, [int(finding)]
        if deviations is not None:
            norm = self._local.norm_for(optimizer, math.prod(self._scales))
            told = norm, self._step.take_loss()
            facts += map(as_int, (0.0, math.nan) if skips_itself(optimizer) else told)
        by_rank = self.meeting.tell(operation, facts)
        findings = {finding for finding, *_ in by_rank}
        if GradientFinding.IN_DOUBT in findings:
            finding = self._look_before(optimizer, sums=True)
            findings = {each for (each,) in self.meeting.tell(f"{operation}, of sums", [finding])}
        if GradientFinding.NONFINITE in findings:
            raise StepSkipped("The gradients of a guarded step aren't finite.")
        if deviations is not None:
            self._judge.judge(
                common_of(optimizer).windows, [told[1:] for told in by_rank], deviations
            )
            if self._judge.spike is not None:
                raise StepSkipped("The gradients, or the loss, of a guarded step are too large.")
        # Before the last update: what follows an earlier one depends on that.
        is_last = len(self._stepped) + 1 == len(self._optimizers)
        if is_last and self._entry is StepEntry.REPEAT:
            raise StepSkipped(_FINITE)
        self._stepped.append(optimizer)

    def _look_before(self, optimizer: Optimizer, *, sums: bool) -> GradientFinding:
        """Look at the gradients before an update, and return what this rank tells of them."""
        found, are_small = look_at(parameters_of(optimizer), self._local, sums=sums)
        self._found = None
        if found.nonfinite and not skips_itself(optimizer):
            self._found = found
            return GradientFinding.NONFINITE
        return GradientFinding.FINITE if are_small else GradientFinding.IN_DOUBT

    @uncompiled
    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        for engine in self.meeting.engines:
            # Another step is refused. But before that, this rank would wait for a backward of the
            # others, as if it had none of its own: until the end it seems to have one.
            # Shown by test_two_updates_on_one_rank_are_an_error_on_all.
            engine.stepped.by[optimizer] = -1

    # The end of the step.

    @uncompiled
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the step on all ranks alike; return whether the body's exception is dealt with."""
        try:
            return self._end(error)
        finally:
            self.meeting.end()

    def _end(self, error: BaseException | None) -> bool:
        self._leave()
        around, self._around = self._around, None
        if error is not None and not isinstance(error, Exception):
            return False
        if isinstance(error, PeerLost | CollectiveTimeout | GroupClosed | ReplicasDiffer):
            return False  # there is nobody to agree with, or nothing to go on from
        if error is None and self._entry is StepEntry.REPEAT:
            error = StepSkipped(_FINITE)  # not all optimizers have stepped
        told = self._told(error, around)
        facts = self._meet(told)
        self._common.num_steps += self._entry is not StepEntry.REPEAT
        are_same = len({guard for _, guard in facts}) == 1
        if are_same and not any(outcome for outcome, _ in facts):
            self._step.skipped, self._common.in_a_row = False, 0
            self._step.num_skipped = self._common.num_skipped
            self._judge.remember()
            return False
        by_rank = [*map(FailureFacts.decoded, self.meeting.gathered(told.encoded()))]
        guilty = to_blame(by_rank) if any(one.blame for one in by_rank) else told
        is_repeat = self._entry is StepEntry.REPEAT
        self._undo(keeps_scale=guilty.is_of_scaler and not is_repeat)
        if not are_same:
            raise ModelError(
                "The ranks' guards differ, in models, optimizers, or options. Every rank guards "
                "the same step in the same way. The step was not applied."
            ) from error
        if not is_repeat:
            self._skip(guilty, by_rank, error)
        self._step.skipped, self._step.blame = True, guilty.blame
        release(error, around)
        return True

    def _leave(self) -> None:
        _current.guard = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for engine in self.meeting.engines:
            engine.reducer.inspect = None
        for optimizer in self._stepped:
            note_step(optimizer, self.meeting.engines)

    def _told(self, error: Exception | None, around: BaseException | None) -> FailureFacts:
        """Return what this rank tells of its step."""
        has_updated = bool(self._stepped)
        is_of_scaler = is_skipped_by(self._scalers, self._scales, self._optimizers)
        if error is None and not has_updated and not is_of_scaler:
            error = Misused(
                "The body of a guard has ended without a step of its optimizer. It is around "
                "forward, backward and update: a loss that leaves it, and is differentiated "
                "behind it, isn't guarded. (If a GradScaler skips the update, or may, give it to "
                "guard() too.)"
            )
        if error is None and not is_of_scaler and self._options.spike is not None:
            error = self._step.refusal_of_loss()
        if error is None and not is_of_scaler:
            return FailureFacts(StepOutcome.GOOD, has_updated=has_updated)
        # A part of the sums is another rank's to look at, where gradients of this one show.
        is_here = isinstance(error, StepSkipped) and bool(self._local.found.nonfinite)
        if self._found is not None or is_here or (error is None and is_of_scaler):
            return self._told_of_gradients(is_of_scaler=error is None)
        assert error is not None
        if self._judge.spike is not None and isinstance(error, StepSkipped):
            return self._told_of_spike(self._judge.spike)
        outcome = StepOutcome.TO_BLAME
        if isinstance(error, Misused):
            outcome = StepOutcome.MISUSED
        elif is_caused_elsewhere(error, around):
            outcome = StepOutcome.CAUSED_ELSEWHERE
        else:
            is_through = len(self._stepped) == len(self._optimizers)
            compares = self._local.digests and not is_through
            self.evidence = in_words(error) if compares else None
        blame = blame_of(error, self.meeting.rank, self._step.number)
        return FailureFacts(outcome, blame, has_updated=has_updated)

    def _told_of_spike(self, spike: Spike) -> FailureFacts:
        """Let the first of its ranks tell of it; if there are more, none alone is to blame."""
        first, *others = spike.ranks
        is_first = first == self.meeting.number
        text = f"{spike.text}; {len(others)} more ranks' is too large" if others else spike.text
        rank = None if others else self.meeting.rank
        blame = Blame(rank, self._step.number, "spike", text)
        return FailureFacts(
            StepOutcome.TO_BLAME if is_first else StepOutcome.CAUSED_ELSEWHERE,
            blame,
            has_updated=bool(self._stepped),
        )

    def _told_of_gradients(self, *, is_of_scaler: bool) -> FailureFacts:
        local = self._local.found
        found = local if local.nonfinite or self._found is None else self._found
        blame = blame_of_gradients(found, self._models, self.meeting.rank, self._step.number)
        if is_of_scaler:
            blame = replace(blame, error=f"{blame.error} (times the loss scale)")
        return FailureFacts(
            StepOutcome.TO_BLAME,
            blame,
            is_local=bool(local.nonfinite),
            is_part=found.is_part,
            is_of_scaler=is_of_scaler,
            has_updated=bool(self._stepped) and not is_of_scaler,
        )

    def _meet(self, told: FailureFacts) -> list[list[int]]:
        """Return how the body has ended on each rank, and a number that equal guards have.

        A rank that has left its body finds the others in other calls. They all raise
        CollectiveMismatch then, which ends the bodies, and meet again.
        """
        things, is_repeat = [*self._optimizers, *self._others], self._entry is StepEntry.REPEAT
        same = fingerprint(self._models, things, self._options, self._step.number, is_repeat)
        outcome = told.outcome
        for remaining in reversed(range(_MOST_MEETINGS)):
            try:
                self.meeting.finish_failed()
                return self.meeting.tell(f"{GUARDED}, its end", [outcome, same])
            except CollectiveMismatch:
                if not remaining:
                    raise
                outcome = outcome or StepOutcome.CAUSED_ELSEWHERE
        raise AssertionError

    def _undo(self, *, keeps_scale: bool) -> None:
        """Put everything back, on all ranks."""
        error: Exception | None = None
        try:
            assert self._kept is not None
            self._kept.put_back(keeps_scale=keeps_scale)
            for each in map(common_of, self._optimizers):
                each.num_updates = each.num_updates_before
            self._drop_gradients()
        except Exception as caught:
            error = caught
        by_rank = self.meeting.tell(f"{GUARDED}, put back", [error is not None])
        failed = [rank for rank, (flag,) in enumerate(by_rank) if flag]
        if failed:
            raise ModelError(
                f"A guarded step has failed, and could not be put back on rank {failed[0]}: "
                "parameters may be those of no step. Go on from a checkpoint."
            ) from error

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            if (sharding := sharding_of(optimizer)) is not None:
                sharding.zero_grad()
            note_step(optimizer, self.meeting.engines)
        models = (p for model in self._models for p in model.parameters())
        others = (p for optimizer in self._optimizers for p in parameters_of(optimizer))
        for parameter in (*models, *others):
            if not lacks_gradient(parameter):
                parameter.grad = None
        for state in self._states:
            state.count = None  # of micro-batches that were accumulated
        for engine in self.meeting.engines:
            engine.buffers.forget_graphs()
        self.meeting.forget_failed()

    def _skip(
        self, guilty: FailureFacts, by_rank: Sequence[FailureFacts], error: BaseException | None
    ) -> None:
        """Tell the program of the step, which is put back; raise if it can't go on."""
        blame, step = guilty.blame, self._step
        assert blame is not None
        if guilty.outcome is StepOutcome.MISUSED:
            raise ModelError(f"{blame.error} (Said by rank {blame.rank}.)") from error
        if not self._options.undoes and any(told.has_updated for told in by_rank):
            raise ModelError(
                "A guarded step has failed in its update or behind it, and undo=False keeps no "
                "copies to undo it: parameters may differ between the ranks. Go on from a "
                f"checkpoint. It was {blame}\n\n{blame.traceback}"
            ) from error
        self._common.num_skipped += 1
        step.num_skipped = self._common.num_skipped
        if not (guilty.is_of_scaler and all(s.get_scale() > 1 for s in self._scalers)):
            self._common.in_a_row += 1
        step.in_a_row = self._common.in_a_row
        if self.meeting.rank == 0 and not guilty.is_of_scaler:
            _log.warning("A step is skipped on all ranks: %s", blame)
        if step.in_a_row >= self._options.max_consecutive:
            skipped = StepSkipped(
                f"{blame.traceback}\n{step.in_a_row} guarded steps in a row were skipped on all "
                f"ranks, the last because of {blame}"
            )
            skipped.blame = blame
            raise skipped from error
        step.skipped, step.blame = True, blame
        if callable(self._options.on_skip) and self._entry is StepEntry.WITH:
            self._options.on_skip(step)  # else when all is known
