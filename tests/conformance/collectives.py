"""torch's own tests of collectives, with shm in Gloo's place.

They are those in torch's wheel, ``torch.testing._internal.distributed.distributed_test``, without
those of DistributedDataParallel: each on three ranks, forked from this process, over Gloo and over
shm. ::

    python -m tests.conformance.collectives                 # all
    python -m tests.conformance.collectives --only gather   # some by name, with tracebacks

It ends with 1 if a test that passes over Gloo fails over shm and isn't in ``ON_PURPOSE``, or is
there and passes.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

WORLD_SIZE = 3
TIMEOUT_SECONDS = 120

_REFUSED = (
    "torch's function refuses every backend but Gloo by its name; the group's own method works",
    "only implemented for GLOO",
)
# Tests that pass over Gloo and not over shm: why that is meant to be so, and how they then fail.
ON_PURPOSE = {
    "test_monitored_barrier_gloo": _REFUSED,
    "test_monitored_barrier_gloo_subgroup": _REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": (
        "the same error, in other words",
        "did not come to barrier() within the timeout of 0 s",
    ),
}


class Result(NamedTuple):
    """What came of a test.

    Attributes:
        outcome: ``"passed"``, ``"skipped"`` or ``"failed"``.
        details: Why it was skipped, or the traceback of the first rank that failed.
    """

    outcome: str
    details: str = ""

    @property
    def reason(self) -> str:
        """The end of the traceback, in one line."""
        lines = [line for line in self.details.splitlines() if line.strip()]
        errors = [line for line in lines if line[0].isalpha() and ": " in line]
        return (errors or lines or ["it said nothing"])[-1].strip()[:200]


def load() -> ModuleType:
    """Import torch's tests, which ask the environment what they are to try."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=tempfile.gettempdir())
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def names_of_tests(tests: ModuleType, only: str) -> list[str]:
    """The tests that call collectives themselves."""
    base = tests.DistributedTest._DistTestBase
    functions = dict(inspect.getmembers(base, inspect.isfunction))
    return [
        name
        for name, function in functions.items()
        if name.startswith("test_") and only in name and not _is_about_ddp(function, functions)
    ]


def _is_about_ddp(function: Callable[..., object], functions: Mapping[str, Callable]) -> bool:
    """Whether a test, or a method that it calls, has to do with DistributedDataParallel."""
    source = inspect.getsource(inspect.unwrap(function))
    called = [
        functions[name] for name in re.findall(r"self\.(_\w+)\(", source) if name in functions
    ]
    if "ddp" in source.lower() or "DistributedDataParallel" in source:
        return True
    return any(_is_about_ddp(each, functions) for each in called if each is not function)


def run(tests: ModuleType, name: str, backend: str) -> Result:
    """Run a test on forked ranks; every rank's end is judged."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir"):
            (Path(folder) / part).mkdir()
        os.environ.update(TEMP_DIR=folder, BACKEND=backend)
        tests.BACKEND = backend
        processes: dict[int, int] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(WORLD_SIZE):
            if (process := os.fork()) == 0:
                try:
                    be_rank(tests, name, backend, rank, Path(folder))
                finally:
                    os._exit(1)
            processes[process] = rank
        return judge(processes, Path(folder))


def be_rank(tests: ModuleType, name: str, backend: str, rank: int, folder: Path) -> None:
    """Run a test as one of its ranks, and leave in ``folder`` what came of it."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Of a test case of torch's only what a rank needs: not that which starts and judges ranks.
    case = type(
        "Case", (tests.DistributedTest._DistTestBase, tests.TestDistBackend), {"setUp": lambda _: 0}
    )(name)
    case.rank, case.file_name = rank, str(folder / "store")
    result = Result("passed")
    try:
        timeout = timedelta(seconds=tests.default_pg_timeout)
        dist.init_process_group(
            backend, f"file://{folder}/store", timeout, world_size=WORLD_SIZE, rank=rank
        )
        case._barrier()  # a rank that skips the test leaves at once
        getattr(case, name)()
        case._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as skip:
        result = Result("skipped", str(skip))
    except SystemExit as end:
        skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if end.code in skips:
            result = Result("skipped", skips[end.code])
        elif end.code not in (0, None):
            result = Result("failed", f"SystemExit: {end.code}")
    except BaseException:
        result = Result("failed", traceback.format_exc())
    (folder / f"result-{rank}").write_bytes(pickle.dumps(tuple(result)))
    # A rank that fails keeps its connections, so that the others fail of themselves.
    if result.outcome == "failed":
        time.sleep(1)
    os._exit(0)


def judge(processes: dict[int, int], folder: Path) -> Result:
    """Wait for the ranks, ending them when time is up; say how the first that failed did so."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    left = dict(processes)
    while left and time.monotonic() < deadline:
        process, _ = os.waitpid(-1, os.WNOHANG)
        if process:
            del left[process]
        else:
            time.sleep(0.01)
    for process in left:
        os.kill(process, signal.SIGUSR1)
    if left:
        time.sleep(0.5)
    for process in left:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    results = []
    for rank in range(WORLD_SIZE):
        path = folder / f"result-{rank}"
        if path.exists():
            results.append((path.stat().st_mtime, Result(*pickle.loads(path.read_bytes()))))
        else:
            log = (folder / f"log-{rank}").read_text(errors="replace")
            late = "did not end" if rank in left.values() else "was killed"
            results.append(
                (time.time(), Result("failed", f"{log}\nTimeoutError: rank {rank} {late}"))
            )
    failed = [(when, result) for when, result in results if result.outcome == "failed"]
    if failed:
        return min(failed, key=lambda found: found[0])[1]
    return next((result for _, result in results if result.outcome == "skipped"), Result("passed"))


def main() -> int:
    """Run the tests over Gloo and shm, print what came of them, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the tests' names")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    tests = load()
    from lockstep.comm.backends import register_backends

    register_backends()
    counts: dict[str, Counter[str]] = {"gloo": Counter(), "shm": Counter()}
    unexpected: list[str] = []
    names = names_of_tests(tests, only)
    print(f"{len(names)} tests of collectives, on {WORLD_SIZE} ranks", flush=True)
    for name in names:
        over_gloo = run(tests, name, "gloo")
        counts["gloo"][over_gloo.outcome] += 1
        if over_gloo.outcome == "skipped":
            counts["shm"]["skipped"] += 1
            continue
        over_shm = run(tests, name, "shm")
        counts["shm"][over_shm.outcome] += 1
        why, how = ON_PURPOSE.get(name, ("", ""))
        if (over_gloo.outcome, over_shm.outcome) == ("passed", "failed"):
            is_meant = bool(why) and how in over_shm.details
            print(f"{name}: fails over shm: {why if is_meant else over_shm.reason}")
            unexpected += [] if is_meant else [name]
        elif over_gloo.outcome == "failed":
            print(f"{name}: fails over gloo, {over_shm.outcome} over shm: {over_gloo.reason}")
        elif why:
            print(f"{name}: {over_shm.outcome} over shm, but is among those that are meant to fail")
            unexpected.append(name)
        if only and over_shm.outcome == "failed":
            print(over_shm.details)
        sys.stdout.flush()
    for backend, count in counts.items():
        print(
            f"{backend}: {count['passed']} passed, {count['failed']} failed, "
            f"{count['skipped']} skipped"
        )
    print(f"not meant to be so: {', '.join(unexpected)}" if unexpected else "all as it is meant")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())
