"""Models and courses of training drawn at random: plain data, from which every rank builds its own.

What is drawn is a plan. It says everything that one process does, or many in step, so a plan that
fails can be printed, and run again alone.

Whatever lockstep allows is drawn. What it doesn't is this:

- An optimizer steps on gradients that are not reduced: the last backward before a step reduces.
- A rank whose loss touches nothing, and which takes part when it steps, has another reduced
  backward in that step, or gradients that wait to be reduced (see :func:`_give_something_to_do`).
- Gradients of an earlier batch are there when means are accumulated, which scales all that is
  there: before such a batch there is a zero_grad().
- A rank that has samples takes a mean of values without a graph, and so can't run a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3


class Part(NamedTuple):
    """One part of a model.

    Attributes:
        kind: Which one, of :data:`KINDS`.
        source: Whose output it takes: 0 for the input, n for the n-th part.
        of: Which earlier part it shares a module or a weight with.
        is_used: Whether the model's own methods ever use it.
        is_checkpointed: Whether its activations are recomputed in backward.
    """

    kind: str
    source: int = 0
    of: int = 0
    is_used: bool = True
    is_checkpointed: bool = False


class Use(NamedTuple):
    """What one rank does with its samples for one loss.

    Attributes:
        method: Which method gives the outputs, of :data:`METHODS`.
        left_out: Which parts aren't used this time.
        at: Which part is called, if it is one alone.
    """

    method: str = "forward"
    left_out: Sequence[int] = ()
    at: int = 0


# "part" calls a submodule. "nothing" and "leaf" touch no part of the model; "leaf" has something
# to run backward through all the same.
METHODS = ("forward", "features", "pieces", "part", "nothing", "leaf")


class Factor(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.empty.sum()


class Phase(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.phase).real


class Single(nn.Module):
    """A side branch in float32, through which no gradient flows back."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.single(x.detach().float()).double()


class Wide(nn.Module):
    """A parameter so large that its gradient is dealt with by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5500, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.square().mean(0)


class Buffered(nn.Module):
    """Buffers: one that is used and stays, one that is set anew, one that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("scale", torch.rand(WIDTH, dtype=torch.float64))
        self.register_buffer("average", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.5 * self.average + len(x)
        self.count += 1
        return x * self.scale * self.weight


def _linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "nested": lambda: nn.Sequential(_linear(), nn.Tanh(), nn.Sequential(_linear(bias=False))),
    "norm": lambda: nn.LayerNorm(WIDTH, dtype=torch.float64),
    "factor": Factor,
    "empty": Empty,
    "phase": Phase,
    "single": Single,
    "wide": Wide,
    "buffered": Buffered,
    "again": _linear,
    "tied": _linear,
}


class RandomModel(nn.Module):
    """Parts that take each other's outputs; what comes out is the outputs of all that are used.

    Samples don't meet, so that the mean over parts of a batch is the mean.
    """

    def __init__(self, recipe: Sequence[Part]) -> None:
        super().__init__()
        self.recipe = list(recipe)
        self.parts = nn.ModuleList()
        for part in recipe:
            self.parts.append(self._make(part))

    def _make(self, part: Part) -> nn.Module:
        earlier = self.parts[part.of] if part.of < len(self.parts) else None
        if part.kind == "again" and earlier is not None:
            return earlier
        module = KINDS[part.kind]()
        if part.kind == "tied" and isinstance(earlier, nn.Linear):
            module.weight = earlier.weight
        return module

    def forward(self, x: torch.Tensor, use: Use) -> torch.Tensor:
        return torch.cat([x, *self.pieces(x, use)], dim=1)

    def features(self, x: torch.Tensor, use: Use) -> torch.Tensor:
        """Only what the first half of the parts gives."""
        return torch.cat([x, *self.pieces(x, use, self._half())], dim=1)

    def pieces(self, x: torch.Tensor, use: Use, stop: int | None = None) -> Iterator[torch.Tensor]:
        """The outputs of the parts that are used, one after the other."""
        values = [x]
        used = self._used(use, stop)
        for index, part in enumerate(self.recipe[:stop]):
            value = values[part.source]
            if index in used:
                piece = self.run(index, value)
                if not isinstance(self.parts[index], Single):
                    piece = value = torch.tanh(piece + value)
                yield piece
            values.append(value)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self.recipe[index].is_checkpointed:
            # Ranks that are threads share torch's generator, whose state is not to be put back.
            return checkpoint(self.parts[index], x, use_reentrant=False, preserve_rng_state=False)
        return self.parts[index](x)

    def _half(self) -> int:
        return (len(self.recipe) + 1) // 2

    def _used(self, use: Use, stop: int | None = None) -> list[int]:
        parts = enumerate(self.recipe[:stop])
        return [index for index, part in parts if part.is_used and index not in use.left_out]

    def touched(self, uses: Iterable[Use]) -> set[int]:
        """Which parameters, by number, get gradients from losses that are made in these ways."""
        parts = {index for use in uses for index in self._runs(use)}
        found = {id(p) for index in parts for p in self.parts[index].parameters()}
        parameters = enumerate(self.parameters())
        return {index for index, p in parameters if id(p) in found and p.requires_grad}

    def _runs(self, use: Use) -> Sequence[int]:
        if use.method == "part":
            return [use.at]
        if use.method in ("nothing", "leaf"):
            return []
        return self._used(use, self._half() if use.method == "features" else None)

    def freeze(self, frozen: Sequence[int]) -> None:
        """Freeze the parameters of these parts, and train all others."""
        self.requires_grad_(True)
        for index in frozen:
            self.parts[index].requires_grad_(False)


def build(recipe: Sequence[Part]) -> RandomModel:
    """The same model every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(recipe))
        return RandomModel(recipe)


def outputs_of(model: nn.Module, x: torch.Tensor, use: Use) -> torch.Tensor:
    """What ``use`` makes of the samples, in a row for each; ``model`` may be in a wrapper."""
    if use.method == "nothing":
        return x
    if use.method == "leaf":
        return x * torch.ones(WIDTH, dtype=x.dtype, requires_grad=True)
    if use.method == "part":
        return model.parts[use.at](x)
    if use.method == "pieces":
        return torch.cat([x, *(piece for piece in model.pieces(x, use))], dim=1)
    if use.method == "features":
        return model.features(x, use)
    return model(x, use)


def samples(seed: int, count: int) -> torch.Tensor:
    """The same ones every time, on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)


class Setting(NamedTuple):
    """What stays the same throughout a course of training.

    Attributes:
        world_size: How many ranks there are.
        recipe: The parts of the model.
        frozen: Which of them are frozen when it is made parallel.
        is_wrapped: Whether it is in a DistributedDataParallel, or parallel in place.
        bucket_cap_mb: How much makes a bucket full.
        momentum: The optimizer's.
    """

    world_size: int
    recipe: Sequence[Part]
    frozen: Sequence[int]
    is_wrapped: bool
    bucket_cap_mb: float
    momentum: float


class Loss(NamedTuple):
    """A batch, and what each rank does with its part of it.

    Attributes:
        seed: Which batch.
        sizes: How many samples of it each rank has.
        uses: What each rank does with them.
    """

    seed: int
    sizes: Sequence[int]
    uses: Sequence[Use]


class Backward(NamedTuple):
    """One backward.

    Attributes:
        of: Of which losses of the round it is; of their sum, if they are several.
        how: "reduce", or in which context it runs, of :data:`CONTEXTS`.
    """

    of: Sequence[int]
    how: str


CONTEXTS = ("no_sync", "accumulate", "own no_sync")


class Round(NamedTuple):
    """Some forwards and then some backwards, in which a loss may come several times or never.

    Attributes:
        frozen: Which parts are frozen.
        zero: ``set_to_none`` of a zero_grad() before it; None for no such call.
        losses: What is computed.
        is_forward_accumulating: Whether that is in a no_sync() which is left before the backwards.
        backwards: In this order.
    """

    frozen: Sequence[int]
    zero: bool | None
    losses: Sequence[Loss]
    is_forward_accumulating: bool
    backwards: Sequence[Backward]

    def uses_of(self, backward: Backward, rank: int) -> Sequence[Use]:
        """What leads to one of the backwards on this rank."""
        return [self.losses[i].uses[rank] for i in backward.of]


class Step(NamedTuple):
    """Some rounds, and a step of an optimizer, which may be a new one."""

    rounds: Sequence[Round]
    has_new_optimizer: bool


class Training(NamedTuple):
    """A course of training whose losses are sums over samples."""

    setting: Setting
    steps: Sequence[Step]


class MicroBatch(NamedTuple):
    """A batch of which a mean is taken.

    Attributes:
        loss: The samples, and what becomes of them. A rank without samples may touch nothing.
        kind: How they are weighted: "none", "scalar" or "each".
        factors: What each rank's weights are multiplied by.
        is_by_column: Whether there is a value for each sample and column, or for each sample.
        is_bare: Whether accumulate() is given what is in the wrapper.
    """

    loss: Loss
    kind: str
    factors: Sequence[float]
    is_by_column: bool
    is_bare: bool

    def weight(self, rank: int) -> torch.Tensor | float | None:
        """What ``lockstep.mean`` is given on this rank."""
        if self.kind == "none":
            return None
        if self.kind == "scalar":
            return self.factors[rank]
        generator = torch.Generator().manual_seed(100 * self.loss.seed + rank)
        each = torch.randint(0, 4, (self.loss.sizes[rank],), generator=generator).double()
        each[:1] = 3.0  # so that it isn't all zeros by chance
        each *= self.factors[rank]
        return each[:, None] if self.is_by_column else each


class Batch(NamedTuple):
    """Micro-batches whose gradients are those of one mean.

    Attributes:
        dropped: Micro-batches whose gradients are added up and dropped before it begins.
        zero: ``set_to_none`` of a zero_grad() before it; None for no such call.
        micro_batches: What it is made of; all but the last under accumulate().
        is_in_one_context: Whether these share one such context, or each has its own.
        steps: Whether the optimizer steps after it.
    """

    dropped: Sequence[MicroBatch]
    zero: bool | None
    micro_batches: Sequence[MicroBatch]
    is_in_one_context: bool
    steps: bool


class MeanTraining(NamedTuple):
    """A course of training whose losses are weighted means."""

    setting: Setting
    batches: Sequence[Batch]


def one_in(number: int) -> st.SearchStrategy[bool]:
    """Whether something happens that does once in so many times, and not in a minimal plan."""
    return st.integers(1, number).map(lambda drawn: drawn == number)


@st.composite
def recipes(draw: st.DrawFn) -> Sequence[Part]:
    count = draw(st.integers(1, 7))
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
def settings_of_training(draw: st.DrawFn) -> Setting:
    recipe = draw(recipes())
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
    draw: st.DrawFn, model: RandomModel, world_size: int, frozen: Sequence[int]
) -> tuple[Round, Sequence[int]]:
    """A round, and what is frozen in it and from then on."""
    if draw(one_in(5)):
        frozen = draw(frozen_parts(model))
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
        one, frozen = draw(rounds(model, world_size, frozen))
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
