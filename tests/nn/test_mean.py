"""The mean over the global batch: its value, and the gradients after backward."""

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
from tests.nn.test_parallelize import in_place, wrapped
from tests.ranks import run_ranks

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
SPLITS = [[12], [6, 6], [1, 11], [0, 12], [5, 0, 7], [0, 0, 12, 0], [3, 3, 3, 3]]


with torch.random.fork_rng():
    torch.manual_seed(11)
    _CLASSIFIER = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def classifier() -> nn.Module:
    """The same one every time. (Ranks, as threads, share torch's seed.)"""
    return copy.deepcopy(_CLASSIFIER)


def samples(count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and weights."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(count, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    return x, y, torch.rand(count, dtype=torch.float64, generator=generator)


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def by_hand(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return model


def assert_gradients(model: nn.Module, oracle: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE)


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


@pytest.mark.parametrize("parallel", [in_place, wrapped])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [0, 12], [4, 0, 8]], ids=str)
def test_micro_batches_of_different_sizes_are_one_batch(parallel, sizes: list[int]) -> None:
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x, y).mean().backward()
    # Of each micro-batch, which rows: of the first the first rank may have none, and so on.
    micro_batches = [[0, 1, 2, 11], [3], [4, 5, 6, 7, 8, 9, 10]]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = parallel(classifier(), group)
        own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for _ in range(3):
            model.zero_grad()
            for number, rows in enumerate(micro_batches, start=1):
                mine = [row for row in rows if row in own]
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


@pytest.mark.parametrize("sizes", [[12], [5, 7], [0, 12]], ids=str)
@pytest.mark.parametrize("of", ["inputs", "parameters", "both"])
def test_gradients_that_are_asked_for_are_no_micro_batch(of: str, sizes: list[int]) -> None:
    """As for a saliency map, or a gradient penalty: nothing is added up in ``.grad``."""
    (x, y, _), oracle = samples(), classifier()
    losses_of(oracle, x, y).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(classifier(), group)
        own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for _ in range(2):
            model.zero_grad()
            for rows in ([0, 1, 2, 11], [3], [4, 5, 6, 7, 8, 9, 10]):
                mine = [row for row in rows if row in own]
                inputs = x[mine].requires_grad_()
                wanted = [*([inputs] * (of != "parameters")), *model.parameters()]
                wanted = wanted[:1] if of == "inputs" else wanted
                with contextlib.nullcontext() if rows[-1] == 10 else lockstep.accumulate(model):
                    loss = lockstep.mean(losses_of(model, inputs, y[mine]), process_group=group)
                    torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
                    loss.backward()
            assert_gradients(model, oracle)

    run_ranks(len(sizes), body)


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
