"""Steps in shards: every bit is that of one process, whatever the number of ranks."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.same_bits import Shards, bounds_of, in_memory, over_ranks, sums
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of
from tests.same_bits.runs import (
    OPTIMIZERS,
    Run,
    batch_of,
    bits_on,
    differing,
    model_of,
)

BACKENDS = ["threads", "shm", "gloo"]
SOME_STEPS = [*range(3)]


def run_of(
    kind: str, optimizer: str, group: dist.ProcessGroup | None, num_shards: int, **options: Any
) -> Run:
    run = Run(model_of(kind), OPTIMIZERS[optimizer], group, num_shards, **options)
    run.steps(SOME_STEPS, size=30, autocast=optimizer.endswith("autocast"))
    return run


def compare(
    kind: str,
    optimizer: str,
    num_shards: int,
    ranks: list[tuple[int, str]],
    **options: Any,
) -> None:
    """Fail unless runs on all these ranks end with the bits of one process."""
    (alone,) = bits_on(1, "", lambda group: run_of(kind, optimizer, group, num_shards, **options))
    for num_ranks, backend in ranks:
        for bits in bits_on(
            num_ranks,
            backend,
            lambda group: run_of(kind, optimizer, group, num_shards, **options),
        ):
            assert not differing(bits, alone), (num_ranks, backend)


@pytest.mark.parametrize(
    ("kind", "optimizer", "num_shards", "num_ranks", "backend"),
    [
        ("convnet", "SGD", 8, 3, "threads"),
        ("convnet", "AdamW", 4, 2, "gloo"),
        ("partly used", "AdamW", 8, 4, "shm"),
        ("partly used", "SGD", 5, 3, "gloo"),
        ("transformer", "AdamW under autocast", 4, 4, "threads"),
        ("transformer", "SGD", 7, 2, "shm"),
    ],
)
def test_ranks_end_with_the_bits_of_one_process(
    kind: str, optimizer: str, num_shards: int, num_ranks: int, backend: str
) -> None:
    compare(kind, optimizer, num_shards, [(num_ranks, backend)])


@pytest.mark.parametrize("policy", ["rank0", "mean"])
def test_buffers_are_those_of_one_process(policy: str) -> None:
    policies = {"*": policy}
    compare("convnet", "SGD", 4, [(3, "threads")], broadcast_buffers=policies)


@pytest.mark.parametrize("num_shards", [1, 6])
def test_gradients_are_those_of_the_whole_batch(num_shards: int) -> None:
    """Regularisation too, of which lockstep.mean() knows nothing."""
    model = nn.Sequential(nn.Linear(108, 7), nn.Tanh(), nn.Linear(7, 5)).double()

    def loss_of(one: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(one(x.double()), y, reduction="none")
        penalty = sum(p.square().sum() for p in one.parameters())
        return lockstep.mean(losses) + 0.1 * penalty

    alone = copy.deepcopy(model)
    loss = loss_of(alone, *batch_of(0, 31))
    loss.backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = lockstep.parallelize(copy.deepcopy(model), process_group=group)
        step = lockstep.shards(mine, batch_of(0, 31), num_shards)
        assert step.loss is None
        for x, y in step:
            loss_of(mine, x, y).backward()
        assert_same(gradients_of(mine), gradients_of(alone))
        assert step.loss == pytest.approx(
            F.cross_entropy(alone(batch_of(0, 31)[0].double()), batch_of(0, 31)[1]).item()
        )

    run_ranks(min(num_shards, 3), body)


def test_other_losses_are_averaged_over_the_shards() -> None:
    model = nn.Linear(108, 5).double()
    x, y = batch_of(0, 10)
    (
        sum(F.cross_entropy(model(x[a:b].double()), y[a:b]) for a, b in [(0, 4), (4, 7), (7, 10)])
        / 3
    ).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = lockstep.parallelize(copy.deepcopy(model), process_group=group)
        mine.zero_grad()
        step = lockstep.shards(mine, (x, y), 3)
        for a, b in step:
            F.cross_entropy(mine(a.double()), b).backward()
        assert_same(gradients_of(mine), gradients_of(model))
        assert step.loss is None

    run_ranks(2, body)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_shards_without_samples_are_not_yielded(size: int) -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = Run(model_of("partly used"), OPTIMIZERS["SGD"], group, 4)
        run.steps([0], size=size)
        return run

    (alone,) = bits_on(1, "", body)
    for bits in bits_on(4, "threads", body):
        assert not differing(bits, alone)


def test_several_forwards_and_backwards_are_one_shard() -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = Run(model_of("partly used"), OPTIMIZERS["SGD"], group, 4)
        step = lockstep.shards(run.model, batch_of(0), 4)
        for x, y in step:
            first = F.cross_entropy(run.model(x), y, reduction="none")
            lockstep.mean(first).backward()
            second = F.cross_entropy(run.model(-x), y, reduction="none")
            third = F.cross_entropy(run.model(2 * x), y, reduction="none")
            (lockstep.mean(second) + 0.5 * lockstep.mean(third)).backward()
            with torch.no_grad():
                lockstep.mean(second)
        run.numbers.append(step.loss)
        run.optimizer.step()
        return run

    (alone,) = bits_on(1, "", body)
    for bits in bits_on(3, "threads", body):
        assert not differing(bits, alone)


def test_gradients_are_added_to_those_before_the_loop() -> None:
    def body(group: dist.ProcessGroup | None) -> Run:
        run = Run(model_of("partly used"), OPTIMIZERS["SGD"], group, 4)
        gradients = []
        for step in range(2):
            for x, y in lockstep.shards(run.model, batch_of(step), 4):
                F.cross_entropy(run.model(x), y).backward()
            gradients.append(run.model.first.weight.grad)  # type: ignore[union-attr]
        assert gradients[0] is gradients[1]
        run.optimizer.step()
        return run

    (alone,) = bits_on(1, "", body)
    for bits in bits_on(2, "gloo", body):
        assert not differing(bits, alone)


def test_each_shard_draws_numbers_of_its_own_and_all_ranks_the_same_after_the_loop() -> None:
    def body(rank: int, group: dist.ProcessGroup | None) -> list[Any]:
        model = lockstep.parallelize(copy.deepcopy(nn.Linear(2, 2)), process_group=group)
        drawn = []
        for _ in range(2):
            for x in lockstep.shards(model, torch.zeros(4, 2), 4):
                drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
                model(x).sum().backward()
        return drawn

    alone = body(0, None)
    assert len({*alone}) == 8
    by_rank = run_ranks(2, body)
    assert [*by_rank[0][:2], *by_rank[1][:2], *by_rank[0][2:], *by_rank[1][2:]] == alone

    def after(rank: int, group: dist.ProcessGroup | None) -> int:
        model = lockstep.parallelize(copy.deepcopy(nn.Linear(2, 2)), process_group=group)
        for _ in lockstep.shards(model, torch.zeros(4, 2), 4):
            torch.rand(rank + 1)
        return torch.initial_seed()  # not what is drawn: these ranks share the generator

    assert {*run_ranks(2, after, backend="gloo")} == {after(0, None)}


def test_a_parameter_without_gradient_in_some_shards_keeps_the_sign_of_zero() -> None:
    def body(rank: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        model = lockstep.parallelize(nn.Linear(1, 1, bias=False), process_group=group)
        other = model.register_parameter("other", nn.Parameter(torch.ones(1)))
        assert other is None
        for number, x in enumerate(lockstep.shards(model, torch.ones(2, 1), 2)):
            loss = model(x).sum()
            if number + rank == 0:
                loss = loss - 0.0 * model.other.sum()  # type: ignore[operator, union-attr]
            loss.backward()
        gradient = model.other.grad  # type: ignore[union-attr]
        assert isinstance(gradient, torch.Tensor)
        return gradient

    for gradient in [body(0, None), *run_ranks(2, body), *run_ranks(2, body, backend="gloo")]:
        assert torch.signbit(gradient).all()


def test_each_shard_has_memory_of_its_own() -> None:
    x = torch.randn(9, 3)
    model = lockstep.parallelize(nn.Linear(3, 1))
    for part, _ in lockstep.shards(model, (x, {"a": [torch.arange(9)]}), 4):
        assert part.data_ptr() % 64 == 0
        assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_batches_of_every_form_are_cut() -> None:
    batch = {"x": torch.arange(5), "names": ["a", "b", "c", "d", "e"], "k": 3, "none": None}
    model = lockstep.parallelize(nn.Linear(3, 1))
    parts = [*lockstep.shards(model, batch, 2)]
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["names"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [(part["k"], part["none"]) for part in parts] == [(3, None)] * 2


class _RankFirst(sums.LocalSums):
    """Adds up all shards of a rank first, as they come."""

    def add(self, shard: int, gradients: sums.Gradients) -> None:
        if self._stack:
            self._next = shard + 1
            (first, _), left = self._stack[0]
            self._stack = [((first, shard + 1), sums._sum(left, gradients))]
        else:
            super().add(shard, gradients)


def test_a_sum_of_each_ranks_shards_first_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: without the order of the tree the comparison fails."""
    monkeypatch.setattr("lockstep.same_bits.local_step.LocalSums", _RankFirst)
    for module in sums, over_ranks:
        monkeypatch.setattr(module, "cover", lambda shards, root: [(shards.start, shards.stop)])

    def in_turn(root: Any, values: Any, add: Any) -> Any:
        first, *others = values.values()
        for each in others:
            first = add(first, each)
        return first

    monkeypatch.setattr(in_memory, "fold", in_turn)
    runs = [
        bits_on(number, "threads", lambda group: run_of("transformer", "SGD", group, 8))[0]
        for number in (1, 2)
    ]
    assert differing(*runs)


def test_random_numbers_by_rank_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control."""

    def by_rank(self: Any, number: int) -> int:
        return hash((self._place, self._rank, number - self._mine.start)) % 2**62

    monkeypatch.setattr(Shards, "_seed", by_rank)
    runs = [
        bits_on(number, "threads", lambda group: run_of("transformer", "SGD", group, 8))[0]
        for number in (1, 2)
    ]
    assert differing(*runs)


def test_slices_of_a_ranks_samples_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: where a slice begins depends on where the rank's first sample is."""

    def sliced(batch: torch.Tensor, num_shards: int, shards: range) -> tuple[list[Any], list[int]]:
        bounds = bounds_of(len(batch), num_shards)
        first = bounds[shards.start]
        mine = batch[first : bounds[shards.stop]].clone()
        parts = [mine[bounds[each] - first : bounds[each + 1] - first] for each in shards]
        return parts, [*shards]

    def gradients(_: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
        model = lockstep.parallelize(copy.deepcopy(net), process_group=group)
        for x in lockstep.shards(model, features, 6):
            lockstep.mean(model(x).square().sum(1)).backward()
        named = model.named_parameters()
        return {name: p.grad.numpy().tobytes() for name, p in named if p.grad is not None}

    torch.random.manual_seed(0)
    net, features = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 5)), torch.randn(18, 9)
    assert not differing(gradients(0, None), run_ranks(2, gradients)[0])
    monkeypatch.setattr("lockstep.same_bits.step.cut", sliced)
    assert differing(gradients(0, None), run_ranks(2, gradients)[0])


def test_two_threads_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: of a large product in two threads."""

    def run(num_threads: int) -> dict[str, Any]:
        monkeypatch.setattr(
            "lockstep.same_bits.step.use_threads", lambda: torch.set_num_threads(num_threads)
        )
        torch.random.manual_seed(0)
        model = nn.Sequential(nn.Linear(600, 257), nn.LayerNorm(257), nn.Linear(257, 3))
        model = lockstep.parallelize(model)
        for x in lockstep.shards(model, torch.randn(2000, 600), 2):
            model(x).square().mean().backward()
        return {
            name: p.grad.numpy().tobytes()
            for name, p in model.named_parameters()
            if p.grad is not None
        }

    assert not differing(run(1), run(1))
    assert differing(run(1), run(2))
