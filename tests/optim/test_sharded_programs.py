"""What programs do with an optimizer, they do with a sharded one, and get the same bits."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.optim.state import decoded, encoded
from tests.counts import a_third, in_turn
from tests.optim.programs import Program, adamw, check_same_bits, losses, take_steps


def plainly(model: nn.Module, shard: Any, rank: int) -> None:
    take_steps(model, shard(adamw(model.parameters())), rank)


def with_a_scheduler_made_before(model: nn.Module, shard: Any, rank: int) -> list[float]:
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    shard(optimizer)
    return with_scheduler(model, optimizer, scheduler, rank)


def with_a_scheduler_made_after(model: nn.Module, shard: Any, rank: int) -> list[float]:
    optimizer = shard(adamw(model.parameters()))
    return with_scheduler(
        model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9), rank
    )


def with_scheduler(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, rank: int
) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, that step() was replaced
        for loss in losses(model, rank, 4):
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [group["lr"] for group in optimizer.param_groups]


def with_clipping(model: nn.Module, shard: Any, rank: int) -> list[float]:
    optimizer = shard(adamw(model.parameters()))
    norms = []
    for loss in losses(model, rank, 4):
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def with_clipping_in_a_hook(model: nn.Module, shard: Any, rank: int) -> list[float]:
    optimizer, norms = shard(adamw(model.parameters())), []

    def clip(self: Optimizer, args: object, kwargs: object) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1).item())

    def note(self: Optimizer, args: object, kwargs: object) -> None:
        norms.append(sum(p.sum().item() for group in self.param_groups for p in group["params"]))

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(note)
    take_steps(model, optimizer, rank)
    return norms


def with_accumulation(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    for number, loss in enumerate(losses(model, rank, 6)):
        if number % 3 < 2:
            with lockstep.no_sync(model):
                loss.backward()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_two_backwards_a_step(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    for number, loss in enumerate(losses(model, rank, 6)):
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)


def with_groups(model: nn.Module, shard: Any, rank: int) -> None:
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay}, {"params": others, "weight_decay": 0.0, "lr": 0.1}]
    optimizer = shard(adamw(groups))
    take_steps(model, optimizer, rank)
    optimizer.param_groups[1]["lr"] = 0.001
    take_steps(model, optimizer, rank, first=3)


def with_a_group_added(model: nn.Module, shard: Any, rank: int) -> None:
    first, second, *others = model.parameters()
    optimizer = shard(adamw([first]))
    take_steps(model, optimizer, rank)
    optimizer.add_param_group({"params": [second], "lr": 0.1})
    take_steps(model, optimizer, rank, first=3)
    optimizer.add_param_group({"params": others, "lr": 0.1})
    optimizer.zero_grad()
    take_steps(model, optimizer, rank, first=6)


def with_a_layer_frozen_for_a_while(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    weights = [*model.parameters()][1:3]
    for weight in weights:
        weight.requires_grad_(False)
    take_steps(model, optimizer, rank, first=3)
    for weight in weights:
        weight.requires_grad_(True)
    take_steps(model, optimizer, rank, first=6)


def with_a_layer_replaced(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    old = model.conv1.weight
    model.conv1.weight = nn.Parameter(old.detach() * 2)
    parameters = optimizer.param_groups[0]["params"]
    index = next(index for index, parameter in enumerate(parameters) if parameter is old)
    parameters[index] = model.conv1.weight
    take_steps(model, optimizer, rank, first=3)


def with_data_replaced(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    take_steps(model, optimizer, rank, first=3)


def with_values_changed_in_place(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    for loss in losses(model, rank, 4):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)
            with torch.no_grad():
                parameter.mul_(1.01)


def with_an_average_swapped_in(model: nn.Module, shard: Any, rank: int) -> list[float]:
    optimizer = shard(adamw(model.parameters()))
    average, outputs = torch.optim.swa_utils.AveragedModel(model), []
    for loss in losses(model, rank, 4):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        state = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        outputs.append(next(losses(model, rank, 1)).item())
        model.load_state_dict(state)
    return outputs


def with_a_closure(model: nn.Module, shard: Any, rank: int) -> list[float]:
    optimizer, batches = shard(adamw(model.parameters())), losses(model, rank, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = next(batches)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(4)]


def with_a_scaler(model: nn.Module, shard: Any, rank: int) -> list[float]:
    optimizer = shard(adamw(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number, loss in enumerate(losses(model, rank, 5)):
        scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [scaler.get_scale()]


def with_the_state_dict_loaded(model: nn.Module, shard: Any, rank: int) -> None:
    take_steps(model, first := shard(adamw(model.parameters())), rank)
    second = shard(torch.optim.AdamW(model.parameters(), lr=1.0))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(model, second, rank, first=3)


def with_a_part_used_by_one_rank(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    for number, loss in enumerate(losses(model, rank, 6)):
        if number % 3 == 1 and rank:
            loss = model.fc2.weight.square().sum()
        elif number % 3 == 2:
            loss = model.conv1.weight.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_in_mid_training(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = adamw(model.parameters())
    take_steps(model, optimizer, rank)
    take_steps(model, shard(optimizer), rank, first=3)


def with_two_optimizers(model: nn.Module, shard: Any, rank: int) -> None:
    first, second = [*model.parameters()][:3], [*model.parameters()][3:]
    optimizers = [shard(torch.optim.SGD(first, lr=0.1, momentum=0.9)), shard(adamw(second))]
    for number, loss in enumerate(losses(model, rank, 5)):
        loss.backward()
        for optimizer in optimizers[: 1 + number % 2]:
            optimizer.step()
            optimizer.zero_grad()


def with_parameters_of_its_own(model: nn.Module, shard: Any, rank: int) -> float:
    local = nn.Parameter(torch.tensor(1.0 + rank))
    optimizer = shard(adamw([*model.parameters(), local]))
    for loss in losses(model, rank, 3):
        (loss + local * rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return local.item()


def in_channels_last(model: nn.Module, shard: Any, rank: int) -> None:
    model.to(memory_format=torch.channels_last)
    take_steps(model, shard(adamw(model.parameters())), rank)
    assert model.conv2.weight.is_contiguous(memory_format=torch.channels_last)


def of_two_dtypes(model: nn.Module, shard: Any, rank: int) -> None:
    model.fc2.double()
    model.fc2.register_forward_pre_hook(lambda module, args: args[0].double())
    take_steps(model, shard(adamw(model.parameters())), rank)


def with_data_tied_later(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    model.conv1.bias.data = model.fc2.bias.data
    take_steps(model, optimizer, rank, first=3)
    assert torch.equal(model.conv1.bias, model.fc2.bias)


def with_a_norm_of_a_weight_added(model: nn.Module, shard: Any, rank: int) -> list[float]:
    """The optimizer keeps the weight that was there before, as in one process."""
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    old = model.fc1.weight
    torch.nn.utils.parametrizations.weight_norm(model.fc1)
    take_steps(model, optimizer, rank, first=3)
    model.fc2.bias = nn.Parameter(model.fc2.bias)
    assert not isinstance(model.fc2.weight.detach(), nn.Parameter)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    take_steps(model, optimizer, rank, first=6)
    return [old.sum().item()]


class Two(nn.Module):
    """Two parameters of one shape."""

    sample = (4,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def with_all_tied_later(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    model.last.weight.data = model.first.weight.data
    take_steps(model, optimizer, rank, first=3)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(model, optimizer, rank, first=6)


def test_no_parameter_may_be_left_to_divide() -> None:
    check_same_bits(with_all_tied_later, Two)


class Prepared(Optimizer):
    """A trainer's wrapper: its step is that of the optimizer in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def in_a_trainers_wrapper(model: nn.Module, shard: Any, rank: int) -> list[float]:
    prepared = Prepared(adamw(model.parameters()))
    optimizer = shard(prepared)
    assert optimizer is prepared
    take_steps(model, optimizer, rank)
    state = optimizer.state_dict()["state"]
    return [state[index]["exp_avg"].sum().item() for index in range(len(state))]


PROGRAMS = [
    plainly,
    with_a_scheduler_made_before,
    with_a_scheduler_made_after,
    with_clipping,
    with_clipping_in_a_hook,
    with_accumulation,
    with_two_backwards_a_step,
    with_groups,
    with_a_group_added,
    with_a_layer_frozen_for_a_while,
    with_a_layer_replaced,
    with_data_replaced,
    with_values_changed_in_place,
    with_an_average_swapped_in,
    with_a_closure,
    with_a_scaler,
    with_the_state_dict_loaded,
    with_a_part_used_by_one_rank,
    sharded_in_mid_training,
    with_two_optimizers,
    with_parameters_of_its_own,
    in_channels_last,
    of_two_dtypes,
    with_data_tied_later,
    with_a_norm_of_a_weight_added,
    in_a_trainers_wrapper,
]


@in_turn("program, backend", PROGRAMS, ["threads", "shm"])
def test_a_program_has_the_same_bits(program: Program, backend: str) -> None:
    check_same_bits(program, backend=backend)


@pytest.mark.parametrize("program", [with_groups, with_a_part_used_by_one_rank])
def test_three_ranks_have_the_same_bits(program: Program) -> None:
    check_same_bits(program, size=3)


def test_gloo_has_the_same_bits() -> None:
    check_same_bits(with_groups, backend="gloo")


@a_third("program", PROGRAMS)
def test_a_program_has_the_same_bits_if_it_overlaps(program: Program, monkeypatch: Any) -> None:
    monkeypatch.setattr("lockstep.optim.division._CAP_BYTES", 20_000)
    check_same_bits(program, backend="gloo", overlap=True)


def test_a_step_that_was_compiled_before_has_the_same_bits() -> None:
    """Those of one that isn't compiled: compiled code would compute others."""

    def program(model: nn.Module, shard: Any, rank: int) -> None:
        optimizer = adamw(model.parameters())
        if shard.__class__ is partial:
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        take_steps(model, shard(optimizer), rank)

    check_same_bits(program)


def test_state_whose_elements_are_not_in_order_is_told_as_it_is() -> None:
    value = torch.arange(40_000.0).view(200, 200).t()
    for _ in range(20):  # its bytes were once read from memory that was free again
        assert torch.equal(decoded(encoded({"state": value}))["state"], value)
