"""``mixed_precision``: low precision in forward and between ranks, on parameters in full.

torch's wrapper does this on GPUs alone, so what is expected is computed by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import lockstep
from tests.nn.parallel import net, parts
from tests.ranks import run_ranks

OurDDP = lockstep.DistributedDataParallel
LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def single() -> nn.Module:
    return net().float()


def data(rank: int) -> torch.Tensor:
    return parts(2)[rank].float()


def gradients_alone(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One rank's gradients, computed on a model that is in ``dtype`` altogether."""
    model = single().to(dtype)
    model(data(rank).to(dtype), 1).float().square().mean().backward()
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


def mean_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    return [(one + other) / 2 for one, other in zip(*(gradients_alone(r, dtype) for r in (0, 1)))]  # noqa: B905


def wrapped(group: dist.ProcessGroup, *dtypes: torch.dtype | None, **options: Any) -> nn.Module:
    precision = _MixedPrecision(*dtypes)
    return OurDDP(single(), process_group=group, mixed_precision=precision, **options)


def backward(model: nn.Module, rank: int) -> list[torch.Tensor]:
    model(data(rank), 1).float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@LOW
@pytest.mark.parametrize("cap", [25, 0.0001], ids=["one bucket", "several buckets"])
def test_forward_and_backward_are_in_low_precision_and_gradients_in_full(
    low: torch.dtype, cap: float
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        seen = []
        model = wrapped(group, low, torch.float32, bucket_cap_mb=cap)
        model.module.second.register_forward_hook(
            lambda part, inputs, out: seen.append((part.weight.dtype, inputs[0].dtype, out.dtype))
        )
        for _ in range(3):
            model.zero_grad()
            gradients = backward(model, rank)
            assert all(p.dtype is torch.float32 for p in model.parameters())
            assert all(g.dtype is torch.float32 for g in gradients)
            torch.testing.assert_close(gradients, mean_gradients(low), rtol=1e-6, atol=1e-7)
        assert seen == [(low, low, low)] * 3
        exact = mean_gradients(torch.float32)
        assert not all(map(torch.allclose, gradients, exact))

    run_ranks(2, body)


@LOW
def test_gradients_travel_in_low_precision(low: torch.dtype) -> None:
    """Alone, or where parameters are in low precision and nothing is said of the reduction."""

    def body(rank: int, group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        for dtypes in ((None, low), (low, low)):
            model = wrapped(group, *dtypes)
            for _ in range(2):
                model.zero_grad()
                gradients = backward(model, rank)
            assert all(g.dtype is torch.float32 for g in gradients)
            assert all(torch.equal(g, g.to(low).float()) for g in gradients)
            expected = mean_gradients(dtypes[0] or torch.float32)
            eps = 2 * torch.finfo(low).eps
            torch.testing.assert_close(gradients, expected, rtol=eps, atol=eps / 100)
            assert not all(map(torch.equal, gradients, expected))
        return gradients

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


@LOW
def test_the_mean_is_right_where_no_reduction_is_spoken_of(low: torch.dtype) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        gradients = backward(wrapped(group, low), rank)
        eps = 2 * torch.finfo(low).eps
        torch.testing.assert_close(gradients, mean_gradients(low), rtol=eps, atol=eps / 100)
        return gradients

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


def test_nothing_is_changed_where_nothing_is_asked_for() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        gradients = backward(wrapped(group), rank)
        torch.testing.assert_close(gradients, mean_gradients(torch.float32), rtol=1e-6, atol=1e-7)

    run_ranks(2, body)


@LOW
def test_training_in_low_precision_keeps_ranks_in_step(low: torch.dtype) -> None:
    def train_in_lower_precision(model: nn.Module, rank: int) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(data(rank)).float().square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = wrapped(group, low, low)
        train_in_lower_precision(model, rank)
        assert all(value.dtype is torch.float32 for value in model.state_dict().values())
        return [p.detach() for p in model.parameters()]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))
    alone, whole = single(), parts(2).flatten(0, 1).float()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        alone(whole).square().mean().backward()
        optimizer.step()
    eps = torch.finfo(low).eps
    torch.testing.assert_close(first, [p.detach() for p in alone.parameters()], rtol=0, atol=eps)


class WithBuffers(nn.Module):
    """Has buffers of several dtypes, and takes inputs of several."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.seen: list[torch.dtype] = []

    def forward(
        self, x: torch.Tensor, *, rows: torch.Tensor, more: dict[str, list[torch.Tensor]]
    ) -> torch.Tensor:
        self.seen = [x.dtype, rows.dtype, more["list"][0].dtype]
        return self.norm(self.layer(x + self.table(rows) + more["list"][0])) * self.mask


def test_buffers_are_cast_and_whole_numbers_are_not() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = OurDDP(
            WithBuffers(),
            process_group=group,
            mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        )
        inner = model.module
        for _ in range(2):
            x, rows = data(rank), torch.tensor([0, 1, 2, 3 + rank])
            out = model(x, rows=rows, more={"list": [x]})
            assert inner.seen == [torch.bfloat16, torch.int64, torch.bfloat16]
            assert out.dtype is torch.bfloat16
            out.float().square().sum().backward()
        assert inner.norm.running_mean.dtype is torch.bfloat16
        assert inner.norm.num_batches_tracked.dtype is torch.int64
        assert inner.mask.dtype is torch.bool
        return [buffer.clone() for buffer in inner.buffers()]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))
    assert first[1].abs().sum() > 0


def test_ignored_parameters_are_not_cast() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
        OurDDP._set_params_and_buffers_to_ignore_for_model(inner, ["0.bias", "1.running_mean"])
        precision = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        model = OurDDP(inner, process_group=group, mixed_precision=precision)
        assert inner[1].running_mean.dtype is torch.float32
        assert inner[1].running_var.dtype is torch.bfloat16
        seen = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            seen.append((inner[0].weight.dtype, inner[0].bias.dtype))
            return x @ inner[0].weight.T

        inner.forward = forward
        model(data(rank)).sum().backward()
        assert seen == [(torch.bfloat16, torch.float32)]

    run_ranks(2, body)


def test_weights_that_are_shared_are_cast_once() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        inner[1].weight = inner[0].weight
        with torch.no_grad():
            inner[0].weight.fill_(0.25)
        precision = _MixedPrecision(torch.bfloat16, torch.float32)
        model = OurDDP(inner, process_group=group, mixed_precision=precision)
        model(torch.ones(1, 4)).sum().backward()
        # Of the second use, whose input is 1 + bias, and of the first, behind four quarters.
        bias = inner[0].bias.detach()
        expected = (1 + bias).expand(4, 4) + 1
        torch.testing.assert_close(inner[0].weight.grad, expected, rtol=2e-2, atol=2e-2)

    run_ranks(2, body)


def test_gradients_are_added_up_before_they_travel() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(group, torch.bfloat16, torch.float32)
        with model.no_sync():
            first = [g.clone() for g in backward(model, rank)]
        torch.testing.assert_close(
            first, gradients_alone(rank, torch.bfloat16), rtol=1e-6, atol=1e-7
        )
        both = backward(model, rank)
        expected = [2 * g for g in mean_gradients(torch.bfloat16)]
        torch.testing.assert_close(both, expected, rtol=1e-6, atol=1e-7)

    run_ranks(2, body)


def test_in_a_joined_loop_the_mean_may_be_over_those_that_have_data() -> None:
    """Rank 1 has two batches, and rank 0 one."""

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = wrapped(group, None, torch.bfloat16)
        with model.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                model.zero_grad()
                gradients = [gradient.clone() for gradient in backward(model, 1)]
        return gradients

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_hook_beside_it_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(group, torch.bfloat16, torch.bfloat16)
        with pytest.raises(RuntimeError, match="registered already"):
            model.register_comm_hook(group, default_hooks.allreduce_hook)

    run_ranks(2, body)
