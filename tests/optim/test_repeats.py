"""A second rank repeats some updates of an unknown class: what parts later is told at that step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.errors import CollectiveMismatch, ModelError
from lockstep.optim import repeats, sharding_of
from tests.nn.models import Digits, Unused
from tests.optim.optimizers import Plain
from tests.optim.programs import check_same_bits, losses, take_steps
from tests.ranks import run_ranks


class Late(Plain):
    """After as many steps as its trial doesn't take, it divides by a norm over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
            if group["k"] > 35:
                group["norm"] = torch.stack([torch.zeros(()), *norms]).norm().item()
            for parameter in group["params"]:
                self.update(parameter, group["lr"] / group.get("norm", 1))


class Threshold(Plain):
    """It clips a norm over all, which in its trial is far lower."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([torch.zeros(()), *(p.grad.norm() for p in every)]).norm().item()
        for parameter in every:
            self.update(parameter, 0.1 / norm if norm > 1e9 else 0.1)


class Inner(torch.optim.AdamW):
    """It is known to nobody."""


class Momentum(Plain):
    """It has state of its own, with a list."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"])

    @torch.no_grad()
    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter.grad is not None:
            state = self.state[parameter]
            recent = state.setdefault("recent", [torch.zeros_like(parameter)])
            state["num_steps"] = state.get("num_steps", 0) + 1
            recent[0].mul_(0.9).add_(parameter.grad)
            parameter.sub_(recent[0] / state["num_steps"], alpha=lr)


def pairs_of(optimizer: Optimizer) -> list[Any]:
    sharding: Any = sharding_of(optimizer)
    return [*sharding._division.repeats._each()]


@pytest.mark.parametrize(("size", "backend"), [(2, "shm"), (3, "threads"), (2, "gloo")])
def test_an_update_that_parts_late_is_told_in_that_step(size: int, backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[Any]:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Late(model.parameters()))
        before = [p.data_ptr() for p in model.parameters()]
        take_steps(model, optimizer, rank, steps=35)
        with pytest.raises(ModelError, match=r"Late can't be divided .* in step 36 ") as caught:
            take_steps(model, optimizer, rank, steps=1)
        told = str(caught.value)
        assert "group['norm'] differ" in told
        assert 'undivided="always"' in told
        assert [p.data_ptr() for p in model.parameters()] == before
        return [told, [p.tolist() for p in model.parameters()]]

    first, *others = run_ranks(size, body, backend=backend)
    assert all(other == first for other in others)


def test_a_threshold_that_real_gradients_cross_is_told() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Threshold(model.parameters()))
        take_steps(model, optimizer, rank)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e8)
        with pytest.raises(ModelError, match=r"Threshold can't be divided .* in step 4 "):
            optimizer.step()

    run_ranks(2, body)


def program_of(kind: Callable[[Any], Optimizer]) -> Any:
    """Return a program that does what may confuse two ranks that are to make the same update."""

    def program(model: nn.Module, shard: Any, rank: int) -> Any:
        parameters = [*model.parameters()]
        halves = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
        optimizer = shard(kind(halves))
        take_steps(model, optimizer, rank)
        for group in optimizer.param_groups:
            group["lr"] /= 2
        parameters[-1].requires_grad_(False)
        take_steps(model, optimizer, rank)
        parameters[-1].requires_grad_(True)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        take_steps(model, optimizer, rank)
        with torch.no_grad():
            for parameter in parameters:
                parameter.clamp_(-0.2, 0.2)
        for loss in losses(model, rank, 2, 20):
            optimizer.step(lambda loss=loss: (loss.backward(), loss)[1])
            for parameter in parameters:
                parameter.grad = None
            optimizer.step()
        model.more = nn.Parameter(torch.ones(3))
        model.more.grad = torch.ones(3)
        optimizer.add_param_group({"params": [model.more]})
        take_steps(model, optimizer, rank)
        if sharding_of(optimizer) is not None:
            assert any(pair.is_followed for pair in pairs_of(optimizer))
        return len(optimizer.state_dict()["state"])

    return program


@pytest.mark.parametrize(
    ("kind", "backend"), [(Inner, "shm"), (Inner, "gloo"), (Momentum, "threads")]
)
def test_a_program_has_the_same_bits(kind: Any, backend: str) -> None:
    check_same_bits(program_of(kind), Unused, backend=backend)


def joining(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(Momentum(model.parameters()))
    with lockstep.join(model):
        for loss in losses(model, rank, 2 + 2 * rank):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if sharding_of(optimizer) is not None:
        assert all(pair.is_followed for pair in pairs_of(optimizer))


def losing_numbers(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(Inner(model.parameters()))
    take_steps(model, optimizer, rank)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    take_steps(model, optimizer, rank)
    for parameter in model.parameters():
        parameter.detach().nan_to_num_(1.0)


@pytest.mark.parametrize("program", [joining, losing_numbers])
def test_steps_along_with_others_and_without_numbers_have_the_same_bits(program: Any) -> None:
    check_same_bits(program)


def test_ranks_without_parameters_have_the_same_bits() -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> None:
        take_steps(model, shard(Inner([model.fc2.bias])), rank)

    check_same_bits(program, size=3)


@pytest.mark.parametrize("owner_alone", [True, False])
def test_what_the_program_changes_on_one_rank_is_no_difference(owner_alone: bool) -> None:
    """State or gradients that one rank changes are the program's matter; later both go on alike."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Momentum(model.parameters()))
        followed = []
        for step in range(8):
            if step == 3 and owner_alone:
                for state in optimizer.state.values():
                    for recent in state.get("recent", []):
                        recent.zero_()
            next(losses(model, rank, 1, step)).backward()
            if step == 3 and rank and not owner_alone:
                for parameter in model.parameters():
                    parameter.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()
            followed.append([pair.is_followed for pair in pairs_of(optimizer)])
        assert not any(followed[3])
        assert all(map(all, [*followed[:3], *followed[4:]]))
        for parameter in model.parameters():
            assert sum(key is parameter for key in optimizer.state) <= 1

    run_ranks(2, body)


def test_a_step_that_has_failed_is_no_difference() -> None:
    class Failing(Momentum):
        fails = False

        def update(self, parameter: nn.Parameter, lr: float) -> None:
            super().update(parameter, lr)
            if self.fails:
                raise ArithmeticError

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Failing(model.parameters()))
        take_steps(model, optimizer, rank)
        keys = [*map(id, optimizer.state)]
        optimizer.fails = True
        with pytest.raises(ArithmeticError):
            take_steps(model, optimizer, rank, steps=1)
        assert [*map(id, optimizer.state)][: len(keys) - 1] == keys[:-1]
        optimizer.fails = False
        take_steps(model, optimizer, rank)
        assert all(pair.is_followed for pair in pairs_of(optimizer))

    run_ranks(2, body)


def test_what_is_repeated_is_not_in_the_state_nor_saved(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[str]:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Momentum(model.parameters()))
        take_steps(model, optimizer, rank)
        named = [*model.named_parameters()]
        local = [name for name, p in named if any(key is p for key in optimizer.state)]
        others = [p for name, p in named if name not in local]
        with pytest.raises(ModelError, match=f"is on rank {1 - rank}"):
            optimizer.state[others[-1]]
        lockstep.save(tmp_path, process_group=group, optimizer=optimizer)
        saved = copy.deepcopy(optimizer.state_dict()["state"])
        take_steps(model, optimizer, rank)
        lockstep.load(tmp_path, process_group=group, optimizer=optimizer)
        found = optimizer.state_dict()["state"]
        torch.testing.assert_close(found, saved, rtol=0, atol=0)
        take_steps(model, optimizer, rank)
        assert all(pair.is_followed for pair in pairs_of(optimizer))
        return local

    first, second = run_ranks(2, body)
    assert sorted(first + second) == sorted(name for name, _ in Digits().named_parameters())


def test_master_values_are_repeated() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits().bfloat16(), process_group=group)
        optimizer = lockstep.shard_optimizer(
            Late(model.parameters(), lr=0.01), master_dtype=torch.float32
        )
        take_steps(model, optimizer, rank)
        optimizer.load_state_dict(optimizer.state_dict())
        take_steps(model, optimizer, rank, steps=32)
        with pytest.raises(ModelError, match="in step 36 "):
            take_steps(model, optimizer, rank, steps=1)

    run_ranks(2, body)


def test_machines_whose_last_bits_may_differ_are_not_compared(monkeypatch: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Inner(model.parameters()))
        assert not pairs_of(optimizer)
        take_steps(model, optimizer, rank)

    capabilities = iter(["AVX2", "AVX512"])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: next(capabilities))
    run_ranks(2, body)


class Elsewhere(Plain):
    """It keeps momentum in attributes of the parameters, or in an object of its own."""

    in_optimizer = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        kept_in: dict[Any, Any] = {}
        if self.in_optimizer:
            kept_in = vars(self).setdefault("kept_in", SimpleNamespace(buffers={})).buffers
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                kept = kept_in.setdefault(parameter, {}) if self.in_optimizer else vars(parameter)
                buffer = kept.setdefault("buffer", torch.zeros_like(parameter))
                parameter.sub_(buffer.mul_(0.9).add_(parameter.grad), alpha=1e-3)


@pytest.mark.parametrize("in_optimizer", [True, False])
@pytest.mark.parametrize("way", ["loads", "changes", "adds"])
def test_values_kept_elsewhere_are_not_compared_after_a_loss(
    way: str, in_optimizer: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Elsewhere, "in_optimizer", in_optimizer)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Elsewhere(model.parameters()))
        for step in range(14):
            next(losses(model, rank, 1, step)).backward()
            if step == 3 and rank and way == "changes":
                for parameter in model.parameters():
                    parameter.grad.mul_(2)
            if step == 3 and way == "adds":
                model.more = nn.Parameter(torch.ones(3))
                model.more.grad = torch.ones(3)
                optimizer.add_param_group({"params": [model.more]})
            optimizer.step()
            optimizer.zero_grad()
            assert step > 2 or all(pair.is_followed for pair in pairs_of(optimizer))
            if step % 4 == 2 and way == "loads":
                optimizer.load_state_dict(optimizer.state_dict())
        for pair in pairs_of(optimizer):
            is_more = pair.parameter is getattr(model, "more", None)
            assert pair.is_followed == (is_more and not in_optimizer)

    run_ranks(2, body)


def test_a_rank_that_misses_the_end_of_a_step_is_told_where_the_others_are() -> None:
    class Failing(Momentum):
        fails = False

        def update(self, parameter: nn.Parameter, lr: float) -> None:
            if self.fails:
                raise ArithmeticError
            super().update(parameter, lr)

    def body(rank: int, group: dist.ProcessGroup) -> str:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Failing(model.parameters()))
        take_steps(model, optimizer, rank)
        optimizer.fails = rank == 1
        with pytest.raises((CollectiveMismatch, ArithmeticError)) as caught:
            take_steps(model, optimizer, rank, steps=1)
        if rank:
            with pytest.raises(CollectiveMismatch) as caught:
                take_steps(model, optimizer, rank, steps=1)
        return str(caught.value)

    assert all("called end of an optimizer's step" in told for told in run_ranks(2, body))


class Signed(Plain):
    """Zeros have a sign that comes from the rank, and numbers none."""

    def __init__(self, parameters: Any, sign: float = 1.0) -> None:
        super().__init__(parameters)
        self.sign = sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.copy_(0.0 * self.sign if parameter.grad is None else -parameter.grad)
            if parameter.grad is not None and not parameter.grad.any():
                parameter.fill_(0.0 * self.sign)


def test_updates_that_differ_in_the_sign_of_zeros_are_compared_once(monkeypatch: Any) -> None:
    gathered = []
    gather = repeats.Repeats._told
    monkeypatch.setattr(
        repeats.Repeats, "_told", lambda *args: (gathered.append(1), gather(*args))[1]
    )

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Signed(model.parameters()))
        optimizer.sign = 1.0 - 2 * rank
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()

    run_ranks(2, body)
    assert len(gathered) == 2  # once on each rank


def test_a_difference_is_told_once() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Late(model.parameters()))
        take_steps(model, optimizer, rank, steps=35)
        with pytest.raises(ModelError, match="in step 36 "):
            take_steps(model, optimizer, rank, steps=1)
        take_steps(model, optimizer, rank)

    run_ranks(2, body)


def test_nothing_is_compared_while_a_cuda_graph_is_captured(monkeypatch: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Momentum(model.parameters()))
        seen = []
        for is_capturing in (False, True, False):
            dist.barrier(group)
            monkeypatch.setattr(repeats, "is_capturing", lambda value=is_capturing: value)
            take_steps(model, optimizer, rank, steps=1)
            seen.append({pair.is_followed for pair in pairs_of(optimizer)})
        assert seen == [{True}, {False}, {True}]

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digests_of_accelerators_find_what_parts(dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(repeats, "_crc", repeats._sum_of_bits)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits().to(dtype), process_group=group)
        optimizer = lockstep.shard_optimizer(Threshold(model.parameters()))
        for gradient in (1.0, -1.0):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
            assert all(pair.is_followed for pair in pairs_of(optimizer))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e8)
        with pytest.raises(ModelError, match="in step 3 "):
            optimizer.step()

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool])
def test_a_sum_of_bits_shows_each_change(dtype: torch.dtype) -> None:
    values = torch.ones(5, 3).to(dtype)
    changed = [values.clone() for _ in range(15)]
    for place, each in enumerate(changed):
        each.view(-1)[place] = False if dtype is torch.bool else -1.0
    digests = [int(repeats._sum_of_bits(each)) for each in [values, *changed]]
    assert len({*digests}) == 16


def test_methods_that_are_divided_as_steps_are_not_counted_as_such() -> None:
    class Averaging(Threshold):
        def average(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["num_averages"] = 1

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Averaging(model.parameters()))
        take_steps(model, optimizer, rank)
        optimizer.average()
        assert "average" in vars(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e8)
        with pytest.raises(ModelError, match=r"in step 4 "):
            optimizer.step()

    run_ranks(2, body)
