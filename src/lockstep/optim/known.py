"""Optimizers whose steps are known, and classes of a program that are derived from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.optim.methods import code_names, names_used

# Optimizers whose update of an element depends on nothing but the element's value, gradient and
# state, on options, and on the number of steps.
ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
# And those whose update of a parameter depends on nothing but the same of the parameter.
KNOWN = ELEMENTWISE | {torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam}

# Names that a derived class may not define if the steps of its base class are to be known.
_LOOKUPS = {"__getattribute__", "__setattr__", "__delattr__"}
# Takes a step of a known class, which it is given with its arguments.
Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def known_base(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the known class whose ``step()`` that of ``kind`` calls by ``super()``, if it does.

    None if ``kind`` changes more of that class's steps than what comes before and after them, or if
    its code uses the state, of which each rank has a part.
    """
    known: type[Optimizer] = next((each for each in kind.__mro__ if each in KNOWN), kind)
    if known is kind or inspect.unwrap(kind.step) is inspect.unwrap(known.step):
        return None
    fixed = (names_used(known, "step") | _LOOKUPS) - {"step"}
    for each in takewhile(lambda each: each is not known, kind.__mro__):
        attributes = vars(each)
        used = {k: code_names(v) for k, v in attributes.items() if isinstance(v, FunctionType)}
        if not fixed.isdisjoint(attributes) or any("state" in names for names in used.values()):
            return None
        if "step" in attributes and not {"super", "step"} <= used.get("step", set()):
            return None
    return known


def updating_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class whose ``step()`` updates parameters: a known base of ``kind``, or itself."""
    return known_base(kind) or kind


def divide_base_step(optimizer: Optimizer, known: type[Optimizer], run: Run) -> None:
    """Let ``run`` take the steps of the class ``known``, which that of the program calls.

    What the program's class does before and after is as it was. For that, ``optimizer`` becomes an
    instance of a class of the same name, derived from its own, in which ``super().step()`` finds
    another class before the known one.
    """

    def step(stepped: Optimizer, *args: Any, **options: Any) -> Any:
        function: Any = super(between, stepped).step.__func__
        if stepped is not optimizer:  # a copy
            return function(stepped, *args, **options)
        is_hooked = getattr(function, "hooked", False)
        inner = function.__wrapped__ if is_hooked else function

        def divided(*args: Any, **options: Any) -> Any:
            return run(inner, args, options)

        # The program's hooks, where torch has put them around this step too, see its parameters.
        outer: Any = Optimizer.profile_hook_step(divided) if is_hooked else divided
        return outer(stepped, *args, **options)

    kind = type(optimizer)
    between: Any = type(known.__name__, (known,), {**_description(known), "step": step})
    optimizer.__class__ = type(kind.__name__, (kind, between), _description(kind))


def _description(kind: type[Optimizer]) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
