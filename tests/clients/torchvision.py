"""A stand-in for torchvision, of which timm's models and optimizers need nothing."""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

from torch import nn

_NAMES = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.ops",
    "torchvision.ops.misc",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.utils",
)


class _StandIn(types.ModuleType):
    """A module of classes that do nothing."""

    __path__: list[str] = []  # noqa: RUF012 - as a package has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (nn.Module,), {})
        setattr(self, name, value)
        return value


def stand_in_for_torchvision() -> None:
    """Let timm be imported where there is no torchvision, as there is none for this torch."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    for name in _NAMES:
        sys.modules[name] = _StandIn(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    modes = "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS"
    functional = sys.modules["torchvision.transforms.functional"]
    functional.InterpolationMode = enum.Enum("InterpolationMode", modes)  # type: ignore[attr-defined]
