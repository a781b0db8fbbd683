"""Layers, imports, size, and which names are public."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"

# A package, or a module of its own, imports only from lower layers.
LAYERS = {
    "deadline": -2,
    "folders": -2,
    "memory_files": -2,
    "printable": -2,
    "status": -1,
    "torch_private": 0,
    "errors": 0,
    "spans": 0,
    "arguments": 0,
    "comm": 1,
    "world": 2,
    "grad": 2,
    "nn": 3,
    "launcher": 4,
    "train": 4,
    # The library.
    "tables": 5,
    "tree": 5,
    "generators": 5,
    "data": 6,
    "metrics": 6,
    "optim": 6,
    "seeds": 6,
    "checkpoint": 7,
    "values": 7,
    "integrations": 7,
    "resume": 8,
    # Commands.
    "bench": 9,
    "demo": 9,
    "check": 9,
    "observe": 9,
    "cli": 10,
    "__main__": 11,
}

# What a training step needs, the library on it, and commands. By package the most lines, blank ones
# and comments counted; a module of its own has fewer.
# Lower them as the code shrinks. Who raises one says in the commit what for, and what it took away.
BUDGET_OF_A_MODULE = 300
SHELVES = {
    "core": {
        "deadline": BUDGET_OF_A_MODULE,
        "folders": BUDGET_OF_A_MODULE,
        "memory_files": BUDGET_OF_A_MODULE,
        "printable": BUDGET_OF_A_MODULE,
        "status": BUDGET_OF_A_MODULE,
        "torch_private": BUDGET_OF_A_MODULE,
        "errors": BUDGET_OF_A_MODULE,
        "spans": BUDGET_OF_A_MODULE,
        "arguments": BUDGET_OF_A_MODULE,
        "comm": 6_150,
        "world": 2_680,
        "grad": 2_900,
        "nn": 7_380,
        "launcher": 5_300,
        "train": BUDGET_OF_A_MODULE,
    },
    "library": {
        "tables": BUDGET_OF_A_MODULE,
        "tree": BUDGET_OF_A_MODULE,
        "generators": BUDGET_OF_A_MODULE,
        "data": 2_700,
        "optim": 4_400,
        "checkpoint": 2_500,
        "resume": 1_200,
        "metrics": BUDGET_OF_A_MODULE,
        "seeds": BUDGET_OF_A_MODULE,
        "values": BUDGET_OF_A_MODULE,
        "integrations": BUDGET_OF_A_MODULE,
    },
    "commands": {
        "observe": 5_200,
        "check": 2_800,
        "bench": 800,
        "demo": 400,
        "cli": 500,
        "__main__": BUDGET_OF_A_MODULE,
    },
}
MAX_LINES_OF_A_FILE = 500
MOST_ATTRIBUTES = 20

# What modules keep and change, that no object owns, and why. Whoever adds some says why here.
MODULE_STATE = {
    # By process group and by rank.
    "comm.context._contexts": "the contexts of all groups: torch's groups take no attributes",
    "comm.threads.ranks._current": "the rank that a thread is, or works for",
    "comm.any_group._waited": "a thread's time in collectives, whichever group they are of",
    "world.world._of_process": "what init() has returned, which needs no argument",
    # By what takes no attribute, as it is to pickle and copy as before.
    "nn.parallel_state._states": "by module, what parallelize() knows of it",
    "world.apart._watched": "by optimizer, its steps that were compared",
    "world.told._told": "by parameter, whether a rank was told that nothing keeps it in step",
    # What is the process's: torch's hooks, forks, its exit, ports, memory.
    "nn.global_hooks._handles": "torch's hooks for all modules and optimizers, each put there once",
    "world.apart._hooks": "the same, which gives way to one that is called later",
    "comm.base_group._groups": "groups that a fork renews in the child",
    "comm.shm.memory._shared_at": "by address, which memory other processes reach",
    "comm.shm.memory._Room": "memory that may be taken: a look at its limits takes long",
    "comm.shm.one_copy._copies": "mappings whose pages are taken before a fork",
    "comm.shm.one_copy._watch_forks": "so that a fork takes them once",
    "grad.memory._memories": "gradients that are the parent's alone after a fork",
    "grad.memory._fork": "what a thread that forks has yet to tell its child",
    "checkpoint.saving._backgrounds": "saves that the exit of the process waits for",
    "comm.network._addresses": "where Gloo listens, which no function of torch's takes",
    "world.rendezvous._held_open": "stores at ports, which can be opened once",
    "world.rendezvous._open_files": "files of stores, open as long as the process",
    "comm.threads.ranks.changed": "wakes threads that wait for each other",
    "comm.threads.ranks._isolation": "torch's record of groups, while ranks are threads",
    "comm.threads.transport._states": "where threads meet that are to be a group, by its name",
    # Where a higher layer tells a lower one what to call.
    "world.apart.keepers": "what keeps parameters in step, asked for by optimizer",
    "world.world.when_joined": "what a trace does when its rank gets to know its number",
    "spans.recorder": "the trace, which sees all ranks of this process",
    "spans.status": "what the display of a run reads of this process",
    "observe.tracing._process": "all traces of this process, which share its hooks",
    "observe.logger._logger": "where log() writes, which takes no argument",
    "world.world.World": "a trial of `lockstep check` has the program see another world_size",
    # By context, which Python keeps; and torch's own.
    "torch_private._execution_engine": "torch's engine of autograd",
    "nn.autograd._task": "the backward whose hook runs",
    "nn.replicas.group._replica": "the replica that runs",
    # What is said once.
    "nn.parallel_state._has_warned": "losses that are divided though their mean is taken",
    "nn.sync_batch_norm._told_of_local_statistics": "statistics of a rank's own samples",
    "world.told._tell_of_strangers": "ranks that have not met",
    # Results that are the same each time.
    "comm.collectives._reduction": "how a reduction is computed",
    "comm.transport.encoded": "a signature in bytes",
    "data.partition.cuts": "where parts begin",
    "launcher.failures._torch_folder": "where torch is",
    "nn.replicas.worker_threads._pause": "a function of torch's OpenMP",
    "nn.sync_batch_norm._synchronised": "classes, of which there is one for each of torch's",
    "world.devices._has_float64": "what a device can",
}

# Imports past the face of a package, which are to go: whoever mends one takes it off this list.
STILL_OPEN: dict[str, str] = {}

TESTS = Path(__file__).parent

# Tests that import inner modules of another package than their own, and why; the list only shrinks.
STILL_INSIDE = {
    "launcher/test_without_memfd.py world.rendezvous": "meets within one process, without files",
    "nn/test_several_models.py grad.facts": "what is reduced is counted, facts included",
    "observe/test_fuzzing.py launcher.live": "draws pages of ranks that anybody may have written",
    "optim/test_deferred_errors.py comm.shared_buffers": "lets one rank lack memory, or fail there",
    "ranks.py comm.shm.transport": "groups of ranks that are threads, without a store of a run",
    "ranks.py comm.threads.transport": "the same",
    "ranks.py launcher.threads": "the same",
    "simulated/test_overlap.py optim.arriving": "streams are there on simulated devices alone",
    "simulated/test_overlap.py optim.flat": "the same",
    "simulated/test_sums.py world.devices": "what a device can is patched",
}

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


by_module = pytest.mark.parametrize("module", MODULES)


@by_module
def test_imports_point_to_lower_layers(module: str) -> None:
    package = package_of(module)
    for each in imports_of(module):
        target = target_of(each)
        assert target != "lockstep", f"{module}: import from the package that defines the name"
        other = package_of(target)
        assert other == package or LAYERS[other] < LAYERS[package], f"{package} imports {other}"


def test_what_a_training_step_needs_imports_nothing_that_only_observes_it() -> None:
    core, library, commands = ([*map(LAYERS.__getitem__, shelf)] for shelf in SHELVES.values())
    assert max(core) < min(library)
    assert max(library) < min(commands)


def test_files_do_not_import_each_other_in_a_circle() -> None:
    graph = {module: modules_run_by(module) for module in MODULES}
    for module in MODULES:
        circle = shortest_circle(module, graph)
        assert not circle, f"a circle of imports: {' -> '.join(circle)}"


def modules_run_by(module: str) -> set[str]:
    """The modules that an import of ``module`` runs, those of packages around them included."""
    targets = {target_of(each) for each in imports_of(module)} - {module}
    for target in list(targets):
        parts = target.split(".")
        packages = {".".join(parts[:end]) for end in range(2, len(parts))}
        targets |= {package for package in packages if not module.startswith(f"{package}.")}
    return targets - {module}


def shortest_circle(start: str, graph: dict[str, set[str]]) -> list[str]:
    """The shortest way from a module back to itself, or an empty list."""
    paths = deque([[start]])
    seen = set()
    while paths:
        path = paths.popleft()
        for target in sorted(graph.get(path[-1], ())):
            if target == start:
                return [*path, start]
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return []


def test_a_circle_is_found_and_named() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert shortest_circle("a", graph) == ["a", "b", "c", "a"]
    assert shortest_circle("d", graph) == []


def test_packages_import_each_other_by_their_faces() -> None:
    """``from lockstep.comm import x``, outside of comm, and not ``from lockstep.comm.y``."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for target in map(target_of, imports_of(module)):
            if package_of(target) != package_of(module) and target.count(".") > 1:
                found.setdefault(name_of(module), set()).add(target.removeprefix("lockstep."))
    for name in sorted(found.keys() | STILL_OPEN.keys()):
        past, listed = found.get(name, set()), set(STILL_OPEN.get(name, "").split())
        assert not past - listed, f"{name} imports past a face: {sorted(past - listed)}"
        assert not listed - past, f"take off STILL_OPEN, {name}: {sorted(listed - past)}"


LAZY = [module for module, path in FILES.items() if path.with_suffix(".pyi").exists()]


def test_no_test_imports_another() -> None:
    """What several of them need is in a module of its own, which has no tests."""
    found = set()
    for path in sorted(TESTS.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        if any(re.match(r"tests\.(\w+\.)*test_", name) for name in names):
            found.add(str(path.relative_to(TESTS)))
    assert not found, "move what they import into a module without tests"


@functools.cache
def _imports_of_tests() -> list[tuple[str, str, Import]]:
    """Imports of lockstep: the file, the package whose tests it has, and what is imported."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS)
        package = name.parts[0] if len(name.parts) > 1 else name.stem.removeprefix("test_")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep"):
                for alias in node.names:
                    found.append((str(name), package, Import(node.module or "", alias.name)))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("lockstep"):
                        found.append((str(name), package, Import(alias.name, "")))
    return found


def test_tests_import_by_faces_what_these_list() -> None:
    for name, _, each in _imports_of_tests():
        face = ".".join(each.module.split(".")[:2])
        listed = {one.name: target_of(one) for one in imports_of(face)} if face in FILES else {}
        if each.module != face and target_of(each) == each.module:
            assert each.name not in listed, f"{name}: import {each.name} from {face}"


def test_tests_of_a_package_import_no_inner_modules_of_others() -> None:
    """Behaviour is tested through faces; what is inside, by the unit tests of its own package."""
    found = set()
    for name, package, each in _imports_of_tests():
        _, other, inner = (*target_of(each).split(".", 2), "", "")[:3]
        if inner and other not in (package, "integrations"):  # one for each trainer, public
            found.add(f"{name} {target_of(each).removeprefix('lockstep.')}")
    assert found - STILL_INSIDE.keys() == set(), "import them from the package's face"
    assert STILL_INSIDE.keys() - found == set(), "take them off STILL_INSIDE"


@pytest.mark.parametrize("package", LAZY)
def test_no_name_of_a_lazy_package_is_that_of_a_file_in_it(package: str) -> None:
    """The lazy loader would change the package's class, and a module of another can't be pickled.

    ``launch()`` pickles packages by reference for a function that names one, ``torch.optim`` too.
    """
    prefix = f"{package}."
    files = {name.removeprefix(prefix).split(".")[0] for name in FILES if name.startswith(prefix)}
    listed = {each.name for each in imports_of(package) if each.module != package}
    assert not files & listed
    cloudpickle.dumps(importlib.import_module(package))


def test_size_is_bounded() -> None:
    """No file grows to a size that nobody reads at one sitting, and no package past its budget."""
    num_lines = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    assert {m: n for m, n in num_lines.items() if n > MAX_LINES_OF_A_FILE} == {}
    packages: Counter[str] = Counter()
    for module in MODULES:
        packages[package_of(module)] += num_lines[module]
    budgets = {package: most for shelf in SHELVES.values() for package, most in shelf.items()}
    assert budgets.keys() == packages.keys()
    assert {p: n for p, n in packages.items() if n > budgets[p]} == {}


def _attributes_of_classes(modules: Iterable[str]) -> dict[str, tuple[set[str], list[str]]]:
    """Of each class, by name: what its methods set on ``self``, and its bases."""
    found = {}
    for node in itertools.chain(*(ast.walk(ast.parse(FILES[m].read_text())) for m in modules)):
        if isinstance(node, ast.ClassDef):
            inside = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
            stored = [each for each in inside if isinstance(each.ctx, ast.Store)]
            names = {each.attr for each in stored if getattr(each.value, "id", "") == "self"}
            fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
            names |= {each.target.id for each in fields if isinstance(each.target, ast.Name)}
            found[node.name] = names, [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def test_no_class_that_a_step_needs_has_more_state_than_one_can_hold_in_mind() -> None:
    """In sections, with a comment each; of all its bases."""
    core = [module for module in MODULES if package_of(module) in ("comm", "grad", "nn", "world")]
    classes = _attributes_of_classes(core)

    def attributes_of(name: str) -> set[str]:
        attributes, bases = classes.get(name, (set(), []))
        return attributes.union(*map(attributes_of, bases))

    most = {name: len(attributes_of(name)) for name in classes}
    assert {name: number for name, number in most.items() if number > MOST_ATTRIBUTES} == {}


def test_the_listing_of_the_source_has_packages_from_the_highest_layer_to_the_lowest() -> None:
    (listing,) = re.findall(r"```\nsrc/lockstep/\n(.*?)```", CONTRIBUTING.read_text(), flags=re.S)
    listed = re.findall(r"^  (?! )((?:[\w.]+/?  ?)+) ", listing, flags=re.M)
    names = [word.removesuffix("/").removesuffix(".py") for row in listed for word in row.split()]
    assert sorted(names) == sorted({package_of(module) for module in MODULES} - {"__main__"})
    layers = [LAYERS[name] for name in names]
    assert layers == sorted(layers, reverse=True)


def test_one_backward_is_told_in_functions_that_are_there() -> None:
    """One in each line, by the class that defines it, and by its file where that is another one."""
    text = CONTRIBUTING.read_text()
    (told,) = re.findall(r"^## One backward\n(.*?)^## ", text, flags=re.M | re.S)
    assert len(told.splitlines()) <= 60
    rows = re.findall(r"^(\d+)\. `((?:\w+\.)?\w+)\(\)`(?: \(([\w/.]+)\))?: ", told, flags=re.M)
    assert [int(number) for number, *_ in rows] == [
        *range(1, 1 + len(re.findall(r"^\d", told, flags=re.M)))
    ]
    file = ""
    for _, name, named_file in rows:
        file = named_file or file
        tree = ast.parse((SOURCE / file).read_text())
        for part in name.split("."):
            tree = next(each for each in tree.body if getattr(each, "name", "") == part)
        assert isinstance(tree, ast.FunctionDef), name


def test_the_words_of_the_glossary_are_few() -> None:
    (words,) = re.findall(r"^## Words\n\n(.*?)\n\n## ", CONTRIBUTING.read_text(), flags=re.M | re.S)
    assert len(words.splitlines()) <= 20
    for name in re.findall(r"\(`(\w+/\w+\.py)`\)", words):
        assert (SOURCE / name).is_file()


PUBLIC_MODULES = [
    "lockstep.checkpoint",
    "lockstep.comm",
    "lockstep.data",
    "lockstep.errors",
    "lockstep.grad",
    "lockstep.integrations",
    "lockstep.launcher",
    "lockstep.nn",
    "lockstep.observe",
    "lockstep.resume",
    "lockstep.train",
    "lockstep.world",
]


# Whoever adds a public name adds it here, and so means it.
PUBLIC_NAMES = {
    "DataLoader",
    "DataParallel",
    "DataPartitioner",
    "DistributedDataParallel",
    "DistributedSampler",
    "LockstepError",
    "Partition",
    "World",
    "ZeroRedundancyOptimizer",
    "accumulate",
    "any",
    "average_gradients",
    "broadcast",
    "clip_grad_norm_",
    "data_parallel",
    "checkpoint",
    "errors",
    "explain",
    "gather",
    "init",
    "join",
    "launch",
    "load",
    "log",
    "log_to",
    "SyncBatchNorm",
    "mean",
    "no_sync",
    "parallel_apply",
    "parallelize",
    "partition",
    "reduce",
    "replicate",
    "save",
    "scatter",
    "scatter_kwargs",
    "seed",
    "shard_optimizer",
    "steps",
    "sync_buffers",
    "trace",
}


def test_public_names_are_those_and_exist() -> None:
    assert set(lockstep.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(lockstep, name).__doc__


def test_types_of_all_public_names_are_checked() -> None:
    """mypy checks them in ``make check``; here it is only whether none is left out."""
    used = set(re.findall(r"lockstep\.(\w+)", (TESTS / "public_types.py").read_text()))
    assert not PUBLIC_NAMES - used, "use them in tests/public_types.py"


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
    launchers = {"MARK", "'MASTER_ADDR'", "'MASTER_PORT'", "'RANK'", "'TORCHELASTIC_RUN_ID'"}
    for module in MODULES:
        path, package = FILES[module], package_of(module)
        text = path.read_text()
        if package == "world" or "env" not in text:  # taking it apart takes long
            continue
        uses = set(re.findall(r"environ(?:\.get\(|\[)([^\])]*)", ast.unparse(ast.parse(text))))
        assert "getenv" not in text, path
        assert uses <= (launchers if package == "launcher" else set()), path
