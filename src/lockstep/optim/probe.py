"""Tries an optimizer of an unknown class, before its steps are divided among the ranks.

Its update of a parameter may depend on others: on a norm over all of them, on an estimate such as
Prodigy's, on numbers that are drawn one after the other. Nothing of that can be read off a class.
So copies of the optimizer take steps on small stand-ins for its parameters: one copy with all of
them, and others with the parts that ranks would have. After each step the parts have to have the
bits of the whole.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stdout, suppress
from enum import StrEnum
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TextIO, cast

import torch
from torch.optim import Optimizer

from lockstep.optim.differences import difference, have_same_bits
from lockstep.optim.methods import methods_with_state, names_used
from lockstep.optim.no_collectives import collectives_refused
from lockstep.optim.records import kept, records_of
from lockstep.optim.stand_ins import Copy, choose
from lockstep.optim.undivided import generators_drawn_from
from lockstep.tree import Collector

# Rounding hides small differences: so more steps are taken in float64 than in the own dtype. More
# than these take seconds with optimizers such as SOAP, and what parts later is told by repeats.py.
_NUM_STEPS, _NUM_STEPS_IN_ITS_DTYPE = 20, 12
# The number of first steps in which two equal copies are compared, and in which parts are tried
# that lack most stand-ins.
_NUM_REPEATED, _NUM_LACKING = 3, 8
# By step: most at one scale, then on both sides of thresholds such as those of clipping.
_SCALES = [1.0] * 10 + [2.0**-12, 2.0**9, 1.0, 1.0, 2.0**-4, 2.0**5]
# Steps from this one on leave some stand-ins without gradient.
_FIRST_WITHOUT = 3


class Treatment(StrEnum):
    """What to do with an optimizer that was tried."""

    DIVIDE = "divide"
    UNDIVIDED = "undivided"  # each rank updates all parameters
    REFUSE = "refuse"


class Verdict(NamedTuple):
    """What a trial has found.

    Attributes:
        treatment: What to do.
        reason: Why it isn't divided, as a clause.
        may_draw: Whether a step may draw random numbers.
        updates_all: Whether a step may update a parameter that has no gradient.
        drops_gradients: Whether each step sets all gradients to None.
    """

    treatment: Treatment
    reason: str = ""
    may_draw: bool = False
    updates_all: bool = False
    drops_gradients: bool = False


class _Told(Exception):
    """A part differs from the whole, for a reason."""


class _Refused(_Told):
    """No rank could take the step, for a reason."""


class _NotTried(Exception):
    """A copy can't take steps, for a reason."""


def probe(
    optimizer: Optimizer, groups_by_rank: Iterable[Set[int]] = (), *, in_parts: bool = True
) -> Verdict:
    """Try whether ranks that update a part of the parameters each would leave the same bits.

    Or, if it isn't to take steps ``in_parts``, whether they take the same steps with all of the
    parameters. It takes no step of ``optimizer`` itself and changes nothing of it. The states of
    generators are put back, and lists and the like in which its class notes what it does. It takes
    some hundredths of a second.

    Args:
        optimizer: The optimizer.
        groups_by_rank: For each rank, the indices of the groups of which it would have parameters.
        in_parts: Whether ranks would update a part of the parameters each.
    """
    trial = partial(_try, optimizer, groups_by_rank if in_parts else None)
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    try:
        with _undisturbed(optimizer), collectives_refused() as called:
            found = _try_twice(trial, is_fine=dtypes == {torch.float64})
    except Exception as error:  # the other ranks wait for a verdict
        return Verdict(Treatment.UNDIVIDED, f"it can't be tried ({_told(error)})", may_draw=True)
    if called:
        reason = f"its steps call {called[0]}(), in which ranks meet"
        return Verdict(Treatment.UNDIVIDED, reason, may_draw=True)
    return found


def _try_twice(trial: Callable[[torch.dtype | None, int], Verdict], *, is_fine: bool) -> Verdict:
    """Try it in float64, and in its own dtype, which ``is_fine`` if it is float64 already."""
    fine = Verdict(Treatment.UNDIVIDED)
    if not is_fine:
        fine = trial(torch.float64, _NUM_STEPS)
    if fine.treatment is Treatment.REFUSE:
        return fine
    num_steps = _NUM_STEPS_IN_ITS_DTYPE if fine.treatment is Treatment.DIVIDE else _NUM_STEPS
    found = trial(None, num_steps)
    if fine.reason and not fine.may_draw:  # told; and it may draw in its own dtype alone
        return fine._replace(may_draw=found.may_draw)
    return found._replace(updates_all=found.updates_all or fine.updates_all)


@contextmanager
def _undisturbed(optimizer: Optimizer) -> Iterator[None]:
    """Keep what steps of copies may change of the process, or show."""
    warns_always = torch.is_warn_always_enabled()
    # Else torch would give a warning that it gives once to the trial, and not to the program.
    torch.set_warn_always(True)
    try:
        with (
            generators_drawn_from(optimizer).kept(),
            kept(type(optimizer)),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(action="ignore"),
            redirect_stdout(cast(Any, _Muted(sys.stdout))),
        ):
            yield
    finally:
        torch.set_warn_always(warns_always)


class _Muted:
    """Standard output without what this thread prints, as some optimizers do in each step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write what other threads print."""
        is_this_thread = threading.get_ident() == self._thread
        return len(text) if is_this_thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _try(
    optimizer: Optimizer,
    groups_by_rank: Iterable[Set[int]] | None,
    dtype: torch.dtype | None,
    num_steps: int,
) -> Verdict:
    """Try it with stand-ins of ``dtype``; with gradients for all if it needs them."""
    for leaves_out in True, False:
        trial = None
        try:
            trial = _Trial(optimizer, groups_by_rank, dtype, leaves_out=leaves_out)
            trial.run(num_steps)
            return Verdict(
                Treatment.DIVIDE,
                updates_all=trial.updates_all,
                drops_gradients=bool(trial.drops_gradients),
            )
        except _Refused as found:
            return Verdict(Treatment.REFUSE, str(found))
        except _Told as found:
            may_draw = trial is None or trial.draws_in(num_steps)
            return Verdict(Treatment.UNDIVIDED, str(found), may_draw=may_draw)
        except _NotTried as found:
            verdict = Verdict(Treatment.UNDIVIDED, str(found), may_draw=True)
    return verdict


class _TrialRank:
    """A copy of the optimizer that updates some of its stand-ins, as a rank would.

    Attributes:
        owned: The indices of these.
        group_of: For each stand-in, the index of its group.
    """

    def __init__(self, made: Copy, owned: Set[int] | None = None) -> None:
        self.optimizer, self.stand_ins = made.optimizer, made.stand_ins
        self.owned = {*range(len(self.stand_ins))} if owned is None else owned
        ids = {id(self.stand_ins[index]) for index in self.owned}
        groups = self.optimizer.param_groups
        numbers = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        self.group_of = [numbers[id(p)] for p in self.stand_ins]
        self._groups = [[p for p in group["params"] if id(p) in ids] for group in groups]
        with suppress(Exception):  # without this, Schedule-Free's takes no step
            self.act(self.optimizer.train)  # type: ignore[attr-defined]

    def values(self) -> list[torch.Tensor]:
        """Return the values of the stand-ins."""
        return [p.detach().clone() for p in self.stand_ins]

    def records(self) -> dict[str, Any]:
        """Return the options and attributes of the optimizer."""
        return records_of(self.optimizer, self.stand_ins)

    def step(
        self, gradients: Sequence[torch.Tensor | None], closure: Callable[[], Any] | None
    ) -> None:
        """Take a step with the stand-ins that it owns."""
        for p, gradient in zip(self.stand_ins, gradients, strict=True):
            p.grad = None if gradient is None else gradient.clone()
        step = partial(type(self.optimizer).step, self.optimizer)
        self.act(step if closure is None else partial(step, closure))

    def act(self, method: Callable[[], Any]) -> None:
        """Call a method with the stand-ins that it owns in the groups."""
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for group, parameters in zip(groups, self._groups, strict=True):
            group["params"] = parameters
        try:
            method()
        finally:
            for group, every in zip(self.optimizer.param_groups, before, strict=True):
                group["params"] = every


class _Trial:
    """Steps of a copy with all stand-ins, and of copies with some, beside each other.

    Attributes:
        updates_all: Whether a step has changed a stand-in without gradient.
        drops_gradients: Whether steps have set all gradients to None; None before the first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups_by_rank: Iterable[Set[int]] | None,
        dtype: torch.dtype | None,
        *,
        leaves_out: bool,
    ) -> None:
        self._make = partial(Copy, optimizer, choose(optimizer), dtype)
        self._kind, self._leaves_out = type(optimizer), leaves_out
        self._in_parts = groups_by_rank is not None
        self._num_steps, self._takes_closure = 0, False
        self._differs = ""  # what parts have noted otherwise
        self._has_moved = self._has_drawn = self.updates_all = False
        self.drops_gradients: bool | None = None
        try:
            self._whole, self._again = _TrialRank(self._make()), _TrialRank(self._make())
            self._parts: list[_TrialRank] = []
            self._few: list[_TrialRank] = []
            if groups_by_rank is not None:
                self._parts += [_TrialRank(self._make(), owned) for owned in self._halves()]
                self._few += [
                    _TrialRank(self._make(), owned) for owned in self._with_few(groups_by_rank)
                ]
        except Exception as error:
            raise _NotTried(f"it can't be copied to try it ({_told(error)})") from error
        self._pool = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))

    def _halves(self) -> list[Set[int]]:
        """Return two parts, in which are about half of each group's vectors and of its matrices."""
        halves: list[set[int]] = [set(), set()]
        last: dict[int, dict[bool, int]] = defaultdict(dict)
        for index, p in enumerate(self._whole.stand_ins):
            kinds, is_matrix = last[self._whole.group_of[index]], p.dim() > 1
            kinds[is_matrix] = 1 - kinds.get(is_matrix, (len(last) + len(kinds)) % 2)
            halves[kinds[is_matrix]].add(index)
        return [*filter(None, halves)]

    def _with_few(self, groups_by_rank: Iterable[Set[int]]) -> list[Set[int]]:
        """Return parts as of ranks that lack groups, and one of a single stand-in."""
        every, group_of = self._whole.owned, self._whole.group_of
        fewest = [has for has in groups_by_rank if not any(other < has for other in groups_by_rank)]
        parts = [frozenset(i for i in every if group_of[i] in has) for has in fewest]
        known = [every, *self._halves()]
        return [part for part in dict.fromkeys([frozenset({0}), *parts]) if part not in known]

    def run(self, num_steps: int) -> None:
        """Take steps, and call the methods that are divided as steps are."""
        tried = names_used(self._kind, "step")
        methods = [name for name in methods_with_state(self._kind) if name not in tried]
        for number in range(num_steps):
            # Early too: from large state, a part may come to the same by saturation.
            for name in methods if number == _NUM_REPEATED else ():
                self._call(name)
            self._step()
        if not self._has_moved:
            raise _NotTried("its steps change nothing when it is tried")
        if self._differs:
            raise _Told(f"{self._differs} would differ between the ranks")
        self._check_state()
        for name in methods:
            self._call(name)
        if methods:
            self._step()

    def _check_state(self) -> None:
        """Raise unless ranks can send each other the state, as they do for a state dict."""
        for p in self._whole.stand_ins:
            state = self._whole.optimizer.state.get(p, {})
            once = {k: v for k, v in state.items() if getattr(v, "shape", None) != p.shape}
            try:
                Collector().encode(once, "state")
            except TypeError as error:
                raise _Told(f"ranks can't send each other its state ({_told(error)})") from error

    def draws_in(self, num_steps: int) -> bool:
        """Whether the whole has drawn random numbers, does in the rest of the steps, or fails."""
        if self._has_drawn:
            return True
        try:
            while self._num_steps < num_steps:
                self._step_whole(self._gradients())
        except (_Told, _NotTried):
            return True
        return False

    def _step(self) -> None:
        gradients, before = self._gradients(), self._whole.values()
        compares = 0 < self._num_steps < _NUM_REPEATED
        records = self._whole.records() if compares else {}
        self._step_whole(gradients)
        if self._in_parts:
            self._look_at_gradients(gradients)
        for old, p, gradient in zip(before, self._whole.stand_ins, gradients, strict=True):
            if not have_same_bits(old, p):
                self._has_moved = True
                self.updates_all |= gradient is None
        if self._num_steps <= _NUM_REPEATED:
            self._again.step(gradients, self._closure_of(self._again))
            if not all(map(have_same_bits, self._whole.stand_ins, self._again.stand_ins)):
                raise _Refused("two equal copies of it take different steps, and so would ranks")
        for part in self._tried():
            self._act(part, partial(part.step, gradients, self._closure_of(part)))
        if compares:
            self._differs = self._differs or self._differing_record(records)

    def _tried(self) -> list[_TrialRank]:
        """Return the parts that are still tried."""
        return self._parts + (self._few if self._num_steps <= _NUM_LACKING else [])

    def _closure_of(self, part: _TrialRank) -> _Closure | None:
        return _Closure(part) if self._takes_closure else None

    def _step_whole(self, gradients: Sequence[torch.Tensor | None]) -> None:
        generators = generators_drawn_from(self._whole.optimizer)
        before = generators.read()
        closure = self._closure_of(self._whole)
        try:
            self._whole.step(gradients, closure)
        except Exception as error:
            if self._num_steps or closure is not None:
                differentiates = "autograd" in names_used(self._kind, "step")
                if differentiates and "does not require grad" in str(error):
                    raise _Refused(
                        "it differentiates gradients, and those of a parallel model, which are "
                        f"means over ranks, have no graph ({_told(error)}). So train with it in "
                        "one process, or take another optimizer"
                    ) from error
                raise _NotTried(f"it can't be tried: its step raises {_told(error)}") from error
            self._takes_closure, self._whole = True, _TrialRank(self._make())
            self._step_whole(gradients)
            return
        if closure is not None and closure.is_misused and self._in_parts:
            raise _Refused(
                "it calls its closure several times in a step, or after it has changed parameters, "
                "of which each rank would have a part. So don't shard it: with a parallel model, "
                "it takes the same steps on every rank"
            )
        self._num_steps += 1
        if generators.read() != before:
            self._has_drawn = True
            raise _Told("it draws random numbers")

    def _look_at_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note whether the whole's step drops gradients; raise if it drops some, or clears them."""
        given = [gradient is not None for gradient in gradients]
        if not any(gradient is not None and gradient.any() for gradient in gradients):
            return
        left = [p.grad for p in compress(self._whole.stand_ins, given)]
        drops = all(gradient is None for gradient in left)
        are_cleared = not drops and not any(g is not None and g.any() for g in left)
        if are_cleared or self.drops_gradients not in (None, drops):
            raise _Told("it drops gradients, and a rank would drop those of its part alone")
        self.drops_gradients = drops

    def _call(self, name: str) -> None:
        """Call a method of the whole and of the parts."""

        def call(part: _TrialRank) -> None:
            part.act(getattr(part.optimizer, name))

        try:
            call(self._whole)
        except Exception as error:
            told = f"its method {name}() uses the state and can't be tried ({_told(error)})"
            raise _Told(told) from error
        for part in self._tried():
            self._act(part, partial(call, part))

    def _act(self, part: _TrialRank, action: Callable[[], None]) -> None:
        """Let a part act as the whole has: it may raise nothing and change only what it owns."""
        before = part.values()
        try:
            action()
        except Exception as error:
            raise _Told(
                f"with a part of the parameters it raises {_told(error)}, and with all it doesn't"
            ) from error
        for index, (old, p) in enumerate(zip(before, part.stand_ins, strict=True)):
            expected = self._whole.stand_ins[index].detach()
            if index not in part.owned:
                if not have_same_bits(old, p):
                    raise _Told("it changes parameters that aren't in its groups")
                p.data.copy_(expected)
            elif not have_same_bits(p, expected):
                raise _Told(difference(self._whole.optimizer, part.optimizer))

    def _differing_record(self, before: Mapping[str, Any]) -> str:
        """Return what parts have noted otherwise than both copies with all parameters in a step.

        What is the same as ``before`` isn't of the step, such as the number of parameters.
        """
        expected, again = self._whole.records(), self._again.records()
        for part in self._tried():
            for name, found in part.records().items():
                if found != expected.get(name) == again.get(name) != before.get(name):
                    return name
        return ""

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return gradients mostly to one side, by which estimates of distances grow."""
        step, pool = self._num_steps, self._pool
        found: list[torch.Tensor | None] = []
        for index, p in enumerate(self._whole.stand_ins):
            is_left_out = step >= _FIRST_WITHOUT and (index + step) % 11 == 5
            if not p.requires_grad or (is_left_out and self._leaves_out and (index + step) % 2):
                found.append(None)
            elif is_left_out:
                found.append(torch.zeros_like(p))
            else:
                drift = pool[index * 97 :][: p.numel()]
                noise = pool[8192 + (index * 1009 + step * 4099) % (1 << 16) :][: p.numel()]
                scale = 2.0 ** (3 * index % 5 - 2) * _SCALES[step % len(_SCALES)]
                values = torch.add(drift, noise, alpha=0.3).mul_(scale)
                found.append(values.view(p.shape).to(p))
        return found


class _Closure:
    """The closure of a step, which notes how it is called.

    Attributes:
        is_misused: Whether it was called twice, or after a parameter had been changed.
    """

    def __init__(self, part: _TrialRank) -> None:
        self._stand_ins, self._versions = part.stand_ins, [p._version for p in part.stand_ins]
        self._num_calls, self.is_misused = 0, False

    def __call__(self) -> torch.Tensor:
        """Return a loss."""
        self._num_calls += 1
        has_changed = [p._version for p in self._stand_ins] != self._versions
        self.is_misused |= self._num_calls > 1 or has_changed
        return torch.tensor(0.7, dtype=self._stand_ins[0].dtype, requires_grad=True) * 1.0


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
