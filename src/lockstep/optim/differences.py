"""How the steps of an optimizer differ, of which each should be the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal; zeros are, and what is no number is, whatever its bits."""
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def difference(whole: Optimizer, part: Optimizer) -> str:
    """Return why a part leaves other values, by the options that differ."""
    names = differing_names(numbers_of(whole), numbers_of(part))
    if not names:
        return "with a part of the parameters it updates them to other values than with all"
    return f"{', '.join(names)} would differ between the ranks"


def differing_names(a: Mapping[str, float], b: Mapping[str, float]) -> list[str]:
    """Return the names of some numbers that both have, and that differ."""
    return [name for name, value in a.items() if value != b.get(name, value)][:3]


def numbers_of(optimizer: Optimizer) -> dict[str, float]:
    """Return options and attributes that are numbers, as estimates for all parameters are."""
    places = [
        (f"group[{name!r}]" + f" of group {index}" * bool(index), value)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
    ]
    places += [(f"its {name}", value) for name, value in vars(optimizer).items()]
    return {
        name: float(value)
        for name, value in places
        if isinstance(value, float | int)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
