"""What of a module changes after its import: state that no object owns, by the names of it."""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib
import logging
import operator
import re
import threading
import types
import typing
from collections.abc import Iterator
from types import ModuleType

# What is named so is never changed, whatever its type: see :func:`changed_constants`.
_CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*|__\w+__")
_CHANGES = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("reverse", "setdefault", "sort", "update"),
}
# Types of what is assigned in modules and doesn't change. A lock has no state but being held.
_UNCHANGING: tuple[typing.Any, ...] = (
    *(type(None), bool, int, float, str, bytes, type, types.FunctionType, types.ModuleType),
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.GenericAlias, types.UnionType, re.Pattern),
    *(typing.TypeVar, type(typing.List[int]), logging.Logger, operator.attrgetter),  # noqa: UP006
    *(functools.partial, ctypes.CDLL, type(ctypes.pythonapi.Py_IsInitialized).__base__),
    *(type(threading.Lock()), type(threading.RLock())),
)


def state_of(module: str, tree: ast.Module) -> set[str]:
    """Return what changes of ``module``, and of others through it: names after ``lockstep.``."""
    found = importlib.import_module(module)
    here = module.removeprefix("lockstep.")
    names = {f"{here}.{name}" for name in _assigned(tree) if _changes(name, vars(found).get(name))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names |= {f"{here}.{name}" for name in node.names}
    for name, value in vars(found).items():
        if hasattr(value, "cache_info") and value.__module__ == module:
            names.add(f"{here}.{name}")
    return names | {*_set_from_outside(found, tree)}


def _assigned(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        for target in _targets(node):
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to or deletes, one by one."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    return [
        each
        for target in targets
        for each in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
    ]


def _changes(name: str, value: object) -> bool:
    return not _CONSTANT.fullmatch(name) and not isinstance(value, _UNCHANGING)


def _set_from_outside(module: ModuleType, tree: ast.Module) -> Iterator[str]:
    """Yield attributes of lockstep's modules, and classes of it, that the module sets."""
    known = dict(vars(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "lockstep":
            known |= {a.name: importlib.import_module(f"lockstep.{a.name}") for a in node.names}
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                owner = known.get(target.value.id)
                if isinstance(owner, ModuleType) and owner.__name__.startswith("lockstep."):
                    yield f"{owner.__name__.removeprefix('lockstep.')}.{target.attr}"
                elif isinstance(owner, type) and owner.__module__.startswith("lockstep."):
                    yield f"{owner.__module__.removeprefix('lockstep.')}.{owner.__name__}"


def changed_constants(tree: ast.Module) -> list[str]:
    """Return the code that changes what is named in capitals."""
    found = []
    for node in ast.walk(tree):
        owners = [t.value for t in _targets(node) if isinstance(t, ast.Attribute | ast.Subscript)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owners += [node.func.value] if node.func.attr in _CHANGES else []
        if any(isinstance(owner, ast.Name) and _CONSTANT.fullmatch(owner.id) for owner in owners):
            found.append(ast.unparse(node))
    return found
