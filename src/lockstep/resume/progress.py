"""Where a run is, and what it keeps beside its things, such as the modes of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.checkpoint import unwrapped
from lockstep.nn import expect_gradient_orders, gradient_orders

Flags = dict[str, str]


class ModulesModes:
    """Which modules among ``things`` are training, and which parameters frozen.

    No state dict has that, and steps may change it.

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


_FORMAT = 3


class Progress:
    """Where a run is: what steps() keeps of itself.

    Args:
        batches: What gives batches.
        things: The program's things.
        num_ranks: The number of ranks.

    Attributes:
        num_done: How many steps are committed.
        first: How many were so when the program began.
        num_steps: How many there are in all.
        seed: Of all random numbers.
        best: The best metric so far.
    """

    def __init__(self, batches: Any, things: Mapping[str, Any], num_ranks: int) -> None:
        self.batches, self._num_ranks = batches, num_ranks
        self.num_done = self.first = self.seed = 0
        self.num_steps: float = 0
        self.best: float | None = None
        self._modes = ModulesModes(things)
        self._modules = [unwrapped(each) for each in things.values() if isinstance(each, nn.Module)]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self._modules for parameter in module.parameters()]

    def state(self) -> dict[str, Any]:
        """Return what is the same on all ranks, as JSON has it. Every rank calls it."""
        return {
            "format": _FORMAT,
            "step": self.num_done,
            "seed": self.seed,
            "best": self.best,
            "batches": self.batches.state(),
            "modes": self._modes.state(),
            "orders": gradient_orders(self._parameters(), self._num_ranks),
        }

    def load(self, state: Mapping[str, Any], loader_state: Any) -> None:
        """Go on from a state, and from a foreign loader's on this rank. Every rank calls it.

        Raises:
            ValueError: If it is of another loader or another release.
        """
        if state["format"] != _FORMAT:
            raise ValueError(
                f"The newest checkpoint was written by another release of lockstep (format "
                f"{state['format']}; this one knows {_FORMAT}). Give another path."
            )
        self.num_done, self.seed, self.best = state["step"], state["seed"], state["best"]
        self.batches.load(state["batches"], loader_state)
        self._modes.put(state["modes"])
        expect_gradient_orders(self._parameters(), self._num_ranks, state["orders"])
