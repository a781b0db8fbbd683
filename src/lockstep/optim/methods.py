"""Methods of an optimizer that torch's don't have, and that use its state."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from itertools import takewhile
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
    """Return the names in the code of a method, and of the methods of ``kind`` that it names.

    It may call those of base classes that it overrides.
    """
    found: set[str] = set()
    waiting = [name]
    while waiting:
        wanted = waiting.pop()
        for each in takewhile(lambda each: each is not Optimizer, kind.__mro__):
            method = vars(each).get(wanted)
            method = getattr(method, "__func__", method)  # of a static or class method
            if isinstance(method, FunctionType):
                new = code_names(method) - found
                found |= new
                waiting += [each for each in new if not hasattr(Optimizer, each)]
    return found


def code_names(function: Any) -> set[str]:
    """Return the names in the code of ``function``, and of the functions in it."""
    return {name for code in _codes_in(inspect.unwrap(function).__code__) for name in code.co_names}


def globals_used(function: Any) -> list[Any]:
    """Return what the global names in the code of ``function`` stand for."""
    function = inspect.unwrap(function)
    names = {
        instruction.argval
        for code in _codes_in(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    return [function.__globals__[name] for name in names if name in function.__globals__]


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function in it
            yield from _codes_in(constant)
