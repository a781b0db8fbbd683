"""Functions that torch.compile leaves as they are.

While compiled code runs, dynamo traces every Python function that is called in its thread, and so
hooks, callbacks of autograd and methods of process groups, which torch calls from C++. Ours can't
be traced: they wait for other ranks, and ask for autograd's state.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from lockstep.torch_private import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_T = TypeVar("_T", bound=Callable[..., Any])

_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_REASON = "it works with other ranks, or with autograd's state, neither of which can be traced"


def uncompiled(target: _T) -> _T:
    """Have torch.compile run a function, and all functions that it calls, as they are.

    It does what ``torch.compiler.disable`` does, without an import of dynamo, which takes seconds,
    and without a wrapper in Python around every call.

    Args:
        target: The function, or a class, for each of its methods.
    """
    for function in _functions_of(target):
        # For frames that dynamo would trace when they are called.
        set_code_exec_strategy(function.__code__, _SKIP)
        # For calls that dynamo meets while it traces the caller.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return target


def _functions_of(target: Callable[..., Any]) -> list[FunctionType]:
    if isinstance(target, FunctionType):
        return [target]
    found = []
    for value in vars(target).values():
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            function = part.__func__ if isinstance(part, staticmethod | classmethod) else part
            if isinstance(function, FunctionType):
                found.append(function)
    return found
