"""The mean over the global batch: its value, and the gradients after backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lockstep
from tests.nn.classifying import TOLERANCE, assert_gradients, classifier, losses_of, samples
from tests.nn.parallel import in_place, wrapped
from tests.ranks import run_ranks

SPLITS = [[12], [6, 6], [1, 11], [0, 12], [5, 0, 7], [0, 0, 12, 0], [3, 3, 3, 3]]


def by_hand(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return model


@pytest.mark.parametrize("parallel", [in_place, wrapped, by_hand])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_mean_is_that_of_one_process(parallel, sizes: list[int], weighted: bool) -> None:
    (x, y, w), oracle = samples(), classifier()
    losses = losses_of(oracle, x, y)
    expected = (losses * w).sum() / w.sum() if weighted else losses.mean()
    expected.backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = parallel(classifier(), group)
        part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for _ in range(3):
            model.zero_grad()
            weight = w[part] if weighted else None
            losses = losses_of(model, x[part], y[part])
            loss = lockstep.mean(losses, weight=weight, process_group=group)
            torch.testing.assert_close(loss, expected, **TOLERANCE)
            loss.backward()
            if parallel is by_hand:
                lockstep.average_gradients(model, process_group=group)
            assert_gradients(model, oracle)

    run_ranks(len(sizes), body)


def test_mean_without_ranks_is_torchs() -> None:
    model, oracle = classifier(), classifier()
    x, y, _ = samples()
    losses_of(oracle, x, y).mean().backward()
    loss = lockstep.mean(losses_of(model, x, y))
    loss.backward()
    assert loss.shape == ()
    assert_gradients(model, oracle)


def mean_in_groups_of_one(world: lockstep.World) -> float:
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    return lockstep.mean(torch.full((2,), float(world.rank)), process_group=alone).item()


def test_mean_over_a_group_of_one_rank_is_that_ranks() -> None:
    assert lockstep.launch(mean_in_groups_of_one, 2, ranks="threads") == [0, 1]


def test_a_rank_without_samples_needs_no_model() -> None:
    x, y, _ = samples()
    oracle = classifier()
    losses_of(oracle, x, y).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        for step in range(4):
            model.zero_grad()
            if rank == step % 2:
                losses = torch.zeros(0, dtype=torch.float64)
            else:
                losses = losses_of(model, x, y)
            lockstep.mean(losses, process_group=group).backward()
            assert_gradients(model, oracle)

    run_ranks(2, body)


def test_means_of_different_things_add_up() -> None:
    """Each is divided by its own number, and what is no mean at all stays what it is."""
    x, y, w = samples()

    def loss_of(model, x, y, w, mean) -> torch.Tensor:
        out = model(x)
        sizes = (y > 0).double()
        penalty = sum(p.square().sum() for p in model.parameters())
        return (
            mean(F.cross_entropy(out, y, reduction="none"), None)
            + 3 * mean(out.square().sum(1), sizes)
            + 0.1 * penalty
        )

    oracle = classifier()
    loss_of(
        oracle, x, y, w, lambda v, w: v.mean() if w is None else (v * w).sum() / w.sum()
    ).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        part = slice(0, 3) if rank == 0 else slice(3, 12)
        mean = lambda v, w: lockstep.mean(v, weight=w, process_group=group)  # noqa: E731
        loss_of(model, x[part], y[part], w[part], mean).backward()
        assert_gradients(model, oracle)

    run_ranks(2, body)


def test_mean_can_be_differentiated_twice() -> None:
    x, y, _ = samples()

    def penalty(model: nn.Module, mean, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mean(losses_of(model, x, y)), x, create_graph=True)
        return slope

    oracle = classifier()
    slope = penalty(oracle, torch.mean, x, y)
    slope.square().sum().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        rows = slice(0, 4) if rank == 0 else slice(4, 12)
        mean = lambda values: lockstep.mean(values, process_group=group)  # noqa: E731
        mine = penalty(model, mean, x[rows], y[rows])
        # Scaled by the number of ranks, as gradients are before they are averaged.
        torch.testing.assert_close(mine / 2, slope[rows], **TOLERANCE)
        (mine / 2).square().sum().mul(2).backward()
        assert_gradients(model, oracle)

    run_ranks(2, body)


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_may_be_negative(sign: int) -> None:
    (x, y, _), oracle = samples(), classifier()
    weight = sign * torch.tensor([2.0, -1, 3, 1, -0.5, 0, 1, 1, 4, -2, 1, 2], dtype=x.dtype)
    loss = (losses_of(oracle, x, y) * weight).sum() / weight.sum()
    loss.backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        rows = slice(0, 5) if rank == 0 else slice(5, 12)
        losses = losses_of(model, x[rows], y[rows])
        mine = lockstep.mean(losses, weight=weight[rows], process_group=group)
        torch.testing.assert_close(mine, loss, **TOLERANCE)
        mine.backward()
        assert_gradients(model, oracle)

    run_ranks(2, body)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_on_every_rank(bad: float) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        weight = torch.tensor([1.0, bad if rank else 2.0])
        with pytest.raises(ValueError, match="takes finite weights"):
            lockstep.mean(torch.ones(2), weight=weight, process_group=group)

    run_ranks(2, body)


def test_a_loss_that_is_averaged_already_is_refused() -> None:
    x, y, _ = samples()
    with pytest.raises(ValueError, match=r'got a single number(.|\n)*reduction="none"'):
        lockstep.mean(losses_of(classifier(), x, y).mean())


def test_a_mean_may_be_given_with_the_number_of_its_samples() -> None:
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x, y).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        rows = slice(0, 4) if rank == 0 else slice(4, 12)
        loss = losses_of(model, x[rows], y[rows]).mean()
        lockstep.mean(loss, weight=len(x[rows]), process_group=group).backward()
        assert_gradients(model, oracle)

    run_ranks(2, body)


def test_a_metric_needs_no_graph() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        right = torch.tensor([1.0, 0.0, 1.0][: rank + 1])
        accuracy = lockstep.mean(right, process_group=group)
        assert not accuracy.requires_grad
        torch.testing.assert_close(accuracy, torch.tensor(2 / 3))

    run_ranks(2, body)


def test_mean_of_nothing_is_nan() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        assert lockstep.mean(torch.zeros(0), process_group=group).isnan()
        weight = torch.zeros(3)
        assert lockstep.mean(torch.ones(3), weight=weight, process_group=group).isnan()

    run_ranks(2, body)


@pytest.mark.parametrize("values", [torch.tensor([1, 2]), 3.0])
def test_mean_of_what_is_no_loss_is_refused(values: object) -> None:
    with pytest.raises(TypeError, match=r'reduction="none"'):
        lockstep.mean(values)


def test_half_precision_is_added_up_in_double() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        values = torch.full((3000,), 1 + rank * 2**-7, dtype=torch.bfloat16)
        assert lockstep.mean(values, process_group=group).dtype is torch.bfloat16
        expected = torch.tensor(1 + 2**-8, dtype=torch.float64).bfloat16()
        assert lockstep.mean(values, process_group=group) == expected

    run_ranks(2, body)


def test_weights_are_broadcast() -> None:
    losses = torch.arange(6.0).view(2, 3)
    mask = torch.tensor([1.0, 1.0, 0.0])
    assert lockstep.mean(losses, weight=mask) == (0 + 1 + 3 + 4) / 4
    assert lockstep.mean(losses, weight=2) == losses.mean()


def test_two_means_of_nothing_in_one_backward() -> None:
    x, y, _ = samples()
    oracle = classifier()
    (losses_of(oracle, x, y).mean() * 3).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        for _ in range(3):
            model.zero_grad()
            nothing = torch.zeros(0, dtype=torch.float64)
            losses = losses_of(model, x, y) if rank == 0 else nothing
            total = lockstep.mean(losses, process_group=group)
            (total + 2 * lockstep.mean(losses, process_group=group)).backward()
            assert_gradients(model, oracle)

    run_ranks(2, body)


def test_weights_that_are_trained_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight\.detach\(\)"):
        lockstep.mean(torch.ones(2), weight=torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("weight", [None, 2.0, torch.ones(3)])
def test_an_error_of_the_device_is_not_taken_for_one_of_the_weight(weight, monkeypatch) -> None:
    """As that of an earlier kernel, which CUDA reports at the next use of the device."""

    def late(*args, **options):
        if args[0] is weight and options.get("device") == "cpu":  # a number is no use of it
            return torch.tensor(weight, dtype=torch.float64)
        raise RuntimeError("CUDA error: device-side assert triggered")

    values = torch.ones(3)
    for owner, name in ((torch, "as_tensor"), (torch, "ones"), (torch.Tensor, "to")):
        monkeypatch.setattr(owner, name, late)
    with pytest.raises(RuntimeError, match=r"^CUDA error: device-side assert"):
        lockstep.mean(values, weight=weight)


def test_a_batch_without_weight_adds_nothing_to_gradients() -> None:
    """As padding alone has none; its mean is NaN."""

    def body(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = in_place(nn.Linear(1, 1, bias=False), group)
        mean = lockstep.mean(model(torch.ones(2, 1)), weight=torch.zeros(2, 1), process_group=group)
        assert mean.isnan()
        mean.backward()
        return model.weight.grad.tolist()

    assert run_ranks(2, body) == [[[0.0]]] * 2
