"""Gradients travel while backward still computes others: seen through a group that takes notes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.nn.parallel import net, parts
from tests.ranks import run_ranks


class NotingGroup:
    """A process group that notes what it is asked to carry, beside what else is noted."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.notes: list[str | int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
        self.notes.append(tensors[0].numel())
        return self._group.allreduce(tensors, options)


class Layers(nn.Module):
    """Four layers of 20 parameters, of which some may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, leave_out: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != leave_out:
                x = torch.tanh(layer(x))
        return x


def noted(group: dist.ProcessGroup, cap_bytes: int) -> tuple[Layers, NotingGroup]:
    """Layers that note when their weights' gradients come, in a group that notes too."""
    noting = NotingGroup(group)
    model = Layers()
    for index, layer in enumerate(model.layers):
        layer.weight.register_hook(lambda _, index=index: noting.notes.append(f"layer {index}"))
    lockstep.parallelize(model, process_group=noting, bucket_cap_mb=cap_bytes / 2**20)
    return model, noting


def notes_of_backward(model: Layers, noting: NotingGroup, leave_out: int | None = None) -> list:
    noting.notes.clear()
    model(torch.ones(2, 4), leave_out).sum().backward()
    return list(noting.notes)


# The gradients of a layer, of which each begins at a multiple of 16 elements.
LAYER = 16 + 16
FACTS = 8 + 2  # for each parameter, and of ranks that failed, at the end of the last bucket


def test_buckets_leave_when_they_are_full() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, noting = noted(group, cap_bytes=80)  # a layer's weight and bias
        notes_of_backward(model, noting)
        assert notes_of_backward(model, noting) == [
            "layer 3", LAYER, "layer 2", LAYER, "layer 1", LAYER, "layer 0", LAYER + FACTS
        ]  # fmt: skip

    run_ranks(2, body)


def test_buckets_are_as_large_as_asked_for() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, noting = noted(group, cap_bytes=160)
        for _ in range(2):
            notes = notes_of_backward(model, noting)
        assert notes == ["layer 3", "layer 2", 2 * LAYER, "layer 1", "layer 0", 2 * LAYER + FACTS]

    run_ranks(2, body)


def test_a_layer_that_is_left_out_holds_nothing_up() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, noting = noted(group, cap_bytes=80)
        notes_of_backward(model, noting)
        for _ in range(2):
            notes = notes_of_backward(model, noting, leave_out=2)
        assert notes[:3] == ["layer 3", LAYER, LAYER]
        # Here again, it is waited for.
        assert notes_of_backward(model, noting)[:4] == ["layer 3", LAYER, "layer 2", LAYER]

    run_ranks(2, body)


def test_buckets_of_two_models_in_one_backward_leave_when_they_are_full() -> None:
    """Also those of the model in which the backward doesn't begin."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        noting, models = NotingGroup(group), {"first": Layers(), "second": Layers()}
        for name, model in models.items():
            for index, layer in enumerate(model.layers):
                layer.weight.register_hook(
                    lambda _, note=f"{name} {index}": noting.notes.append(note) or None
                )
            lockstep.parallelize(model, process_group=noting, bucket_cap_mb=80 / 2**20)
        for _ in range(4):
            noting.notes.clear()
            models["second"](models["first"](torch.ones(2, 4))).sum().backward()
        notes = noting.notes[noting.notes.index("first 3") :]
        # Those of the second one have waited for their turn.
        assert notes == [
            "first 3", LAYER, "first 2", LAYER, "first 1", LAYER, LAYER, LAYER, LAYER, "first 0",
            LAYER + FACTS, LAYER + FACTS,
        ]  # fmt: skip

    run_ranks(2, body)


@pytest.mark.parametrize("one_rank_only", [True, False])
def test_reentrant_checkpoints_of_changing_layers(one_rank_only: bool) -> None:
    """A layer that was left out comes back inside of a checkpoint, where nobody can foresee it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.head = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, leave_out: int | None) -> torch.Tensor:
            x = x.requires_grad_()
            for index, layer in enumerate(self.layers):
                if index != leave_out:
                    x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
            return self.head(x)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = lockstep.parallelize(
            Model().double(), process_group=group, bucket_cap_mb=80 / 2**20
        )
        for step in range(6):
            model.zero_grad()
            leave_out = None if one_rank_only and rank else step % 3
            model(parts(2)[rank], leave_out).sum().backward()
        return [p.grad for p in model.parameters()]

    first, second = run_ranks(2, body)
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_everything_inside_of_reentrant_checkpoints_is_right_too() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(net(), process_group=group)
        x = parts(2)[rank].requires_grad_()
        for _ in range(3):
            model.zero_grad()
            hidden = checkpoint(model.first, x, use_reentrant=True, preserve_rng_state=False)
            checkpoint(
                model.second, hidden, use_reentrant=True, preserve_rng_state=False
            ).square().mean().backward()
        return [p.grad for p in (*model.first.parameters(), *model.second.parameters())]

    model = net()
    model.second(model.first(parts(2).flatten(0, 1))).square().mean().backward()
    oracle = [p.grad for p in (*model.first.parameters(), *model.second.parameters())]
    for gradients in run_ranks(2, body):
        for mine, theirs in zip(gradients, oracle, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("width", [8, 300])
def test_a_weight_outside_and_inside_of_a_checkpoint(width: int) -> None:
    """In the first backward its gradient comes twice, after it has been copied once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width)
            self.other = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layer, self.other(x), use_reentrant=True, preserve_rng_state=False)
            return self.layer(torch.tanh(x))

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Model().double()
        x = torch.randn(2, 4, width, dtype=torch.float64)
    oracle = copy.deepcopy(model)
    oracle(x.flatten(0, 1)).square().mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = lockstep.parallelize(copy.deepcopy(model), process_group=group)
        for _ in range(3):
            mine.zero_grad()
            mine(x[rank]).square().mean().backward()
            for a, b in zip(mine.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)

    run_ranks(2, body)


def test_reentrant_checkpoints_may_begin_after_other_steps() -> None:
    """A gradient from inside of one, which comes again, isn't copied with those of a full chunk."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Of 14,400 numbers each, of which nine are copied at once.
            self.first = nn.Linear(120, 120, bias=False)
            self.shared = nn.Linear(120, 120, bias=False)
            self.others = nn.ModuleList(nn.Linear(120, 120, bias=False) for _ in range(9))

        def forward(self, x: torch.Tensor, is_checkpointed: bool) -> torch.Tensor:
            x = torch.tanh(self.shared(torch.tanh(self.first(x))))
            for number, layer in enumerate(self.others):
                x = torch.tanh(layer(x))
                if number == 4 and is_checkpointed:
                    x = checkpoint(self.shared, x, use_reentrant=True, preserve_rng_state=False)
                elif number == 4:
                    x = self.shared(x)
            return x

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Model().double()
        x = torch.randn(2, 4, 120, dtype=torch.float64)
    oracle = copy.deepcopy(model)
    oracle(x.flatten(0, 1), False).square().mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = lockstep.parallelize(copy.deepcopy(model), process_group=group)
        for is_checkpointed in (False, False, False, True, True, False):
            mine.zero_grad()
            mine(x[rank], is_checkpointed).square().mean().backward()
            for a, b in zip(mine.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)

    run_ranks(2, body, backend="gloo")  # which can't average: gradients are scaled first
