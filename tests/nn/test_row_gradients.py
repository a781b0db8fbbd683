"""Gradients of large embeddings, of which only the rows travel that some rank has looked up.

To the program they are dense: as of one process, and in every bit as if all of them had travelled.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.counts import num_examples
from tests.nn.parallel import BOTH
from tests.nn.table_plans import OPTIMIZERS, Step, check, plain, steps
from tests.nn.tables import (
    build,
)

KINDS = [
    ("embedding", "sum"), ("function", "sum"), ("bags", "sum"), ("bags", "mean"), ("bags", "max"),
    ("weighted", "sum"), ("last", "mean"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), KINDS)
@pytest.mark.parametrize("padding", [None, 7])
def test_rows_travel_and_the_gradient_is_the_dense_one(
    kind: str, mode: str, padding: int | None
) -> None:
    model = build(kind=kind, mode=mode, padding=padding)
    assert check(model, plain(3), num_ranks=3)


@BOTH
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_rows_travel_over_every_group_and_in_wrappers(
    backend: str, parallel: Callable[..., nn.Module]
) -> None:
    plan = plain(2, also=["twice", "unused"], after="clip")
    assert check(build(kind="bags"), plan, 2, "momentum", backend, parallel)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_dense_gradients_at_any_number_of_ranks(
    num_ranks: int, dtype: torch.dtype
) -> None:
    assert check(build(dtype), plain(num_ranks, 5), num_ranks, "adam", "shm")


@given(
    plan=steps(2),
    kind=st.sampled_from(KINDS),
    padding=st.sampled_from([None, 0, 7]),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float32]),
)
@settings(max_examples=num_examples(400, 25), deadline=None)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_whatever_the_program_does_the_gradient_is_the_dense_one(
    plan: list[Step],
    kind: tuple[str, str],
    padding: int | None,
    optimizer: str,
    dtype: torch.dtype,
) -> None:
    model = build(dtype, kind=kind[0], mode=kind[1], padding=padding)
    check(model, plan, optimizer=optimizer)


def test_writes_past_the_count_of_writes_change_nothing() -> None:
    """torch counts neither what is written to ``p.grad.data`` nor to an array of its memory."""
    for after in "past", "array":
        once = plain(2, 8, after=after)  # as late as somebody would no longer look for it
        assert check(build(), once + plain(2, 3, after=after)[-1:] * 2 + plain(2, 3))
