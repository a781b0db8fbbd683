"""torch's GradScaler in step: all ranks skip the same steps, with the same scale.

A scaler skips the step of an optimizer with a gradient that isn't finite, and lowers its scale.
Gradients that lockstep reduces are the same on all ranks. But an optimizer may have others, such as
those of a parameter that one rank alone has, which no other rank knows of. So where a scaler looks
for such gradients, ranks tell each other what they have found, in four numbers.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.comm import Announced, device_of_facts, gather_announced, uncompiled
from lockstep.errors import ModelError
from lockstep.nn.after_backward import Call
from lockstep.nn.backward import engines_with, finish_failed
from lockstep.nn.global_hooks import note_step, receive_gradients
from lockstep.world import parameters_of

_Found = dict[torch.device, torch.Tensor]
_NUM_TOLD = 4  # numbers that each rank tells
_lock = threading.Lock()  # ranks may be threads
_unscale: Any = GradScaler._unscale_grads_


def watch_scalers() -> None:
    """Let the ranks agree where a scaler looks for gradients that aren't finite."""
    with _lock:
        if GradScaler._unscale_grads_ is _unscale:
            GradScaler._unscale_grads_ = _unscale_together  # type: ignore[assignment, method-assign]


@uncompiled
@wraps(_unscale)
def _unscale_together(
    scaler: GradScaler, optimizer: Optimizer, *args: Any, **options: Any
) -> _Found:
    parameters = parameters_of(optimizer)
    # Without synchronisation each rank takes steps of its own.
    engines = [engine for engine in engines_with(parameters) if engine.is_syncing]
    receive_gradients(optimizer, engines)
    found: _Found = _unscale(scaler, optimizer, *args, **options)
    for group in dict.fromkeys(engine.process_group for engine in engines):
        finish_failed(group, Call(Announced.GATHER, _NUM_TOLD))
        if _agree(scaler, optimizer, found, group):
            note_step(optimizer, engines)
    return found


def _agree(
    scaler: GradScaler, optimizer: Optimizer, found: _Found, group: dist.ProcessGroup
) -> bool:
    """Make what was ``found`` that of all ranks, and return whether the step is to be skipped."""
    scale: torch.Tensor = scaler._scale  # type: ignore[assignment]
    flags = [flag.to(scale) for flag in found.values()]
    is_here, is_any = torch.ones_like(scale), scale.new_tensor(bool(flags))
    local = torch.stack([is_here, is_any, sum(flags, torch.zeros_like(scale)), scale])
    told = gather_announced(group, local.to(device_of_facts(group), torch.float64))
    # In join(), those that have no more data tell zeros.
    there = [each for is_here, *each in torch.stack(told).tolist() if is_here]
    (any_by_rank, found_by_rank, scales) = zip(*there, strict=True)
    is_any_told, most_found = any(any_by_rank), max(found_by_rank)
    if len({*scales}) > 1:
        raise ModelError(
            f"The scale of this {type(scaler).__name__} is {min(scales)} on one rank and "
            f"{max(scales)} "
            f"on another, so that the gradients of this {type(optimizer).__name__} are means of "
            "losses that were scaled differently. Load and set it alike on all ranks. If it is the "
            "scaler of another optimizer too, whose parameters no parallel model has, give that "
            "optimizer a scaler of its own."
        )
    if is_any_told and not found:  # this rank has no gradient at all
        found[scale.device] = torch.zeros_like(scale)
    for flag in found.values():
        flag.fill_(most_found)
    return bool(most_found)
