"""Several parallel models: in one backward, in turn, and inside of each other."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.grad.facts import num_facts
from lockstep.nn import autograd
from lockstep.nn.backward import engines_with
from tests.nn.parallel import BOTH, in_place, net, parts, wrapped
from tests.ranks import BACKENDS, Backend, run_ranks
from tests.same import assert_same, gradients_of

assert_close = partial(assert_same, tolerance=1e-10)


class Tower(nn.Module):
    """Layers of which each call uses some."""

    def __init__(self, num_layers: int = 6, *, has_table: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.table = nn.Embedding(7, 4, sparse=True) if has_table else None

    def forward(self, x: torch.Tensor, leave_out: int | None) -> torch.Tensor:
        if self.table is not None:
            x = x + self.table(torch.arange(len(x)) + (leave_out or 0) % 4)
        for index, layer in enumerate(self.layers):
            if index != leave_out:
                x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_table", [False, True])
def test_two_models_in_one_backward_launch_in_one_order(backend: Backend, has_table: bool) -> None:
    """Which of their buckets fill first differs, as each rank leaves out another layer.

    The gradient of a table is sparse: it comes between its model's buckets and the last of them.
    """
    torch.manual_seed(4)
    towers = [Tower(has_table=has_table).double(), Tower().double()]
    data = parts(3)

    def loss_of(first, second, x: torch.Tensor, rank: int, turn: int) -> torch.Tensor:
        a = first(x, (rank + turn) % 7 or None)
        b = second(a if turn % 2 else x, (2 * rank + turn) % 7 or None)
        return (a + 2 * b).square().mean()

    def expected(turn: int) -> list[torch.Tensor | None]:
        every = []
        for rank in range(3):
            copies = copy.deepcopy(towers)
            loss_of(*copies, data[rank], rank, turn).backward()
            every.append(gradients_of(*copies))
        sums = []
        for of_ranks in zip(*every, strict=True):
            there = [gradient for gradient in of_ranks if gradient is not None]
            sums.append(sum(there) / 3 if there else None)
        return sums

    oracles = [expected(turn) for turn in range(8)]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = [in_place(m, group, bucket_cap_mb=100 / 2**20) for m in copy.deepcopy(towers)]
        for turn, oracle in enumerate(oracles):
            for model in models:
                model.zero_grad()
            loss_of(*models, data[rank], rank, turn).backward()
            assert_close(gradients_of(*models), oracle)

    run_ranks(3, body, backend=backend)


@BOTH
def test_a_generator_and_its_critic_in_turn(parallel) -> None:
    data = parts(2, rows=6)

    def train_adversaries(generator, critic, x: torch.Tensor, average) -> list[torch.Tensor | None]:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
        for _ in range(4):
            fake = generator(x).detach()
            optimizers[1].zero_grad()
            (critic(fake).square().mean() - critic(x).mean()).backward()
            average(critic)
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(generator(x)).square().mean().backward()
            average(generator)
            optimizers[0].step()
        return [p.detach() for m in (generator, critic) for p in m.parameters()]

    torch.manual_seed(2)
    generator = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    oracle = train_adversaries(
        copy.deepcopy(generator), copy.deepcopy(critic), data.flatten(0, 1), lambda _: None
    )

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        models = [parallel(copy.deepcopy(m), group) for m in (generator, critic)]
        return train_adversaries(*models, data[rank], lambda _: None)

    for mine in run_ranks(2, body):
        assert_close(mine, oracle)


def numel_in_lines(model: nn.Module) -> int:
    """The elements that gradients take, each of which begins at a multiple of 64 bytes."""
    return sum(-(-p.nbytes // 64) * 64 // p.itemsize for p in model.parameters())


class Counting:
    """A process group that counts how much is reduced through it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.num_reduced = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> dist.Work:
        if tensors[0].is_floating_point():  # and not what ranks tell each other
            self.num_reduced += tensors[0].numel()
        return self._group.allreduce(tensors, options)


@BOTH
@pytest.mark.parametrize("parallel_part", [wrapped, in_place])
def test_a_parallel_part_of_a_parallel_model_is_reduced_once(parallel, parallel_part) -> None:
    data = parts(2)
    oracle = net()
    oracle(data.flatten(0, 1), 1).square().mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        counting = Counting(group)
        model = net()
        model.second = parallel_part(model.second, counting)
        whole = parallel(model, counting)
        for _ in range(3):
            whole.zero_grad()
            counting.num_reduced = 0
            whole(data[rank], 1).square().mean().backward()
            assert_close(gradients_of(model), gradients_of(oracle))
        # One for each parameter, and in each of two last buckets two on ranks that failed.
        count = len(list(model.parameters())) + 2 * 2
        assert counting.num_reduced == numel_in_lines(model) + count

    run_ranks(2, body)


@pytest.mark.parametrize("which", ["outer", "inner", "both"])
def test_accumulating_in_a_parallel_model_with_a_parallel_part(which: str) -> None:
    data = parts(4)
    oracle = net()
    for x in data:
        (oracle(x, 1).square().mean() / 2).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = net()
        in_place(model.branches, group)
        whole = wrapped(model, group)
        for model_ in {"outer": [whole], "inner": [model], "both": [whole, model]}[which]:
            context = lockstep.no_sync(model_)
            context.__enter__()
            whole(data[rank], 1).square().mean().backward()
            context.__exit__(None, None, None)
            if which == "both":
                whole.zero_grad()
        if which == "both":
            with whole.no_sync(), lockstep.no_sync(model):
                whole(data[rank], 1).square().mean().backward()
        whole(data[rank + 2], 1).square().mean().backward()
        assert_close(gradients_of(model), gradients_of(oracle))

    run_ranks(2, body)


def test_experts_over_some_of_the_ranks() -> None:
    """Each pair of ranks has an expert of its own; what all share is reduced over all."""
    data = parts(4)
    torch.manual_seed(8)
    shared = nn.Linear(4, 4).double()
    experts = [nn.Linear(4, 4).double() for _ in range(2)]

    one = copy.deepcopy(shared), copy.deepcopy(experts)
    loss = sum(one[1][rank // 2](one[0](data[rank])).square().mean() for rank in range(4))
    loss.backward()

    def rank_body(_: int) -> None:
        world = lockstep.init()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = world.rank // 2
        model = nn.Sequential(copy.deepcopy(shared), copy.deepcopy(experts[mine]))
        in_place(model[1], pairs[mine])
        in_place(model, world.process_group, init_sync=False)
        for _ in range(3):
            model.zero_grad()
            model(data[world.rank]).square().mean().backward()
        assert_close(gradients_of(model[0]), [g / 4 for g in gradients_of(one[0])])
        assert_close(gradients_of(model[1]), [g / 2 for g in gradients_of(one[1][mine])])

    lockstep.launch(rank_body, nprocs=4, ranks="threads")


def test_a_copy_that_is_not_trained_takes_no_part_and_no_memory() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        counting = Counting(group)
        model = wrapped(net(), counting)
        average = copy.deepcopy(model)
        for _ in range(2):
            counting.num_reduced = 0
            model(parts(2)[rank], 0).sum().backward()
        count = num_facts(len(list(model.parameters())))
        assert counting.num_reduced == numel_in_lines(model) + count
        (engine,) = average._engines
        assert engine.reducer.buckets == []

    run_ranks(2, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_in_one_reentrant_checkpoint_are_reduced_in_one_order(backend: Backend) -> None:
    """Nobody foresees them when the last model begins; each goes with its like on the others."""

    def body(rank: int, group: dist.ProcessGroup) -> list[list[float]]:
        models = [
            lockstep.parallelize(nn.Linear(size, size + 1, bias=False), process_group=group)
            for size in range(1, 7)
        ]
        for model in models:
            nn.init.ones_(model.weight)
        *chain, last = models
        for _ in range(2):
            nn.Sequential(*models).zero_grad()
            x = torch.full((1, 1), 1.0 + rank, requires_grad=True)
            last(checkpoint(nn.Sequential(*chain), x, use_reentrant=True)).sum().backward()
        return [model.weight.grad.unique().tolist() for model in models]

    # As often as there are ways through each number, times the mean of both inputs.
    assert (
        run_ranks(2, body, backend=backend)
        == [[[7560.0 / size / (size + 1)] for size in range(1, 7)]] * 2
    )


def test_engines_of_different_groups_have_one_order() -> None:
    """That in which they were made: in it a rank takes part that has no gradients for several."""

    def rank_body(_: int) -> None:
        lockstep.init()
        groups = [dist.new_group([0, 1]) for _ in range(6)]
        models = [in_place(nn.Linear(1, 1), group) for group in groups]
        parameters = [p for model in models for p in model.parameters()]
        assert [engine.module for engine in engines_with(parameters)] == models

    lockstep.launch(rank_body, nprocs=2, ranks="threads")


def test_a_copys_state_may_be_assigned_on_one_rank_alone() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(net(), group)
        if rank == 0:
            average = copy.deepcopy(model)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            average.load_state_dict(state, assign=True)
            with torch.no_grad():
                average(parts(2)[rank], 0)
        else:
            model(parts(2)[rank], 0)

    run_ranks(2, body)


@BOTH
def test_a_rank_whose_loss_touches_nothing_has_the_others_gradients_when_it_steps(parallel) -> None:
    data = parts(3)

    def train_or_idle(model: nn.Module, batches: list[torch.Tensor | None], share: float) -> list:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in batches:
            optimizer.zero_grad()
            if batch is None:
                torch.zeros((), requires_grad=True).backward()
            else:
                (model(batch).square().sum() * share).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    idle = [1, 0, None, 2, 1, 1]  # who has nothing, in each step
    one = [torch.cat([part for rank, part in enumerate(data) if rank != nobody]) for nobody in idle]
    oracle = train_or_idle(net(), one, 1 / 3)

    def body(rank: int, group: dist.ProcessGroup) -> list:
        model = parallel(net(), group)
        return train_or_idle(model, [None if rank == nobody else data[rank] for nobody in idle], 1)

    for mine in run_ranks(3, body):
        assert_close(mine, oracle)


def test_steps_without_reduction_are_let_alone() -> None:
    """Who accumulates and steps means to; and a step twice after one backward reduces once."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        counting = Counting(group)
        model = in_place(net(), counting)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.no_sync(model):
            model(parts(2)[rank]).sum().backward()
        optimizer.step()
        assert counting.num_reduced == 0
        optimizer.zero_grad()
        with lockstep.no_sync(model):
            optimizer.step()
        assert counting.num_reduced == 0

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(parts(2)[rank]).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        count = num_facts(len(list(model.parameters())))
        assert counting.num_reduced == numel_in_lines(model) + count

    run_ranks(2, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_reach_different_models_in_one_backward(backend: Backend) -> None:
    """Rank 1 leaves a model out in some steps, and has its forwards in another order."""
    data = parts(2)

    def run_backward(rank: int, first: nn.Module, second: nn.Module, turn: int) -> None:
        models = [first, second] if rank == 0 else [second, first]
        outputs = {model: model(data[rank]) for model in models}
        loss = outputs[second].square().sum()
        if rank == 0 or turn % 3 == 1:
            loss = loss + 5 * outputs[first].square().sum()
        loss.backward()

    torch.manual_seed(6)
    layers = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]

    def expected(turn: int) -> list[torch.Tensor]:
        copies = [copy.deepcopy(layers) for _ in range(2)]
        for rank, (first, second) in enumerate(copies):
            run_backward(rank, first, second, turn)
        by_rank = [gradients_of(*models) for models in copies]
        return [(a if b is None else a + b) / 2 for a, b in zip(*by_rank, strict=True)]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        first, second = (in_place(copy.deepcopy(layer), group) for layer in layers)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (first, second)]
        for turn in range(6):
            first.zero_grad()
            second.zero_grad()
            run_backward(rank, first, second, turn)
            for optimizer in optimizers:
                optimizer.step()
            assert_close(gradients_of(first, second), expected(turn))

    run_ranks(2, body, backend=backend)


def test_models_in_no_graph_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[torch.Tensor] = []
    apply = autograd._UsesAll.apply

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = [lockstep.parallelize(nn.Linear(2, 1), process_group=group) for _ in range(3)]
        (models[0](torch.ones(1, 2)) + models[1](torch.ones(1, 2))).sum().backward()
        for model in models[:2]:
            for parameter in model.parameters():
                assert torch.equal(parameter.grad, torch.ones_like(parameter))
        assert not any(p in {*looked_at} for p in models[2].parameters())
        assert any(p in {*looked_at} for m in models[:2] for p in m.parameters())

    monkeypatch.setattr(
        autograd._UsesAll, "apply", lambda *leaves: looked_at.extend(leaves) or apply(*leaves)
    )
    run_ranks(2, body)
