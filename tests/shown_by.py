"""``make test-shown``: whether tests notice the mistakes that they are there for.

For each mutation of ``tests/mutations`` its test runs with a copy of the source that has it, and
must fail. All these tests run with an unchanged copy first, several in one process, and must pass.
Each process is a fork of this one, which has imported torch and not lockstep.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from tests.mutations import Mutation, mutated, named_tests
from tests.mutations.others import OTHERS
from tests.mutations.shown import SHOWN
from tests.mutations.waits import WAITS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lockstep"
MUTATIONS = [*SHOWN, *OTHERS, *WAITS]
# How long all tests may take as they are; and one with a mutation, times as long as without, but at
# least: one that waits for ever has failed.
_MOST_SECONDS, _TIMES, _LEAST_SECONDS = 300, 4, 15
# What a run prints of each test that has ended: how long it took, and its node id.
_TOOK = re.compile(r"^took ([\d.]+) s: (.+)$", re.MULTILINE)
# Of pytest: all passed, one failed, one could not be collected, options are wrong, none was found.
_PASSED, _FAILED, _NOT_RUN, _NOTHING_FOUND = 0, 1, (2, 3, 4), 5
# What all runs need, for an optimizer's first step (dynamo), the tests and pytest: to import it
# takes three quarters of the time of most runs.
_IMPORTED = (
    *("torch", "torch._dynamo", "numpy", "psutil", "pytest", "hypothesis", "hypothesis.strategies"),
    *("_hypothesis_pytestplugin", "pytest_timeout", "xdist.plugin", "xdist.looponfail"),
)
# torch imports lockstep, unless this is 0.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Result(NamedTuple):
    """How pytest has ended, after how long, and what it has said."""

    code: int
    seconds: float
    output: str


@cache
def places_of(test: str) -> tuple[str, ...]:
    """The node ids of the test; those on simulated devices if there are no others."""
    if test.startswith("tests/"):
        return (test,)
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if f"def {test}(" in text and "gpu" not in path.relative_to(ROOT).parts:
            for node in ast.walk(ast.parse(text)):
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.FunctionDef) and child.name == test:
                        names = [node.name] if isinstance(node, ast.ClassDef) else []
                        file = str(path.relative_to(ROOT))
                        found.append("::".join([file, *names, test]))
    real = tuple(place for place in found if not place.startswith("tests/simulated"))
    return real or tuple(found)


@contextlib.contextmanager
def copy_of_source(mutation: Mutation | None) -> Iterator[Path]:
    """A folder that has a copy of lockstep with the mutation.

    Raises:
        ValueError, SyntaxError: If the mutation is of another source.
    """
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name).resolve() / "src" / "lockstep"
        shutil.copytree(SOURCE, copy)  # with what Python has compiled
        if mutation is not None:
            path = copy / mutation.path
            text = mutated(path.read_text(), mutation)
            compile(text, mutation.path, "exec")
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()
            path.write_text(text)
        yield copy.parent


class Run:
    """A run of pytest with a copy of the source, in a fork of this process."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], variables: Mapping[str, str], limit: float
    ) -> None:
        self._began, self._limit = time.monotonic(), limit
        self._log = folder / "log"
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_pytest(folder, self._log, arguments, variables)

    def result(self) -> Result | None:
        """How it has ended; None if it runs."""
        seconds = time.monotonic() - self._began
        is_over = seconds > self._limit
        if is_over:
            os.kill(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if is_over else os.WNOHANG)
        if not pid:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what the test has left
        return Result(os.waitstatus_to_exitcode(status), seconds, self._log.read_text())


def _run_pytest(
    folder: Path, log: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> NoReturn:
    code: int = _NOT_RUN[0]
    try:
        os.setsid()
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(variables)
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ.pop(_AUTOLOAD)
        sys.path.insert(0, str(folder))
        sys.modules["__main__"] = ModuleType("__main__")  # which processes of tests don't import
        code = _pytest(folder, arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pytest(folder: Path, arguments: Sequence[str]) -> int:
    import pytest
    import torch

    torch._import_device_backends()
    lockstep = importlib.import_module("lockstep")
    if not lockstep.__file__.startswith(str(folder)):
        raise RuntimeError(f"Not the copy in {folder} is imported, but {lockstep.__file__}")
    if delay := os.environ.get("SIM_DELAY"):
        from tests.simulated.control import set_delay

        set_delay(delay)
        arguments = ["-p", "tests.simulated.plugin", *arguments]
    # pytest can't rewrite assertions of plugins that are imported already.
    options = ["-q", "-p", "no:cacheprovider", "--assert=plain"]
    return pytest.main([*options, *arguments], plugins=[_EndsAtAFailure()])


class _EndsAtAFailure:
    """A plugin of pytest: the first failure is all there is to know, and cleaning up takes long."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        print(f"\ntook {report.duration:.3f} s: {report.nodeid}")
        if report.failed:
            print(report.longreprtext, flush=True)
            os._exit(_FAILED)


class Trial(NamedTuple):
    """Tests, and the source with which they run: as it is, or with a mutation.

    Attributes:
        tests: As in the mutation.
        delay: As in the mutation.
        limit: After how many seconds they have failed.
        mutation: None for the source as it is.
    """

    tests: tuple[str, ...]
    delay: str
    limit: float
    mutation: Mutation | None

    def steps(self) -> Generator[Run, Result, str]:
        """Runs whose results it wants; returns what is wrong, nothing if all is as it has to be."""
        places = [place for test in self.tests for place in places_of(test)]
        variables = {"SIM_DELAY": self.delay} if self.delay else {}
        try:
            with copy_of_source(self.mutation) as folder:
                # First what make test does of it; if that passes, all.
                for options in (), ("--long",):
                    result = yield Run(folder, [*options, *places], variables, self.limit)
                    if result.code not in (_PASSED, _NOTHING_FOUND):
                        break
        except (ValueError, SyntaxError) as error:
            return f"has a mutation of another source: {error}"
        has_passed = result.code in (_PASSED, _NOTHING_FOUND)
        if self.mutation is None:
            return "" if has_passed else f"fail in the source as it is:\n{result.output}"
        if result.code in _NOT_RUN:
            return f"could not be run:\n{result.output}"
        # The process itself may have ended, of a signal.
        return "passes all the same" if has_passed else ""

    def __str__(self) -> str:
        if self.mutation is None:
            return f"unchanged: {len(self.tests)} tests"
        return f"{self.mutation.path}: {self.mutation.test}"


class Outcomes(NamedTuple):
    """What has gone wrong, a text for each trial, and each test's seconds by its node id."""

    wrong: list[str]
    seconds: Counter[str]


def tried(trials: Sequence[Trial], num_jobs: int) -> Outcomes:
    """Carry out trials, several at once."""
    waiting = deque((trial, trial.steps()) for trial in trials)
    running: list[tuple[Trial, Generator[Run, Result, str], Run]] = []
    wrong, seconds = [], Counter[str]()

    def go_on(trial: Trial, steps: Generator[Run, Result, str], result: Result | None) -> None:
        for took, node in _TOOK.findall(result.output if result else ""):
            seconds[node.partition("[")[0]] += float(took)
        try:
            running.append((trial, steps, steps.send(result)))
        except StopIteration as end:
            as_it_has_to = "fails, as it has to" if trial.mutation else "pass"
            told = f"{trial} {end.value or as_it_has_to}"
            print(told, flush=True)
            if end.value:
                wrong.append(told)

    while waiting or running:
        while waiting and len(running) < num_jobs:
            go_on(*waiting.popleft(), None)
        for each in list(running):
            trial, steps, run = each
            if (result := run.result()) is not None:
                running.remove(each)
                go_on(trial, steps, result)
        time.sleep(0.01)
    return Outcomes(wrong, seconds)


def unnamed() -> list[str]:
    """Comments without a mutation, and the other way around."""
    named = set(named_tests(SOURCE))
    differing = sorted(named ^ {(one.path, one.test) for one in SHOWN})
    found = []
    for path, test in differing:
        what = "no mutation" if (path, test) in named else "a mutation and no comment"
        found.append(f"{path}: {test} has {what}")
    return found


def in_this_process(mutations: Sequence[Mutation], num_jobs: int) -> list[str]:
    """Try the mutations in forks of this process; return what is to be mended."""
    os.environ[_AUTOLOAD] = "0"
    for name in _IMPORTED:
        importlib.import_module(name)
    assert "lockstep" not in sys.modules
    gc.collect()
    gc.freeze()
    unchanged = []
    for delay in dict.fromkeys(one.delay for one in mutations):
        tests = [*dict.fromkeys(one.test for one in mutations if one.delay == delay)]
        parts = [tuple(tests[first::num_jobs]) for first in range(num_jobs)]
        unchanged += [Trial(part, delay, _MOST_SECONDS, None) for part in parts if part]
    wrong, seconds = tried(unchanged, num_jobs)
    if wrong:
        return wrong
    return tried([_trial_of(one, seconds) for one in mutations], num_jobs).wrong


def _trial_of(mutation: Mutation, seconds: Mapping[str, float]) -> Trial:
    places = places_of(mutation.test)
    taken = sum(took for node, took in seconds.items() if node.startswith(places))
    limit = max(_LEAST_SECONDS, _TIMES * taken)
    return Trial((mutation.test,), mutation.delay, limit, mutation)


def on_simulated_devices(arguments: Sequence[str]) -> int:
    """Call this program in an environment that has them."""
    from tests.simulated.build import CannotBuild, environment

    try:
        variables = environment(devices=3)
    except CannotBuild as error:
        print(f"skipped: {error}")
        return 0
    command = [sys.executable, "-m", "tests.shown_by", "--simulated", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}).returncode


def main(arguments: Sequence[str]) -> int:
    """Try all mutations, or those of the given tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--simulated", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help="the tests, or files of the source, to try")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if not given.tests or {m.test, m.path} & {*given.tests}]
    began = time.monotonic()
    wrong = [] if given.tests or given.simulated else unnamed()
    here = [one for one in chosen if bool(one.delay) == given.simulated]
    wrong += in_this_process(here, given.jobs) if here else []
    status = 1 if wrong else 0
    if not given.simulated and len(here) < len(chosen):
        status |= on_simulated_devices(arguments)
    what = "All are noticed" if not status else "Some are to be mended"
    print(f"{what}: {len(here)} mutations in {time.monotonic() - began:.0f} s", flush=True)
    # Once more, as the end of a long log is what is read of it.
    print("".join(f"  to be mended: {told}\n" for told in wrong), end="", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
