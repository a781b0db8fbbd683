"""Modes of modules: which are training, and which parameters are frozen. No state dict has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.checkpoint import unwrapped

Flags = dict[str, str]


class Modes:
    """The modes of the modules among ``things``, which steps may change: an unfrozen layer, say.

    Args:
        things: All things, as the program has made them.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self._modules: dict[str, nn.Module] = {
            name: unwrapped(thing) for name, thing in things.items() if isinstance(thing, nn.Module)
        }
        self._made = self._flags()

    def state(self) -> dict[str, Flags]:
        """Return them as JSON has them, and what the program has made of them at its beginning."""
        return {"made": self._made, "now": self._flags()}

    def put(self, state: Mapping[str, Flags]) -> None:
        """Set them; but a program that makes them otherwise now than then has been edited."""
        if state["made"] != self._made:
            return
        for name, module in self._modules.items():
            training, learning = state["now"][name].split()
            for part, flag in zip(module.modules(), training, strict=True):
                part.training = flag == "1"
            for parameter, flag in zip(module.parameters(), learning[1:], strict=True):
                if parameter.requires_grad != (flag == "1"):
                    parameter.requires_grad_(flag == "1")
        # As it was made in the run's first attempt.
        self._made = dict(state["made"])

    def _flags(self) -> Flags:
        found = {}
        for name, module in self._modules.items():
            training = "".join("01"[part.training] for part in module.modules())
            learning = "".join("01"[each.requires_grad] for each in module.parameters())
            found[name] = f"{training} :{learning}"  # there may be no parameter
        return found
