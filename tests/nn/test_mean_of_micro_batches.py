"""Micro-batches: means whose gradients are accumulated are those of one batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.nn.classifying import assert_gradients, classifier, losses_of, samples
from tests.nn.parallel import in_place, wrapped
from tests.ranks import run_ranks


@pytest.mark.parametrize("parallel", [in_place, wrapped])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [0, 12], [4, 0, 8]], ids=str)
def test_micro_batches_of_different_sizes_are_one_batch(parallel, sizes: list[int]) -> None:
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x, y).mean().backward()
    # Of each micro-batch, which rows: of the first the first rank may have none, and so on.
    micro_batches = [[0, 1, 2, 11], [3], [4, 5, 6, 7, 8, 9, 10]]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = parallel(classifier(), group)
        local = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for _ in range(3):
            model.zero_grad()
            for number, rows in enumerate(micro_batches, start=1):
                mine = [row for row in rows if row in local]
                is_last = number == len(micro_batches)
                with contextlib.nullcontext() if is_last else lockstep.accumulate(model):
                    losses = losses_of(model, x[mine], y[mine])
                    lockstep.mean(losses, process_group=group).backward()
            assert_gradients(model, oracle)

    run_ranks(len(sizes), body)


@pytest.mark.parametrize("where", ["forward inside", "backward inside"])
def test_accumulation_is_decided_at_backward(where: str) -> None:
    x, y, _ = samples()

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = in_place(classifier(), group)
        rows = slice(0, 6) if rank == 0 else slice(6, 12)
        if where == "forward inside":
            with lockstep.accumulate(model):
                loss = losses_of(model, x[rows], y[rows]).mean()
            loss.backward()
        else:
            loss = losses_of(model, x[rows], y[rows]).mean()
            with lockstep.accumulate(model):
                loss.backward()
        return model[0].weight.grad

    first, second = run_ranks(2, body)
    assert torch.equal(first, second) == (where == "forward inside")


def drop_but_one(model: nn.Module) -> None:
    """As where a parameter is in no optimizer."""
    for parameter in [*model.parameters()][1:]:
        parameter.grad = None
    next(model.parameters()).grad.zero_()


DROPS: dict[str, Callable[[nn.Module], None]] = {
    "to None": lambda model: model.zero_grad(),
    "to zero": lambda model: model.zero_grad(set_to_none=False),
    "all but one": drop_but_one,
}


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS.keys())
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_that_was_dropped_does_not_count(
    num_ranks: int, drop: Callable[[nn.Module], None]
) -> None:
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x[4:], y[4:]).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        with lockstep.accumulate(model):
            lockstep.mean(losses_of(model, x[:4], y[:4]), process_group=group).backward()
        drop(model)
        with lockstep.accumulate(model):
            lockstep.mean(losses_of(model, x[4:6], y[4:6]), process_group=group).backward()
        lockstep.mean(losses_of(model, x[6:], y[6:]), process_group=group).backward()
        assert_gradients(model, oracle)

    run_ranks(num_ranks, body)


def test_a_micro_batch_whose_gradients_are_zero_counts() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    oracle = nn.Linear(3, 1).double()
    model = lockstep.parallelize(copy.deepcopy(oracle))
    (oracle(x)[2:].square().sum() / 4).backward()
    with lockstep.accumulate(model):
        lockstep.mean(model(x)[:2].square() * 0).backward()
    lockstep.mean(model(x)[2:].square()).backward()
    assert_gradients(model, oracle)


def test_another_models_mean_is_left_out_of_the_batch() -> None:
    (x, y, _), oracle, critic_oracle = samples(), classifier(), classifier()
    losses_of(oracle, x, y).mean().backward()
    losses_of(critic_oracle, x[:2], y[:2]).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, critic = in_place(classifier(), group), in_place(classifier(), group)
        with lockstep.accumulate(model):
            lockstep.mean(losses_of(model, x[:5], y[:5]), process_group=group).backward()
        lockstep.mean(losses_of(critic, x[:2], y[:2]), process_group=group).backward()
        lockstep.mean(losses_of(model, x[5:], y[5:]), process_group=group).backward()
        assert_gradients(model, oracle)
        assert_gradients(critic, critic_oracle)

    run_ranks(2, body)


def test_two_means_over_different_numbers_cannot_be_accumulated() -> None:
    x, y, _ = samples()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        losses = losses_of(model, x, y)
        both = lockstep.mean(losses, process_group=group)
        both = both + lockstep.mean(losses[:3], process_group=group)
        with (
            lockstep.accumulate(model),
            pytest.raises(
                ValueError, match=r"two means, over (24 and over 6|6 and over 24) samples"
            ),
        ):
            both.backward()

    run_ranks(2, body)


@pytest.mark.parametrize("reentrant", [True, False])
def test_micro_batches_of_a_model_inside_of_checkpoints(reentrant: bool) -> None:
    """Seen from outside of a reentrant checkpoint, the backward reaches no parameter in it."""
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x, y).mean().backward()

    def losses(model: nn.Module, rows: slice) -> torch.Tensor:
        start = x[rows].clone().requires_grad_()
        output = checkpoint(model, start, use_reentrant=reentrant, preserve_rng_state=False)
        return F.cross_entropy(output, y[rows], reduction="none")

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        for _ in range(2):
            model.zero_grad()
            with lockstep.accumulate(model):
                lockstep.mean(losses(model, slice(0, 3)), process_group=group).backward()
            lockstep.mean(losses(model, slice(3, None)), process_group=group).backward()
            assert_gradients(model, oracle)

    run_ranks(2, body)


def test_models_with_different_batches_cannot_share_a_mean() -> None:
    """What to divide by for one of them is wrong for the other."""
    x, y, _ = samples()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        first, second = (in_place(classifier(), group) for _ in range(2))
        with lockstep.accumulate(first), lockstep.accumulate(second):
            lockstep.mean(losses_of(first, x[:3], y[:3]), process_group=group).backward()
            both = losses_of(first, x[3:], y[3:]) + losses_of(second, x[3:], y[3:])
            with pytest.raises(ValueError, match="different numbers of samples: 24, 18"):
                lockstep.mean(both, process_group=group).backward()

    run_ranks(2, body)


@pytest.mark.parametrize("sizes", [[12], [5, 7], [0, 12]], ids=str)
@pytest.mark.parametrize("of", ["inputs", "parameters", "both"])
def test_gradients_that_are_asked_for_are_no_micro_batch(of: str, sizes: list[int]) -> None:
    """As for a saliency map, or a gradient penalty: nothing is added up in ``.grad``."""
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x, y).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        local = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for _ in range(2):
            model.zero_grad()
            for rows in ([0, 1, 2, 11], [3], [4, 5, 6, 7, 8, 9, 10]):
                mine = [row for row in rows if row in local]
                inputs = x[mine].requires_grad_()
                wanted = [*([inputs] * (of != "parameters")), *model.parameters()]
                wanted = wanted[:1] if of == "inputs" else wanted
                with contextlib.nullcontext() if rows[-1] == 10 else lockstep.accumulate(model):
                    loss = lockstep.mean(losses_of(model, inputs, y[mine]), process_group=group)
                    torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
                    loss.backward()
            assert_gradients(model, oracle)

    run_ranks(len(sizes), body)


def test_copies_of_the_model_are_other_models() -> None:
    """EMA: a copy that is not in the backward doesn't scale anything."""
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x, y).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        average = copy.deepcopy(model)
        with lockstep.accumulate(model):
            lockstep.mean(losses_of(model, x[:5], y[:5]), process_group=group).backward()
        with torch.no_grad():
            lockstep.mean(losses_of(average, x, y), process_group=group)
        lockstep.mean(losses_of(model, x[5:], y[5:]), process_group=group).backward()
        assert_gradients(model, oracle)

    run_ranks(2, body)
