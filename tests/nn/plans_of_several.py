"""Courses of training of several models: as plain data, and drawn at random.

Each rank's loss reaches the models that it likes, in its own order, one fed on what another gives.
Whatever lockstep allows is drawn. What it doesn't is this:

- Models that are new meet in different backwards on different ranks: the first one has all of them.
- Weights get into reentrant checkpoints more often than in that first backward, which uses every
  part, and calls each model as often as any later one does.
- A rank that takes part when its optimizers step, as its loss reaches nothing, does so for one of
  several backwards, or with gradients that wait to be reduced, or not in every step.
- Means of which nothing reaches any model on any rank, where some ranks have no samples.
- An optimizer steps on gradients that are not reduced: a later backward reaches what was held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from tests.nn.random_models import Part, RandomModel, Use, build
from tests.nn.random_plans import frozen_parts, one_in, settings_of_training
from tests.nn.training_plans import Setting

MAX_PARTS = 3


class Call(NamedTuple):
    """One forward of a model.

    Attributes:
        model: Which one.
        left_out: Which of its parts aren't used.
        source: What it takes: 0 for the batch, n for what the n-th call before has given.
    """

    model: int
    left_out: Sequence[int]
    source: int


class Pass(NamedTuple):
    """A batch, forward and backward.

    Attributes:
        seed: Which batch.
        sizes: How many samples of it each rank has.
        calls: What each rank does with them; all that this gives is in its loss.
        held: Which models are in a no_sync() while the backward runs.
    """

    seed: int
    sizes: Sequence[int]
    calls: Sequence[Sequence[Call]]
    held: Sequence[int]


class Step(NamedTuple):
    """``zero_grad(set_to_none=zero)`` or none, passes, and steps of optimizers in this order."""

    zero: bool | None
    passes: Sequence[Pass]
    optimizers: Sequence[int]


class Plan(NamedTuple):
    """A course of training of several models, whose losses are sums, or ``lockstep.mean``."""

    settings: Sequence[Setting]
    has_one_optimizer: bool
    is_of_means: bool
    steps: Sequence[Step]

    @property
    def world_size(self) -> int:
        return self.settings[0].world_size


def touched(models: Sequence[RandomModel], calls: Iterable[Call]) -> set[int]:
    """Which models get gradients from a loss of these calls."""
    return {c.model for c in calls if models[c.model].touched([Use(left_out=c.left_out)])}


@st.composite
def left_out(draw: st.DrawFn, recipe: Sequence[Part]) -> Sequence[int]:
    return [index for index in range(len(recipe)) if draw(one_in(3))]


@st.composite
def small_settings(draw: st.DrawFn, world_size: int) -> Setting:
    setting = draw(settings_of_training(MAX_PARTS))
    recipe = [
        part._replace(
            # What float32 rounds off would get into the models that are fed on it.
            kind="linear" if part.kind == "single" else part.kind,
            is_used=True,
            is_checkpointed=draw(st.booleans()),
            is_reentrant=draw(st.booleans()),
        )
        for part in setting.recipe
    ]
    frozen = draw(frozen_parts(build(recipe)))
    return setting._replace(world_size=world_size, recipe=recipe, frozen=frozen)


@st.composite
def passes(
    draw: st.DrawFn, chosen: Sequence[Setting], limits: Sequence[int], *, is_first: bool
) -> Pass:
    """A pass in which each model is called so many times at most; if it is the first, just so."""
    calls = []
    for _ in range(chosen[0].world_size):
        order = draw(st.permutations([i for i, n in enumerate(limits) for _ in range(n)]))
        count = len(order) if is_first else draw(st.integers(0, len(order)))
        calls.append(
            [
                Call(
                    model,
                    () if is_first else draw(left_out(chosen[model].recipe)),
                    draw(st.integers(0, place)),
                )
                for place, model in enumerate(order[:count])
            ]
        )
    sizes = [draw(st.sampled_from([2, 1, 0, 3])) for _ in calls]
    held = [] if is_first else [i for i in range(len(limits)) if draw(one_in(4))]
    return Pass(draw(st.integers(0, 9)), sizes if sum(sizes) else [1] * len(sizes), calls, held)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size = draw(st.sampled_from([2, 3, 4]))
    chosen = [draw(small_settings(world_size)) for _ in range(3 if draw(one_in(4)) else 2)]
    models = [build(setting.recipe) for setting in chosen]
    for model, setting in zip(models, chosen, strict=True):
        model.freeze(setting.frozen)
    limits = [2 if draw(one_in(3)) else 1 for _ in chosen]
    has_one_optimizer, is_of_means = draw(st.booleans()), draw(one_in(3))
    everyone = range(1 if has_one_optimizer else len(models))
    # Then there may be backwards of several steps before an optimizer's, and a rank sits out one.
    steps_some = draw(one_in(4)) and not has_one_optimizer
    steps = [Step(None, [draw(passes(chosen, limits, is_first=True))], list(everyone))]
    for _ in range(draw(st.integers(1, 3))):
        few = st.lists(passes(chosen, limits, is_first=False), min_size=1, max_size=2)
        drawn, optimizers = draw(few), draw(st.permutations(everyone))
        if steps_some:
            optimizers = optimizers[: draw(st.integers(0, len(models)))]
        may_be_idle = not steps_some and len(drawn) == 1
        made = _give_something_to_do(models, drawn, may_be_idle=may_be_idle, is_told=is_of_means)
        steps.append(Step(draw(st.sampled_from([None, True, False])), made, optimizers))
    return Plan(chosen, has_one_optimizer, is_of_means, steps)


def _give_something_to_do(
    models: Sequence[RandomModel], drawn: Sequence[Pass], *, may_be_idle: bool, is_told: bool
) -> Sequence[Pass]:
    """Reduce what was held, and let ranks touch something that couldn't take part otherwise."""
    made: list[Pass] = []
    later: set[int] = set()
    for one in reversed(drawn):
        held, calls, sizes = later.intersection(one.held), list(one.calls), list(one.sizes)
        free = [number for number in range(len(models)) if number not in held]
        for rank, of_rank in enumerate(calls):
            if not free or touched(models, of_rank) - held:
                continue
            if is_told and not of_rank:
                sizes[rank] = 0
            elif not may_be_idle:
                calls[rank] = [Call(free[0], (), 0)]
        if is_told and not any(touched(models, of_rank) - held for of_rank in calls):
            sizes[0], calls[0] = 1, [Call((free or [0])[0], (), 0)]
        later.update(*(touched(models, of_rank) - held for of_rank in calls))
        made.insert(0, one._replace(held=sorted(held), calls=calls, sizes=sizes))
    return made
