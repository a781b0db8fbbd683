"""What a thread's work depends on beside its arguments: autograd's modes, autocast, contexts."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from lockstep.comm.rank_threads import of_this_rank
from lockstep.world.threads import of_this_place

T = TypeVar("T")

# Which autocast has states of its own for.
_HOST = ("cpu",)


def as_this_thread(task: Callable[[], T]) -> Callable[[], T]:
    """Let ``task``, which another thread runs, find there what it would find here.

    That is grad mode, inference mode, autocast (for each kind of device whether, with which dtype,
    and whether casts are kept), the default device, context variables, and which rank this is.
    The default dtype is the same in all threads anyway.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    accelerator = torch.accelerator.current_accelerator()
    kinds = _HOST if accelerator is None else (*_HOST, accelerator.type)
    keeps_casts = torch.is_autocast_cache_enabled()
    autocasts = {
        kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
    }
    modes = _get_current_function_mode_stack()
    devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    context = contextvars.copy_context()

    def run() -> T:
        with ExitStack() as entered:
            if inference:
                entered.enter_context(torch.inference_mode())
            entered.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocasts.items():
                entered.enter_context(torch.autocast(kind, dtype, cache_enabled=keeps_casts))
            for device in devices:
                entered.enter_context(torch.device(device))
            return context.run(task)

    return of_this_rank(of_this_place(run))
