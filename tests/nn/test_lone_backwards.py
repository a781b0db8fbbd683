"""A backward of one rank alone: an error on every rank, and then all go on together."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveMismatch
from tests.comm.groups import OURS, run_on
from tests.counts import pairs
from tests.nn.failing import Layers, gradients

SIZES = (2, 3)
over_ours_and_sizes = pytest.mark.parametrize(
    ("backend", "size"), [*itertools.product(OURS, SIZES)]
)

WIDTH = 4


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH, sparse=True, dtype=torch.float64)
        self.layers = Layers(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = x[:, 0].abs().mul(10).long() % 6
        return self.layers(x + self.table(indices))


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH, dtype=torch.float64), Layers(WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: Layers(WIDTH),
    "buffers": normed,
    "sparse": Sparse,
}


def batch(rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def wrapped(model: nn.Module, group: dist.ProcessGroup) -> lockstep.DistributedDataParallel:
    return lockstep.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-6)


def assert_steps_as_one(ddp: nn.Module, group: dist.ProcessGroup, seed: int) -> None:
    """Fail unless a step of all ranks has the gradients of one process."""
    alone = copy.deepcopy(ddp.module)
    alone.zero_grad()
    for rank in range(group.size()):
        (alone(batch(rank, seed)) / group.size()).backward()
    ddp(batch(group.rank(), seed)).backward()
    for mine, expected in zip(gradients(ddp.module), gradients(alone), strict=True):
        torch.testing.assert_close(mine.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-12)


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(CollectiveMismatch):
        call()


@pairs("name, backend, size", MODELS, OURS, SIZES)
def test_all_train_on_after_a_backward_of_one_rank_alone(
    name: str, backend: str, size: int
) -> None:
    torch.manual_seed(1)
    made = MODELS[name]()

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        ddp = wrapped(copy.deepcopy(made), group)
        for step in range(4):  # before the first, before the rearrangement, and after it
            ddp.zero_grad()
            if group.rank() == step % size:
                loss = ddp.module(batch(0, 50 + step))
                with pytest.raises(CollectiveMismatch) as caught:
                    loss.backward()
                assert "one that is of this rank alone runs in" in "".join(caught.value.__notes__)
            else:
                refused(lambda: dist.barrier(group=group))
            ddp.zero_grad()
            assert_steps_as_one(ddp, group, step)
            dist.barrier(group=group)
        return gradients(ddp.module)

    first, *others = run_on(backend, size, body)
    for other in others:
        assert all(
            map(torch.equal, map(torch.Tensor.to_dense, first), map(torch.Tensor.to_dense, other))
        )


@pairs("num_steps, backend, size", range(3), OURS, SIZES)
def test_a_step_of_an_optimizer_after_a_backward_of_one_rank_alone(
    num_steps: int, backend: str, size: int
) -> None:
    """No rank has reduced a gradient since the last step, so all ask each other for one."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = wrapped(Layers(WIDTH), group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(num_steps):
            ddp.zero_grad()
            assert_steps_as_one(ddp, group, step)
            optimizer.step()
        ddp.zero_grad()
        if group.rank() == 0:
            refused(ddp.module(batch(0, 50)).backward)
        else:
            refused(lambda: dist.barrier(group=group))
        ddp.zero_grad()
        optimizer.step()
        assert_steps_as_one(ddp, group, 9)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_a_backward_that_raises_on_one_rank_and_is_met_by_another_call(
    backend: str, size: int
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = wrapped(Layers(WIDTH), group)
        for step in range(4):
            ddp.zero_grad()
            assert_steps_as_one(ddp, group, step)
            ddp.zero_grad()
            if step == 0:  # gradients have no order before the second backward
                continue
            if group.rank() == 0:
                with pytest.raises(ArithmeticError):
                    ddp.module(batch(0, 50), fails_at=2).backward()
                if step == 1:
                    refused(lambda: lockstep.mean(torch.ones(1), process_group=group))
                else:
                    refused(lambda: dist.all_reduce(torch.ones(99), group=group))
            else:
                refused(lambda: dist.barrier(group=group))
        ddp.zero_grad()
        assert_steps_as_one(ddp, group, 9)
        dist.barrier(group=group)

    run_on(backend, size, body)


@pairs(
    "num_steps, which, backend, size", range(3), ["first", "second", "both", "a copy"], OURS, SIZES
)
def test_two_models_of_which_one_rank_trains_some_alone(
    num_steps: int, which: str, backend: str, size: int
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        models = [wrapped(Layers(WIDTH), group) for _ in range(1 if which == "a copy" else 2)]
        for step in range(num_steps):
            for model in models:
                model.zero_grad()
                assert_steps_as_one(model, group, step)
        if which == "a copy":
            models.append(copy.deepcopy(models[0]))
        for model in models:
            model.zero_grad()
        for step in range(2):
            if group.rank() == 0:
                first, second = (model.module(batch(0, 50)) for model in models)
                losses = {"first": first, "both": first + second}
                refused(losses.get(which, second).backward)
            else:
                refused(lambda: dist.barrier(group=group))
            for number in range(2):
                for model in models:
                    model.zero_grad()
                    assert_steps_as_one(model, group, 10 * step + number)
        dist.barrier(group=group)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_a_backward_of_one_rank_alone_that_sums_in_it(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        norm = lockstep.SyncBatchNorm(WIDTH, process_group=group, dtype=torch.float64)
        ddp = wrapped(nn.Sequential(Layers(WIDTH).layers[0], norm, Layers(WIDTH)), group)
        for step in range(3):
            ddp.zero_grad()
            loss = ddp.module(batch(group.rank(), 50))
            if group.rank() == 0:
                refused(loss.backward)
            else:
                refused(lambda: dist.barrier(group=group))
            ddp.zero_grad()
            ddp(batch(group.rank(), step)).backward()
            everyone = [torch.empty(WIDTH, WIDTH, dtype=torch.float64) for _ in range(size)]
            dist.all_gather(everyone, next(ddp.parameters()).grad, group=group)
            assert all(torch.equal(local, everyone[0]) for local in everyone)
        dist.barrier(group=group)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_a_hook_that_calls_something_of_this_rank_alone(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = wrapped(Layers(WIDTH), group)
        for step in range(4):
            ddp.zero_grad()
            loss = ddp.module(batch(group.rank(), 50))
            if group.rank() == 0:
                middle = ddp.module.layers[2].weight
                handle = middle.register_hook(
                    lambda _: dist.all_reduce(torch.ones(3), group=group) and None
                )
                refused(loss.backward)
                handle.remove()
            else:
                refused(loss.backward)
            ddp.zero_grad()
            assert_steps_as_one(ddp, group, step)
        dist.barrier(group=group)

    run_on(backend, size, body)


@pytest.mark.parametrize("backend", OURS)
def test_a_backward_that_could_not_begin_counts_on_no_rank(backend: str) -> None:
    """Or one rank would take part in others' backwards when its optimizer steps, and one not."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1, dtype=torch.float64)
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * self.scale).sum()

    def body(group: dist.ProcessGroup) -> None:
        ddp = wrapped(Scaled(), group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            ddp(batch(group.rank(), seed=1)).backward()
            optimizer.step()

        step()
        loss = ddp(batch(group.rank(), seed=2))
        ddp.module.scale.requires_grad_(group.rank() == 0)
        refused(loss.backward)
        ddp.module.scale.requires_grad_(True)
        optimizer.step()
        for seed in (3, 4):
            step()
            optimizer.zero_grad()
            assert_steps_as_one(ddp, group, seed)

    run_on(backend, 2, body)
