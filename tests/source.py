"""The files of the source, and what they import."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import lockstep

SOURCE = Path(lockstep.__file__).parent
TESTS = Path(__file__).parent
CONTRIBUTING = TESTS.parent / "CONTRIBUTING.md"
FILES = {
    ".".join(("lockstep", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SOURCE.rglob("*.py"))
}
MODULES = [name for name in FILES if name != "lockstep"]


def name_of(module: str) -> str:
    return str(FILES[module].relative_to(SOURCE))


def package_of(module: str) -> str:
    return module.split(".")[1]


class Import(NamedTuple):
    """``from module import name``, or ``import module`` where there is no name."""

    module: str
    name: str


@functools.cache
def imports_of(module: str) -> list[Import]:
    """Imports of lockstep's modules, those inside functions and for types alone included.

    A package whose names are imported when they are first used lists them in its stub.
    """
    path = FILES[module]
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or stub.exists(), f"{path}: relative imports hide their layer"
            parts = [module] * node.level + ([node.module] if node.module else [])
            found += [Import(".".join(parts), a.name) for a in node.names]
    return [each for each in found if each.module.split(".")[0] == "lockstep"]


def target_of(each: Import) -> str:
    """The module that is imported: a submodule, unless its package defines the name itself."""
    submodule = f"{each.module}.{each.name}"
    imports = imports_of(each.module) if each.module in FILES else []
    listed = {name.name for name in imports if name.module != each.module}
    return submodule if submodule in FILES and each.name not in listed else each.module
