"""What a replica's work depends on beside its arguments: autograd's modes, autocast, contexts."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeVar

import torch

from lockstep.comm import of_this_rank
from lockstep.torch_private import DeviceContext, _get_current_function_mode_stack
from lockstep.world.threads import of_this_place

T = TypeVar("T")


class Modes(NamedTuple):
    """Those of one thread.

    Attributes:
        grad: Whether autograd records.
        inference: Whether in inference mode.
        autocasts: The kinds of device for which autocast is enabled, each with its dtype.
        keeps_casts: Whether autocast casts each weight once.
        devices: The default device, if one is set.
    """

    grad: bool
    inference: bool
    autocasts: dict[str, torch.dtype]
    keeps_casts: bool
    devices: list[torch.device]

    @classmethod
    def here(cls) -> Modes:
        """Those of this thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        modes = _get_current_function_mode_stack()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)},
            torch.is_autocast_cache_enabled(),
            [mode.device for mode in modes if isinstance(mode, DeviceContext)],
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in them, in a thread that is in none."""
        with ExitStack() as entered:
            if self.inference:
                entered.enter_context(torch.inference_mode())
            entered.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocasts.items():
                entered.enter_context(torch.autocast(kind, dtype, cache_enabled=self.keeps_casts))
            for device in self.devices:
                entered.enter_context(torch.device(device))
            yield


def as_this_thread(task: Callable[[], T]) -> Callable[[], T]:
    """Let ``task``, which another thread runs, find there what it would find here.

    That is its modes, context variables, and which rank this is. The default dtype is the same in
    all threads anyway.
    """
    modes, context = Modes.here(), contextvars.copy_context()

    def run() -> T:
        with modes.entered():
            return context.run(task)

    return of_this_rank(of_this_place(run))
