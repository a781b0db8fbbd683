"""Whatever a program does, it finds the same with a sharded optimizer, in every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

import lockstep
from tests.counts import num_examples
from tests.ranks import run_ranks


class Own(torch.optim.AdamW):
    """Of an unknown class: each rank repeats updates of another."""


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Own": lambda p: Own(p, lr=0.01),
}


class Net(nn.Module):
    """Layers of odd sizes, of which a forward uses one or another."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(5, widths[0])
        self.middle = nn.ModuleList(nn.Linear(widths[0], 6) for _ in widths)
        self.scale = nn.Parameter(torch.ones(6))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, x: torch.Tensor, branch: int, scaled: bool) -> torch.Tensor:
        hidden = self.middle[branch % len(self.middle)](self.first(x).tanh())
        return ((hidden * self.scale if scaled else hidden) ** 2).mean()


class Act(NamedTuple):
    """What a program does next; ``of`` is the parameter, or the branch, that it does it to."""

    kind: str
    of: int
    on: int  # the rank, where one does it alone
    flag: bool


# How often each: most programs train most of the time.
ACTS = [
    *("train", "train", "train", "backward", "backward", "step", "zero", "zero by the model"),
    *("read", "hold", "scale", "replace", "drop", "change", "accumulate", "clip", "clip with ours"),
    *("freeze", "add group", "load", "load model", "late hook"),
]
plans = st.lists(
    st.builds(Act, st.sampled_from(ACTS), st.integers(0, 9), st.integers(0, 3), st.booleans()),
    min_size=3,
    max_size=14,
)


def run(
    acts: list[Act], model: Net, optimizer: Optimizer, rank: int, size: int, *, alike: bool
) -> Iterator[torch.Tensor | None]:
    """Do it all, and yield what the program sees."""
    named = [*model.named_parameters()]
    held: list[torch.Tensor] = []
    model(torch.ones(1, 5), 0, True).backward()  # before the next one, buckets are made anew
    optimizer.zero_grad()
    for number, (kind, of, on, flag) in enumerate(acts):
        parameter = named[of % len(named)][1]
        generator = torch.Generator().manual_seed(size * number + rank)
        # Ranks may use different layers.
        branch, x = of + (rank if flag else 0), torch.randn(3, 5, generator=generator)
        if kind in ("train", "backward"):
            model(x, branch, flag).backward()
        if kind in ("train", "step"):
            optimizer.step()
        if kind in ("train", "zero"):
            optimizer.zero_grad(set_to_none=kind == "train" or flag)
        if kind == "zero by the model":
            model.zero_grad(set_to_none=flag)
        if kind == "read" and (alike or rank == on % size):
            yield parameter.grad
        if kind == "hold" and parameter.grad is not None:
            held.append(parameter.grad)
        if kind == "scale" and parameter.grad is not None:
            parameter.grad.mul_(0.5)
        if kind == "replace":
            parameter.grad = torch.full_like(parameter, 0.1)
        if kind == "drop":
            parameter.grad = None
        if kind in ("train", "replace", "drop") or (kind in ("zero", "zero by the model") and flag):
            held.clear()  # an unsharded gradient's memory is used again
        if kind == "change":
            with torch.no_grad():
                parameter.mul_(0.9)
        if kind == "accumulate":
            with lockstep.no_sync(model):
                model(x, branch, flag).backward()
            model(x, branch, not flag).backward()
            optimizer.step()
        if kind == "clip":
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if kind == "clip with ours":  # the norm rounds otherwise
            lockstep.clip_grad_norm_(model.parameters(), 1e6)
        if kind == "freeze":
            parameter.requires_grad_(not parameter.requires_grad)
        if kind == "add group" and not hasattr(model, "more"):
            model.more = nn.Parameter(torch.full((of + 1,), 0.5))
            model.more.grad = torch.ones_like(model.more)
            optimizer.add_param_group({"params": [model.more], "lr": 0.05})
        if kind == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if kind == "load model":
            values = {name: value * 0.5 for name, value in model.state_dict().items()}
            model.load_state_dict(values)
        if kind == "late hook":
            seen: list[torch.Tensor] = []
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p, to=seen: to.append(p.grad.clone())
                )
                model(x, of, flag).backward()
                hook.remove()
            yield from seen
        yield from (p.detach() for p in model.parameters())
    yield from held
    yield from (p.grad for p in model.parameters())


@given(
    acts=plans,
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    kind=st.sampled_from(sorted(KINDS)),
    size=st.integers(1, 4),
    backend=st.sampled_from(["threads", "threads", "shm", "gloo"]),
    seed=st.integers(0, 99),
)
def check(
    acts: list[Act], widths: list[int], kind: str, size: int, backend: str, seed: int
) -> None:
    torch.manual_seed(seed)
    first, overlaps = Net(widths), backend == "gloo"
    size = min(size, 2) if overlaps else size  # Gloo adds three numbers in different orders

    def body(rank: int, group: dist.ProcessGroup) -> None:
        found: list[list[torch.Tensor | None]] = []
        sharded = partial(lockstep.shard_optimizer, overlap=overlaps)
        for shard in (lambda optimizer: optimizer), sharded:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(KINDS[kind](model.parameters()))
            seen = run(acts, model, optimizer, rank, size, alike=overlaps)
            found.append([None if each is None else each.clone() for each in seen])
        assert [each is None for each in found[0]] == [each is None for each in found[1]]
        for plain, other in zip(*found, strict=True):
            if plain is not None:
                assert torch.equal(plain.nan_to_num(7.5), other.nan_to_num(7.5))

    run_ranks(size, body, backend=backend)


@pytest.mark.shortened
def test_a_program_finds_the_same() -> None:
    how = settings(
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        max_examples=num_examples(600, 20),
    )
    how(check)()
