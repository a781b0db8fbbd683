"""Embeddings with max_norm: rows that lookups scale in place are the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import CollectiveFailed, ModelError
from lockstep.nn.backward import engines_with
from tests.comm.ranks_on_hosts import run_hosts
from tests.counts import num_examples, pairs
from tests.nn.parallel import BOTH, in_place, wrapped
from tests.ranks import BACKENDS, run_ranks

ROWS, WIDTH, NORM = 9, 4, 0.7


class Words(nn.Module):
    """A table that is looked up, in bags or one by one, and a layer."""

    def __init__(self, kind: str = "embedding", **options: Any) -> None:
        super().__init__()
        of = nn.Embedding if kind == "embedding" else nn.EmbeddingBag
        options = {"max_norm": NORM} | options
        if kind == "function":
            del options["max_norm"]
            of = nn.Embedding
        self.table = of(ROWS, WIDTH, **options)
        self.layer = nn.Linear(WIDTH, 1)
        self.kind = kind
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if self.kind == "function":
            looked_up = F.embedding(words, self.table.weight, max_norm=NORM)
        else:
            looked_up = self.table(words)
        return self.layer(torch.tanh(looked_up)).flatten()


KINDS = ["embedding", "bags", "function"]


def build(kind: str = "embedding", **options: Any) -> Words:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Words(kind, **options)


def words(step: int, rank: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (count, 2), generator=generator)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.1)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.3)


def train_alone(
    model: Words, steps: list[torch.Tensor], optimizer: Callable[..., Any] = sgd
) -> list[float]:
    stepping, losses = optimizer(model.parameters()), []
    for batch in steps:
        loss = model(batch).square().mean()
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.item())
    return losses


def check_same(models: list[Words], expected: Words, tolerance: float = 1e-12) -> None:
    """All ranks' tables have the same bits, and one process has the same to the tolerance."""
    for model in models:
        for mine, first, its in zip(
            model.parameters(), models[0].parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


@pairs("parallel, kind, backend, size", [wrapped, in_place], KINDS, [*BACKENDS, "shm"], [2, 3])
def test_ranks_train_as_one_process_does(parallel, kind: str, backend: str, size: int) -> None:
    one, num_steps = build(kind), 5
    steps = [torch.cat([words(step, rank) for rank in range(size)]) for step in range(num_steps)]
    expected = train_alone(copy.deepcopy(one), steps), copy.deepcopy(one)
    train_alone(expected[1], steps)

    def body(rank: int, group: dist.ProcessGroup) -> tuple[list[float], Words]:
        model = copy.deepcopy(one)
        train, optimizer = parallel(model, group), sgd(model.parameters())
        losses = []
        for step in range(num_steps):
            loss = train(words(step, rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    results = run_ranks(size, body, backend=backend)
    losses = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses.tolist(), expected[0], rtol=1e-12, atol=1e-12)
    check_same([model for _, model in results], expected[1])


@pytest.mark.parametrize("hosts", [[[0, 1], [2]], [[0], [1, 2]]], ids=str)
def test_hosts_train_as_one_process_does(hosts: list[list[int]]) -> None:
    check_sharded(partial(run_hosts, hosts), 3, "bags", sgd)


@pairs("backend, kind, optimizer", [*BACKENDS, "shm"], KINDS, [sgd, adamw])
def test_sharded_steps_are_those_of_one_process(backend: str, kind: str, optimizer: Any) -> None:
    check_sharded(partial(run_ranks, 2, backend=backend), 2, kind, optimizer)


def check_sharded(run: Callable[..., list[Any]], size: int, kind: str, optimizer: Any) -> None:
    one = build(kind)

    def body(rank: int, group: dist.ProcessGroup) -> list[Words]:
        models = [in_place(copy.deepcopy(one), group) for _ in range(2)]
        plain, sharded = (optimizer(model.parameters()) for model in models)
        lockstep.shard_optimizer(sharded)
        for step in range(5):
            for model, stepping in zip(models, [plain, sharded], strict=True):
                model(words(step, rank)).square().mean().backward()
                stepping.step()
                stepping.zero_grad()
        return models

    expected = copy.deepcopy(one)
    steps = [torch.cat([words(step, rank) for rank in range(size)]) for step in range(5)]
    train_alone(expected, steps, optimizer)
    check_same([model for models in run(body) for model in models], expected)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_norms_of_other_types(kind: str, norm_type: float) -> None:
    one = build(kind, norm_type=norm_type)
    expected = copy.deepcopy(one)
    train_alone(expected, [torch.cat([words(step, rank) for rank in (0, 1)]) for step in range(4)])

    def body(rank: int, group: dist.ProcessGroup) -> Words:
        model = in_place(copy.deepcopy(one), group)
        train_alone(model, [words(step, rank) for step in range(4)])
        return model

    check_same(run_ranks(2, body), expected)


@BOTH
@settings(max_examples=num_examples(60))
@given(data=st.data())
def test_micro_batches_of_random_lookups(parallel, data: st.DataObject) -> None:
    """Ranks look up other rows, as many as they like or none, in single precision too."""
    size = data.draw(st.integers(2, 3))
    norm = data.draw(st.sampled_from([0.1, 1.0, 3.0]))
    kind, dtype = (
        data.draw(st.sampled_from(KINDS[:2])),
        data.draw(st.sampled_from([torch.float64, torch.float32])),
    )
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 4), min_size=size, max_size=size), min_size=4, max_size=4)
    )
    one = build(kind, max_norm=norm).to(dtype)

    def losses(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(words(step, rank, counts[step][rank])).square()

    expected = copy.deepcopy(one)
    stepping = sgd(expected.parameters())
    for step in range(4):
        sum(losses(expected, step, rank).sum() for rank in range(size)).backward()
        if step % 2:
            stepping.step()
            stepping.zero_grad()

    def body(rank: int, group: dist.ProcessGroup) -> Words:
        model = copy.deepcopy(one)
        train, optimizer = parallel(model, group), sgd(model.parameters())
        for step in range(4):
            with nullcontext() if step % 2 else lockstep.no_sync(model):
                (size * losses(train, step, rank).sum()).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return model

    models = run_ranks(size, body)
    check_same(
        [model.double() for model in models],
        expected.double(),
        1e-12 if dtype is torch.float64 else 1e-5,
    )


@pytest.mark.parametrize("lengths", [(2, 4, 3), (3, 0, 1)], ids=str)
def test_loops_of_different_lengths(lengths: tuple[int, ...]) -> None:
    one = build()
    expected = copy.deepcopy(one)
    stepping = sgd(expected.parameters())
    for step in range(max(lengths)):
        with_data = [rank for rank, length in enumerate(lengths) if step < length]
        sum(expected(words(step, r)).square().mean() / len(lengths) for r in with_data).backward()
        stepping.step()
        stepping.zero_grad()

    def body(rank: int, group: dist.ProcessGroup) -> Words:
        model = in_place(copy.deepcopy(one), group)
        with lockstep.join(model):
            train_alone(model, [words(step, rank) for step in range(lengths[rank])])
        return model

    check_same(run_ranks(len(lengths), body), expected)


def test_a_failed_backward_leaves_rows_to_the_next() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Words:
        model = in_place(build(), group)
        loss = model(words(0, rank)).square().mean()
        weight = model.table.weight
        hook = weight.register_hook(lambda gradient: 1 // 0 if rank == 0 else gradient)
        with pytest.raises(ZeroDivisionError if rank == 0 else CollectiveFailed):
            loss.backward()
        hook.remove()
        model.zero_grad()
        train_alone(model, [words(step, rank) for step in range(1, 4)])
        return model

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_replicas_of_a_parallel_model() -> None:
    one = build()
    expected = copy.deepcopy(one)
    steps = [[words(step, rank) for rank in (0, 1)] for step in range(4)]
    train_alone(expected, [torch.cat(both) for both in steps])

    def body(rank: int, group: dist.ProcessGroup) -> Words:
        model = in_place(copy.deepcopy(one), group)
        train_alone(lockstep.DataParallel(model, ["cpu"] * 2), [both[rank] for both in steps])
        return model

    check_same(run_ranks(2, body), expected)


def test_a_frozen_table_is_the_same_on_all_ranks() -> None:
    one = build()
    one.table.weight.requires_grad_(False)
    expected = copy.deepcopy(one)
    train_alone(expected, [torch.cat([words(step, rank) for rank in (0, 1)]) for step in range(3)])

    def body(rank: int, group: dist.ProcessGroup) -> Words:
        model = in_place(copy.deepcopy(one), group)
        train_alone(model, [words(step, rank) for step in range(3)])
        return model

    check_same(run_ranks(2, body), expected)


@pytest.mark.parametrize(
    ("backend", "kind", "is_run_before"),
    [
        pytest.param("aot_eager", "embedding", False, marks=pytest.mark.long),
        pytest.param("aot_eager", "embedding", True, marks=pytest.mark.thorough),
        pytest.param("aot_eager", "bags", False, marks=pytest.mark.thorough),
        pytest.param("eager", "embedding", True, marks=pytest.mark.thorough),
    ],
)
def test_compiled_lookups(backend: str, kind: str, is_run_before: bool) -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = build(kind)
        compiled = torch.compile(model, backend=backend)
        if is_run_before:
            compiled(words(0, 0))
        lockstep.parallelize(model)
        for step in range(3):
            compiled(words(step, world.rank)).square().mean().backward()
        return [p.detach() for p in model.parameters()]

    first, second = lockstep.launch(body, 2)
    assert all(map(torch.equal, first, second))


def test_rows_without_a_backward_are_not_stepped_with() -> None:
    """The rank that has scaled them says so; all ranks may exchange them, or step before."""

    def body(rank: int, group: dist.ProcessGroup) -> Words:
        model = in_place(build(max_norm=0.1), group)
        optimizer = sgd(model.parameters())
        model(words(0, rank)[:1]).sum().backward()
        before = model.table.weight.detach().clone()
        if rank == 1:
            with torch.no_grad():
                model(torch.arange(ROWS).view(-1, 1))
            num_scaled = int((model.table.weight != before).any(1).sum())
            with pytest.raises(ModelError, match=rf"scaled {num_scaled} rows of 'table.weight' on"):
                optimizer.step()
        lockstep.sync_buffers(model)
        optimizer.step()
        optimizer.zero_grad()
        model(torch.arange(ROWS).view(-1, 1)[rank::2])  # after the step
        model(words(1, rank)).sum().backward()
        optimizer.step()
        return model

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


class Tied(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, max_norm=1.0)
        self.second = nn.Embedding(ROWS, WIDTH, **options)
        self.second.weight = self.first.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return (self.first(words) * self.second(words.flip(1))).sum(-1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_table_that_is_looked_up_twice(size: int) -> None:
    """A rank's second lookup reads rows that another rank's first one has scaled."""
    one = Tied(max_norm=1.0).double()
    expected = copy.deepcopy(one)
    steps = [[words(step, rank) for rank in range(size)] for step in range(4)]
    losses = train_alone(expected, [torch.cat(all_) for all_ in steps])

    def body(rank: int, group: dist.ProcessGroup) -> tuple[Tied, list[float]]:
        model = in_place(copy.deepcopy(one), group)
        return model, train_alone(model, [all_[rank] for all_ in steps])

    models, found = zip(*run_ranks(size, body), strict=True)
    means = torch.tensor(found, dtype=torch.float64).mean(0)
    torch.testing.assert_close(means.tolist(), losses, rtol=1e-12, atol=1e-12)
    check_same([*models], expected)


def test_a_function_on_a_device_whose_ranks_do_not_know_of_it_is_refused() -> None:
    """Before it scales rows; a rank that alone exchanged some would wait for the others."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(build("function"), group)
        elsewhere = nn.Parameter(torch.empty(1, device="meta"))
        for engine in engines_with([model.table.weight]):
            engine.renormed.find(model, [*model.named_parameters(), ("other", elsewhere)])
        before = model.table.weight.detach().clone()
        with pytest.raises(ModelError, match=r"that isn't on the CPU alone: .* nn.Embedding\(max"):
            model(words(0, rank))
        assert torch.equal(model.table.weight, before)

    run_ranks(2, body)


def test_a_transform_does_not_scale_rows_unseen() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(build(), group)

        def loss(table: torch.Tensor) -> torch.Tensor:
            return F.embedding(words(0, rank), table, max_norm=0.1).sum()

        table = model.table.weight.detach()
        before = table.clone()
        once = torch.func.grad(loss)
        for gradient in (once, torch.func.grad(lambda table: once(table).sum())):
            gradient(table.clone())
            with pytest.raises(ModelError, match=r"A transform of torch\.func is about to"):
                gradient(table)
        assert torch.equal(table, before)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_traces_of_parallel_tables_are_refused_and_of_others_are_not() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), group)
        inputs = (torch.tensor([1]),)
        with pytest.raises(ModelError, match=r"torch\.jit\.trace\(\) is about to record"):
            torch.jit.trace(model, inputs)
        other = nn.Embedding(7, 3, max_norm=1.0)
        assert torch.equal(torch.jit.trace(other, inputs)(*inputs), other(*inputs))

    run_ranks(2, body)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Embedding(2, 2, max_norm=1.0)))


def traced() -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Embedding(2, 2, max_norm=1.0)))
    model[0] = torch.jit.trace(model[0], (torch.tensor([1]),))
    return model


def frozen() -> nn.Module:
    return nn.Embedding(2, 2, scale_grad_by_freq=True).requires_grad_(False)


REFUSED = {
    r"'second.weight' is the table of 'first.weight' too, .* \(1.0, 2.0\), and here \(2.0, 2.0\)": (
        lambda: Tied(max_norm=2.0)
    ),
    "'second.weight' is the table of 'first.weight' too": lambda: Tied(max_norm=1.0, norm_type=1.0),
    "'0.weight' has max_norm=1.0, in a scripted module": scripted,
    "'0', a part that was traced, looks up a table with max_norm": traced,
    "'weight' has scale_grad_by_freq=True: torch": frozen,
    "'weight' has scale_grad_by_freq=True": lambda: nn.Embedding(2, 2, scale_grad_by_freq=True),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("message", REFUSED)
def test_tables_that_ranks_can_not_have_alike_are_refused(message: str) -> None:
    model = REFUSED[message]()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(ModelError, match=message):
            in_place(model, group)

    run_ranks(2, body)


def test_an_ignored_table_is_each_ranks_own() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 1))
        model._ddp_params_and_buffers_to_ignore = ["0.weight"]
        model = lockstep.DistributedDataParallel(model, process_group=group)
        model(torch.tensor([rank, 1])).sum().backward()

    run_ranks(2, body)
