"""What one rank alone changes: named on all ranks, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelMismatch, ParameterChanged
from tests.simulated import control

pytestmark = pytest.mark.forks

NUM_STEPS, SECONDS = 6, 5
# A group that carries tensors of the host too.
BOTH = f"cpu:gloo,{control.KIND}:{control.BACKEND}"


class Cached(nn.Module):
    """Layers with a buffer, which a program may set anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("cache", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + self.cache.sum())


def set_another_buffer(model: Cached) -> None:
    model.cache = torch.ones(3, device=model.cache.device)


def put_a_parameter(model: Cached) -> None:
    model.first._parameters["bias"] = nn.Parameter(model.first.bias.detach().clone())


def add_a_module(model: Cached) -> None:
    model.extra = nn.Linear(2, 2).to(model.cache.device)


def group_of(backend: str) -> dist.ProcessGroup:
    """One whose ranks don't wait long for others."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=SECONDS))
    if backend == "simccl":  # which doesn't tell how long it waits, as backends of others needn't
        group.get_group_store().set_timeout(timedelta(seconds=SECONDS))
    return group


def told_in_steps(
    world: lockstep.World, changes: Callable, rank: int, backend: str | None = None
) -> list[str]:
    """What each step of a program is told that goes on after an error."""
    control.set_delay("0,0")
    group = None if backend is None else group_of(backend)
    model = lockstep.parallelize(Cached().to(world.device), process_group=group)
    told = []
    for step in range(NUM_STEPS):
        if step == 2 and world.rank == rank:
            changes(model)
        try:
            model(torch.full((2, 4), 1.0 + world.rank, device=world.device)).sum().backward()
            told.append("")
        except ModelMismatch as error:
            told.append(str(error))
        torch.accelerator.synchronize()
    return told


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("changes", "here", "everywhere"),
    [
        (set_another_buffer, "the buffer 'cache' from (2,) float32 to (3,)", "buffer 'cache' is ("),
        (put_a_parameter, "the parameter 'first.bias', put", "'first.bias' is a "),
        (add_a_module, "the parameter 'extra.weight', put", "'extra.weight' is "),
    ],
)
@pytest.mark.parametrize("backend", [control.BACKEND, BOTH])
def test_a_change_of_one_rank_alone_is_named_on_all(
    changes: Callable, here: str, everywhere: str, rank: int, backend: str
) -> None:
    """On that rank at once, and on all in the next backward, of which all know.

    Of a module torch tells, and other ranks are waited for first.
    """
    by_rank = lockstep.launch(told_in_steps, 2, (changes, rank, backend))
    mine, others = by_rank[rank], by_rank[1 - rank]
    assert mine[:2] + others[:3] == [""] * 5
    assert mine[2].startswith(f"Rank {rank} has changed {here}")
    assert mine[3] == others[3]
    assert everywhere in mine[3]


def grow(world: lockstep.World) -> list[float]:
    control.set_delay("0,0")
    model = lockstep.parallelize(Cached().to(world.device))
    found = []
    for step in range(NUM_STEPS):
        model.cache = torch.full((step + 1,), 1.0 + world.rank, device=world.device)
        model(torch.ones(2, 4, device=world.device)).sum().backward()
        found.append(model.cache.sum().item())
    return found


def test_buffers_that_grow_alike_are_rank_0s_at_once() -> None:
    for found in lockstep.launch(grow, 2):
        assert found == [1.0 + step for step in range(NUM_STEPS)]


def cut(model: Cached) -> None:
    model.first.bias.data = model.first.bias.data[:1].clone()


def train_cut(world: lockstep.World) -> list[str]:
    control.set_delay("0,0")
    model = lockstep.parallelize(Cached().to(world.device))
    told = []
    for step in range(3):
        if step == 2:
            cut(model)
        model.zero_grad()
        try:
            model(torch.full((2, 4), 1.0 + world.rank, device=world.device)).sum().backward()
            told.append("")
        except ParameterChanged as error:
            told.append(str(error))
    return told


def test_data_of_another_form_is_named() -> None:
    for *before, last in lockstep.launch(train_cut, 2):
        assert before == ["", ""]
        assert "'first.bias' is (1,) float32" in last
