"""Gradients that a program keeps, and memory of its own in which it wants them.

In one process a gradient that ``zero_grad()`` has dropped stays as it is as long as somebody has
it, and one that is not dropped is the tensor to which the next backward adds.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.counts import pairs
from tests.nn.parallel import in_place, net, parts, wrapped
from tests.ranks import run_ranks
from tests.same import assert_same

Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]


def with_hook(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """As DDP with torch's example of a hook."""

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    mine = wrapped(model, group)
    mine.register_comm_hook(None, hook)
    return mine


def in_small_buckets(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return in_place(model, group, bucket_cap_mb=1e-4)


WRAPS = [wrapped, in_place, with_hook, in_small_buckets]


DROPPED = ["drop", "keep", "alias", "own", "flat"]
ADDED_TO = ["drop", "keep", "zero", "add", "own", "flat", "hold"]
EACH = sorted({*DROPPED, *ADDED_TO})


class Program:
    """What a program does with the gradients of some parameters between steps, by a seed.

    Each parameter has a habit of its own; with the first seeds, all have the same. ``kept`` has
    what the program looks at in the end.
    """

    def __init__(self, parameters: list[nn.Parameter], seed: int) -> None:
        self.parameters, self._random = parameters, random.Random(seed)
        self.kept: list[torch.Tensor] = []
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        self._parts = flat.split([p.numel() for p in parameters])
        # An alias of a gradient to which more is added can't be told from one of a dropped one.
        habits = self._random.choice([DROPPED, ADDED_TO])
        self._habits = [self._random.choice(habits) for _ in parameters]
        if seed < len(EACH):
            self._habits = [EACH[seed] for _ in parameters]
        self._flat = flat

    def go_on(self) -> None:
        """What is done after a step."""
        self.kept.append(self._flat.clone())
        for parameter, habit, part in zip(self.parameters, self._habits, self._parts, strict=True):
            gradient = parameter.grad
            if gradient is not None and habit == "keep":
                self.kept.append(gradient)
            if gradient is not None and habit == "alias":
                self.kept.append(gradient.data.view(-1))
            if gradient is not None and habit == "hold":
                self.kept.append(gradient)
            if habit in ("drop", "keep", "alias"):
                parameter.grad = None
            elif habit == "zero" and gradient is not None:
                gradient.zero_()
            elif habit == "own":
                parameter.grad = torch.zeros_like(parameter)
                self.kept.append(parameter.grad)
            elif habit == "flat":
                parameter.grad = part.zero_().view_as(parameter)


def run_program(
    model: nn.Module,
    seed: int,
    losses: Callable[[int, int | None], torch.Tensor],
    no_sync: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> list[torch.Tensor]:
    program = Program(list(model.parameters()), seed)
    habits = random.Random(seed)
    for step in range(6):
        branch = habits.choice([None, 0, 1])
        if habits.random() < 0.3:
            with no_sync():
                losses(step, branch).backward()
        losses(step + 1, branch).backward()
        program.go_on()
    return program.kept


def check(wrap: Wrap, backend: str, seed: int) -> None:
    model, data = net(), torch.stack([parts(2) + step for step in range(7)])
    oracle = copy.deepcopy(model)
    expected = run_program(
        oracle, seed, lambda step, b: oracle(data[step].flatten(0, 1), b).square().mean()
    )

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = wrap(copy.deepcopy(model), group)
        kept = run_program(
            mine,
            seed,
            lambda step, branch: mine(data[step][rank], branch).square().mean(),
            lambda: lockstep.no_sync(mine),
        )
        assert_same(kept, expected)

    run_ranks(2, body, backend=backend)


@pairs("wrap, backend, seed", WRAPS, ["threads", "gloo", "shm"], range(14))
def test_what_a_program_keeps_is_as_in_one_process(wrap: Wrap, backend: str, seed: int) -> None:
    check(wrap, backend, seed)


@pytest.mark.long
@pytest.mark.parametrize("wrap", WRAPS)
def test_what_many_programs_keep(wrap: Wrap) -> None:
    for seed in range(100, 200):
        check(wrap, "threads", seed)


def backwards(mine: nn.Module, data: torch.Tensor) -> Iterator[nn.Module]:
    for _ in range(5):
        mine(data).square().mean().backward()
        yield mine


def memories(mine: nn.Module) -> set[int]:
    return {p.grad.untyped_storage().data_ptr() for p in mine.parameters() if p.grad is not None}


def test_memory_is_used_again_unless_it_is_kept() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine, used, kept = in_place(net(), group), [], []
        for _ in backwards(mine, parts(2)[rank]):
            used.append(memories(mine))
            mine.zero_grad()
        assert len(set.union(*used[1:])) == 1  # buckets are assigned anew after the first
        used.clear()
        for _ in backwards(mine, parts(2)[rank]):
            used.append(memories(mine))
            kept = [p.grad for p in mine.parameters()]
            mine.zero_grad()
        assert len(set.union(*used)) == 2  # they take turns
        assert kept

    run_ranks(2, body)
