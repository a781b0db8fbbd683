"""Steps in shards that fail on a rank, and what they refuse."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed, ModelError, ModelMismatch, SplitError
from tests.ranks import run_ranks
from tests.same_bits.runs import OPTIMIZERS, Run, batch_of, bits_on, differing, model_of


def linear(group: dist.ProcessGroup | None = None, **options: Any) -> nn.Module:
    return lockstep.parallelize(nn.Linear(3, 2), process_group=group, **options)


def step_of(model: nn.Module, body: Callable[[Any], object], *args: Any, **options: Any) -> None:
    """Run ``body`` on each shard of a step."""
    for x in lockstep.shards(model, *args, **options):
        body(x)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_step_that_fails_on_a_rank_is_left_out_on_all(backend: str) -> None:
    """And the next one has the bits that it would have had."""

    def body(group: dist.ProcessGroup | None) -> Run:
        run = Run(model_of("convnet"), OPTIMIZERS["SGD"], group, 4)
        run.steps([0])
        rank = 0 if group is None else group.rank()
        errors: list[Exception] = []
        try:
            for number, (x, _) in enumerate(lockstep.shards(run.model, batch_of(1), 4, step=1)):
                run.model(x).sum().backward()
                if rank == 0 and number == 1:
                    raise ZeroDivisionError
        except (ZeroDivisionError, CollectiveFailed) as error:
            errors = [error.with_traceback(None)]  # which would hold the loop
        assert [getattr(error, "ranks", (0,)) for error in errors] == [(0,)]
        assert all(p.grad is None for p in run.model.parameters())
        run.steps([2])
        return run

    (alone,) = bits_on(1, "", body)
    for bits in bits_on(2, backend, body):
        assert not differing(bits, alone)


def test_a_loop_that_is_held_and_left_is_given_up_by_the_next() -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = Run(model_of("convnet"), OPTIMIZERS["SGD"], group, 4)
        step = lockstep.shards(run.model, batch_of(0), 4, step=0)
        for x, _ in step:
            run.model(x).sum().backward()
            break
        with pytest.raises(ModelError, match="SGD steps in the loop over"):
            run.optimizer.step()
        held = step
        run.steps([1])
        with pytest.raises(ModelError, match="Another loop"):
            next(held)
        assert [*held] == []
        return run

    (alone,) = bits_on(1, "", body)
    for bits in bits_on(2, "threads", body):
        assert not differing(bits, alone)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), lockstep.SyncBatchNorm(3)), "'1' is a SyncBatch"),
        (lambda: nn.Sequential(nn.Embedding(3, 3, sparse=True)), "'0' has sparse gradients"),
        (lambda: nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)), "'0' has max_norm"),
        (lambda: nn.Linear(3, 3).half(), "the gradient of 'weight' is float16"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), "the gradient of 'weight' is complex64"),
        (lambda: nn.Linear(3, 3, device="meta"), "'weight' is on meta"),
    ],
)
def test_models_are_refused_by_name(make: Callable[[], nn.Module], words: str) -> None:
    model = lockstep.parallelize(make())
    with pytest.raises(ModelError, match=words):
        lockstep.shards(model, torch.zeros(4, 3), 2)


def test_a_part_that_is_parallel_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    lockstep.parallelize(model[1])
    with pytest.raises(ModelError, match="'1' is parallel by itself"):
        lockstep.shards(lockstep.parallelize(model), torch.zeros(4, 3), 2)
    with pytest.raises(ModelError, match="isn't parallel"):
        lockstep.shards(nn.Linear(3, 3), torch.zeros(4, 3), 2)


def test_no_sync_and_join_and_hooks_are_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = linear(group)
        with lockstep.no_sync(model):
            with pytest.raises(ModelError, match="it is in no_sync"):
                lockstep.shards(model, torch.zeros(4, 3), 2)
            model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ModelError, match="gradients that were added up under no_sync"):
            lockstep.shards(model, torch.zeros(4, 3), 2)
        model.zero_grad()
        hooked = lockstep.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        hooked.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
        with pytest.raises(ModelError, match="a communication hook"):
            lockstep.shards(hooked, torch.zeros(4, 3), 2)

    run_ranks(2, body)


def test_what_belongs_behind_the_loop_is_refused_in_it() -> None:
    model, other = linear(), nn.Linear(3, 2)
    for _ in lockstep.shards(model, torch.zeros(4, 3), 2):
        for call in (
            lambda: lockstep.any(True),
            lambda: lockstep.broadcast(1),
            lambda: lockstep.reduce(torch.ones(1), "sum"),
            lambda: lockstep.average_gradients(other),
            torch.optim.SGD(model.parameters(), lr=1.0).step,
        ):
            with pytest.raises(ModelError, match=r"in the loop over lockstep.shards\(\)"):
                call()


def test_a_backward_of_another_parallel_model_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, other = linear(group), linear(group)
        with pytest.raises(ModelError, match="A backward reaches another parallel model"):
            step_of(model, lambda x: other(x).sum().backward(), torch.zeros(4, 3), 2)

    run_ranks(2, body)


def test_numbers_of_shards_and_batches_are_checked() -> None:
    model = linear()
    with pytest.raises(SplitError, match="Give num_shards"):
        lockstep.shards(model, torch.zeros(4, 3))
    with pytest.raises(ValueError, match="num_shards"):
        lockstep.shards(model, torch.zeros(4, 3), 0)
    with pytest.raises(SplitError, match="without a tensor"):
        lockstep.shards(model, "abc", 2)
    with pytest.raises(SplitError, match=r"batch\[0\] has 4 samples and batch\[1\] has 5"):
        lockstep.shards(model, (torch.zeros(4, 3), torch.zeros(5)), 2)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(SplitError, match="2 shards can't be divided among 3 ranks"):
            lockstep.shards(linear(group), torch.zeros(4, 3), 2)

    run_ranks(3, body)


def test_ranks_that_differ_are_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = linear(group)

        def backward(x: torch.Tensor) -> None:
            model(x).sum().backward()

        with pytest.raises(ModelMismatch, match="number of shards is 3 on rank 1 and 2 on rank 0"):
            step_of(model, backward, torch.zeros(4, 3), 2 + rank)
        with pytest.raises(ModelMismatch, match="seed and step is"):
            step_of(model, backward, torch.zeros(4, 3), 2, step=5 * rank)
        assert model.weight.grad is None
        step_of(model, backward, torch.ones(4, 3), 2, step=9)
        assert model.weight.grad is not None

    run_ranks(2, body)


def test_means_have_one_weight() -> None:
    model = linear()

    def two_means(x: torch.Tensor) -> None:
        lockstep.mean(model(x).sum(1)).backward()
        lockstep.mean(model(x).sum(1)[:1]).backward()

    with pytest.raises(ValueError, match="Shard 0 has two means, over 1 and over 2 samples"):
        step_of(model, two_means, torch.ones(4, 3), 2)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = linear(group)

        def one_mean(x: torch.Tensor) -> None:
            loss = model(x).sum(1)
            (loss.sum() if rank else lockstep.mean(loss)).backward()

        with pytest.raises(ValueError, match=r"Shard 0 had the backward of a lockstep.mean\(\)"):
            step_of(model, one_mean, torch.ones(4, 3), 2)

    run_ranks(2, body)


def test_buffers_that_depend_on_the_number_of_ranks_are_refused() -> None:
    model = lockstep.parallelize(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), broadcast_buffers=False
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=r"Shard 0 has changed the buffer '1.running_mean'"):
        step_of(model, lambda x: model(x).sum().backward(), torch.randn(4, 3), 2)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_calls_of_all_ranks_are_refused_in_the_loop(tmp_path: Path) -> None:
    model = linear()
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: lockstep.save(tmp_path, model=model), r"lockstep.save\(\) is called in the loop"),
        (lambda: lockstep.load(tmp_path, model=model), r"lockstep.load\(\) is called in the loop"),
        (lambda: lockstep.parallelize(nn.Linear(3, 2)), "A model is made parallel in the loop"),
        (lambda: lockstep.any(True), r"lockstep.any\(\) is called in the loop"),
        (lambda: lockstep.shard_optimizer(sgd), "An optimizer is sharded in the loop"),
    ]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for call, words in calls:
        with pytest.raises(ModelError, match=words):
            step_of(model, lambda _, call=call: call(), torch.zeros(4, 3), 2)  # type: ignore[misc]


def test_another_loop_in_the_loop_is_an_error() -> None:
    one, other = linear(), linear()
    with pytest.raises(ModelError, match=r"Another loop over lockstep\.shards"):
        step_of(
            one,
            lambda _: step_of(other, lambda x: other(x).sum().backward(), torch.ones(4, 3), 2),
            torch.ones(4, 3),
            2,
        )


def test_a_loop_that_is_left_early_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = linear()
    for _, x in zip(range(2), lockstep.shards(model, torch.ones(4, 3), 2), strict=False):
        model(x).sum().backward()
    gc.collect()
    assert model.weight.grad is None
    assert "left before its end" in caplog.text


def test_parameters_that_are_unfrozen_or_put_in_place_in_the_loop_are_named() -> None:
    def unfrozen(model: nn.Module) -> None:
        model[0].requires_grad_(True)

    def replaced(model: nn.Module) -> None:
        model[0].weight = nn.Parameter(torch.ones(3, 3))

    for change in unfrozen, replaced:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model[0].requires_grad_(False)
        lockstep.parallelize(model)

        def body(x: torch.Tensor, change: Any = change, model: nn.Module = model) -> None:
            change(model)
            model(x).sum().backward()

        with pytest.raises(ModelError, match=r"'0.weight' has a gradient"):
            step_of(model, body, torch.ones(4, 3), 2)


def test_buffers_that_differ_before_the_step_are_an_error_on_all_ranks() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), process_group=group
        )
        step_of(model, lambda x: model(x).square().sum().backward(), torch.rand(8, 3), 4)
        model[1].running_mean += rank
        with pytest.raises(ModelMismatch, match="digest of the buffers"):
            step_of(model, lambda x: model(x).square().sum().backward(), torch.rand(8, 3), 4)

    run_ranks(2, body)


def test_a_buffer_with_another_form_is_named_and_gradients_are_put_back() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("cache", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.data = torch.zeros(len(x) + 1)
            return self.layer(x)

    model = lockstep.parallelize(Cache())
    before = model.layer.weight.grad = torch.ones(2, 3)
    with pytest.raises(ModelError, match="The buffer 'cache' was"):
        step_of(model, lambda x: model(x).sum().backward(), torch.ones(4, 3), 2)
    assert model.layer.weight.grad is before
