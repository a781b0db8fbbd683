"""A model that is cast to another dtype after it was wrapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.counts import pairs
from tests.nn.parallel import net, parts
from tests.ranks import run_ranks

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to float64": lambda model: model.to(torch.float64),
    "to float16": lambda model: model.to("cpu", torch.float16),
    "the inner model": lambda model: getattr(model, "module", model).double(),
    "there and back": lambda model: model.double().float(),
    "a part": lambda model: getattr(model, "module", model).branches.double(),
}


@pairs("name, before, set_to_none", CASTS, [0, 2], [True, False])
def test_a_model_cast_after_wrapping_trains_in_its_new_dtype(
    name: str, before: int, set_to_none: bool
) -> None:
    def train_and_cast(model: nn.Module, data: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(before + 3):
            if step == before:
                CASTS[name](model)
            dtype = next(model.parameters()).dtype
            optimizer.zero_grad(set_to_none=set_to_none)
            model(data.to(dtype)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    alone = train_and_cast(net().float(), parts(2).flatten(0, 1))

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.DistributedDataParallel(net().float(), process_group=group)
        return train_and_cast(model, parts(2)[rank])

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))
    for mine, other in zip(first, alone, strict=True):
        assert mine.dtype is other.dtype
        dtype = mine.dtype if mine.dtype is not torch.float64 else torch.float32
        torch.testing.assert_close(mine, other, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("before", [0, 2], ids=["at once", "after two steps"])
def test_a_model_given_another_memory_order_after_wrapping(before: int) -> None:
    def gradients_of_both(model: nn.Module, data: torch.Tensor) -> list[torch.Tensor]:
        for step in range(before + 3):
            if step == before:
                model.to(memory_format=torch.channels_last)
            model.zero_grad()
            model(data).square().mean().backward()
        return [p.grad for p in model.parameters()]

    with torch.random.fork_rng():
        torch.manual_seed(1)
        start = nn.Conv2d(3, 4, 3).double().state_dict()
        data = torch.randn(2, 2, 3, 6, 6, dtype=torch.float64)

    def model() -> nn.Module:
        conv = nn.Conv2d(3, 4, 3).double()
        conv.load_state_dict(start)
        return conv

    alone = gradients_of_both(model(), data.flatten(0, 1))

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        return gradients_of_both(
            lockstep.DistributedDataParallel(model(), process_group=group), data[rank]
        )

    for gradients in run_ranks(2, body):
        torch.testing.assert_close(gradients, alone, rtol=1e-12, atol=1e-12)
