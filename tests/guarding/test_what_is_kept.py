"""What a skipped step leaves as it was, and in which cases it is told of, and of whom."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelError, StepSkipped
from lockstep.guarding.kept import ValueCopies
from tests.guarding.faulty import Refused, fail
from tests.ranks import run_ranks

BASE = nn.Linear(3, 2)
ONES = torch.ones(2, 3)


def on_ranks(body: Callable[[int, nn.Module], Any], num_ranks: int = 2) -> list[Any]:
    """Call ``body`` on ranks, each with the parallel model."""

    def of_rank(rank: int, group: dist.ProcessGroup) -> Any:
        return body(rank, lockstep.parallelize(copy.deepcopy(BASE), process_group=group))

    return run_ranks(num_ranks, of_rank)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, and notes it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.history, self.part = inner, [0], None
        super().__init__(inner.param_groups[0]["params"], {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.history.append(1)
        self.last = len(self.history)


def test_an_optimizer_within_and_its_lists_are_as_before_the_step() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer, history = Around(inner), []
        for fails in (True, False, True):
            before = copy.deepcopy(inner.state_dict())
            with lockstep.guard(model, optimizer) as step:
                model(ONES).sum().backward()
                optimizer.step()
                history = optimizer.history
                if fails and rank == 1:
                    raise Refused
            optimizer.zero_grad()
            assert step.skipped is fails
            assert hasattr(optimizer, "last") is bool(before["state"]) or not fails
        assert optimizer.history is history
        assert history == [0, 1]
        for number, state in before["state"].items():
            now = inner.state_dict()["state"][number]["momentum_buffer"]
            assert torch.equal(now, state["momentum_buffer"])

    on_ranks(body)


def test_an_optimizer_with_a_part_that_cannot_be_kept_is_refused() -> None:
    def body(_: int, model: nn.Module) -> None:
        optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.part = [object()]
        with pytest.raises(ModelError, match="undo=False"), lockstep.guard(model, optimizer):
            pass

    on_ranks(body)


def test_a_gradient_whose_data_was_replaced_is_looked_at() -> None:
    def body(rank: int, model: nn.Module) -> bool | None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.guard(model, optimizer) as step:
            model(ONES).sum().backward()
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data * (float("nan") if rank == 1 else 1)
            optimizer.step()
        return step.skipped

    assert on_ranks(body) == [True, True]


def test_a_parameter_of_no_model_is_as_before_the_step() -> None:
    def body(_: int, model: nn.Module) -> None:
        scale = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        with lockstep.guard(model, optimizer) as step:
            (model(ONES) * scale).sum().backward()
            optimizer.step()
            raise Refused
        assert step.skipped
        assert scale.tolist() == [1, 1]

    on_ranks(body)


class FailsOnce(torch.optim.SGD):
    """Raises in its first step."""

    has_failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise Refused
        return super().step(closure)


def test_an_update_that_has_raised_is_not_taken_again() -> None:
    def body(_: int, model: nn.Module) -> None:
        optimizer = FailsOnce(model.parameters(), lr=0.1)

        def step() -> None:
            model(ONES).sum().backward()
            with suppress(Refused):
                optimizer.step()
            optimizer.step()

        with pytest.raises(ModelError, match="twice"):
            lockstep.guard(model, optimizer).run(step)
        assert torch.equal(model.weight, BASE.weight)

    on_ranks(body)


def test_an_exception_that_is_handled_around_a_guard_is_not_its_cause() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            raise StepSkipped("earlier")
        except StepSkipped:
            with lockstep.guard(model, optimizer) as step:
                if rank == 1:
                    fail("exception")
                model(ONES).sum().backward()
                optimizer.step()
        return str(step.blame)

    for blame in on_ranks(body):
        assert blame.startswith("rank 1")
        assert blame.endswith("planted")


def test_a_rank_is_to_blame_in_the_step_in_which_a_model_is_unfrozen() -> None:
    def body(rank: int, model: nn.Module) -> int | None:
        model.bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for is_last in (False, True):
            with lockstep.guard(model, optimizer) as step:
                model.bias.requires_grad_(is_last)
                factor = float("nan") if rank == 1 and is_last else 1
                (model(ONES).sum() * factor).backward()
                optimizer.step()
            optimizer.zero_grad()
        assert step.blame is not None
        return step.blame.rank

    assert on_ranks(body) == [1, 1]


def test_parameters_of_other_modules_are_as_before_without_undo() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = nn.Linear(3, 2)
        before = average.weight.detach().clone()
        with lockstep.guard(model, optimizer, average, undo=False) as step:
            with torch.no_grad():
                average.weight.mul_(2)
            if rank == 1:
                raise Refused
            model(ONES).sum().backward()
            optimizer.step()
        assert step.skipped
        assert torch.equal(average.weight, before)

    on_ranks(body)


@pytest.mark.parametrize("shards", [False, True], ids=["plain", "sharded"])
def test_copies_stay_in_one_memory(shards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memories: list[Any] = []
    keep = ValueCopies.keep

    def noted(copies: ValueCopies, tensors: Any) -> None:
        keep(copies, tensors)
        memories.append(copies._copies)

    monkeypatch.setattr(ValueCopies, "keep", noted)

    def body(_: int, model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if shards:
            lockstep.shard_optimizer(optimizer)
        for _ in range(4):
            with lockstep.guard(model, optimizer):
                model(ONES).sum().backward()
                optimizer.step()
            optimizer.zero_grad()

    on_ranks(body, 1)
    assert memories[-1] is memories[-2]


def test_micro_batches_from_before_a_step_that_is_retried_are_refused() -> None:
    def body(_: int, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.accumulate(model):
            model(ONES).sum().backward()

        def step() -> None:
            model(ONES).sum().backward()
            optimizer.step()

        with pytest.raises(ModelError, match="micro-batches"):
            lockstep.guard(model, optimizer, on_skip="retry").run(step)
        optimizer.zero_grad()
        assert not lockstep.guard(model, optimizer, on_skip="retry").run(step).skipped
        assert not lockstep.guard(model, optimizer, on_skip="retry").run(step).skipped

    on_ranks(body)


def test_a_generator_that_is_new_in_a_step_is_as_before_it() -> None:
    def body(_: int, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            model.generator = torch.Generator().manual_seed(seed)
            before = model.generator.get_state()
            with lockstep.guard(model, optimizer):
                torch.rand(2, generator=model.generator)
                raise Refused
            assert torch.equal(model.generator.get_state(), before)

    on_ranks(body, 1)


def test_a_scale_that_a_skipped_step_has_begun_is_begun_anew() -> None:
    def body(_: int, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        with lockstep.guard(model, optimizer, scaler) as step:
            scaler.scale(model(ONES).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            raise Refused
        assert step.skipped
        assert scaler.get_scale() == 8

    on_ranks(body)
