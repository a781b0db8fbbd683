"""What a check changes for a program: no dropout, seeds for all, and float64 if asked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.generators import global_generators
from lockstep.nn import current_shard

_DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout", "rrelu"),
)
NO_DROPOUT = "dropout is off in both runs, as it can't drop the same on 1 rank and on several"


class Switches:
    """Replaces functions of torch until ``undo`` closes; ``notes`` get what is to be told."""

    def __init__(self, undo: ExitStack, notes: list[str]) -> None:
        self._undo = undo
        self._notes = notes

    def wrap(self, owner: Any, name: str, around: Callable[..., object]) -> None:
        """Have ``owner.name(*args)`` call ``around(original, *args)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **options: Any) -> object:
            return around(original, *args, **options)

        had = vars(owner).get(name)
        setattr(owner, name, wrapped)
        self._undo.callback(
            *((delattr, owner, name) if had is None else (setattr, owner, name, had))
        )

    def seed(self, rank: int) -> None:
        """Let numbers of Python and numpy be the same in each run, and different on each rank.

        torch's own begin with the same seed in every process.
        """
        for name, generator in global_generators().items():
            if name != "torch":
                generator.seed(rank)

    def turn_off_dropout(self) -> None:
        """Let what drops values at random in training do as in evaluation."""

        def keep(
            original: Callable[..., object], x: torch.Tensor, *args: Any, **options: Any
        ) -> object:
            if current_shard() is not None:  # it draws the same on any number of ranks
                return original(x, *args, **options)
            if original.__name__ == "rrelu":
                return original(x, *args[:2], training=False)
            self._note()
            return x

        for name in _DROPOUTS:
            self.wrap(F, name, keep)
        self.wrap(F, "scaled_dot_product_attention", self._attend)
        for cls in (nn.RNNBase, nn.MultiheadAttention):
            self.wrap(cls, "__init__", self._make)

    def _attend(self, original: Callable[..., object], *args: Any, **options: Any) -> object:
        if current_shard() is not None:
            return original(*args, **options)
        if options.pop("dropout_p", 0.0) or args[4:5] not in ((), (0.0,)):
            self._note()
        return original(*args[:4], *((0.0,) if args[4:] else ()), *args[5:], **options)

    def _make(self, original: Callable[..., None], module: Any, *args: Any, **options: Any) -> None:
        original(module, *args, **options)
        if module.dropout:
            self._note()
            module.dropout = 0.0

    def _note(self) -> None:
        if NO_DROPOUT not in self._notes:
            self._notes.append(NO_DROPOUT)

    def use_float64(self) -> None:
        """Let the program compute in float64, whatever else it asks for."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self._undo.callback(torch.set_default_dtype, before)
        for owner in (torch.Tensor, nn.Module):
            for name in ("float", "half", "bfloat16"):
                self.wrap(owner, name, lambda original, this: this.double())
        self.wrap(torch.autocast, "__init__", self._no_autocast)

    @staticmethod
    def _no_autocast(original: Callable[..., None], *args: Any, **options: Any) -> None:
        original(*args[:2], **{**options, "enabled": False})


def rounded(tensor: torch.Tensor, eps: float) -> torch.Tensor:
    """``tensor`` with a random rounding error of ``eps`` in each number."""
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + eps * signs.to(tensor.device, tensor.dtype))
