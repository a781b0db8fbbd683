"""What can't be sharded is refused, with what to do instead, and loses nothing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.checkpoint import kind_of
from lockstep.errors import (
    AlreadyParallel,
    CollectiveFailed,
    ModelError,
    ModelMismatch,
    PeerLost,
)
from tests.nn.models import Digits
from tests.optim.programs import adamw, losses, take_steps
from tests.ranks import run_ranks


def test_ranks_with_other_optimizers_are_told() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        kind = torch.optim.SGD if rank else torch.optim.Adam
        with pytest.raises(ModelMismatch, match="optimizer on every rank"):
            lockstep.shard_optimizer(kind(model.parameters(), lr=0.1))

    run_ranks(2, body)


def test_an_lbfgs_is_refused() -> None:
    model = lockstep.parallelize(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="LBFGS"):
        lockstep.shard_optimizer(torch.optim.LBFGS(model.parameters()))


class Lookahead(Optimizer):
    """As timm's: every second step it goes half the way back to where it was."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self._base, self.param_groups = base, base.param_groups
        self._slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]
        self._count = 0

    def step(self, closure: Any = None) -> None:
        self._base.step(closure)
        self._count += 1
        if self._count % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for slow, parameter in zip(self._slow, fast, strict=True):
                    parameter.copy_(slow.lerp_(parameter, 0.5))


class Masking(Optimizer):
    """As pytorch_optimizer's Magma: the state is that of the optimizer in it, and it saves more."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.masks = [1.0]

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict(), "masks": self.masks}


class Stateless(Masking):
    """As pytorch_optimizer's SafeFP16Optimizer: it has no ``state``."""

    @property
    def state(self) -> Any:
        raise AttributeError("state")


@pytest.mark.parametrize("kind", [Masking, Stateless])
def test_what_saves_more_than_the_optimizer_in_it_has_state_of_its_own(kind: Any) -> None:
    model = lockstep.parallelize(nn.Linear(2, 2))
    optimizer = kind(adamw(model.parameters()))
    with pytest.raises(ModelError, match=r"in it, AdamW \('optimizer'\), which takes the steps"):
        lockstep.shard_optimizer(optimizer)
    assert kind_of(optimizer) == "state"


def test_an_optimizer_around_another_is_refused_and_may_have_a_sharded_one() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        ends = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = Lookahead(shard(adamw(model.parameters())))
            with pytest.raises(
                ModelError, match=r"in it, AdamW \('_base'\), which takes the steps"
            ):
                lockstep.shard_optimizer(optimizer)
            for step in range(5):
                x = torch.rand(3, *first.sample, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(model)
        assert all(map(torch.equal, *(model.parameters() for model in ends)))

    run_ranks(2, body, backend="shm")


def test_a_model_that_is_not_parallel_is_told() -> None:
    with pytest.raises(ModelError, match="Call lockstep"):
        lockstep.shard_optimizer(adamw(nn.Linear(2, 2).parameters()))


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer is 3"):
        lockstep.shard_optimizer(3)  # type: ignore[type-var]


def test_an_optimizer_is_sharded_once() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 2), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        with pytest.raises(AlreadyParallel, match="sharded already"):
            lockstep.shard_optimizer(optimizer)

    run_ranks(1, body)
    run_ranks(2, body)


def test_an_error_in_a_step_leaves_the_groups_as_they_were() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 2), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        model(torch.ones(1, 2)).sum().backward()
        betas, optimizer.param_groups[0]["betas"] = optimizer.param_groups[0]["betas"], None
        with pytest.raises(TypeError):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == [*model.parameters()]
        optimizer.param_groups[0]["betas"] = betas
        optimizer.step()

    run_ranks(2, body)


def test_a_rank_that_is_lost_in_a_step_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 2), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        model(torch.ones(1, 2)).sum().backward()
        if rank:
            return
        with pytest.raises(PeerLost) as caught:
            optimizer.step()
        assert caught.value.ranks == (1,)
        assert "step of AdamW" in caught.value.__notes__[-2]

    run_ranks(2, body)


def test_copies_of_a_part_of_the_state_are_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        take_steps(model, optimizer, rank)
        for make in copy.deepcopy, pickle.dumps:
            with pytest.raises(TypeError, match="state_dict"):
                make(optimizer)

    run_ranks(2, body)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization, with an optimizer of ``base`` in it, or without."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer] | None = None) -> None:
        super().__init__(params, {"lr": 0.1})
        if base is not None:
            self.base_optimizer = base(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        each = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            norm = sum(p.grad.square().sum() for p in each).sqrt()
            moves = [0.05 * p.grad / norm for p in each]
            torch._foreach_add_(each, moves)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(each, moves)
            if hasattr(self, "base_optimizer"):
                self.base_optimizer.step()
            else:
                torch._foreach_sub_(each, [0.1 * p.grad for p in each])
        return loss


def sharpness_steps(model: nn.Module, optimizer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = lockstep.mean(model(x).square().sum(1))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("base", [None, torch.optim.SGD])
def test_what_refusals_of_closures_advise_trains_as_one_process(base: Any) -> None:
    model = nn.Linear(2, 2).double()
    x = torch.arange(10.0).view(5, 2).double().cos()
    copied = copy.deepcopy(model)
    alone = sharpness_steps(copied, Sharpness(copied.parameters(), base), x)

    def body(world: lockstep.World) -> None:
        mine = lockstep.parallelize(copy.deepcopy(model))
        optimizer = Sharpness(mine.parameters(), base)
        part = x.split([3, 2])[world.rank]
        if base is None:
            with pytest.raises(ModelError, match=r"several times in a step.*don't shard it"):
                lockstep.shard_optimizer(optimizer)
        else:
            advice = r"has an optimizer in it, SGD.*shard_optimizer\(optimizer.base_optimizer\)"
            with pytest.raises(ModelError, match=advice):
                lockstep.shard_optimizer(optimizer)
            lockstep.shard_optimizer(optimizer.base_optimizer)
        for found, wanted in zip(sharpness_steps(mine, optimizer, part), alone, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)

    lockstep.launch(body, 2, ranks="threads")


def test_a_failed_backward_is_told_at_the_step_of_the_others() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        loss = next(losses(model, rank, 1))
        if rank == 1:
            model.conv2.weight.register_hook(fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
        else:
            with pytest.raises(CollectiveFailed, match="failed on rank 1"):
                loss.backward()
        optimizer.state_dict()
        optimizer.step()

    run_ranks(2, body)


def test_a_group_that_differs_among_ranks_leaves_the_optimizer_as_it_was() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        first, second, *_ = model.parameters()
        optimizer = lockstep.shard_optimizer(adamw([first]))
        take_steps(model, optimizer, rank)
        optimizer.add_param_group({"params": [second] if rank else [*model.parameters()][2:]})
        next(losses(model, rank, 1)).backward()
        before = first.detach().clone()
        with pytest.raises(ModelMismatch):
            optimizer.step()
        del optimizer.param_groups[1]
        optimizer.step()
        assert not torch.equal(first, before)

    run_ranks(2, body)


def test_a_state_dict_of_one_rank_alone_says_what_it_was() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        take_steps(model, optimizer, rank, steps=1)
        if rank == 0:
            with pytest.raises(CollectiveFailed) as failed:
                optimizer.state_dict()
            told = "\n".join(failed.value.__notes__)
            assert "state_dict() of a sharded AdamW, which every rank must call" in told
            return
        with pytest.raises(CollectiveFailed):
            take_steps(model, optimizer, rank, steps=1)

    run_ranks(2, body)
