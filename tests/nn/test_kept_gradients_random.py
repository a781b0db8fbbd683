"""Gradients that a program keeps, sets and changes are those that one process would have."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from lockstep.errors import CollectiveFailed
from tests.nn.parallel import in_place, net, parts, wrapped
from tests.ranks import run_ranks
from tests.same import assert_same

NUM_LAYERS, ALL = 3, 7
RANKS = 2
Step = tuple[str, int, int]


class Layers(nn.Module):
    """Layers of which each loss uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, dtype=torch.float64) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        outputs = [layer(x) for index, layer in enumerate(self.layers) if used >> index & 1]
        return torch.stack(outputs).square().sum((0, 2))


with torch.random.fork_rng():
    torch.manual_seed(0)
    LAYERS = Layers()
    DATA = torch.randn(RANKS, 4, 3, dtype=torch.float64)


class Program:
    """What one process or rank does, by a plan of steps; and all that it has seen."""

    def __init__(
        self, model: nn.Module, loss: Callable[[float, int], torch.Tensor], no_sync: Callable
    ) -> None:
        self.parameters, self.loss, self.no_sync = list(model.parameters()), loss, no_sync
        self.kept: list[torch.Tensor] = []
        self.seen: list[torch.Tensor | None] = []

    def some(self, mask: int) -> list[nn.Parameter]:
        """The parameters whose bits ``mask`` has, which are of gradients that are there."""
        chosen = (p for index, p in enumerate(self.parameters) if mask >> index & 1)
        return [p for p in chosen if p.grad is not None]

    def run(self, plan: Sequence[Step]) -> list[torch.Tensor | None]:
        for number, (action, mask, used) in enumerate(plan):
            getattr(self, action)(mask, used, 1 + 0.1 * number)
        self.seen += [None if p.grad is None else p.grad.clone() for p in self.parameters]
        return self.seen

    def backward(self, mask: int, used: int, scale: float) -> None:
        self.loss(scale, used).backward()
        self.seen += [tensor.clone() for tensor in self.kept]

    def accumulate(self, mask: int, used: int, scale: float) -> None:
        with self.no_sync():
            self.loss(scale, ALL).backward()
        self.keep(mask, used, scale)
        self.loss(2 * scale, ALL).backward()
        self.seen += [tensor.clone() for tensor in self.kept]

    def keep(self, mask: int, used: int, scale: float) -> None:
        self.kept += [p.grad for p in self.some(mask)]

    def keep_views(self, mask: int, used: int, scale: float) -> None:
        kinds = (torch.Tensor.detach, torch.Tensor.flatten, lambda gradient: gradient.data[..., 1:])
        self.kept += [kinds[used % len(kinds)](p.grad) for p in self.some(mask)]

    def forget(self, mask: int, used: int, scale: float) -> None:
        del self.kept[: used + 1]

    def drop(self, mask: int, used: int, scale: float) -> None:
        for parameter in self.some(mask):
            parameter.grad = None

    def zero(self, mask: int, used: int, scale: float) -> None:
        for parameter in self.some(mask):
            parameter.grad.zero_()

    def change(self, mask: int, used: int, scale: float) -> None:
        if self.kept:
            torch._foreach_mul_(self.kept[-used - 1 :], scale)

    def set_views(self, mask: int, used: int, scale: float) -> None:
        """Let gradients be views of one tensor, as of a program that flattens them."""
        chosen = [p for index, p in enumerate(self.parameters) if mask >> index & 1]
        flat = torch.zeros(sum(p.numel() for p in chosen), dtype=torch.float64)
        for parameter, part in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.kept.append(flat)


def alone(plan: Sequence[Step]) -> list[torch.Tensor | None]:
    model = copy.deepcopy(LAYERS)

    def loss(scale: float, used: int) -> torch.Tensor:
        return (
            sum(model(DATA[rank] * scale, uses(used, rank)).mean() for rank in range(RANKS)) / RANKS
        )

    return Program(model, loss, contextlib.nullcontext).run(plan)


def uses(used: int, rank: int) -> int:
    """The layers that a rank uses: rank 1 uses others than rank 0, unless all are used."""
    return used if used == ALL else (used ^ rank) or 2


def on_ranks(plan: Sequence[Step], backend: str = "threads", **sharded: bool) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        model = in_place(copy.deepcopy(LAYERS), group)
        if sharded:
            optimizer = torch.optim.SGD(model.parameters(), lr=0)
            lockstep.shard_optimizer(optimizer, **sharded)

        def loss(scale: float, used: int) -> torch.Tensor:
            return model(DATA[rank] * scale, uses(used, rank)).mean()

        return Program(model, loss, lambda: lockstep.no_sync(model)).run(plan)

    expected = alone(plan)
    for seen in run_ranks(RANKS, body, backend=backend):
        assert_same(seen, expected, tolerance=1e-9)


ACTIONS = ["accumulate", "keep", "keep_views", "forget", "drop", "zero", "change", "set_views"]
steps = st.tuples(
    st.sampled_from([*ACTIONS, "keep", "drop", "drop", *["backward"] * 4]),
    st.integers(0, 2 ** (2 * NUM_LAYERS) - 1) | st.just(-1),
    st.integers(0, 7) | st.just(7),
)
plans = st.lists(steps, min_size=6, max_size=14)


@given(plan=plans)
def test_random_programs_keep_what_one_process_would(plan: Sequence[Step]) -> None:
    on_ranks(plan)


@given(plan=plans)
def test_random_programs_with_a_sharded_optimizer_keep_the_same(plan: Sequence[Step]) -> None:
    on_ranks(plan, overlap=False)


@given(plan=plans)
def test_random_programs_with_scattered_gradients_keep_the_same(plan: Sequence[Step]) -> None:
    on_ranks(plan, "gloo", overlap=True)


def hooked(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    parallel = wrapped(model, group)
    parallel.register_comm_hook(group, default_hooks.allreduce_hook)
    return parallel


def bucket_views(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return wrapped(model, group, gradient_as_bucket_view=True)


@pytest.mark.parametrize("parallel", [in_place, wrapped, hooked, bucket_views])
def test_gradients_of_the_last_step_stay_as_they_were(parallel: Callable) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        trained = parallel(net(), group)
        parameters = list(trained.parameters())
        before: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        addresses = set()
        for step in range(5):
            trained.zero_grad()
            trained(parts(2)[rank] * (1 + step)).square().mean().backward()
            assert_same(before, copies, tolerance=0)
            before = [p.grad for p in parameters if p.grad is not None]
            copies = [gradient.clone() for gradient in before]
            addresses.add(parameters[0].grad.data_ptr())
        # After those of the first step, whose buckets are others, two memories take turns.
        assert len(addresses) == 3

    run_ranks(2, body, backend="gloo" if parallel is hooked else "threads")


def test_a_bucket_stays_where_it_is_if_nobody_holds_its_gradients() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(net(), group)
        addresses = []
        for step in range(5):
            model.zero_grad(set_to_none=step % 2 == 0)
            model(parts(2)[rank]).square().mean().backward()
            addresses.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        assert addresses[1:] == [addresses[1]] * 4

    run_ranks(2, body)


def test_gradients_kept_of_a_failed_backward_stay_as_they_were() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(net(), group)
        for _ in range(2):
            model(parts(2)[rank]).square().mean().backward()
        output = model(parts(2)[rank])
        first = next(model.parameters())
        handle = first.register_hook(fail) if rank == 0 else None
        with pytest.raises((ValueError, CollectiveFailed)):
            output.square().mean().backward()
        if handle is not None:
            handle.remove()
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        copies = [gradient.clone() for gradient in kept]
        model.zero_grad()
        model(parts(2)[rank]).square().mean().backward()
        assert_same(kept, copies, tolerance=0)

    run_ranks(2, body)


def fail(gradient: torch.Tensor) -> None:
    raise ValueError("planned")
