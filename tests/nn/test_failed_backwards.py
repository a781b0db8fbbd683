"""Backwards that fail, on all ranks or on some, and what comes after."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed, LockstepError
from tests.counts import pairs
from tests.nn.failing import Layers, batch, gradients, layers
from tests.nn.parallel import in_place, net, parts
from tests.ranks import BACKENDS, Backend, run_ranks

WHERE = pytest.mark.parametrize("backend", BACKENDS)


def mean_of_both(model: nn.Module, size: int, step: int) -> list[torch.Tensor]:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(2):
        (alone(batch(rank, size, step)) / 2).backward()
    return gradients(alone)


def run_backwards(model: nn.Module, rank: int, size: int, steps: int = 3, without=()) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(batch(rank, size), without=without).backward()


@pairs(
    "left_out, then, size, backend", [(), (4,)], ["dropped", "zeroed", "kept"], [4, 300], BACKENDS
)
def test_a_backward_that_fails_at_different_places_on_each_rank(
    left_out: tuple[int, ...], then: str, size: int, backend: Backend
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        model = layers(size, group)
        run_backwards(model, rank, size, without=left_out if rank else ())
        for step in range(3):
            model.zero_grad()
            with pytest.raises(ArithmeticError):
                model(batch(rank, size, step), fails_at=(2, 4)[rank]).backward()
            if then == "kept":
                model(batch(rank, size, step)).backward()
                continue
            model.zero_grad(set_to_none=then == "dropped")
            model(batch(rank, size, step)).backward()
            for mine, expected in zip(
                gradients(model), mean_of_both(model, size, step), strict=True
            ):
                torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
        return gradients(model)

    first, second = run_ranks(2, body, backend=backend)
    assert all(map(torch.equal, first, second))


@WHERE
def test_a_backward_that_fails_on_one_rank_is_an_error_on_the_others(backend: Backend) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = layers(4, group)
        run_backwards(model, rank, 4)
        for _ in range(2):
            model.zero_grad()
            if rank == 1:
                with pytest.raises(ArithmeticError):
                    model(batch(rank, 4), fails_at=3).backward()
                model.zero_grad()
            else:
                with pytest.raises(CollectiveFailed, match="A backward failed on rank 1"):
                    model(batch(rank, 4)).backward()
                assert all(p.grad is None for p in model.parameters())
            # What needs all ranks before their next backward.
            assert lockstep.mean(torch.full((2,), float(rank)), process_group=group) == 0.5
            model(batch(rank, 4)).backward()
        for mine, expected in zip(gradients(model), mean_of_both(model, 4, 0), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
        return gradients(model)

    first, second = run_ranks(2, body, backend=backend)
    assert all(map(torch.equal, first, second))


@WHERE
def test_a_gradient_to_which_a_failed_backward_adds_nothing_stays(backend: Backend) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = layers(4, group)
        run_backwards(model, rank, 4, steps=1)
        held = [p.grad for p in model.parameters()]  # and so it is nowhere else
        values = [gradient.clone() for gradient in held]
        error = ArithmeticError if rank else CollectiveFailed
        with pytest.raises(error, match=None if rank else "A backward failed on rank 1"):
            model(batch(rank, 4), fails_at=3 if rank else None, without=(4, 5)).backward()
        lockstep.reduce(torch.zeros(1), process_group=group)  # with which the other backward ends
        # Of layers 4 and 5.
        for parameter, mine, value in list(zip(model.parameters(), held, values, strict=True))[8:]:
            assert parameter.grad is mine
            assert torch.equal(mine, value)

    run_ranks(2, body, backend=backend)


@pairs(
    "around, fails_on, backend",
    ["two models", "join", "entered later", "unused are skipped"],
    [(0, 1), (1,)],
    BACKENDS,
)
def test_a_backward_that_fails_beside_others(
    around: str, fails_on: tuple[int, ...], backend: Backend
) -> None:
    skips = around == "unused are skipped"

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        models = [Layers(4) for _ in range(2 if around == "two models" else 1)]
        parallel = [
            lockstep.DistributedDataParallel(
                model,
                process_group=group,
                bucket_cap_mb=1e-6,
                skip_all_reduce_unused_params=skips,
            )
            for model in models
        ]

        def loss(fails_at: int | None = None) -> torch.Tensor:
            without = (4,) if skips else ()
            return sum(model(batch(rank, 4), fails_at, without) for model in parallel)

        def step(fails: bool = False) -> None:
            for model in models:
                model.zero_grad()
            if not fails:
                loss().backward()
            elif rank in fails_on:
                with pytest.raises(ArithmeticError):
                    loss(fails_at=2 + rank).backward()
            else:
                with pytest.raises(CollectiveFailed, match="failed on rank 1"):
                    loss().backward()

        joined = lockstep.join(*parallel) if around in ("join", "entered later") else None
        for _ in range(2):
            step()
        if around == "entered later":
            step(fails=True)
        with joined or contextlib.nullcontext():
            for _ in range(2):
                if around != "entered later":
                    step(fails=True)
                step()
                step()
        return [gradient for model in models for gradient in gradients(model)]

    first, second = run_ranks(2, body, backend=backend)
    assert all(map(torch.equal, first, second))
    alone = Layers(4)
    sum(alone(batch(rank, 4), None, (4,) if skips else ()) / 2 for rank in range(2)).backward()
    for mine, expected in zip(first, gradients(alone) * 2, strict=False):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_a_backward_that_fails_with_a_gradient_from_before() -> None:
    """It is not lost, as long as it is not on its way."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = layers(4, group)
        run_backwards(model, rank, 4)
        model.zero_grad()
        with lockstep.no_sync(model):
            model(batch(rank, 4)).backward()
        with pytest.raises(ArithmeticError):
            model(batch(rank, 4), fails_at=6 - 1).backward()
        with pytest.raises(ArithmeticError):  # before the next one has finished the first
            model(batch(rank, 4), fails_at=6 - 1).backward()
        model(batch(rank, 4)).backward()
        expected = [2 * gradient for gradient in mean_of_both(model, 4, 0)]
        for mine, its in zip(gradients(model)[:8], expected[:8], strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)

    run_ranks(2, body)


def test_an_undefined_gradient_is_none() -> None:
    """A Function may return None for a parameter, as in torch's DDP with unused parameters."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, gives):
            ctx.gives = gives
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            return gradient, gradient if ctx.gives else None, None

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

        def forward(self, x, gives):
            return Half.apply(self.first(x), self.weight, gives)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Scaled(), process_group=group)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 3), gives=False).sum().backward()
            assert model.weight.grad is None
            assert model.first.bias.grad.tolist() == [2, 2, 2]
        model(torch.ones(2, 3), gives=rank == 1).sum().backward()
        assert model.weight.grad.tolist() == [1, 1, 1]

    run_ranks(2, body)


@WHERE
def test_a_failed_backward_tells_nothing_of_the_one_before(backend: Backend) -> None:
    """Whose buffers were new, which the ranks agreed on then, and only then."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = layers(4, group)
        run_backwards(model, rank, 4)
        model.register_buffer("count", torch.zeros(1))
        run_backwards(model, rank, 4, steps=1)
        with pytest.raises((ArithmeticError, CollectiveFailed)):
            model(batch(rank, 4), fails_at=2 if rank == 0 else None).backward()
        run_backwards(model, rank, 4)
        copies = [torch.empty(4, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(copies, model.layers[0].bias.grad, group=group)
        assert torch.equal(*copies)

    run_ranks(2, body, backend=backend)


@pytest.mark.parametrize("overlaps", [None, False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_data_that_one_rank_alone_cuts_is_named_in_each_step(
    backend: Backend, overlaps: bool | None
) -> None:
    """With an optimizer that is sharded, and overlaps, or that is not; and no rank steps."""

    def body(rank: int, group: dist.ProcessGroup) -> list[str]:
        model, x = in_place(net(), group), parts(2)[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if overlaps is not None:
            lockstep.shard_optimizer(optimizer, overlap=overlaps)
        told = []
        for step in range(4):
            if step == 2 and rank == 1:
                model.first.bias.data = model.first.bias.data[:1].clone()
            try:
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()  # not after an error
                told.append("")
            except LockstepError as error:
                told.append(f"{type(error).__name__}: {error}")
        lockstep.any(False, process_group=group)  # before it, a failed backward is finished
        return told

    others, mine = run_ranks(2, body, backend=backend)
    assert mine[:2] == others[:2] == ["", ""]
    for text in mine[2:]:
        assert text.startswith("ParameterChanged: The gradient of 'first.bias' is (1,) float64")
    for text in others[2:]:
        assert text.startswith("CollectiveFailed: "), text
        assert "rank 1" in text
