"""What tests import, and what is defined once for all of them."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator

from tests.source import (
    FILES,
    TESTS,
    Import,
    imports_of,
    target_of,
)

# Tests that import inner modules of another package than their own, and why; the list only shrinks.
STILL_INSIDE = {
    "launcher/test_without_memfd.py world.rendezvous": "meets within one process, without files",
    "nn/tables.py grad.row_bucket": "tables of a test are small",
    "nn/test_several_models.py grad.facts": "what is reduced is counted, facts included",
    "observe/test_fuzzing.py launcher.live": "draws pages of ranks that anybody may have written",
    "optim/test_deferred_errors.py comm.shared_buffers": "lets one rank lack memory, or fail there",
    "ranks.py comm.shm.transport": "groups of ranks that are threads, without a store of a run",
    "ranks.py comm.threads.transport": "the same",
    "ranks.py launcher.threads": "the same",
    "simulated/test_failed_backwards.py nn.backward": "lets autograd drop a callback late",
    "simulated/test_overlap.py optim.arriving": "streams are there on simulated devices alone",
    "simulated/test_overlap.py optim.flat": "the same",
    "simulated/test_shards.py same_bits.chunks": "each of the rules is left out in turn",
    "simulated/test_shards.py same_bits.local_step": "the same",
    "simulated/test_shards.py same_bits.messages": "the same",
    "simulated/test_shards.py same_bits.over_ranks": "the same",
    "simulated/test_shards.py same_bits.sums": "the same",
    "simulated/test_sums.py world.devices": "what a device can is patched",
}


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


def test_what_many_tests_need_is_defined_once() -> None:
    """Functions; a class may have a method of the name. What does something else says so."""
    names = Counter(
        node.name
        for path in TESTS.rglob("*.py")
        for node in _functions_of(ast.parse(path.read_text()))
        if node.name in ("train", "net", "assert_same")
    )
    assert names == {"train": 1, "net": 1, "assert_same": 1}


def _functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Those that aren't methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and not isinstance(tree, ast.ClassDef):
            yield node
        yield from _functions_of(node)
