"""Steps whose gradients are finite, and far larger than those before."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ModelError, StepSkipped
from lockstep.guarding.spikes import Losses, Norms, as_float, as_int
from tests.guarding.faulty import batch
from tests.ranks import run_ranks
from tests.same import assert_same

NUM_STEPS = 24


def to_train(group: dist.ProcessGroup | None, how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A parallel model, the same on each rank, and its optimizer."""
    torch.set_num_threads(1)
    net = nn.Linear(6, 3)
    nn.init.constant_(net.weight, 0.3)
    nn.init.zeros_(net.bias)
    model = lockstep.parallelize(net, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if "sharded" in how:
        lockstep.shard_optimizer(optimizer)
    return model, optimizer


def guarded_steps(
    rank: int, group: dist.ProcessGroup | None, factors: dict[int, tuple[int, float]], how: str
) -> tuple[list[Any], list[torch.Tensor]]:
    """Take steps, in some of which a rank's loss is multiplied; leave them out, or guard them."""
    model, optimizer = to_train(group, how)
    told = []
    for step in range(NUM_STEPS):
        if step in factors and how.startswith("left out"):
            continue
        with lockstep.guard(model, optimizer, spike=6.0) as guarded:
            loss = model(batch(rank, step)).square().mean()
            of_rank, factor = factors.get(step, (0, 1.0))
            (loss * (factor if rank == of_rank else 1.0)).backward()
            if "clipped" in how:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        optimizer.zero_grad()
        told.append(guarded)
    return told, [p.detach().clone() for p in model.parameters()]


# On one rank the norm is that before the update, behind a clipping.
@pytest.mark.parametrize(
    ("size", "how"),
    [(size, how) for size in (1, 2, 3) for how in ("plain", "sharded", "clipped")[: size + 1]],
)
def test_a_step_with_far_larger_gradients_is_left_out(size: int, how: str) -> None:
    factors = {20: (size - 1, 50.0), 22: (0, 1e20)}

    def body(rank: int, group: dist.ProcessGroup) -> None:
        told, parameters = guarded_steps(rank, group, factors, how)
        assert [n for n, step in enumerate(told) if step.skipped] == [20, 22]
        for number, (culprit, _) in factors.items():
            blame = told[number].blame
            assert (blame.kind, blame.rank, blame.step) == ("spike", culprit, number)
            assert "deviations above the mean of the last" in blame.error
        assert [told[21].num_skipped, told[23].num_skipped] == [1, 2]
        _, expected = guarded_steps(rank, group, factors, f"left out, {how}")
        assert_same(parameters, expected, 0)

    run_ranks(size, body, backend="threads")


def test_without_a_limit_no_step_is_too_large() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(6, 3), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(NUM_STEPS):
            with lockstep.guard(model, optimizer) as guarded:
                (model(batch(rank, step)).sum() * 10.0**step).backward()
                optimizer.step()
            assert not guarded.skipped

    run_ranks(2, body, backend="threads")


def test_nobody_alone_is_to_blame_where_all_ranks_are_too_large() -> None:
    norms = Norms()
    for step in range(20):
        norms.add([1.0 + step % 2 / 10, 0.5])
    assert norms.spike([1.2, 1.3], 6.0) is None
    assert norms.spike([9.0, 0.5], 6.0).ranks == (0,)
    assert norms.spike([9.0, 10.0], 6.0).ranks == (1, 0)


def test_steps_that_were_too_large_are_not_remembered() -> None:
    norms = Norms()
    for _ in range(15):
        norms.add([1.0, 0.0])
    norms.add([0.0, 0.0])  # of ranks without data
    assert norms.spike([100.0, 0.0], 6.0) is None, "too few are known"
    norms.add([1.0, 0.0])
    norms.add([float("inf"), 0.0])  # which would be in all later means
    assert norms.spike([1.5, 0.0], 6.0) is None, "they may be all alike"
    assert norms.spike([1.7, 0.0], 6.0) is not None
    assert norms.spike([float("inf"), 0.0], 6.0) is not None
    later = Norms()
    later.load(norms.state())
    assert later.state() == [1.0] * 16
    for number in (0.0, 1.5, float("inf")):
        assert as_float(as_int(number)) == number


def test_steps_that_stay_too_large_end_the_run() -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with pytest.raises(StepSkipped, match="3 guarded steps in a row"):  # noqa: PT012
        for step in range(40):
            guard = lockstep.guard(model, optimizer, spike=6, max_consecutive=3)
            with guard:
                (model(torch.ones(1, 2)).sum() * (100 if step > 20 else 1)).backward()
                optimizer.step()
            optimizer.zero_grad()
    assert step == 23


@pytest.mark.parametrize("spike", [float("nan"), -1.0, "6"])
def test_a_limit_is_a_number(spike: Any) -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with pytest.raises((TypeError, ValueError), match="spike"):
        lockstep.guard(model, optimizer, spike=spike)


def test_what_a_guard_knows_is_part_of_what_a_run_goes_on_from(tmp_path: Path) -> None:
    """A run that is ended and goes on judges and counts as one that isn't."""

    def run(folder: Path, last: int) -> tuple[list[bool | None], dict[str, Any]]:
        torch.manual_seed(0)
        model = lockstep.parallelize(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        guard = lockstep.guard(model, optimizer, spike=6.0)
        data = TensorDataset(1 + torch.rand(60, 6))
        loader = lockstep.DataLoader(data, batch_size=2)
        things = {"model": model, "optimizer": optimizer, "guard": guard}
        steps = lockstep.steps(loader, folder, epochs=1, save_every=1, **things)
        skipped = []
        for (x,) in steps:
            with guard as step:
                (model(x).square().mean() * (1e3 if steps.step in (18, 25) else 1)).backward()
                optimizer.step()
            optimizer.zero_grad()
            skipped.append(step.skipped)
            if steps.step == last:
                break
        return skipped, guard.state_dict()

    whole, known = run(tmp_path / "whole", 99)
    assert [n for n, is_skipped in enumerate(whole) if is_skipped] == [18, 25]
    first, _ = run(tmp_path / "parts", 20)
    second, after = run(tmp_path / "parts", 99)
    assert len(second) < len(whole)
    assert second == whole[-len(second) :]
    assert after == known
    assert known["num_skipped"] == 2
    assert first == whole[: len(first)]


def watched_steps(
    rank: int, group: dist.ProcessGroup | None, added: dict[int, tuple[int, float]], how: str
) -> tuple[list[Any], list[torch.Tensor]]:
    """Take steps, in some of which a rank's loss is larger, though its gradients are not."""
    model, optimizer = to_train(group, how)
    guard = lockstep.guard(model, optimizer, spike=6.0)

    def body(step: int) -> None:
        of_rank, more = added.get(step, (0, 0.0))
        samples = model(batch(rank, step)).square().mean(1) + (more if rank == of_rank else 0.0)
        loss = lockstep.mean(samples, process_group=group) if "mean" in how else samples.mean()
        guard.watch(loss)
        loss.backward()
        optimizer.step()

    told = []
    for step in range(NUM_STEPS):
        if step in added and how.startswith("left out"):
            continue
        told.append(guard.run(body, step))
        optimizer.zero_grad()
    return told, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("size", "how"),
    [(size, how) for size in (1, 2, 3) for how in ("plain", "plain, mean", "sharded")[: size + 1]],
)
def test_a_step_with_a_far_larger_loss_is_left_out(size: int, how: str) -> None:
    added = {20: (size - 1, 1e4), 21: (0, float("nan")), 22: (0, float("inf"))}

    def body(rank: int, group: dist.ProcessGroup) -> None:
        told, parameters = watched_steps(rank, group, added, how)
        assert [n for n, step in enumerate(told) if step.skipped] == [20, 21, 22]
        for number, (culprit, _) in added.items():
            blame = told[number].blame
            # All ranks have the mean of all.
            who = None if "mean" in how and size > 1 else culprit
            assert (blame.kind, blame.rank, blame.step) == ("spike", who, number)
            assert "mean of the ranks' losses is" in blame.error
        _, expected = watched_steps(rank, group, added, f"left out, {how}")
        assert_same(parameters, expected, 0)

    run_ranks(size, body, backend="threads")


def test_losses_may_be_negative_all_alike_or_of_some_ranks() -> None:
    losses = Losses()
    for step in range(20):
        losses.add([-2.0 - step % 2 / 10, math.nan])
    losses.add([math.nan, math.nan])
    losses.add([math.inf, -2.0])
    assert len(losses.state()) == 20
    assert losses.spike([-1.9, math.nan], 6.0) is None
    assert losses.spike([math.nan, math.nan], 6.0) is None
    assert losses.spike([-3.0, 2.0], 6.0).ranks == (1,)
    assert losses.spike([-9.0, 2.0], 6.0) is None, "the mean is as before"
    zeros = Losses()
    for _ in range(20):
        zeros.add([0.0])
    assert zeros.spike([1.0], 6.0) is None, "nothing is known of how far losses vary"


def test_losses_of_micro_batches_are_added_up() -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    guard = lockstep.guard(model, optimizer, spike=6.0)
    with guard as step:
        for loss in (torch.tensor([1.5]), 2, model(torch.zeros(1, 2)).sum() * 0 + 0.25):
            step.watch(loss)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    known = guard.state_dict()
    assert known["losses"] == [[3.75]]
    guard.load_state_dict({name: value for name, value in known.items() if name != "losses"})
    assert guard.state_dict()["losses"] == [[]]


@pytest.mark.parametrize(
    "loss", [torch.ones(2), "1", None, True, torch.ones((), dtype=torch.cfloat)]
)
def test_a_loss_is_a_number(loss: Any) -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with pytest.raises(TypeError, match="watch"):
        lockstep.guard(model, optimizer, spike=6.0).watch(loss)


def test_a_loss_behind_the_update_is_too_late() -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = model.weight.detach().clone()
    guard = lockstep.guard(model, optimizer, spike=6.0)
    with pytest.raises(ModelError, match="too late"), guard as step:  # noqa: PT012
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        step.watch(loss)
    assert torch.equal(model.weight, before)
