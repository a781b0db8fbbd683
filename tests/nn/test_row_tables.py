"""Tables whose gradients travel by rows, in all that a program may do with its model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import CollectiveFailed, ModelError
from lockstep.nn.backward import engines_with
from tests.nn.tables import (
    build,
    by_rows,
    equal_bits,
    one_step,
    tables_from,
    words_of,
)
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of, values_of


def test_only_rows_of_a_large_table_travel_with_their_indices() -> None:
    base = nn.Sequential(nn.EmbeddingBag(40_000, 64), nn.Linear(64, 1))

    def body(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        words = torch.arange(300).view(100, 3) * (rank + 1)
        for _ in range(3):
            one_step(model, words)
        (engine,) = engines_with([*model.parameters()])
        (sent,) = [b.num_bytes for b in engine.reducer._buckets if type(b).__name__ == "RowBucket"]
        explanation = lockstep.explain(model)
        told = {one["name"]: one["how"] for one in explanation.to_dict()["parameters"]}
        assert "of which the rows travel" in told["0.weight"]
        assert "sparse=True" not in str(explanation)
        return sent, explanation.to_dict()["bytes_per_step"]["gradients"]

    for sent, told in run_ranks(2, body):
        assert sent == 300 * (64 * 4 + 8)
        assert sent < told < 2 * sent


def test_a_table_that_also_has_other_gradients_is_in_an_ordinary_bucket_again() -> None:
    """So that it is sent while the backward goes on."""

    def body(rank: int, group: dist.ProcessGroup) -> list[list[str]]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        kinds = []
        for step in range(7):
            model.zero_grad()
            loss = model(words_of(rank, step)).square().mean()
            if rank == 1 and step > 1:
                loss = loss + model.table.weight.square().mean()
            loss.backward()
            (engine,) = engines_with([*model.parameters()])
            kinds.append(sorted(type(bucket).__name__ for bucket in engine.reducer._buckets))
        return kinds

    base = build()
    with tables_from(1):
        for kinds in run_ranks(2, body):
            assert kinds == [["Bucket"], *[["Bucket", "RowBucket"]] * 4, ["Bucket"], ["Bucket"]]


def test_a_backward_that_fails_on_one_rank_leaves_plain_gradients() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)

        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError("as a hook of the program may")

        for step in range(5):
            model.zero_grad()
            earlier = torch.ones((), requires_grad=True) * 1  # its backward comes last
            hidden = model(words_of(rank, step))
            if step == 3 and rank == 1:
                earlier.register_hook(fail)
                loss = hidden.square().mean()
                with pytest.raises(ArithmeticError):  # once the table has its gradient
                    torch.autograd.backward([loss, earlier])
                assert type(model.table.weight.grad) in (torch.Tensor, type(None))
            elif step == 3:
                with pytest.raises(CollectiveFailed):
                    hidden.square().mean().backward()
                assert model.table.weight.grad is None
            else:
                hidden.square().mean().backward()
        assert by_rows(model)
        return gradients_of(model)

    base = build()
    with tables_from(1):
        mine = run_ranks(2, body)
    with tables_from(2**60):
        alone = copy.deepcopy(base)
        torch.stack(
            [alone(words_of(rank, 4)).square().mean() for rank in range(2)]
        ).mean().backward()
    for each in mine:
        assert_same(each, gradients_of(alone))


def test_sharded_optimizers_get_the_dense_gradient() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        for step in range(4):
            one_step(model, words_of(rank, step))
            optimizer.step()
        return values_of(model)

    base = build()
    alone, stepping = copy.deepcopy(base), None
    stepping = torch.optim.Adam(alone.parameters(), lr=0.1)
    for step in range(4):
        stepping.zero_grad()
        losses = [alone(words_of(rank, step)).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        stepping.step()
    with tables_from(1):
        for each in run_ranks(2, body):
            assert_same(each, values_of(alone))


def test_ranks_without_data_take_part() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.join(model):
            for step in range(3 + 2 * rank):
                one_step(model, words_of(rank, step))
                optimizer.step()
        return values_of(model)

    base = build()
    with tables_from(1):
        rows = run_ranks(2, body)
    with tables_from(2**60):
        dense = run_ranks(2, body)
    for mine, theirs in zip(rows, dense, strict=True):
        assert equal_bits(mine, theirs)


def test_a_mean_over_uneven_batches_is_that_of_one_process() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        for step in range(4):
            model.zero_grad()
            words = words_of(rank, step)[: 3 - rank]
            lockstep.mean(model(words).square().sum(1), process_group=group).backward()
        assert by_rows(model)
        return gradients_of(model)

    base = build()
    alone = copy.deepcopy(base)
    alone(torch.cat([words_of(0, 3), words_of(1, 3)[:2]])).square().sum(1).mean().backward()
    with tables_from(1):
        for each in run_ranks(2, body):
            assert_same(each, gradients_of(alone))


def test_scale_grad_by_freq_of_a_functions_lookup_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(build(), process_group=group)
        weight = model.table.weight
        with pytest.raises(ModelError, match="scale_grad_by_freq"):
            F.embedding(words_of(rank), weight, scale_grad_by_freq=True)
        with pytest.raises(ModelError, match="scale_grad_by_freq"):
            F.embedding_bag(words_of(rank), weight, scale_grad_by_freq=True)
        with torch.no_grad():
            F.embedding(words_of(rank), weight, scale_grad_by_freq=True)

    run_ranks(2, body)


def test_rows_that_are_not_finite_blame_their_rank() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int | None]:
        model = lockstep.parallelize(build(), process_group=group)
        optimizer, blamed = torch.optim.SGD(model.parameters(), lr=0.1), list[int | None]()
        for fails in (False, False, True):
            with lockstep.guard(model, optimizer) as step:
                words = torch.tensor([[rank, 2]])
                rows = model.look_up(words)
                if fails and rank == 1:
                    rows.register_hook(lambda gradient: gradient * float("nan"))
                model.layer(rows).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
            if step.blame is not None:
                assert step.blame.nonfinite == ("table.weight",)
                blamed.append(step.blame.rank)
        assert by_rows(model)
        return blamed

    with tables_from(1):
        assert run_ranks(2, body) == [[1], [1]]


def test_a_hook_sees_the_rows_of_its_own_backward() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, seen = lockstep.parallelize(build(), process_group=group), list[float]()
        weight = model.table.weight
        node = torch.autograd.graph.get_gradient_edge(weight).node
        node.register_hook(lambda *_: seen.append(float(weight.grad[5 + len(seen)].abs().sum())))
        for step in range(4):
            model(torch.tensor([[5 + step]])).sum().backward()
            assert type(weight.grad) is torch.Tensor
            model.zero_grad()
        assert len(seen) == 4
        assert all(seen)

    with tables_from(1):
        run_ranks(2, body)


def test_a_hook_writes_to_the_rows_of_its_own_backward() -> None:
    base = build()  # not in threads, which have one random state

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, found = lockstep.parallelize(copy.deepcopy(base), process_group=group), []
        weight = model.table.weight
        node = torch.autograd.graph.get_gradient_edge(weight).node

        def scale(*_: Any) -> None:
            weight.grad.mul_(4)

        node.register_hook(scale)
        for step in range(4):
            model(torch.tensor([[5 + step, rank]])).sum().backward()
            found.append(weight.grad)
            weight.grad = None
        return found

    results = []
    for num_bytes in (1, 10**9):
        with tables_from(num_bytes):
            results.append(run_ranks(2, body))
    for by_row, whole in zip(*results, strict=True):
        assert_same(by_row, whole, 0)
