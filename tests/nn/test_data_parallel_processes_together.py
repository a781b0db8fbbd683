"""What replicas in processes have to know of each other, and of what their caller does."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.nn.replicas import DataParallel

pytestmark = pytest.mark.keeps_descriptors
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
TWO = ["cpu", "cpu"]


class WithLoss(nn.Module):
    """A classifier of words that returns its loss."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, **options)
        self.layer = nn.Linear(4, 3)
        self.double()

    def losses(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(self.embed(words)), words % 3, reduction="none")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return lockstep.mean(self.losses(words))

    def two_means(self, words: torch.Tensor) -> torch.Tensor:
        losses = self.losses(words)
        return lockstep.mean(losses) + lockstep.mean(losses[:1])

    def fail_alone(self, words: torch.Tensor) -> torch.Tensor:
        if len(words) == 3:  # the second replica's part
            raise ArithmeticError("no loss")
        return self(words)


def words(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(8, (count,), generator=torch.Generator().manual_seed(seed))


def assert_same(mine: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **TOLERANCE)
        torch.testing.assert_close(p.grad, q.grad, **TOLERANCE)


def in_processes(module: nn.Module) -> DataParallel:
    return DataParallel(module, TWO, workers="processes")


def test_a_mean_over_micro_batches() -> None:
    """Those of each step are of different sizes; the gradients are those of all at once."""
    module = WithLoss()
    expected = copy.deepcopy(module)
    parallel = lockstep.parallelize(module)
    model = in_processes(parallel)
    for step, sizes in enumerate([(2, 5, 9), (7, 3), (4,)]):
        module.zero_grad()
        expected.zero_grad()
        parts = [words(size, 10 * step + number) for number, size in enumerate(sizes)]
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            with contextlib.nullcontext() if last else lockstep.accumulate(parallel):
                model(part).backward()
        expected(torch.cat(parts)).backward()
        assert_same(module, expected)


def test_micro_batches_in_ranks() -> None:
    """Each rank's replicas first, and then the ranks."""
    rows = [[words(5, 1), words(2, 2)], [words(12, 3), words(4, 4)]]  # each rank's micro-batches
    start = WithLoss()
    expected = copy.deepcopy(start)
    expected(torch.cat([part for own in rows for part in own])).backward()

    def body(world: lockstep.World) -> None:
        module = copy.deepcopy(start)
        parallel = lockstep.parallelize(module)
        replicated = in_processes(parallel)
        for _ in range(2):
            module.zero_grad()
            for number, own in enumerate(rows[world.rank]):
                with contextlib.nullcontext() if number else lockstep.accumulate(parallel):
                    replicated(own).backward()
            assert_same(module, expected)

    lockstep.launch(body, 2, ranks="threads")


def test_what_the_caller_raises_is_raised_in_the_replica() -> None:
    parallel = lockstep.parallelize(WithLoss())
    model = in_processes(parallel)
    with lockstep.accumulate(parallel):
        loss = model.two_means(words(7)).mean()
        with pytest.raises(ValueError, match="two means, over 7 and over 2 samples") as caught:
            loss.backward()
    in_its_process, where, also = caught.value.__notes__
    assert "in count_micro_batch" not in in_its_process
    assert "in count_micro_batch" not in also
    assert where == "(raised in replica 0 on cpu)"


def test_a_replica_that_fails_is_not_waited_for() -> None:
    model = in_processes(WithLoss())
    with pytest.raises(ArithmeticError, match="no loss"):
        model.fail_alone(words(7))
    assert model(words(7)).ndim == 0


@pytest.mark.parametrize("option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_whose_rows_are_looked_up_together(option: dict) -> None:
    module = WithLoss(**option)
    expected = copy.deepcopy(module)
    model = in_processes(module)
    for seed in range(3):
        module.zero_grad()
        expected.zero_grad()
        loss, other = model(words(11, seed)), expected(words(11, seed))
        torch.testing.assert_close(loss, other, **TOLERANCE)
        loss.backward()
        other.backward()
        assert_same(module, expected)


def test_rows_are_normalised_once() -> None:
    rows = torch.randperm(2000).repeat(2)
    table = nn.Embedding(2000, 64, max_norm=1.0)
    model = in_processes(table)
    for _ in range(10):
        nn.init.normal_(table.weight)
        expected = copy.deepcopy(table)
        with torch.no_grad():
            assert torch.equal(model(rows), expected(rows))
        assert torch.equal(table.weight, expected.weight)


def test_tensors_of_other_devices_go_by_handle() -> None:
    """On meta, which has handles as accelerators have, and nothing to compute."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("meta")
    model = DataParallel(module, ["meta", "meta"], workers="processes")
    for rows in (6, 7):
        x = torch.ones(rows, 4, device="meta", requires_grad=True)
        out = model(x)
        assert (out.shape, out.device.type) == ((rows, 3), "meta")
        module.zero_grad()
        out.sum().backward()
        for tensor in (x, *module.parameters()):
            assert (tensor.grad.shape, tensor.grad.device.type) == (tensor.shape, "meta")
