"""Parameters that are frozen, unfrozen, replaced, added or cast after a model was made parallel."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import lockstep
from lockstep import errors
from tests.nn.parallel import BOTH, in_place, net, parts
from tests.ranks import run_ranks


class Lora(nn.Module):
    """A frozen layer with a trained correction of low rank, as such libraries put it in."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        options = {"bias": False, "dtype": inner.weight.dtype}
        self.down = nn.Linear(inner.in_features, 2, **options)
        self.up = nn.Linear(2, inner.out_features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


class Offset(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn_like(like))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.offset


def freeze_a_layer(model: nn.Module) -> None:
    model.first.requires_grad_(False)


def freeze_and_unfreeze(model: nn.Module) -> None:
    model.first.requires_grad_(not model.first.weight.requires_grad)


def replace_a_layer(model: nn.Module) -> None:
    model.second = nn.Linear(6, 3).double()


def replace_a_parameter(model: nn.Module) -> None:
    model.second.weight = nn.Parameter(torch.randn(3, 6, dtype=torch.float64))


def add_a_layer(model: nn.Module) -> None:
    model.branches.append(nn.Linear(6, 3).double())


def add_a_bias(model: nn.Module) -> None:
    model.second.register_parameter("shift", nn.Parameter(torch.randn(3, dtype=torch.float64)))
    model.second.register_forward_hook(lambda layer, _, out: out + layer.shift)


def inject_lora(model: nn.Module) -> None:
    if isinstance(model.first, Lora):
        return
    model.requires_grad_(False)
    model.first = Lora(model.first)
    model.second = Lora(model.second)


def parametrize_a_weight(model: nn.Module) -> None:
    parametrize.register_parametrization(model.second, "weight", Offset(model.second.weight))


def cast(model: nn.Module) -> None:
    model.float()


CHANGES = [
    freeze_a_layer,
    freeze_and_unfreeze,
    replace_a_layer,
    replace_a_parameter,
    add_a_layer,
    add_a_bias,
    inject_lora,
    parametrize_a_weight,
    cast,
]


def step(model: nn.Module, x: torch.Tensor, share: float) -> list[torch.Tensor | None]:
    model.zero_grad()
    x = x.to(next(model.parameters()).dtype)
    branch = len(model.branches) - 1
    (model(x, branch).square().sum() * share).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@BOTH
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_changes_trains_on_as_one_process_does(
    parallel, change: Callable[[nn.Module], None]
) -> None:
    data = parts(2)

    def body(rank: int, group: dist.ProcessGroup) -> list:
        mine = parallel(net(), group)
        bare = getattr(mine, "module", mine)
        seen = [step(mine, data[rank], 1)]
        for _ in range(2):
            change(bare)
            for _ in range(3):
                seen.append(step(mine, data[rank], 1))
        # What is new started at random, and from rank 0's values everywhere.
        return [seen, copy.deepcopy(bare)]

    (first, model), (second, other) = run_ranks(2, body)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    slack = 1e-10 if next(model.parameters()).dtype is torch.float64 else 1e-4
    oracle = step(model, data.flatten(0, 1), 1 / 2)
    for gradients in (first[-1], second[-1]):
        for mine, theirs in zip(gradients, oracle, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=slack, atol=slack)


def test_what_is_new_is_known_before_the_next_forward_of_a_part() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = in_place(net(), group)
        model.second = nn.Linear(6, 3).double()
        return model.second(model.middle(torch.ones(1, 4, dtype=torch.float64))).detach()

    assert torch.equal(*run_ranks(2, body))


def test_what_was_frozen_from_the_start_can_be_unfrozen_alone() -> None:
    """No parameter that had a hook gets a gradient any more."""

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = net()
        model.first.requires_grad_(False)
        in_place(model, group)
        step(model, parts(2)[rank], 1)
        model.requires_grad_(False)
        model.first.requires_grad_(True)
        return [g for g in step(model, parts(2)[rank], 1) if g is not None]

    first, second = run_ranks(2, body)
    assert len(first) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_added_up_before_a_change_are_not_lost() -> None:
    data = parts(4)

    def train_and_freeze(
        model: nn.Module, batches: list[torch.Tensor], context
    ) -> list[torch.Tensor]:
        with context():
            model.middle(batches[0]).square().sum().backward()
        model.branches[0].requires_grad_(False)
        with context():
            model(batches[1], 1).square().sum().backward()
        model.second.bias.requires_grad_(False)
        model(batches[2], 2).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = net()
        model.branches[1].requires_grad_(False)
        in_place(model, group)
        model.branches[1].requires_grad_(True)
        return train_and_freeze(
            model, [data[rank], data[rank + 1], data[rank + 2]], lambda: lockstep.no_sync(model)
        )

    def alone(rank: int) -> list[torch.Tensor]:
        from contextlib import nullcontext

        return train_and_freeze(net(), [data[rank], data[rank + 1], data[rank + 2]], nullcontext)

    expected = [(a + b) / 2 for a, b in zip(alone(0), alone(1), strict=True)]
    for gradients in run_ranks(2, body):
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_change_that_differs_between_ranks_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(net(), group)
        step(model, parts(2)[rank], 1)
        model.second = nn.Linear(6, 3 + rank).double()
        with pytest.raises(
            errors.ModelMismatch, match=r"'second\.weight' is .* on rank 1"
        ) as error:
            model(parts(2)[rank])
        assert "changed since" in error.value.__notes__[0]

    run_ranks(2, body)


def test_a_change_on_one_rank_alone_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> str:
        model = in_place(net(), group)
        if rank == 1:
            model.extra = nn.Linear(2, 2).double()
        with pytest.raises(errors.CollectiveFailed) as error:
            model(parts(2)[rank]).sum().backward()
        return "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])

    _, changed = run_ranks(2, body)
    assert "to be trained by now are ['extra.weight', 'extra.bias']" in changed


def test_a_parameter_put_in_behind_torchs_back_is_named_and_then_known() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, x = in_place(net(), group), parts(2)[rank]
        model(x).sum().backward()
        new = nn.Parameter(torch.ones(3, 6, dtype=torch.float64))
        model.second._parameters["weight"] = new
        with pytest.raises(errors.ParameterChanged, match=r"'second\.weight' was put"):
            model(x).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        return [new.grad]

    (first,), (second,) = run_ranks(2, body)
    assert torch.equal(first, second)


def test_other_models_are_not_looked_at() -> None:
    from torch.nn.modules import module as hooks

    gc.collect()  # models of other tests may have left such hooks, which the next forward removes
    nn.Identity()(torch.ones(1))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(net(), group)
        other = net()
        other.second = nn.Linear(6, 3).double()
        group.barrier().wait()
        assert not hooks._global_forward_pre_hooks
        group.barrier().wait()
        model.second = nn.Linear(6, 3).double()
        assert hooks._global_forward_pre_hooks
        step(model, parts(2)[rank], 1)
        model(parts(2)[rank])  # the first forward after a backward looks for what it wasn't told of
        group.barrier().wait()
        assert not hooks._global_forward_pre_hooks

    run_ranks(2, body)


def test_what_is_added_frozen_starts_from_rank_0_and_is_known_when_it_thaws() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = in_place(net(), group)
        layer = nn.Linear(6, 3).double()
        nn.init.constant_(layer.weight, rank + 1.0)
        model.branches.append(layer.requires_grad_(False))
        seen = [g for g in step(model, parts(2)[rank], 1) if g is not None]
        assert layer.weight.eq(1).all()
        layer.requires_grad_(True)
        seen += [g for g in step(model, parts(2)[rank], 1) if g is not None]
        assert layer.weight.grad is not None
        return seen

    first, second = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_buffers_that_are_added_follow() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = in_place(net(), group)
        model.norm = nn.BatchNorm1d(3, affine=False).double()
        model.register_buffer("seen", torch.tensor(rank + 1.0))
        seen = []
        for _ in range(2):
            model.norm(model(parts(2)[rank])).square().sum().backward()
            seen.append(model.seen.item())
            model.seen.add_(rank + 1)
        return [*seen, *model.norm.running_mean.tolist()]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[:2] == [1.0, 2.0]
