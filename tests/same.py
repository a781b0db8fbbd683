"""Whether two models have had the same gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def gradients_of(*models: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients of all parameters, as they are now, sparse ones made dense."""
    parameters = (parameter for model in models for parameter in model.parameters())
    return [None if p.grad is None else p.grad.detach().to_dense().clone() for p in parameters]


def values_of(*models: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters, as they are now."""
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_same(
    mine: Iterable[torch.Tensor | None],
    theirs: Iterable[torch.Tensor | None],
    tolerance: float = 1e-12,
    *,
    single: float | None = None,
) -> None:
    """Fail unless both have as many tensors, as close as that, and None in the same places.

    ``single`` is the tolerance of what isn't in double precision, if it is another one.
    """
    for a, b in zip(mine, theirs, strict=True):
        is_double = a is None or a.dtype in (torch.float64, torch.complex128)
        slack = tolerance if single is None or is_double else single
        torch.testing.assert_close(a, b, rtol=slack, atol=slack)


def assert_same_gradients(mine: nn.Module, theirs: nn.Module, tolerance: float = 1e-12) -> None:
    """Fail unless both modules have the same gradients."""
    assert_same(gradients_of(mine), gradients_of(theirs), tolerance)
