"""State of any kind is kept, divided, saved and loaded as it is without sharding."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.checkpoint.training import same
from tests.nn.models import Digits
from tests.optim.optimizers import Plain
from tests.optim.programs import check_same_bits, take_steps
from tests.ranks import run_ranks


class Collections(Plain):
    """Its state has lists, dictionaries and a queue, as SOAP's and Kron's."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["recent"] = deque([torch.zeros_like(parameter)], maxlen=3)
            state["factors"] = [torch.zeros(n) for n in parameter.shape] + [[], None]
            state["by_name"] = {"sum": torch.zeros_like(parameter), "n": (1, 2.5), 7: True}
            # Names may be numbers, as heavyball's.
            state[0], state[1] = torch.zeros_like(parameter), {2: torch.zeros(3)}
            state["dtype"], state["none"], state["empty"] = torch.bfloat16, None, torch.zeros(0, 3)
        state["recent"].append(parameter.grad.clone())
        for dim, factor in enumerate(state["factors"][:-2]):
            others = [d for d in range(parameter.dim()) if d != dim]
            factor.add_(parameter.grad.square().sum(others))
        state["by_name"]["sum"].add_(parameter.grad)
        super().update(parameter, lr)
        parameter.sub_(torch.stack([*state["recent"]]).mean(0), alpha=lr)
        parameter.sub_(state["by_name"]["sum"] / (1 + state["factors"][0].norm()), alpha=lr)


class EightBit(Plain):
    """Momentum of small parameters is in float32, and of others in eight bits."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        state = self.state[parameter]
        dtype = torch.float32 if parameter.numel() < 200 else torch.int8
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=dtype)
        momentum = state["momentum"].float() / 2 + parameter.grad * 50
        state["momentum"].copy_(momentum.clamp(-100, 100))
        parameter.sub_(state["momentum"].float(), alpha=lr / 50)


class Same:
    """State that is equal to state of the same values and types."""

    def __init__(self, states: list[dict[int, dict[str, Any]]]) -> None:
        self.states = [
            {k: dict(sorted(v.items(), key=repr)) for k, v in sorted(each.items())}
            for each in states
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and same(self.states, other.states)

    def __hash__(self) -> int:
        return 0


KINDS = [Collections, EightBit]


def resuming(kind: Any) -> Any:
    def program(model: nn.Module, shard: Any, rank: int) -> Same:
        optimizer = shard(kind(model.parameters()))
        take_steps(model, optimizer, rank)
        states = [copy.deepcopy(optimizer.state_dict()["state"])]
        optimizer.load_state_dict(optimizer.state_dict())
        states.append(copy.deepcopy(optimizer.state_dict()["state"]))
        take_steps(model, optimizer, rank)
        return Same([*states, optimizer.state_dict()["state"]])

    return program


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_has_state_of_any_kind(kind: Any) -> None:
    check_same_bits(resuming(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_state_of_any_kind(kind: Any, tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(kind(model.parameters()))
        take_steps(model, optimizer, rank)
        state = copy.deepcopy(optimizer.state_dict())
        lockstep.save(tmp_path, process_group=group, optimizer=optimizer)
        lockstep.load(tmp_path, process_group=group, optimizer=optimizer)
        plain = kind(model.parameters())
        plain.load_state_dict(state)
        found = optimizer.state_dict()["state"], plain.state_dict()["state"]
        assert Same([found[0]]) == Same([found[1]])

    run_ranks(2, body)


def test_groups_that_the_program_holds_keep_their_parameters() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Plain(model.parameters()))
        held = optimizer.param_groups
        optimizer.load_state_dict(optimizer.state_dict())
        for kept, parameter in zip(held[0]["params"], model.parameters(), strict=True):
            assert kept is parameter

    run_ranks(2, body)
