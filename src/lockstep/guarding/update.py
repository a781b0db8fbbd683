"""What an optimizer is about to do in a guarded step, and whether it may."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.guarding.step import Misused

# Of what torch puts around each class's step(), which calls the hooks.
_STEP_CODE = Optimizer.profile_hook_step(Optimizer.step).__code__


def check_update(
    optimizer: Optimizer, arguments: Iterable[Any], stepped: Collection[Optimizer]
) -> None:
    """Raise unless the body of a guard may step ``optimizer`` now; some have ``stepped``.

    Raises:
        Misused: If it is called with a closure, or for the second time.
    """
    kind = type(optimizer).__name__
    if any(map(callable, arguments)):
        raise Misused(
            f"{kind} steps with a closure in a guard, and runs the backward itself, when it is "
            "too late to leave out the update. Call backward() before step()."
        )
    if optimizer in stepped:
        raise Misused(
            f"The body of a guard steps its {kind} twice. It is around one step, with one "
            "update of each optimizer: put a guard around each."
        )


def skips_itself(optimizer: Optimizer) -> bool:
    """Whether a GradScaler leaves it to ``optimizer`` to skip the update, and it will."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())


def is_nested(optimizer: Optimizer) -> bool:
    """Whether a step of ``optimizer`` that runs has called the one that begins.

    By the calls that run: one that has raised is over, though no hook has told so.
    """
    frame, calls = sys._getframe(), 0
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is _STEP_CODE:
            calls += frame.f_locals.get("self") is optimizer
    return calls > 1


def is_skipped_by(
    scalers: Sequence[GradScaler], scales: Sequence[float], optimizers: Iterable[Optimizer]
) -> bool:
    """Whether a GradScaler, of these ``scales`` before, has skipped an update or lets it be."""
    pairs = zip(scalers, scales, strict=True)
    is_lower = any(scaler.get_scale() < before for scaler, before in pairs)
    found = (
        flag
        for optimizer in optimizers
        for scaler in scalers
        for flag in scaler._found_inf_per_device(optimizer).values()
    )
    return is_lower or any(bool(flag) for flag in found)
