"""How a random plan is carried out on all ranks, and compared with one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.nn.random_models import RandomModel, build
from tests.nn.training_plans import Setting

PlanT = TypeVar("PlanT")
Tensors = Sequence[torch.Tensor | None]
LEARNING_RATE = 0.02
# What float32 rounds off, in the gradients of parameters of that dtype, and in values.
SINGLE_TOLERANCE = 1e-5
GROUP_TIMEOUT_SECONDS = 30
# How long a smaller plan is looked for when one fails: pytest ends a test after 120 seconds.
PATIENCE_SECONDS = 30
few_hundred = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)


class Seen(NamedTuple):
    """What is compared, at one moment.

    Attributes:
        moment: When it was.
        tensors: Gradients, parameters or a value; None where this rank has them only later.
        buffers: What the buffers were, if they are to be rank 0's.
    """

    moment: str
    tensors: Tensors | None
    buffers: list[torch.Tensor]


def first_model(setting: Setting) -> RandomModel:
    model = build(setting.recipe)
    model.freeze(setting.frozen)
    return model


def compare(
    setting: Setting, ranks: Sequence[Sequence[Seen]], oracle: Sequence[Seen], slack: float
) -> None:
    """Assert that ranks have what one process has, and all the same bits; rank 0's, in buffers."""
    has_single = any(part.kind == "single" for part in setting.recipe)
    for rank, seen in enumerate(ranks):
        for mine, first, theirs in zip(seen, ranks[0], oracle, strict=True):
            where = f"{theirs.moment}, on rank {rank}"
            assert mine.moment == theirs.moment
            of_values = SINGLE_TOLERANCE if has_single and mine.moment == "a mean" else slack
            if mine.tensors is not None:
                assert_close(mine.tensors, theirs.tensors, of_values, where)
            if mine.tensors is not None and first.tensors is not None:
                assert_close(mine.tensors, first.tensors, 0, f"{where}, beside rank 0")
            assert_close(mine.buffers, first.buffers, 0, f"{where}, buffers beside rank 0")


def assert_close(mine: Tensors, theirs: Tensors, slack: float, where: str) -> None:
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a is None) == (b is None), f"{where}, number {place}: {a} and not {b}"
        if a is None or b is None:
            continue
        bound = max(slack, SINGLE_TOLERANCE) if slack and a.dtype is torch.float32 else slack
        if not torch.allclose(a, b, rtol=bound, atol=bound, equal_nan=True):  # which is fast
            message = f"{where}, number {place}"
            torch.testing.assert_close(
                a,
                b,
                rtol=bound,
                atol=bound,
                equal_nan=True,
                msg=lambda why, m=message: f"{m}: {why}",
            )


class Checker(Generic[PlanT]):
    """Checks plans and, once one has failed, for so many seconds other ones.

    After that only those fail that have failed before, with which hypothesis is content.
    """

    def __init__(
        self, check: Callable[[PlanT], None], patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._check = check
        self._patience_seconds = patience_seconds
        self._deadline = float("inf")
        self._failed: set[str] = set()

    def __call__(self, plan: PlanT) -> None:
        if time.monotonic() > self._deadline and repr(plan) not in self._failed:
            return
        try:
            self._check(plan)
        except BaseException:
            if not self._failed:
                self._deadline = time.monotonic() + self._patience_seconds
            self._failed.add(repr(plan))
            raise


def check_all(
    plans: st.SearchStrategy[PlanT], how: settings, check_one_plan: Callable[[PlanT], None]
) -> None:
    """Check plans, as many and as ``how`` says."""
    check = Checker(check_one_plan)

    @how
    @given(plan=plans)
    def check_one(plan: PlanT) -> None:
        check(plan)

    check_one()
