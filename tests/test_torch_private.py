"""Private names of torch are used through lockstep.torch_private alone, and are there.

The files are read, not imported: where a name is gone, lockstep can't be.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

SOURCE = Path(__file__).parents[1] / "src" / "lockstep"
PRIVATE = SOURCE / "torch_private.py"
PATHS = sorted(SOURCE.rglob("*.py"))

# Names of others that begin with an underscore.
OF_PYTHON = {"_asdict", "_at_fork_reinit", "_exit", "_extra_reducers", "_fields", "_getframe"}
OF_PYTHON |= {"_replace", "_xoptions"}

OF_NUMPY = {"_bit_generator"}
OF_LIGHTNING = {"_ddp_kwargs", "_determine_ddp_device_ids", "_process_group_backend"}
OF_TRANSFORMERS = {"_save_optimizer_and_scheduler"}
OF_OTHERS = OF_PYTHON | OF_NUMPY | OF_LIGHTNING | OF_TRANSFORMERS


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """What is in a file. It is read by the first test that asks, not by every process."""
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def listed() -> dict[str, dict[str, str]]:
    """What ATTRIBUTES is, without importing the module."""
    for node in tree_of(PRIVATE).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ATTRIBUTES":
            assert node.value is not None
            found: dict[str, dict[str, str]] = ast.literal_eval(node.value)
            return found
    raise AssertionError("There are no ATTRIBUTES.")


def imported() -> Iterator[str]:
    """The dotted names that the module gives names to, or imports."""
    for node in ast.walk(tree_of(PRIVATE)):
        if isinstance(node, ast.Assign):
            yield ast.unparse(node.value)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


ATTRIBUTES = listed()
LISTED = {name for names in ATTRIBUTES.values() for name in names}


def resolve(dotted: str) -> object:
    """What ``torch.a.b`` is, of which the first parts are modules."""
    found: object = torch
    parts = dotted.split(".")
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


def ignoring() -> nn.Module:
    wrapper = TorchDDP.__new__(TorchDDP)
    nn.Module.__init__(wrapper)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(wrapper, [])
    return wrapper


def stepping() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(1))
    hooks = importlib.import_module("torch.distributed.optim.apply_optimizer_in_backward")
    hooks._apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    return parameter


# What only an object has, not its class.
SAMPLES = {
    "torch._dynamo.eval_frame.OptimizedModule": lambda: torch.compile(
        nn.Linear(1, 1), backend="eager"
    ),
    "torch.distributed.rendezvous": lambda: importlib.import_module("torch.distributed.rendezvous"),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "torch.compile": lambda: torch.compile(ignoring, backend="eager"),
    "torch.nn.Module": nn.Module,
    "torch.nn.Module.state_dict": lambda: nn.Linear(1, 1).state_dict(),
    "torch.nn.RNN": lambda: nn.RNN(1, 1),
    "torch.distributed.optim.apply_optimizer_in_backward": stepping,
    "torch.nn.parallel.DistributedDataParallel": ignoring,
    "torch.utils.data.dataloader._BaseDataLoaderIter": lambda: iter(
        DataLoader(torch.zeros(1), num_workers=1)  # type: ignore[arg-type]
    ),
    "torch.optim.Optimizer": lambda: torch.optim.SGD([torch.zeros(1)]),
}


@pytest.mark.parametrize("name", list(imported()))
def test_name_is_there(name: str) -> None:
    resolve(name)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names]
)
def test_attribute_is_there(owner: str, name: str) -> None:
    assert hasattr(SAMPLES[owner]() if owner in SAMPLES else resolve(owner), name)


@functools.cache
def defined_names() -> set[str]:
    """Names that lockstep gives to something itself."""
    names = set()
    for path in PATHS:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                names.add(
                    ast.literal_eval(node.slice) if isinstance(node.slice, ast.Constant) else ""
                )
    return names


def names_of_torch(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names by which a file knows what it imports from torch, and private ones among them."""
    known, private = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            paths = {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Import):
            paths = {a.asname or a.name.split(".")[0]: a.name for a in node.names}
            paths = {name: path for name, path in paths.items() if path.split(".")[0] == "torch"}
        else:
            continue
        known |= set(paths)
        private |= {path for path in paths.values() if any(map(is_private, path.split(".")))}
    return known, private


@pytest.mark.parametrize(
    "path", [path for path in PATHS if path != PRIVATE], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_other_files_use_what_is_listed(path: Path) -> None:
    known, found = names_of_torch(tree_of(path))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name, text = node.attr, ast.unparse(node)
        elif isinstance(node, ast.Constant) and is_private(str(node.value)):
            name = text = str(node.value)
        else:
            continue
        is_torchs = text.split(".")[0] in known or name not in defined_names()
        if is_torchs and name not in LISTED | OF_OTHERS:
            found.add(f"{text} (line {node.lineno})")
    assert not found, "Import it from lockstep.torch_private, or add it to its ATTRIBUTES."


def classes() -> Iterator[type]:
    """Every class of lockstep's; those that need a library that isn't installed are left out."""
    package = importlib.import_module("lockstep")
    for module in pkgutil.walk_packages(package.__path__, "lockstep."):
        if module.name.endswith("__main__"):
            continue
        try:
            values = vars(importlib.import_module(module.name)).values()
        except ModuleNotFoundError as error:
            if str(error.name).startswith(("lockstep", "torch")):
                raise
            continue
        for value in list(values):
            if isinstance(value, type) and value.__module__.startswith("lockstep"):
                yield value


def test_what_overrides_a_private_name_is_listed() -> None:
    pytest.importorskip("lockstep.torch_private")

    found = set()
    for owner in classes():
        torchs = [base for base in owner.__mro__ if base.__module__.startswith("torch")]
        found |= {
            f"{owner.__name__}.{name}"
            for name in vars(owner)
            if is_private(name) and name in defined_names() - LISTED
            if any(hasattr(base, name) for base in torchs)
        }
    assert not found


def test_importing_torch_needs_no_private_name() -> None:
    """It loads lockstep's backends by itself, and would fail with the first that is gone."""
    program = "import sys, torch; print('lockstep.comm.backends' in sys.modules, "
    program += "'lockstep.torch_private' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout.split() == ["True", "False"]
