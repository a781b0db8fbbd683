"""The house: imports point only to lower floors, and what is public is listed."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent

FLOORS = {
    "arguments": 0,
    "errors": 0,
    "torch_private": 0,
    "trace": 1,
    "comm": 2,
    "world": 3,
    "grad": 3,
    "data": 4,
    "nn": 4,
    "launcher": 5,
    "observe": 5,
    "train": 5,
    "integrations": 6,
    "bench": 6,
    "demo": 6,
    "cli": 7,
    "__main__": 8,
}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def rooms_imported_by(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor they point to"
            names = (
                [node.module]
                if node.module != "lockstep"
                else [f"lockstep.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("lockstep.")}
        assert "lockstep" not in names, f"{path}: import from the module, not from the roof"
    return rooms


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_lower_floors(path: Path) -> None:
    room = room_of(path)
    for other in rooms_imported_by(path) - {room}:
        assert FLOORS[other] < FLOORS[room], f"{room} (floor {FLOORS[room]}) imports {other}"


def test_every_file_has_a_reader() -> None:
    """No file drifts to a size that nobody reads at one sitting."""
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 500, path


PUBLIC_MODULES = [
    "lockstep.comm",
    "lockstep.data",
    "lockstep.errors",
    "lockstep.grad",
    "lockstep.integrations",
    "lockstep.launcher",
    "lockstep.nn",
    "lockstep.train",
    "lockstep.world",
]


# Whoever adds a public name adds it here, and so means it.
PUBLIC_NAMES = {
    "DataParallel",
    "DataPartitioner",
    "DistributedDataParallel",
    "Partition",
    "World",
    "accumulate",
    "average_gradients",
    "data_parallel",
    "errors",
    "gather",
    "init",
    "join",
    "launch",
    "SyncBatchNorm",
    "mean",
    "no_sync",
    "parallel_apply",
    "parallelize",
    "partition",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "sync_buffers",
}


def test_public_names_are_those_and_exist() -> None:
    assert set(lockstep.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(lockstep, name).__doc__


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_all_is_what_is_public(module_name: str) -> None:
    module = importlib.import_module(module_name)
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{name} needs a docstring"
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("lockstep")
    }
    assert public <= set(module.__all__)


def test_every_error_is_in_the_tree_and_its_drawing() -> None:
    errors = lockstep.errors
    defined = {name for name in vars(errors) if not name.startswith("_") and name != "annotations"}
    assert defined == set(errors.__all__)
    for name in defined:
        assert issubclass(getattr(errors, name), errors.LockstepError)
        assert name in errors.__doc__


def test_only_world_reads_the_environment() -> None:
    """What a process is told through its environment is read in one place.

    The launcher hands the environment on, whole, and looks up only what it has put there itself.
    """
    own = {"MARK", "'MASTER_ADDR'", "'MASTER_PORT'", "'RANK'", "'TORCHELASTIC_RUN_ID'"}
    for path in MODULES:
        room, text = room_of(path), path.read_text()
        if room == "world":
            continue
        uses = set(re.findall(r"environ(?:\.get\(|\[)([^\])]*)", ast.unparse(ast.parse(text))))
        assert "getenv" not in text, path
        assert uses <= (own if room == "launcher" else set()), path
