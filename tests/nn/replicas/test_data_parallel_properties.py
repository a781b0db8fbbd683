"""Whatever the module, its inputs and its calls are, replicas give its outputs and gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.nn import DataParallel, data_parallel, gather, scatter
from lockstep.nn.replicas.nested import leaves
from tests.counts import num_examples
from tests.nn.nestings import nestings, same, tensors
from tests.nn.random_models import Part, RandomModel, Use, build, samples
from tests.nn.random_plans import frozen_parts, one_in, recipes

Tensors = Sequence[torch.Tensor | None]

TOLERANCE = 1e-12
# What float32 rounds off, in models that have a part in it.
SINGLE_TOLERANCE = 1e-4
# What bfloat16 rounds off.
AUTOCAST_TOLERANCE = 0.1
LEARNING_RATE = 0.05

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
num_devices = st.integers(1, 5)
num_rows = st.integers(0, 9)
modes = st.sampled_from(["grad", "grad", *MODES])
# It leaves float64 as it is.
casts = st.just("autocast")


def some(count: int) -> settings:
    return settings(
        max_examples=num_examples(count),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )


def assert_close(mine: Tensors, theirs: Tensors, tolerance: float = TOLERANCE) -> None:
    assert [t is None for t in mine] == [t is None for t in theirs]
    for one, other in zip(mine, theirs, strict=True):
        if one is not None:
            assert one.layout is other.layout
            torch.testing.assert_close(
                one.to_dense(), other.to_dense(), rtol=tolerance, atol=tolerance
            )


class Call(NamedTuple):
    """One call of the model.

    Attributes:
        rows: How many samples it gets.
        mode: Of :data:`MODES`.
        method: Which one is called: ``forward``, ``features``, or ``run``, which runs one part.
        use: What the first two are given.
        at: Which part ``run`` runs.
        needs_gradient: Whether the samples require one.
    """

    rows: int
    mode: str
    method: str
    use: Use
    at: int
    needs_gradient: bool


class Round(NamedTuple):
    """Calls, then backwards in any order, each of one or more of the calls, and a step."""

    frozen: Sequence[int]
    calls: Sequence[Call]
    backwards: Sequence[Sequence[int]]


class Course(NamedTuple):
    """What happens to one model.

    Attributes:
        recipe: The model.
        devices: How many replicas there are to be.
        is_by_function: Whether ``data_parallel()`` calls them.
        is_autocast: Whether all is in float32 and under autocast.
        rounds: One after the other.
    """

    recipe: Sequence[Part]
    devices: int
    is_by_function: bool
    is_autocast: bool
    rounds: Sequence[Round]


@st.composite
def calls(draw: st.DrawFn, recipe: Sequence[Part], *, is_by_function: bool) -> Call:
    methods = ["forward"] if is_by_function else ["forward", "features", "run"]
    # torch warns where a reentrant checkpoint would lose gradients.
    must = any(part.is_reentrant for part in recipe)
    indices = range(len(recipe))
    return Call(
        rows=draw(num_rows),
        mode="grad" if must else draw(modes),
        method=draw(st.sampled_from(methods)),
        use=Use(left_out=tuple(index for index in indices if draw(one_in(4)))),
        at=draw(st.sampled_from(indices)),
        needs_gradient=must or draw(st.booleans()),
    )


@st.composite
def rounds(draw: st.DrawFn, recipe: Sequence[Part], *, is_by_function: bool) -> Round:
    made = draw(st.lists(calls(recipe, is_by_function=is_by_function), min_size=1, max_size=3))
    of_one = st.lists(st.sampled_from(range(len(made))), min_size=1, max_size=2, unique=True)
    return Round(
        frozen=draw(frozen_parts(build(recipe))),
        calls=made,
        backwards=draw(st.lists(of_one, min_size=1, max_size=4)),
    )


@st.composite
def courses(draw: st.DrawFn) -> Course:
    is_autocast = draw(one_in(6))
    recipe = []
    for part in draw(recipes(5)):
        if is_autocast and part.kind == "phase":  # complex
            part = part._replace(kind="linear")
        # torch refuses a reentrant checkpoint of what needs no gradients.
        can_be_reentrant = part.is_checkpointed and part.kind != "single"
        recipe.append(part._replace(is_reentrant=can_be_reentrant and draw(st.booleans())))
    is_by_function = draw(st.booleans())
    made = rounds(recipe, is_by_function=is_by_function)
    return Course(
        recipe=recipe,
        devices=draw(num_devices),
        is_by_function=is_by_function,
        is_autocast=is_autocast,
        rounds=draw(st.lists(made, min_size=1, max_size=2)),
    )


class Taken(NamedTuple):
    """A call that has been made."""

    x: torch.Tensor
    output: torch.Tensor

    def loss(self) -> torch.Tensor:
        weights = torch.arange(1, self.output.numel() + 1).reshape(self.output.shape) % 7 - 2.5
        return (self.output.double().sin() * weights).sum()


class Runner:
    """Goes through a course with a bare model, or with replicas of it."""

    def __init__(self, course: Course, *, has_replicas: bool) -> None:
        self.course = course
        self.bare = build(course.recipe)
        if course.is_autocast:
            self.bare.float()
        self.devices = ["cpu"] * course.devices
        self.has_replicas = has_replicas
        self.model: nn.Module = self.bare
        if has_replicas and not course.is_by_function:
            self.model = DataParallel(self.bare, self.devices)

    def take(self, call: Call, seed: int) -> Taken:
        x = samples(seed, call.rows)
        x = (x.float() if self.course.is_autocast else x).requires_grad_(call.needs_gradient)
        casts = torch.autocast("cpu", torch.bfloat16, enabled=self.course.is_autocast)
        with MODES[call.mode](), casts:
            return Taken(x, self._output(call, x))

    def _output(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        if call.method == "run":
            return self.model.run(call.at, x)
        if self.has_replicas and self.course.is_by_function:
            return data_parallel(self.bare, (x, call.use), self.devices)
        if call.method == "features":
            return self.model.features(x, use=call.use)
        return self.model(x, call.use)

    def gradients(self, taken: Sequence[Taken]) -> Tensors:
        return [p.grad for p in self.bare.parameters()] + [one.x.grad for one in taken]

    def step(self) -> None:
        """Change all there is: parameters and buffers, in place or by other memory."""
        torch.optim.SGD(self.bare.parameters(), LEARNING_RATE).step()
        self.bare.zero_grad()
        first, *_ = self.bare.parameters()
        first.data = first.data * 0.9
        with torch.no_grad():
            for name, buffer in self.bare.named_buffers():
                if name.endswith("scale"):
                    buffer.mul_(1.5)


def tolerance_of(course: Course) -> float:
    if course.is_autocast:
        return AUTOCAST_TOLERANCE
    return SINGLE_TOLERANCE if any(p.kind == "single" for p in course.recipe) else TOLERANCE


def counts_of(model: RandomModel) -> Tensors:
    """The buffers that are changed in place."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("count")]


def follow(course: Course) -> None:
    ours, theirs = (Runner(course, has_replicas=one) for one in (True, False))
    close = tolerance_of(course)
    for one in course.rounds:
        taken = []
        for runner in (ours, theirs):
            runner.bare.freeze(one.frozen)
            taken.append([runner.take(call, seed) for seed, call in enumerate(one.calls)])
        for mine, other in zip(*taken, strict=True):
            assert mine.output.requires_grad == other.output.requires_grad
            assert mine.output.is_inference() == other.output.is_inference()
            assert_close([mine.output], [other.output], close)
        for number, of_one in enumerate(one.backwards):
            later = {i for of_other in one.backwards[number + 1 :] for i in of_other}
            for made in taken:
                losses = [made[i].loss() for i in of_one if made[i].output.requires_grad]
                if losses:
                    sum(losses).backward(retain_graph=not later.isdisjoint(of_one))
            assert_close(ours.gradients(taken[0]), theirs.gradients(taken[1]), close)
        assert_close(counts_of(ours.bare), counts_of(theirs.bare))
        for runner in (ours, theirs):
            runner.step()


@some(150)
@given(courses())
def test_any_model_called_in_any_way(course: Course) -> None:
    follow(course)


class OnEach(nn.Module):
    """Returns what it is given, something made of each tensor in it, and the modes it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.shift = nn.Parameter(torch.tensor([0.25], dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = [leaf for _, leaf in leaves((args, kwargs))]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        return args, kwargs, [self.change(leaf) for leaf in found], (modes, casts)

    def change(self, leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=self.change(leaf.data))
        return torch.tanh(leaf * self.slope) + self.shift if torch.is_tensor(leaf) else leaf


@st.composite
def arguments(draw: st.DrawFn, rows: int, dim: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = draw(st.lists(nestings(rows, dim), max_size=2))
    return tuple(args), draw(st.dictionaries(st.sampled_from("ab"), nestings(rows, dim)))


@some(150)
@given(st.data(), num_rows, st.integers(-3, 2), num_devices, modes | casts, st.booleans())
def test_nestings_of_any_kind(
    data: st.DataObject, rows: int, dim: int, count: int, mode: str, is_by_function: bool
) -> None:
    args, kwargs = data.draw(arguments(rows, dim))
    inputs = tensors((args, kwargs))
    assume(inputs)
    module, expected, devices = OnEach(), OnEach(), ["cpu"] * count
    with MODES.get(mode, lambda: torch.autocast("cpu", torch.float16))():
        if is_by_function:
            output = data_parallel(module, args, devices, dim=dim, module_kwargs=kwargs)
        else:
            output = DataParallel(module, devices, dim=dim)(*args, **kwargs)
        # As a single part, so that sequences of one length come in the same order.
        output, other = (
            gather(scatter(one, ["cpu"], dim), "cpu", dim)
            for one in (output, expected(*args, **kwargs))
        )
    assert same(output, other)
    if mode in ("no_grad", "inference"):
        return
    found, wanted = (
        torch.autograd.grad(
            sum((t.reshape(-1) ** 3 * torch.arange(1, t.numel() + 1)).sum() for t in tensors(o)),
            [*inputs, *one.parameters()],
        )
        for one, o in ((module, output), (expected, other))
    )
    assert_close(found, wanted)


VOCABULARY, WIDTH = 6, 3


class Words(nn.Module):
    """An embedding, or bags of them, and a layer; the table may be used a second time."""

    def __init__(self, embedding: nn.Embedding | nn.EmbeddingBag, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.is_tied = is_tied
        self.double()

    def forward(self, words: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(self.embedding, nn.Embedding):
            looked_up = self.embedding(words).sum(1)
        else:
            looked_up = self.embedding(words, per_sample_weights=weights)
        out = torch.tanh(self.layer(looked_up))
        return out @ self.embedding.weight.T if self.is_tied else out


@st.composite
def embeddings(draw: st.DrawFn, **options: Any) -> Words:
    is_tied = draw(st.booleans())
    options["padding_idx"] = draw(st.sampled_from([None, 0, 3, -1]))
    # torch can't do it sparsely, and has no sparse sum with what else the table is used for.
    options["sparse"] = not is_tied and "scale_grad_by_freq" not in options and draw(st.booleans())
    # In torch 2.13, bags on the CPU divide by other frequencies than those of their words.
    if "scale_grad_by_freq" in options or draw(st.booleans()):
        return Words(nn.Embedding(VOCABULARY, WIDTH, **options), is_tied=is_tied)
    options["mode"] = draw(st.sampled_from(["sum", "mean", "max"][: 2 if options["sparse"] else 3]))
    return Words(nn.EmbeddingBag(VOCABULARY, WIDTH, **options), is_tied=is_tied)


def check_embedding(words: Words, data: st.DataObject) -> None:
    expected = copy.deepcopy(words)
    devices = ["cpu"] * data.draw(num_devices)
    model = DataParallel(words, devices)
    is_weighted = isinstance(words.embedding, nn.EmbeddingBag) and words.embedding.mode == "sum"
    for seed in range(data.draw(st.integers(1, 2))):
        rows, by_function = data.draw(num_rows), data.draw(st.booleans())
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randint(VOCABULARY, (rows, 4), generator=generator)]
        if is_weighted and data.draw(st.booleans()):
            inputs.append(torch.rand(rows, 4, dtype=torch.float64, generator=generator))
        output = data_parallel(words, tuple(inputs), devices) if by_function else model(*inputs)
        other = expected(*inputs)
        assert_close([output], [other])
        output.square().sum().backward()
        other.square().sum().backward()
        assert_close([p.grad for p in words.parameters()], [p.grad for p in expected.parameters()])
        assert_close(list(words.parameters()), list(expected.parameters()))


@some(100)
@given(st.data(), embeddings())
def test_embeddings_dense_and_sparse(data: st.DataObject, words: Words) -> None:
    check_embedding(words, data)


@some(60)
@given(st.data(), embeddings(scale_grad_by_freq=True))
def test_embeddings_that_divide_by_frequencies(data: st.DataObject, words: Words) -> None:
    check_embedding(words, data)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_that_divide_by_frequencies(mode: str) -> None:
    bag = nn.EmbeddingBag(2, 1, mode=mode, scale_grad_by_freq=True)
    DataParallel(bag, ["cpu"] * 2)(torch.tensor([[1, 1], [1, 0]])).sum().backward()
    assert bag.weight.grad.tolist() == ([[1], [1]] if mode == "sum" else [[0.5], [0.5]])


def test_frequencies_in_replicas_of_replicas() -> None:
    table, expected = (nn.Embedding(2, 1, scale_grad_by_freq=True) for _ in range(2))
    words = torch.tensor([1, 1, 1, 0])
    DataParallel(DataParallel(table, ["cpu"] * 2), ["cpu"] * 2)(words).sum().backward()
    expected(words).sum().backward()
    assert_close([table.weight.grad], [expected.weight.grad])


# Not strict: the rows are wrong only if two replicas are at one of them at the same time.
@some(60)
@given(st.data(), embeddings(max_norm=0.5))
def test_embeddings_that_normalise_what_is_looked_up(data: st.DataObject, words: Words) -> None:
    check_embedding(words, data)


def test_rows_that_several_replicas_look_up_are_normalised_once() -> None:
    rows = torch.randperm(2000).repeat(2)
    for _ in range(40):
        table = nn.Embedding(2000, 64, max_norm=1.0)
        expected = copy.deepcopy(table)
        with torch.no_grad():
            output = DataParallel(table, ["cpu"] * 2)(rows)
            assert torch.equal(output, expected(rows))
        assert torch.equal(table.weight, expected.weight)


def test_a_table_that_one_replica_uses_sparsely_and_another_densely() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.table(words) if words[0] == 0 else self.table.weight[words]

    words = torch.arange(4)
    module = Either()
    expected = copy.deepcopy(module)
    data_parallel(expected, words, ["cpu"] * 2).square().sum().backward()
    DataParallel(module, ["cpu"] * 2)(words).square().sum().backward()
    assert_close([module.table.weight.grad], [expected.table.weight.grad])


@st.composite
def smooth_courses(draw: st.DrawFn) -> tuple[Sequence[Part], Sequence[int]]:
    recipe = [
        part._replace(is_checkpointed=False, is_reentrant=False)
        for part in draw(recipes(4))
        if part.kind != "single"
    ]
    recipe = recipe or [Part("linear")]
    recipe = [part._replace(source=min(part.source, i)) for i, part in enumerate(recipe)]
    return recipe, draw(frozen_parts(build(recipe)))


@some(60)
@given(smooth_courses(), num_rows, num_devices)
def test_second_derivatives_through_the_function(
    drawn: tuple[Sequence[Part], Sequence[int]], rows: int, count: int
) -> None:
    recipe, frozen = drawn

    def penalty(call: Callable[[RandomModel, torch.Tensor], torch.Tensor]) -> Tensors:
        model = build(recipe)
        model.freeze(frozen)
        x = samples(3, rows).requires_grad_()
        (slope,) = torch.autograd.grad(call(model, x).sin().sum(), x, create_graph=True)
        if slope.requires_grad:
            slope.square().sum().backward()
        return [slope, x.grad, *(p.grad for p in model.parameters())]

    devices = ["cpu"] * count
    assert_close(
        penalty(lambda model, x: data_parallel(model, (x, Use()), devices)),
        penalty(lambda model, x: model(x, Use())),
    )
