"""Models that are in some backwards together: seen or hidden, in any order, and on some ranks only.

Each is a course that went wrong once; ``test_properties_of_several.py`` draws such at random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.nn.autograd import is_any_reached
from tests.nn.parallel import in_place
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of

assert_close = partial(assert_same, tolerance=1e-10)

WIDTH = 3
Models = Sequence["Layers"]
# What rank's loss is in which step; None if it has none.
LossOf = Callable[[Models, int, int], torch.Tensor | None]


class Layers(nn.Module):
    """Layers, of which some are in reentrant checkpoints, and the last may be left out."""

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in hidden)
        self.hidden = [letter == "h" for letter in hidden]

    def forward(self, x: torch.Tensor, count: int | None = None) -> torch.Tensor:
        for layer, is_hidden in list(zip(self.layers, self.hidden, strict=True))[:count]:
            if is_hidden:
                x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
            else:
                x = layer(x)
            x = torch.tanh(x)
        return x


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(2, WIDTH, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


def record_steps(
    models: Models, ranks: Sequence[int], loss_of: LossOf, num_steps: int, *, one_optimizer: bool
) -> list[list[torch.Tensor | None]]:
    """The gradients of each step of these ranks, after the optimizers have stepped."""
    sets = [[p for m in models for p in m.parameters()]] if one_optimizer else models
    optimizers = [torch.optim.SGD(getattr(s, "parameters", lambda s=s: s)(), lr=0.1) for s in sets]
    seen = []
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss for rank in ranks if (loss := loss_of(models, rank, step)) is not None]
        if losses:
            (sum(losses) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
        seen.append(gradients_of(*models))
    return seen


def x_plus_y(models: Models, rank: int, step: int) -> torch.Tensor:
    return sum(model(batch(rank, step)).square().sum() for model in models)


def idle(models: Models, rank: int, step: int) -> torch.Tensor | None:
    return None if step == 1 and rank else x_plus_y(models, rank, step)


def idle_beside(which: int) -> LossOf:
    def loss_of(models: Models, rank: int, step: int) -> torch.Tensor | None:
        if step != 1:
            return x_plus_y(models, rank, step)
        return None if rank else models[which](batch(rank, step)).square().sum()

    return loss_of


def one_without_the_other(models: Models, rank: int, step: int) -> torch.Tensor:
    first, second = models
    x = batch(rank, step)
    return second(first(x) if step != 1 or rank == 0 else x).square().sum()


def late_at_first(models: Models, rank: int, step: int) -> torch.Tensor:
    first, second = models
    x = first(batch(rank, step))
    return (x if step == 1 or (step == 2 and rank == 0) else second(x)).square().sum()


def twice(models: Models, rank: int, step: int) -> torch.Tensor:
    first, second = models
    y = second(second(batch(rank, step)))
    return (first(y) if step == 0 else y).square().sum()


def named_by_another_rank(models: Models, rank: int, step: int) -> torch.Tensor:
    first, second = models
    x, count = batch(rank, step), 1 if step == 1 else 2
    if step == 2 and rank == 0:
        return second(first(x, count)).square().sum()
    return first(second(x), count).square().sum()


def begun_by_a_hidden_one(models: Models, rank: int, step: int) -> torch.Tensor:
    """In step 1 the hidden model isn't used by rank 1; then its gradients come from inside."""
    first, second = models
    x = batch(rank, step)
    if step == 1 and rank == 1:
        return first(x).square().sum()
    return first(second(x)).square().sum() if step != 0 else second(first(x)).square().sum()


@pytest.mark.parametrize("one_optimizer", [True, False], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize(
    ("hidden", "loss_of"),
    [
        (("p", "p"), idle),
        (("p", "p"), idle_beside(0)),
        (("p", "p"), idle_beside(1)),
        (("h", "p"), one_without_the_other),
        (("p", "h"), late_at_first),
        (("h", "phh"), twice),
        (("pp", "ph"), named_by_another_rank),
        (("p", "h"), begun_by_a_hidden_one),
    ],
    ids=[
        "an idle rank",
        "an idle rank beside the first",
        "an idle rank beside the second",
        "one without the other",
        "late at first",
        "twice",
        "named by another rank",
        "begun by a hidden one",
    ],
)
def test_ranks_have_the_gradients_of_one_process(
    hidden: tuple[str, str], loss_of: LossOf, one_optimizer: bool
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [Layers(one) for one in hidden]
    expected = record_steps(copy.deepcopy(models), [0, 1], loss_of, 4, one_optimizer=one_optimizer)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = [in_place(copy.deepcopy(m), group, bucket_cap_mb=1e-7) for m in models]
        found = record_steps(mine, [rank], loss_of, 4, one_optimizer=one_optimizer)
        for got, theirs in zip(found, expected, strict=True):
            assert_close(got, theirs)

    run_ranks(2, body)


def test_a_model_is_reached_through_any_of_its_parameters() -> None:
    first, second, frozen, other = (nn.Parameter(torch.ones(2)) for _ in range(4))
    frozen.requires_grad_(False)
    asked = [[second], [first, second], [frozen, first, second], [first], [frozen], []]
    found: list[list[bool]] = []
    other.register_hook(lambda _: found.append([is_any_reached(one) for one in asked]))
    (other * second * frozen).sum().backward()
    torch.autograd.grad((other * second).sum(), [other])
    assert found == [[True] * 3 + [False] * 3, [False] * 6]
