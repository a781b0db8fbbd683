"""``make test-shown``: whether tests still show what comments in the source say they show.

For each mutation of ``tests/mutations.py`` the test runs in a copy of the source that has it, and
must fail. All these tests run in an unchanged copy first, where they must pass.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.mutations import MUTATIONS, Mutation, mutated, named_tests
from tests.simulated.__main__ import SETTINGS
from tests.simulated.build import CannotBuild, environment

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lockstep"
_COPIED = ("src", "tests", "examples", "docs", "pyproject.toml", "README.md")
_SIMULATED = "tests/simulated"
# A test that waits for ever has failed, and one that takes longer than this by itself is too long.
_TEST_SECONDS, _RUN_SECONDS = 90, 600
# Of pytest: all passed, one failed, one could not be collected, options are wrong, none was found.
_PASSED, _FAILED, _NOT_RUN, _NOTHING_FOUND = 0, 1, (2, 3, 4), 5


class Result(NamedTuple):
    """How pytest has ended, and what it has said."""

    code: int
    output: str


@cache
def places_of(test: str) -> tuple[str, ...]:
    """The node ids of the test; those on simulated devices if there are no others."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if f"def {test}(" in text and "gpu" not in path.parts:
            for node in ast.walk(ast.parse(text)):
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.FunctionDef) and child.name == test:
                        names = [node.name] if isinstance(node, ast.ClassDef) else []
                        file = str(path.relative_to(ROOT))
                        found.append("::".join([file, *names, test]))
    real = tuple(place for place in found if not place.startswith(_SIMULATED))
    return real or tuple(found)


def copy_to(folder: Path) -> None:
    """Copy the source and the tests."""
    ignored = shutil.ignore_patterns("__pycache__", "_build", "_pictures", "*.pyc")
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)


def run(folder: Path, places: Sequence[str], variables: Mapping[str, str], *options: str) -> Result:
    """Run tests in the copy, whose source is the one that is imported."""
    paths = [str(folder / "src"), variables.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    variables = {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    known = "import lockstep; print(lockstep.__file__)"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    limit = ["--timeout", str(_TEST_SECONDS)]
    common = {"cwd": folder, "env": os.environ | variables, "text": True}
    file = subprocess.run([sys.executable, "-c", known], capture_output=True, **common).stdout
    if not file.startswith(str(folder)):
        raise RuntimeError(f"Not the copy in {folder} is imported, but {file}")
    try:
        done = subprocess.run(
            [*command, *limit, *places],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_RUN_SECONDS,
            **common,
        )
    except subprocess.TimeoutExpired:
        return Result(_FAILED, f"no end within {_RUN_SECONDS} s")
    return Result(done.returncode, done.stdout)


def run_anywhere(folder: Path, test: str) -> Result:
    """Run one test, also those that ``make test`` leaves out; on simulated devices until it fails.

    Raises:
        CannotBuild: If there is no compiler for those.
    """
    places = places_of(test)
    if not places[0].startswith(_SIMULATED):
        # First what make test does of it, and if that passes all.
        for options in (), ("--long",):
            result = run(folder, places, {}, *options)
            if result.code not in (_PASSED, _NOTHING_FOUND):
                break
        return result
    for delay in SETTINGS:
        variables = environment(delay=delay, devices=3)
        result = run(folder, places, variables, "-p", "tests.simulated.plugin")
        if result.code != _PASSED:
            break
    return result


def try_one(mutation: Mutation) -> str:
    """Return what is wrong with the test of that mutation; nothing if it fails as it has to."""
    try:
        text = mutated((SOURCE / mutation.path).read_text(), mutation)
        compile(text, mutation.path, "exec")
    except (ValueError, SyntaxError) as error:
        return f"has a mutation of another source: {error}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_to(folder)
        (folder / "src" / "lockstep" / mutation.path).write_text(text)
        try:
            result = run_anywhere(folder, mutation.test)
        except CannotBuild as error:
            return f"skipped: {error}"
    if result.code in _NOT_RUN:
        return f"could not be run:\n{result.output}"
    # The process itself may have ended, of a signal.
    return "passes all the same" if result.code in (_PASSED, _NOTHING_FOUND) else ""


def unchanged(tests: Sequence[str]) -> str:
    """Return what pytest says of the tests in an unchanged copy, if one of them fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_to(folder)
        simulated = [test for test in tests if places_of(test)[0].startswith(_SIMULATED)]
        places = [place for test in tests if test not in simulated for place in places_of(test)]
        results = [run(folder, places, {})] if places else []
        with contextlib.suppress(CannotBuild):
            results += [run_anywhere(folder, test) for test in simulated]
    wrong = [result for result in results if result.code not in (_PASSED, _NOTHING_FOUND)]
    return "\n".join(result.output for result in wrong)


def main(arguments: Sequence[str]) -> int:
    """Try all mutations, or those of the given tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("tests", nargs="*", help="the tests whose mutations are tried")
    given = parser.parse_args(arguments)
    chosen = [one for one in MUTATIONS if one.test in (given.tests or (one.test,))]
    if output := unchanged(sorted({one.test for one in chosen})):
        print(f"In the source as it is:\n{output}")
        return 1
    wrong = 0
    if not given.tests:
        named = set(named_tests(SOURCE))
        for path, test in sorted(named ^ {(one.path, one.test) for one in MUTATIONS}):
            what = "no mutation" if (path, test) in named else "a mutation and no comment"
            print(f"{path}: {test} has {what}")
            wrong += 1
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutation, what in zip(chosen, pool.map(try_one, chosen), strict=True):
            print(f"{mutation.path}: {mutation.test} {what or 'fails, as it has to'}", flush=True)
            wrong += bool(what) and not what.startswith("skipped")
    print("All mutations are noticed" if not wrong else f"{wrong} are to be mended")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
