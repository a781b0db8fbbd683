"""Moves of parallel models to other devices, of which torch calls no hook."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.nn.backward import all_engines

_apply: Any = nn.Module._apply


@functools.wraps(_apply)
def _apply_and_tell(
    self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    moved: nn.Module = _apply(self, fn, recurse)
    if sys._getframe(1).f_code is not _apply.__code__:  # else the module around it is being moved
        modules = {*self.modules()}
        for engine in all_engines():
            if not modules.isdisjoint(engine.modules):
                engine.take_move()
    return moved


def watch_moves() -> None:
    """Have ``to()``, ``cuda()`` and the like of modules tell the engines of what they move.

    A forward pre-hook on all modules would see it as well, until the first forward, but compiled
    modules warn of such a hook.
    """
    module: Any = nn.Module
    if module._apply is _apply:
        module._apply = _apply_and_tell
