"""Functions that torch.compile leaves as they are.

While compiled code runs, dynamo traces every Python function that is called in its thread, and so
hooks, callbacks of autograd and methods of process groups, which torch calls from C++. Ours can't
be traced: they wait for other ranks, and ask for autograd's state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from lockstep.torch_private import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_T = TypeVar("_T", bound=Callable[..., Any])

_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_REASON = "it works with other ranks, or with autograd's state, neither of which can be traced"


def uncompiled(target: _T) -> _T:
    """Have torch.compile run a function, and all that it calls, as is; or each method of a class.

    It does what ``torch.compiler.disable`` does, without an import of dynamo, which takes seconds,
    and without a wrapper in Python around every call.
    """
    for function in _functions_of(target):
        # For frames that dynamo would trace when they are called.
        set_code_exec_strategy(function.__code__, _SKIP)
        # For calls that dynamo meets while it traces the caller.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return target


def has_compiled() -> bool:
    """Whether the program has called torch.compile(); True too if torch doesn't tell."""
    # The backends of all calls. Optimizers import the module too, and leave None there.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(getattr(dynamo, "cached_backends", {0: True}).values())


def is_compiled(module: object) -> bool:
    """Whether ``torch.compile()`` has made ``module`` of another one."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _functions_of(target: Callable[..., Any]) -> list[FunctionType]:
    values = [target] if isinstance(target, FunctionType) else vars(target).values()
    inner = ("fget", "fset", "__func__")  # of properties, class methods and static methods
    parts = [part for v in values for part in (v, *(getattr(v, name, None) for name in inner))]
    return [part for part in parts if isinstance(part, FunctionType)]
