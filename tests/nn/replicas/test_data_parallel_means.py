"""Losses in the replicas: a vector of them, or one exact mean."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ModelError
from lockstep.nn import DataParallel, data_parallel, parallel_apply
from tests.ranks import run_ranks
from tests.same import assert_same_gradients

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
THREE = ["cpu"] * 3


class WithLoss(nn.Module):
    """A classifier that returns its loss."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.group = group

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), y, reduction="none")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return lockstep.mean(self.losses(x, y), process_group=self.group)

    def each(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.losses(x, y).mean()

    def both(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = self.losses(x, y)
        return lockstep.mean(losses) + 2 * lockstep.mean(losses.square(), weight=y + 1.0)

    def of_class_2(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = self.losses(x, y)[y == 2]
        return lockstep.mean(losses) if len(losses) else losses.sum()


with torch.random.fork_rng():
    torch.manual_seed(2)
    _MODEL = WithLoss()


def model(group: dist.ProcessGroup | None = None) -> WithLoss:
    made = WithLoss(group)
    made.load_state_dict(_MODEL.state_dict())
    return made


def samples(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def test_a_loss_of_each_replica_is_in_a_vector() -> None:
    losses = DataParallel(model(), THREE).each(*samples())
    assert losses.shape == (3,)


@pytest.mark.parametrize("rows", [2, 3, 7])
def test_a_mean_is_that_of_all_replicas(rows: int) -> None:
    module, expected = model(), model()
    loss, other = DataParallel(module, THREE)(*samples(rows)), expected(*samples(rows))
    assert loss.ndim == 0
    torch.testing.assert_close(loss, other, **TOLERANCE)
    loss.backward()
    other.backward()
    assert_same_gradients(module, expected)


def test_the_same_through_the_primitives() -> None:
    module, expected = model(), model()
    loss = data_parallel(module, samples(), THREE)
    assert loss.ndim == 0
    loss.backward()
    expected(*samples()).backward()
    assert_same_gradients(module, expected)


def test_what_is_made_of_means_is_the_same_in_all_replicas() -> None:
    module, expected = model(), model()
    losses = DataParallel(module, THREE).both(*samples())
    assert losses.shape == (3,)
    assert losses.eq(losses[0]).all()
    losses.mean().backward()
    expected.both(*samples()).backward()
    assert_same_gradients(module, expected)


def test_a_replica_may_take_no_mean() -> None:
    """The others don't wait for it, and it has nothing to add."""
    x, _ = samples(6)
    y = torch.tensor([2, 2, 0, 1, 2, 0])  # in the second of three there is no class 2
    module, expected = model(), model()
    losses = DataParallel(module, THREE).of_class_2(x, y)
    torch.testing.assert_close(losses[0], expected.of_class_2(x, y), **TOLERANCE)


def test_a_mean_without_gradients() -> None:
    with torch.no_grad():
        assert DataParallel(model(), THREE)(*samples()) == model()(*samples())


def test_a_failure_is_not_waited_for() -> None:
    class Fails(WithLoss):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if len(x) == 1:  # the last
                raise ArithmeticError("no loss")
            return super().forward(x, y)

    with pytest.raises(ArithmeticError, match="no loss"):
        DataParallel(Fails(), THREE)(*samples())


@pytest.mark.parametrize("rows", [2, 3, 9])
def test_replicas_in_replicas(rows: int) -> None:
    """The mean is one over all of them."""
    module, expected = model(), model()
    outer = DataParallel(DataParallel(module, THREE), ["cpu"] * 2)
    loss, other = outer(*samples(rows)), expected(*samples(rows))
    assert loss.ndim == 0
    torch.testing.assert_close(loss, other, **TOLERANCE)
    loss.backward()
    other.backward()
    assert_same_gradients(module, expected)


class WithCheckpoint(WithLoss):
    """What it computes its loss from is computed again in the backward."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, reentrant: bool = False) -> torch.Tensor:
        x = x.requires_grad_() if reentrant else x
        return checkpoint(super().forward, x, y, use_reentrant=reentrant)


def test_a_mean_in_a_checkpoint() -> None:
    module, expected = WithCheckpoint(), WithLoss()
    expected.load_state_dict(module.state_dict())
    replicated = DataParallel(module, THREE)
    replicated(*samples()).backward()
    expected(*samples()).backward()
    assert_same_gradients(module, expected)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        replicated(*samples(), reentrant=True).backward()


def test_means_of_different_samples_are_refused_in_all_replicas() -> None:
    class TwoMeans(WithLoss):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            losses = self.losses(x, y)
            return lockstep.mean(losses) + lockstep.mean(losses[:1])

    parallel = lockstep.parallelize(TwoMeans())
    with lockstep.accumulate(parallel):
        loss = DataParallel(parallel, ["cpu"] * 2)(*samples()).mean()
        with pytest.raises(ValueError, match="two means, over 7 and over 2 samples") as caught:
            loss.backward()
    where, also = caught.value.__notes__
    assert where == "(raised in replica 0 on cpu)"
    assert also.startswith("Replica 1 on cpu failed as well:")


def test_replicas_in_ranks() -> None:
    """Over the replicas of a rank first, and then over the ranks, also of several micro-batches."""
    x, y = samples(23)
    rows = [[range(5), range(5, 7)], [range(7, 19), range(19, 23)]]  # each rank's micro-batches
    expected = model()
    expected(x, y).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        module = model(group)
        parallel = lockstep.parallelize(module, process_group=group)
        replicated = DataParallel(parallel, ["cpu", "cpu"])
        for _ in range(3):
            module.zero_grad()
            for number, indices in enumerate(rows[rank]):
                with contextlib.nullcontext() if number else lockstep.accumulate(parallel):
                    replicated(x[list(indices)], y[list(indices)]).backward()
            assert_same_gradients(module, expected)

    run_ranks(2, body)


def test_sums_are_taken_in_the_order_of_the_replicas() -> None:
    class Sums(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return lockstep.mean(values)

    values = [torch.rand(1000, dtype=torch.float64) for _ in range(4)]
    first = parallel_apply([Sums()] * 4, copy.deepcopy(values))
    for _ in range(20):
        assert parallel_apply([Sums()] * 4, copy.deepcopy(values)) == first


def test_micro_batches_of_another_model_are_left_alone() -> None:
    """Two models accumulate at once, and a backward is of that one only which it reaches."""
    model, other = WithLoss(), WithLoss()
    expected = copy.deepcopy([model, other])
    model, other = lockstep.parallelize(model), lockstep.parallelize(other)
    replicated = DataParallel(model, ["cpu"] * 2)
    of_model, of_other = [samples(3), samples(5), samples(2)], [samples(7), samples(4)]
    with lockstep.accumulate(model), lockstep.accumulate(other):
        other(*of_other[0]).backward()
        replicated(*of_model[0]).backward()
        replicated(*of_model[1]).backward()
    other(*of_other[1]).backward()
    replicated(*of_model[2]).backward()
    for each, parts in zip(expected, (of_model, of_other), strict=True):
        each(*map(torch.cat, zip(*parts, strict=True))).backward()
    assert_same_gradients(model, expected[0])
    assert_same_gradients(other, expected[1])
