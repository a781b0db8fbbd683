"""Plans of steps of a model with a table, and who takes them: ranks, or one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.nn.parallel import in_place
from tests.nn.tables import (
    ROWS,
    WIDTH,
    Table,
    by_rows,
    equal_bits,
    tables_from,
)
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of, values_of


class Step(NamedTuple):
    """What the ranks do in one step: what differs between them, and what doesn't."""

    words: list[list[list[int]]]  # by rank, indices of rows, as many in each list
    also: list[str]  # by rank, what gives the table a gradient besides the lookup, or takes it away
    how: str = ""  # of the backward
    after: str = ""  # what the program does with the gradients
    zeroes: str = "none"


ALSO = ["", "", "", "twice", "tied", "penalty", "thrice", "unused", "few", "hook"]
HOW = ["", "", "", "no_sync", "graph", "checkpoint", "reentrant", "grad"]
AFTER = ["", "", "clip", "hold", "write", "past", "array", "double"]
ZEROES = ["none", "none", "none", "zero", "keep"]


@st.composite
def steps(draw: st.DrawFn, num_ranks: int, num_steps: int = 6) -> list[Step]:
    def words() -> list[list[int]]:
        length = draw(st.integers(0, 3))
        row = st.lists(st.integers(0, ROWS - 1), min_size=length, max_size=length)
        return draw(st.lists(row, min_size=1, max_size=4))

    plan = []
    for _ in range(num_steps):
        is_plain = draw(st.booleans())
        also = [draw(st.sampled_from(ALSO[:3] if is_plain else ALSO)) for _ in range(num_ranks)]
        options = () if is_plain else map(draw, map(st.sampled_from, (HOW, AFTER, ZEROES)))
        plan.append(Step([words() for _ in range(num_ranks)], also, *options))
    return plan


def loss_of(model: Table, step: Step, rank: int) -> torch.Tensor:
    words, also = torch.tensor(step.words[rank], dtype=torch.int64), step.also[rank]
    if words.numel() == 0:
        words = words.view(len(step.words[rank]), 0)
    weight = model.table.weight
    if step.how == "reentrant" and also != "unused":
        also = ""  # LateGradient would tell to repeat the step
    if also == "unused":
        return model.layer(torch.ones(1, WIDTH, dtype=weight.dtype)).square().mean()
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if step.how in ("checkpoint", "reentrant"):
        is_reentrant = step.how == "reentrant"
        again = weight.detach().sum().requires_grad_()  # a segment of it needs one that requires it

        def forward(words: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda w, _: model(w), words, again, use_reentrant=is_reentrant)

    loss = forward(words[:, :1].contiguous() if also == "few" else words).square().mean()
    if also in ("twice", "thrice"):
        loss = loss + model(words.flip(0)).sum()
    if also == "thrice":
        loss = loss + (model.look_up(words) @ weight.T).tanh().mean()
    if also == "tied":
        loss = (model.look_up(words) @ weight.T).tanh().square().mean() + loss
    if also == "penalty":
        loss = loss + weight.square().mean()
    return loss


def _rest(step: Step) -> int:
    used = {word for words in step.words for row in words for word in row}
    return next(number for number in range(ROWS) if number not in used)


def take(model: Table, step: Step, backward: Callable[[bool], None]) -> list[Any]:
    """Take a step, and return what the program sees of gradients in it."""
    weight, seen = model.table.weight, []
    handle = None
    if "hook" in step.also:
        handle = weight.register_hook(lambda gradient: gradient * 2)
    if step.how == "no_sync":
        backward(False)
    backward(True)
    if handle is not None:
        handle.remove()
    if step.after == "clip":
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    if weight.grad is not None:
        assert type(weight.grad) is torch.Tensor
        assert weight.grad.is_contiguous()
    if step.after == "write" and weight.grad is not None:
        weight.grad.add_(weight.detach(), alpha=0.1)
    if step.after == "past" and weight.grad is not None:
        weight.grad.data.add_(weight.detach(), alpha=0.1)
    if step.after == "array" and weight.grad is not None:  # of a row that nobody looks up
        weight.grad.numpy()[_rest(step)] += 1
    return [*seen, *gradients_of(model)]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


def take_all(
    model: Table, plan: Sequence[Step], optimizer: str, backward_of: Callable[[Step, bool], None]
) -> list[Any]:
    """Take the steps of a plan, and return what the program has seen in each."""
    stepping = OPTIMIZERS[optimizer](model.parameters())
    seen, held = [], []
    for step in plan:
        seen.append(take(model, step, partial(backward_of, step)))
        stepping.step()
        if step.after == "hold" and model.table.weight.grad is not None:
            held.append((model.table.weight.grad, model.table.weight.grad.clone()))
        if step.zeroes != "keep":
            stepping.zero_grad(set_to_none=step.zeroes == "none")
            for one, as_it_was in held:
                if step.zeroes == "none":
                    torch.testing.assert_close(one, as_it_was, rtol=0, atol=0)
        if step.zeroes != "none":
            held = []  # autograd, or zero_grad(), writes to what is still the gradient
    return [*seen, values_of(model)]


def train_rank(
    model: Table,
    plan: Sequence[Step],
    optimizer: str,
    parallel: Callable[..., nn.Module],
    rank: int,
    group: dist.ProcessGroup,
) -> list[Any]:
    outer = parallel(copy.deepcopy(model), group)
    inner: Table = getattr(outer, "module", outer)

    def backward(step: Step, syncs: bool) -> None:
        loss = loss_of(inner, step, rank)
        if step.how == "grad":
            torch.autograd.grad(loss, inner.layer.weight, retain_graph=True)
            found = torch.autograd.grad(
                loss, inner.table.weight, retain_graph=True, allow_unused=True
            )
            assert type(found[0]) in (torch.Tensor, type(None))
        with nullcontext() if syncs else lockstep.no_sync(outer):
            loss.backward(create_graph=step.how == "graph")
        if step.how == "graph":  # without which autograd warns of a cycle
            for parameter in inner.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach()

    seen = take_all(inner, plan, optimizer, backward)
    return [*seen, [torch.tensor(by_rows(inner))]]


def train_alone(model: Table, plan: Sequence[Step], optimizer: str, num_ranks: int) -> list[Any]:
    model = copy.deepcopy(model)

    def backward(step: Step, syncs: bool) -> None:
        losses = [loss_of(model, step, rank) for rank in range(num_ranks)]
        # A rank's own hook sees its own gradient, and doubles it.
        (torch.stack(losses).sum() / num_ranks).backward()

    return take_all(model, plan, optimizer, backward)


def check(
    model: Table,
    plan: Sequence[Step],
    num_ranks: int = 2,
    optimizer: str = "sgd",
    backend: str = "threads",
    parallel: Callable[..., nn.Module] = in_place,
) -> bool:
    """Compare with one process and with dense gradients; return whether rows travelled at last."""
    body = partial(train_rank, model, plan, optimizer, parallel)
    with tables_from(1):
        rows = run_ranks(num_ranks, body, backend=backend)
    with tables_from(2**60):
        whole = run_ranks(num_ranks, body, backend=backend)
    for by_row, dense in zip(rows, whole, strict=True):
        for number, (mine, theirs) in enumerate(zip(by_row[:-1], dense[:-1], strict=True)):
            if backend == "gloo" and num_ranks > 2:  # which adds up in orders of its own
                assert_same(mine, theirs, single=1e-4)
            else:
                assert equal_bits(mine, theirs), f"step {number}"
    if model.table.weight.dtype is torch.float64:
        for mine, theirs in zip(
            rows[0][:-1], train_alone(model, plan, optimizer, num_ranks), strict=True
        ):
            assert_same(mine, theirs, 1e-12)
    assert not any(dense[-1][0] for dense in whole)
    return all(bool(by_row[-1][0]) for by_row in rows)


def plain(num_ranks: int, num_steps: int = 4, **last: Any) -> list[Step]:
    """Lookups of a few rows, some of them several times, and in the last step something else."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(num_steps):
        words = torch.randint(0, ROWS, (num_ranks, 3, 2), generator=generator).tolist()
        is_last = number == num_steps - 1
        step = Step(words, [""] * num_ranks)
        found.append(step._replace(**last) if is_last else step)
    return found
