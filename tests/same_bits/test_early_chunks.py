"""Gradients that leave a rank while its last shard is computed, over Gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed, ModelMismatch
from lockstep.nn import current_shard
from lockstep.same_bits.messages import Messages, Sent
from tests.ranks import run_ranks
from tests.same_bits.runs import OPTIMIZERS, Run, batch_of, bits_on, differing, model_of


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each chunk have few gradients."""
    monkeypatch.setattr("lockstep.same_bits.chunks._CAP_BYTES", 1024)


def run_of(group: dist.ProcessGroup | None, kind: str = "transformer", num_shards: int = 6) -> Run:
    return Run(model_of(kind), OPTIMIZERS["SGD"], group, num_shards)


def assert_same_bits(body: Callable[[dist.ProcessGroup | None], Run], *num_ranks: int) -> None:
    (alone,) = bits_on(1, "", body)
    for each in num_ranks:
        for bits in bits_on(each, "gloo", body):
            assert not differing(bits, alone), each


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_leave_in_the_backward_of_the_last_shard(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []  # whether in a shard's turn
    start = Messages.start

    def noting(self: Messages, rows: torch.Tensor) -> Sent:
        started.append(current_shard() is not None)
        return start(self, rows)

    monkeypatch.setattr(Messages, "start", noting)

    def body(group: dist.ProcessGroup | None) -> Run:
        run = run_of(group)
        run.steps([0, 1, 2])
        return run

    assert_same_bits(body, num_ranks)
    assert len(started) % (3 * num_ranks) == 0  # each chunk once in each step of each rank
    assert started.count(True) >= len(started) // 2  # but those of the first step


@pytest.mark.parametrize("kind", ["convnet", "partly used"])
def test_parameters_that_some_shards_use_have_the_bits_of_one_process(kind: str) -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = run_of(group, kind, 7)
        run.steps([*range(5)])
        return run

    assert_same_bits(body, 2, 3)


def two_backwards(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
    lockstep.mean(F.cross_entropy(model(-x), y, reduction="none")).backward()


def penalty_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    sum(p.square().sum() for p in model.last.parameters()).backward()  # type: ignore[union-attr]
    lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()


def penalty_last(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
    sum(p.square().sum() for p in model.last.parameters()).backward()  # type: ignore[union-attr]


def clipped(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def replaced(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
    weight = model.last.weight  # type: ignore[union-attr]
    weight.grad = weight.grad * 2  # type: ignore[operator]


def dropped(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
    if x.mean() > 0:
        model.last.weight.grad = None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "backwards", [two_backwards, penalty_first, penalty_last, clipped, replaced, dropped]
)
def test_gradients_that_change_after_they_left_are_sent_once_more(
    backwards: Callable[[nn.Module, torch.Tensor, torch.Tensor], None],
) -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = run_of(group)
        for number in range(4):
            for x, y in lockstep.shards(run.model, batch_of(number), 6, step=number):
                backwards(run.model, x, y)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    assert_same_bits(body, 2)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_hooks_of_the_program_come_before_the_gradient_leaves() -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = run_of(group)
        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        run.steps([0, 1, 2])
        return run

    assert_same_bits(body, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_after_gradients_left_is_left_out_on_all(rank: int) -> None:
    def failing_step(run: Run, number: int | None) -> None:
        for x, y in lockstep.shards(run.model, batch_of(2), 6, step=2):
            F.cross_entropy(run.model(x), y).backward()
            shard = current_shard()
            assert shard is not None
            if number is None or (number == rank and shard.number == 3 * rank + 2):
                raise ZeroDivisionError

    def body(group: dist.ProcessGroup | None) -> Run:
        run = run_of(group)
        run.steps([0, 1])
        with pytest.raises((ZeroDivisionError, CollectiveFailed)):
            failing_step(run, None if group is None else group.rank())
        run.steps([3, 4])
        return run

    assert_same_bits(body, 2)


def test_a_number_of_shards_may_change_on_all_ranks() -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = run_of(group)
        run.steps([0, 1])
        run.num_shards = 4
        run.steps([2, 3])
        run.num_shards = 6
        run.steps([4, 5])
        return run

    assert_same_bits(body, 2, 3)


def test_a_number_of_shards_that_changes_on_one_rank_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        run = run_of(group)
        run.steps([0, 1])
        run.num_shards = 6 - rank
        with pytest.raises(ModelMismatch, match="number of shards is 5 on rank 1 and 6 on rank 0"):
            run.steps([2])
        run.num_shards = 6
        run.steps([2])

    run_ranks(2, body, backend="gloo")
