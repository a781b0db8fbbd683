"""Updates of a sharded optimizer that arrive while the program goes on, on several streams."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.optim.arriving import ArrivingParameter
from lockstep.optim.flat import FlatParameters
from tests.simulated import control

pytestmark = pytest.mark.forks

# What the first stream does with a parameter, and what another one sums.
READS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "function": lambda model: model.weight,
    "function in Python": lambda model: F.embedding(
        torch.zeros(1, dtype=int).to(control.KIND), model.weight
    ),
    "view": lambda model: model.weight.t(),
    "views": lambda model: model.weight.chunk(2)[1],
    "data": lambda model: model.weight.data,
    "detached": lambda model: model.weight.detach()[1:],
    "storage": lambda model: torch.empty(0, device=control.KIND).set_(
        model.weight.untyped_storage()
    ),
    "parameter": lambda model: nn.Parameter(model.weight),
    "copy": lambda model: copy.deepcopy(model.weight),
}


def sharded(world: lockstep.World) -> tuple[nn.Module, Callable[[], object]]:
    """A model whose next update is to come, and the step that sends it."""
    torch.manual_seed(1)
    model = lockstep.parallelize(nn.Linear(64, 64).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = lockstep.shard_optimizer(optimizer, overlap=True)
    x = torch.randn(4, 64, device=world.device)
    for step in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step < 3:
            optimizer.step()
    torch.accelerator.synchronize()
    return model, optimizer.step


def read_on_three_streams(world: lockstep.World, joins_late: bool) -> list[float]:
    """The sums of the parameters as a stream reads them, then others, and when all is over."""
    model, step = sharded(world)
    main, *others = (
        torch.accelerator.current_stream(),
        torch.Stream(control.KIND),
        torch.Stream(control.KIND),
    )
    with control.delayed("lazy"):
        step()
        if not joins_late:
            for side in others:
                side.wait_stream(main)
        sums = [model.weight.sum()]
        for side in others:
            if joins_late:
                side.wait_stream(main)
            with side:
                sums.append(model.weight.sum())
            side.synchronize()
    torch.accelerator.synchronize()
    sums.append(model.weight.sum())  # finds that the update is over
    assert type(model.weight) is not ArrivingParameter
    return [each.item() for each in sums]


@pytest.mark.parametrize("joins_late", [True, False])
def test_each_stream_that_reads_parameters_waits_for_their_update(joins_late: bool) -> None:
    for first, *others in lockstep.launch(read_on_three_streams, 2, (joins_late,)):
        assert others == [first] * 3


def moved_to_memory_of_another_stream(world: lockstep.World) -> list[float]:
    """The least and greatest element of a parameter whose data another stream has made."""
    model, step = sharded(world)
    main, side = torch.accelerator.current_stream(), torch.Stream(control.KIND)
    take_back = FlatParameters.take_back

    def take_back_and_go_on(flat: FlatParameters) -> bool:
        is_taken = take_back(flat)
        with side:  # takes the memory of what was replaced, if it is free
            for _ in range(3):
                torch.full((64, 64), 9.0, device=world.device)
        side.synchronize()
        return is_taken

    FlatParameters.take_back = take_back_and_go_on  # type: ignore[method-assign]
    model.weight.grad = torch.zeros_like(model.weight)
    torch.accelerator.synchronize()
    with control.delayed("lazy,0"):
        with side:
            data = torch.full((64, 64), 5.0, device=world.device)
        main.wait_stream(side)
        model.weight.data = data
        del data
        step()
    return [model.weight.min().item(), model.weight.max().item()]


def test_data_of_another_stream_is_copied_before_its_memory_is_used_again() -> None:
    for found in lockstep.launch(moved_to_memory_of_another_stream, 2):
        assert found == [5.0, 5.0]


def read_of_another(world: lockstep.World, name: str) -> list[float]:
    """The sum of what one stream has got from a parameter, as another one reads it, and of it."""
    model, step = sharded(world)
    main, side = torch.accelerator.current_stream(), torch.Stream(control.KIND)
    with control.delayed("0,lazy"):
        step()
        side.wait_stream(main)
        read = READS[name](model)
        if name in ("function in Python", "copy"):  # of which the main stream writes the result
            side.wait_stream(main)
        with side:
            total = read.sum()
        side.synchronize()
    return [total.item(), READS[name](model).sum().item()]


@pytest.mark.parametrize("name", READS)
def test_what_a_stream_gets_from_a_parameter_may_be_read_by_another(name: str) -> None:
    for found, expected in lockstep.launch(read_of_another, 2, (name,)):
        assert found == expected
