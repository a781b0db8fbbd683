"""Methods of an optimizer that torch's don't have, and that use its state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch.optim import Optimizer


def methods_with_state(kind: type[Optimizer]) -> list[str]:
    """Return the names of public methods that use the state, such as Schedule-Free's ``eval()``.

    A method uses it if its code names ``state``, or another method of the class that does.
    """
    return [
        name
        for name in dir(kind)
        if not name.startswith("_")
        and not hasattr(Optimizer, name)
        and "state" in names_used(kind, name)
    ]


def names_used(kind: type[Optimizer], name: str) -> set[str]:
    """Return the names in the code of a method, and of the methods of ``kind`` that it names."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        method = inspect.getattr_static(kind, waiting.pop(), None)
        method = getattr(method, "__func__", method)  # of a static or class method
        if isinstance(method, FunctionType):
            new = code_names(method) - found
            found |= new
            waiting += [each for each in new if not hasattr(Optimizer, each)]
    return found


def code_names(function: Any) -> set[str]:
    """Return the names in the code of ``function``, and of the functions in it."""
    return {*_names_in(inspect.unwrap(function).__code__)}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function in it
            yield from _names_in(constant)
