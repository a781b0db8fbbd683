"""``all_gather()``: losses between the samples of a batch, whose gradients are one process's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import CollectiveFailed, CollectiveMismatch
from tests.ranks import BACKENDS, run_ranks

every_group = pytest.mark.parametrize("backend", [*BACKENDS, "shm"])
SPLITS = [[6, 6], [1, 11], [0, 12], [5, 0, 7]]


class Towers(nn.Module):
    """Two encoders, and a temperature behind what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(3, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.double()
        generator = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
        for parameter in (*self.left.parameters(), *self.right.parameters()):
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)


def pairs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (5, 3))


def contrastive(left: Tensor, right: Tensor, temperature: Tensor, begin: int = 0) -> Tensor:
    """The losses of the rows of ``left``, which belong to those of ``right`` from ``begin`` on."""
    target = torch.arange(begin, begin + len(left))
    return F.cross_entropy(left @ right.T / temperature, target, reduction="none")


def oracle(penalty: bool = False) -> Towers:
    towers = Towers()
    left, right = towers(*pairs())
    loss = contrastive(left, right, towers.temperature).mean()
    if penalty:
        (slope,) = torch.autograd.grad(loss, [towers.left.weight], create_graph=True)
        loss = loss + slope.square().sum()
    loss.backward()
    return towers


def assert_gradients(towers: Towers, expected: Towers) -> None:
    for found, wanted in zip(towers.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


@every_group
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_a_loss_of_all_samples_on_each_rank_is_that_of_one_process(
    sizes: list[int], backend: str
) -> None:
    expected = oracle()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        towers = lockstep.parallelize(Towers(), process_group=group)
        part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for _ in range(2):
            towers.zero_grad()
            left, right = towers(*(each[part] for each in pairs()))
            left = lockstep.all_gather(left, process_group=group)
            right = lockstep.all_gather(right, process_group=group)
            contrastive(left, right, towers.temperature).mean().backward()
            assert_gradients(towers, expected)

    run_ranks(len(sizes), body, backend=backend)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_a_mean_of_losses_of_own_samples_is_that_of_one_process(sizes: list[int]) -> None:
    expected = oracle()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        towers = lockstep.parallelize(Towers(), process_group=group)
        part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        left, right = towers(*(each[part] for each in pairs()))
        right = lockstep.all_gather(right, process_group=group)
        losses = contrastive(left, right, towers.temperature, part.start)
        lockstep.mean(losses, process_group=group).backward()
        assert_gradients(towers, expected)

    run_ranks(len(sizes), body)


def test_what_is_gathered_is_in_rank_order_and_has_all_bits() -> None:
    parts = [torch.tensor([[-0.0, torch.nan]]), torch.empty(0, 2), torch.tensor([[1.0, torch.inf]])]

    def body(rank: int, group: dist.ProcessGroup) -> Tensor:
        assert lockstep.all_gather(torch.tensor(rank), process_group=group).tolist() == [0, 1, 2]
        rows = lockstep.all_gather(parts[rank], process_group=group)
        assert not rows.requires_grad
        return rows

    for rows in run_ranks(3, body):
        assert rows.view(torch.int32).equal(torch.cat(parts).view(torch.int32))


def test_gradients_can_be_differentiated_again() -> None:
    expected = oracle(penalty=True)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        towers = Towers()
        part = [slice(0, 5), slice(5, 12)][rank]
        left, right = towers(*(each[part] for each in pairs()))
        left = lockstep.all_gather(left, process_group=group)
        right = lockstep.all_gather(right, process_group=group)
        # One rank's loss is that of all: the other's counts nothing.
        loss = contrastive(left, right, towers.temperature).mean() * (rank == 0)
        (slope,) = torch.autograd.grad(loss, [towers.left.weight], create_graph=True)
        slope = lockstep.all_gather(slope[None], process_group=group).sum(0)
        (loss + slope.square().sum() * (rank == 0)).backward()
        for parameter, wanted in zip(towers.parameters(), expected.parameters(), strict=True):
            found = parameter.grad
            assert found is not None
            dist.all_reduce(found, group=group)
            torch.testing.assert_close(found, wanted.grad)

    run_ranks(2, body)


def test_half_precision_is_summed_in_float32() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Tensor:
        own = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
        rows = lockstep.all_gather(own, process_group=group)
        (rows * (256 if rank == 0 else 0.75)).sum().backward()
        assert own.grad is not None
        return own.grad

    # In bfloat16 each of two sums would be rounded down to 256.
    assert [gradient.item() for gradient in run_ranks(3, body)] == [258, 258, 258]


def test_on_one_rank_it_is_the_tensor_itself() -> None:
    own = torch.ones(2, 1, requires_grad=True)
    assert lockstep.all_gather(own) is own
    assert lockstep.all_gather(own[0, 0]).shape == (1,)  # as on several


def test_ranks_that_give_something_else_are_named() -> None:
    def other_shape(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(CollectiveMismatch, match=r"rows.*\(3,\).*rank 1|rank 1.*\(3,\)"):
            lockstep.all_gather(torch.ones(2, 2 + rank), process_group=group)

    def no_tensor(rank: int, group: dist.ProcessGroup) -> None:
        kind = TypeError if rank == 1 else CollectiveMismatch
        with pytest.raises(kind, match="a tensor to concatenate"):
            lockstep.all_gather("text" if rank == 1 else torch.ones(1), process_group=group)

    def joined(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(1, 1), process_group=group)
        refused = pytest.raises(CollectiveFailed, match=r"all_gather.*inside of join")
        with lockstep.join(model), refused:
            lockstep.all_gather(torch.ones(1), process_group=group)

    for body in (other_shape, no_tensor, joined):
        run_ranks(2, body)
