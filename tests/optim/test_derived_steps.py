"""Classes that do more in a step than the class of torch's that they are derived from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelError
from lockstep.optim.known import known_base
from lockstep.optim.probe import Treatment, Verdict, probe
from tests.counts import pairs
from tests.nn.models import Digits
from tests.optim.programs import check_same_bits, losses, take_steps
from tests.ranks import run_ranks


class Clamped(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        every = [p for group in self.param_groups for p in group["params"]]
        self.num_clamped = sum(int((p.abs() > 0.05).sum()) for p in every)
        for parameter in every:
            parameter.data.clamp_(-0.05, 0.05)
        return result


class Clipped(torch.optim.Adam):
    """It scales gradients by a norm over all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        every = [p.grad for group in self.param_groups for p in group["params"]]
        self.norm = torch.stack([gradient.norm() for gradient in every]).norm()
        for gradient in every:
            gradient.mul_(0.01 / self.norm)
        return super().step(closure)


class Centralized(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    gradient = parameter.grad
                    gradient.sub_(gradient.mean(dim=[*range(1, gradient.dim())], keepdim=True))
        return super().step(closure)


class Averaged(torch.optim.RMSprop):
    """It has an average of all parameters, by parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        every = [p for group in self.param_groups for p in group["params"]]
        averages = vars(self).setdefault("averages", {p: p.detach().clone() for p in every})
        for parameter in every:
            averages[parameter].lerp_(parameter, 0.5)
        return result

    def sums(self) -> list[float]:
        return [average.sum().item() for average in self.averages.values()]


noted: dict[str, list[float]] = {}


class Noting(torch.optim.Adagrad):
    """It notes what it sees, and counts its steps in its groups and in a class."""

    seen: list[int] = []  # noqa: RUF012

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        before = [p.sum().item() for group in self.param_groups for p in group["params"]]
        result = super().step(closure)
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
            noted.setdefault("sums", []).append(sum(before))
            noted["sums"] += [parameter.sum().item() for parameter in group["params"]]
            self.seen.append(len(group["params"]))
        return result


class Sharp(torch.optim.SGD):
    """It computes gradients a second time, where they are larger."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in every]).norm()
        moves = [parameter.grad * (0.05 / norm) for parameter in every]
        torch._foreach_add_(every, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(every, moves)
        super().step()
        return loss


class Twice(Clamped):
    """It is derived from such a class, and takes two steps."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        return super().step()


class Named(torch.optim.AdamW):
    """It changes nothing."""


KINDS = [Clamped, Clipped, Centralized, Averaged, Noting, Twice, Sharp, Named]


def taking_steps(kind: Any) -> Callable[[nn.Module, Any, int], Any]:
    def program(model: nn.Module, shard: Any, rank: int) -> Any:
        decay = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = shard(kind([{"params": decay}, {"params": others, "lr": 0.1}], lr=0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        calls = list[int]()
        optimizer.register_step_pre_hook(
            lambda one, *_: calls.append(sum(len(g["params"]) for g in one.param_groups))
        )
        for loss in losses(model, rank, 4):
            if kind is Sharp:
                (x,) = [torch.full((2, *model.sample), 1.0 + rank)]

                def closure(x: Any = x) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            else:
                loss.backward()
                optimizer.step()
            scheduler.step()
            gradients = [parameter.grad.sum().item() for parameter in model.parameters()]
            optimizer.zero_grad()
        assert isinstance(optimizer, kind)
        assert known_base(type(optimizer)) is known_base(kind)
        numbers = {k: v for k, v in vars(optimizer).items() if k in ("num_clamped", "norm")}
        sums = optimizer.sums() if kind is Averaged else []
        saved = optimizer.state_dict()
        state = {
            key: {name: torch.as_tensor(value).tolist() for name, value in entry.items()}
            for key, entry in saved["state"].items()
        }
        return calls, gradients, numbers, sums, state, saved["param_groups"]

    return program


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let torch have put hooks around steps of its classes, as for an object of them, or not."""

    def hook(is_hooked: bool) -> None:
        for kind in known_base(Clamped), known_base(Clipped):
            kind([torch.zeros(1)])
            if not is_hooked:
                monkeypatch.setattr(kind, "step", kind.step.__wrapped__)

    return hook


@pairs("kind, size, is_hooked", KINDS, [2, 3], [False, True])
def test_a_derived_class_sees_and_changes_all_parameters(
    kind: Any, size: int, is_hooked: bool, hook: Callable[[bool], None]
) -> None:
    hook(is_hooked)
    check_same_bits(taking_steps(kind), size=size)


@pairs("kind, backend", [Clamped, Clipped, Sharp], ["shm", "gloo"])
def test_it_does_over_other_groups(kind: Any, backend: str) -> None:
    check_same_bits(taking_steps(kind), backend=backend, overlap=True)


def test_one_that_is_not_known_to_be_called_by_the_class_is_tried_in_parts() -> None:
    assert known_base(Clamped) is torch.optim.SGD
    assert known_base(Twice) is torch.optim.SGD
    assert known_base(torch.optim.SGD) is known_base(Named) is known_base(Replaced) is None
    assert known_base(Changed) is known_base(WithState) is None


class Replaced(torch.optim.SGD):
    """It has a step of its own."""

    seen: list[int] = []  # noqa: RUF012

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        noted.setdefault("seen", []).append(len(every))
        self.seen.append(len(every))
        self.largest = max(parameter.abs().max().item() for parameter in every)
        for parameter in every:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


class Changed(Clamped):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class WithState(torch.optim.SGD):
    """It has state of its own, which a state dict has too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", parameter.clone())
                average.lerp_(parameter, 0.5)
        return result


class Counting(Replaced):
    """It has what it notes in a group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        seen = self.param_groups[0].setdefault("seen", [])
        seen += [p.numel() for p in self.param_groups[0]["params"]]
        del self.largest


def test_what_is_noted_of_all_parameters_is_a_reason_to_leave_it_undivided() -> None:
    noted.clear()
    model = Digits()
    parameters = (optimizer := Replaced(model.parameters())).param_groups[0]["params"]
    assert probe(optimizer).reason == "its largest would differ between the ranks"
    assert noted == {}
    assert Replaced.seen == []
    reason = "group['seen'] would differ between the ranks"
    assert probe(Counting(parameters)).reason == reason
    assert probe(WithState(parameters)).treatment is Treatment.DIVIDE


@pytest.mark.filterwarnings("ignore:.* can't be divided")
@pytest.mark.parametrize("kind", [Replaced, Counting, WithState])
def test_what_is_noted_is_that_of_one_process(kind: Any) -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> Any:
        optimizer = shard(kind(model.parameters(), lr=0.1, momentum=0.9))
        take_steps(model, optimizer, rank)
        found = optimizer.state_dict()
        for entry in found["state"].values():
            entry.update({name: value.tolist() for name, value in entry.items()})
        return found, getattr(optimizer, "largest", None)

    check_same_bits(program)


class Noisy(Clamped):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
        return result


def test_a_derived_class_that_draws_random_numbers_is_left_undivided() -> None:
    verdict = probe(Noisy(Digits().parameters(), lr=0.1), in_parts=False)
    assert verdict == Verdict(Treatment.UNDIVIDED, "it draws random numbers", may_draw=True)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_ranks_without_data_take_its_steps_too(
    is_hooked: bool, hook: Callable[[bool], None]
) -> None:
    hook(is_hooked)

    def program(model: nn.Module, shard: Any, rank: int) -> Any:
        optimizer = shard(Clamped(model.parameters(), lr=0.01))
        with lockstep.join(model):
            for step, loss in enumerate(losses(model, rank, 2 + rank)):
                loss.backward()
                if step == 2:
                    optimizer.step(lambda loss=loss: loss)
                else:
                    optimizer.step()
                optimizer.zero_grad()

    check_same_bits(program)


def test_in_join_it_may_not_call_the_closure_itself() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Sharp(model.parameters(), lr=0.01))

        def closure() -> torch.Tensor:
            (loss,) = losses(model, rank, 1)
            loss.backward()
            return loss

        with lockstep.join(model), pytest.raises(ModelError, match="its closure itself, in join"):
            optimizer.step(closure)

    run_ranks(2, body)


def test_state_to_come_is_found_without_what_it_does_besides() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> int:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = Clamped(model.parameters(), lr=0.01, momentum=0.9)
        lockstep.shard_optimizer(optimizer)
        state = lockstep.checkpoint.ShardedState(optimizer).state_dict()
        assert not hasattr(optimizer, "num_clamped")
        return len(state["state"])

    assert all(run_ranks(2, body))
