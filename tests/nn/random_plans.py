"""Courses of training drawn at random.

Whatever lockstep allows is drawn. What it doesn't is this:

- An optimizer steps on gradients that are not reduced: the last backward before a step reduces.
- A rank whose loss touches nothing, and which takes part when it steps, has another reduced
  backward in that step, or gradients that wait to be reduced (see :func:`_give_something_to_do`).
- A parameter is frozen again before gradients are reduced that it got in between, in backwards
  which only added up: a step thaws parts between its backwards, but freezes none.
- Gradients of an earlier batch are there when means are accumulated, which scales all that is
  there: before such a batch there is a zero_grad().
- A rank that has samples takes a mean of values without a graph, and so can't run a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.nn.random_models import KINDS, METHODS, Part, RandomModel, Use, build
from tests.nn.training_plans import (
    CONTEXTS,
    Backward,
    Batch,
    Loss,
    MeanTraining,
    MicroBatch,
    Round,
    Setting,
    Step,
    Training,
)


def one_in(number: int) -> st.SearchStrategy[bool]:
    """Whether something happens that does once in so many times, and not in a minimal plan."""
    return st.integers(1, number).map(lambda drawn: drawn == number)


@st.composite
def recipes(draw: st.DrawFn, max_parts: int) -> Sequence[Part]:
    count = draw(st.integers(1, max_parts))
    return [
        Part(
            kind=draw(st.sampled_from(list(KINDS))),
            source=draw(st.integers(0, index)),
            of=draw(st.integers(0, max(0, index - 1))),
            is_used=not draw(one_in(6)),
            is_checkpointed=draw(one_in(4)),
        )
        for index in range(count)
    ]


@st.composite
def settings_of_training(draw: st.DrawFn, max_parts: int = 7) -> Setting:
    recipe = draw(recipes(max_parts))
    return Setting(
        world_size=draw(st.sampled_from([2, 3, 4, 3, 1])),
        recipe=recipe,
        frozen=draw(frozen_parts(build(recipe))),
        is_wrapped=draw(st.booleans()),
        # Every parameter on its own, a few together, and all in one bucket of each kind.
        bucket_cap_mb=draw(st.sampled_from([25.0, 1e-7, 0.00015, 1e6])),
        momentum=draw(st.sampled_from([0.0, 0.9])),
    )


@st.composite
def frozen_parts(draw: st.DrawFn, model: RandomModel) -> Sequence[int]:
    """Parts to freeze, so that something is left to train."""
    indices = range(len(model.recipe))
    frozen = [index for index in indices if draw(one_in(5))]
    model.freeze(frozen)
    return frozen if any(p.requires_grad for p in model.parameters()) else []


@st.composite
def ways_to_use(draw: st.DrawFn, model: RandomModel) -> Use:
    method = draw(st.sampled_from(METHODS))
    indices = range(len(model.recipe))
    if method == "part":
        return Use(method, at=draw(st.sampled_from(indices)))
    if method in ("nothing", "leaf"):
        return Use(method)
    return Use(method, tuple(index for index in indices if draw(one_in(3))))


def _something(model: RandomModel) -> Use:
    """A use that touches something in any case."""
    indices = range(len(model.recipe))
    return next(use for index in indices if model.touched([use := Use("part", at=index)]))


@st.composite
def losses(draw: st.DrawFn, model: RandomModel, world_size: int) -> Loss:
    ranks = range(world_size)
    sizes = [draw(st.sampled_from([2, 1, 0, 3, 5])) for _ in ranks]
    if draw(st.booleans()):
        return Loss(draw(st.integers(0, 9)), sizes, [draw(ways_to_use(model))] * world_size)
    return Loss(draw(st.integers(0, 9)), sizes, [draw(ways_to_use(model)) for _ in ranks])


@st.composite
def rounds(
    draw: st.DrawFn,
    model: RandomModel,
    world_size: int,
    frozen: Sequence[int],
    only_thaws: bool,
) -> tuple[Round, Sequence[int]]:
    """A round, and what is frozen in it and from then on."""
    if draw(one_in(5)):
        drawn = draw(frozen_parts(model))
        frozen = [part for part in drawn if part in frozen or not only_thaws]
    model.freeze(frozen)
    made = []
    for _ in range(draw(st.integers(1, 3))):
        loss = draw(losses(model, world_size))
        made.append(loss if sum(loss.sizes) else loss._replace(sizes=[1] * world_size))
    which = st.lists(st.sampled_from(range(len(made))), min_size=1, max_size=2, unique=True)
    hows = st.sampled_from(["reduce", "reduce", *CONTEXTS])
    backwards = [Backward(draw(which), draw(hows)) for _ in range(draw(st.integers(1, 3)))]
    zero = draw(st.sampled_from([None, True, False, None]))
    return Round(frozen, zero, made, draw(st.booleans()), backwards), frozen


@st.composite
def steps(
    draw: st.DrawFn, model: RandomModel, world_size: int, frozen: Sequence[int]
) -> tuple[Step, Sequence[int]]:
    drawn: list[Round] = []
    for _ in range(draw(st.integers(1, 2))):
        one, frozen = draw(rounds(model, world_size, frozen, only_thaws=bool(drawn)))
        drawn.append(one)
    *others, last = drawn[-1].backwards
    drawn[-1] = drawn[-1]._replace(backwards=[*others, last._replace(how="reduce")])
    made = _give_something_to_do(model, drawn, world_size)
    return Step(made, has_new_optimizer=draw(one_in(5))), frozen


def _give_something_to_do(
    model: RandomModel, drawn: Sequence[Round], world_size: int
) -> Sequence[Round]:
    """Let ranks touch something in a backward that they couldn't take part in otherwise.

    A rank whose loss touches nothing learns of the others' backward when it steps. So it can miss
    one, not two. And if gradients of its own wait to be reduced, nothing tells it from a rank that
    wants to step on these.
    """
    num_reduced = sum(b.how == "reduce" for one in drawn for b in one.backwards)
    has_unreduced = [False] * world_size
    made = []
    for one in drawn:
        model.freeze(one.frozen)
        uses_of = [list(loss.uses) for loss in one.losses]
        if one.zero:
            has_unreduced = [False] * world_size
        for backward in one.backwards:
            for rank in range(world_size):
                touches = bool(model.touched(uses_of[i][rank] for i in backward.of))
                if backward.how != "reduce":
                    has_unreduced[rank] |= touches
                    continue
                if not touches and (num_reduced > 1 or has_unreduced[rank]):
                    uses_of[backward.of[0]][rank] = _something(model)
                has_unreduced[rank] = False
        computed = [loss._replace(uses=u) for loss, u in zip(one.losses, uses_of, strict=True)]
        made.append(one._replace(losses=computed))
    return made


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    setting = draw(settings_of_training())
    model, frozen = build(setting.recipe), setting.frozen
    made = []
    for _ in range(draw(st.integers(1, 3))):
        step, frozen = draw(steps(model, setting.world_size, frozen))
        made.append(step)
    return Training(setting, made)


@st.composite
def micro_batches(draw: st.DrawFn, model: RandomModel, setting: Setting) -> MicroBatch:
    loss = draw(losses(model, setting.world_size))
    # What touches nothing has nothing to run backward through, unless it is empty.
    uses_of = [
        use if model.touched([use]) else (_something(model) if size else Use("nothing"))
        for use, size in zip(loss.uses, loss.sizes, strict=True)
    ]
    return MicroBatch(
        loss._replace(uses=uses_of),
        kind=draw(st.sampled_from(["none", "scalar", "each"])),
        factors=[draw(st.sampled_from([1.0, 2.5, 0.0])) for _ in loss.sizes],
        is_by_column=draw(st.booleans()),
        is_bare=setting.is_wrapped and draw(one_in(4)),
    )


@st.composite
def batches(draw: st.DrawFn, model: RandomModel, setting: Setting) -> Batch:
    few = st.lists(micro_batches(model, setting), max_size=2)
    dropped = draw(few) if draw(one_in(4)) else []
    before, last = draw(few), draw(micro_batches(model, setting))
    # There are samples that count in the whole.
    rank = draw(st.integers(0, setting.world_size - 1))
    sizes, uses, factors = list(last.loss.sizes), list(last.loss.uses), list(last.factors)
    sizes[rank] += 1
    uses[rank] = uses[rank] if model.touched([uses[rank]]) else _something(model)
    factors[rank] = 1.0
    last = last._replace(loss=last.loss._replace(sizes=sizes, uses=uses), factors=factors)
    # Gradients that are zeros may be those of a batch: only None says that one was dropped.
    choices = [True] if dropped else [True, False] if before else [None, True, False]
    zeros = st.sampled_from(choices)
    return Batch(dropped, draw(zeros), [*before, last], draw(st.booleans()), draw(st.booleans()))


@st.composite
def mean_trainings(draw: st.DrawFn) -> MeanTraining:
    setting = draw(settings_of_training())
    model = build(setting.recipe)
    model.freeze(setting.frozen)
    return MeanTraining(setting, draw(st.lists(batches(model, setting), min_size=1, max_size=3)))
