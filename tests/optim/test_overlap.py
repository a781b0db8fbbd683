"""shard_optimizer(overlap=True): parameters and gradients are sent while the program goes on."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed
from lockstep.grad import ScatteredBucket, bucket_of
from tests.counts import a_third
from tests.nn.models import Digits
from tests.optim.late import Late
from tests.optim.optimizers import OPTIMIZERS
from tests.optim.programs import adamw, losses, overlapped
from tests.ranks import run_ranks


@a_third("name", OPTIMIZERS)
def test_it_has_the_bits_of_an_unsharded_optimizer(
    name: str, late: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.optim.division._CAP_BYTES", 20_000)
    torch.manual_seed(0)
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        results = []
        for options in {}, {"overlap": True}:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = OPTIMIZERS[name](model.parameters())
            if options:
                lockstep.shard_optimizer(optimizer, **options)
            for loss in losses(model, rank, 4):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append((model, optimizer.state_dict()["state"]))
        (plain, expected), (other, state) = results
        assert all(map(torch.equal, plain.parameters(), other.parameters()))
        for index, values in expected.items():
            for key, value in values.items():
                found = torch.as_tensor(state[index][key])
                assert torch.equal(torch.as_tensor(value), found), (index, key)

    run_ranks(2, body, backend="gloo")


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_only_the_means_of_its_elements(size: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("lockstep.optim.division._CAP_BYTES", 20_000)
    torch.manual_seed(0)
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first)
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        for mine, its in zip(losses(model, rank, 3), losses(plain, rank, 3), strict=True):
            plain.zero_grad()
            optimizer.zero_grad()
            mine.backward()
            its.backward()
        buckets = {*(bucket_of(p)[0] for p in model.parameters())}
        assert len(buckets) > 2
        assert {*map(type, buckets)} == {ScatteredBucket}
        assert all(bucket.are_all_unsummed() for bucket in buckets)
        gradient_of = {n: p.grad for n, p in plain.named_parameters()}
        for bucket in buckets:
            start, stop = bucket.local_range()
            assert stop - start <= -(-bucket.contents.numel // size) + 64
            names, offsets = bucket.contents.parameter_names, bucket.contents.offsets
            for name, offset in zip(names, offsets, strict=False):
                flat = gradient_of[name].view(-1)
                low, high = max(start, offset), min(stop, offset + len(flat))
                if low < high:
                    local = bucket.new_sum(low, high)
                    torch.testing.assert_close(local, flat[low - offset : high - offset])
        # What reads one gathers all of its bucket, and may change it.
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradient_of[name])
            parameter.grad.zero_()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
        for parameter, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, was)

    run_ranks(size, body, backend="gloo")


def test_clipping_with_ours_reads_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.optim.division._CAP_BYTES", 20_000)
    torch.manual_seed(0)
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first, lambda p: torch.optim.SGD(p, lr=0.1))
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for mine, its in zip(losses(model, rank, 3), losses(plain, rank, 3), strict=True):
            mine.backward()
            its.backward()
            norm = lockstep.clip_grad_norm_(model.parameters(), 0.01)
            assert bucket_of(next(model.parameters()))[0].are_all_unsummed()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
            for each in optimizer, other:
                each.step()
                each.zero_grad()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, its)

    run_ranks(2, body, backend="gloo")


def test_a_norm_that_is_nan_does_not_spoil_the_next() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 3))  # with padding between gradients

    def body(rank: int, group: dist.ProcessGroup) -> None:
        norms: list[list[torch.Tensor]] = []
        for overlap in False, True:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = lockstep.shard_optimizer(adamw(model.parameters()), overlap=overlap)
            norms.append([])
            for step in range(4):
                x = torch.randn(4, 10, generator=torch.Generator().manual_seed(2 * step + rank))
                x[0, 0] = torch.nan if step == 1 else 1.0
                model(x).square().mean().backward()
                norms[-1].append(lockstep.clip_grad_norm_(model.parameters(), 1.0))
                if step != 1:
                    optimizer.step()
                optimizer.zero_grad()
        assert [norm.isnan().item() for norm in norms[1]] == [False, True, False, False]
        torch.testing.assert_close(*norms, equal_nan=True)

    run_ranks(2, body, backend="gloo")


@pytest.mark.parametrize("switch", ["no_sync", "require_backward_grad_sync"])
def test_models_may_come_in_any_order_in_no_sync(switch: str) -> None:
    torch.manual_seed(0)
    first = [nn.Linear(30, 30), nn.Linear(30, 30)]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        results = []
        for options in {}, {"overlap": True}:
            models = [
                lockstep.DistributedDataParallel(copy.deepcopy(one), process_group=group)
                for one in first
            ]
            optimizers = [adamw(model.parameters()) for model in models]
            if options:
                for optimizer in optimizers:
                    lockstep.shard_optimizer(optimizer, **options)
            for step in range(6):
                x = torch.randn(4, 30, generator=torch.Generator().manual_seed(2 * step + rank))
                with contextlib.ExitStack() as stack:
                    for model in models:
                        if (
                            switch == "no_sync" and step % 3 == 1
                        ):  # with gradients of the step before
                            stack.enter_context(model.no_sync())
                        else:
                            model.require_backward_grad_sync = step % 3 != 1
                    outer, inner = models if step % 3 != 1 or rank else reversed(models)
                    outer(inner(x)).square().mean().backward()
                if step % 3 == 2:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            results.append([p.detach().clone() for model in models for p in model.parameters()])
        for mine, its in zip(*results, strict=True):
            torch.testing.assert_close(mine, its)

    run_ranks(2, body, backend="gloo")


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("clips", ["not", "with torch's", "with ours"])
def test_ranks_may_have_loops_of_different_lengths(clips: str, steps: int) -> None:
    torch.manual_seed(0)
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        results = []
        for overlap in False, True:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = lockstep.shard_optimizer(adamw(model.parameters()), overlap=overlap)
            next(losses(model, rank, 1)).backward()  # unsummed when the loop begins
            with lockstep.join(model):
                for loss in losses(model, rank, steps + 2 * rank, 1):
                    optimizer.zero_grad()
                    loss.backward()
                    if clips == "with torch's":
                        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    elif clips == "with ours":
                        lockstep.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
            optimizer.zero_grad()
            next(losses(model, rank, 1, 9)).backward()
            optimizer.step()
            results.append(model)
        for mine, its in zip(*(model.parameters() for model in results), strict=True):
            assert torch.equal(mine, its)

    run_ranks(2, body, backend="gloo")


def test_a_frozen_parameter_leaves_another_layout_to_gradients() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    first[1].weight.requires_grad_(False)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        results = []
        for options in {}, {"overlap": True}:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = adamw(model.parameters())
            if options:
                lockstep.shard_optimizer(optimizer, **options)
            for step in range(3):
                x = torch.randn(4, 30, generator=torch.Generator().manual_seed(2 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(model)
        for mine, its in zip(*(model.parameters() for model in results), strict=True):
            assert torch.equal(mine, its)

    run_ranks(2, body, backend="gloo")


def test_all_ranks_may_hold_gradients_in_a_backward() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[list[float]]:
        model = nn.Linear(1, 1, bias=False)
        model, _ = overlapped(group, model, torch.optim.SGD)
        seen = []
        for _ in range(3):
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()
            held = model.weight.grad  # noqa: F841 - the next backward adds to it
            seen.append(model.weight.grad.item())
        return seen

    assert run_ranks(2, body, backend="gloo") == [[1.5, 3.0, 4.5]] * 2


@pytest.mark.parametrize("change", ["another optimizer", "an unfrozen parameter"])
def test_gradients_that_nobody_has_read_outlive_a_change(change: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        nn.init.ones_(model[0].weight)
        nn.init.ones_(model[1].weight)
        model[1].requires_grad_(change == "another optimizer")
        lockstep.parallelize(model, process_group=group)
        lockstep.shard_optimizer(torch.optim.SGD(model[0].parameters(), lr=1), overlap=True)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        if change == "another optimizer":
            lockstep.shard_optimizer(torch.optim.SGD(model[1].parameters(), lr=1), overlap=True)
        else:
            model[1].requires_grad_(True)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        return [p.grad.item() for p in model.parameters()]

    expected = [3.0, 3.0] if change == "another optimizer" else [3.0, 1.5]
    assert run_ranks(2, body, backend="gloo") == [expected] * 2


def test_a_failed_backward_is_an_error_on_the_other_rank_and_loses_nothing() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, optimizer = overlapped(group, first)
        for loss in losses(model, rank, 2):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]

        def fail(gradient: torch.Tensor) -> None:
            raise KeyError("mine")

        loss = next(losses(model, rank, 1))
        if rank:
            model.conv1.weight.register_hook(fail)
        with pytest.raises(KeyError if rank else CollectiveFailed):
            loss.backward()
        if rank:
            model.conv1.weight._backward_hooks.clear()
        optimizer.zero_grad()
        for parameter, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, was)
        next(losses(model, rank, 1)).backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    one, other = run_ranks(2, body, backend="gloo")
    assert all(map(torch.equal, one, other))


def test_overlap_is_a_flag() -> None:
    with pytest.raises(TypeError, match="overlap"):
        lockstep.shard_optimizer(adamw(nn.Linear(1, 1).parameters()), overlap="yes")
