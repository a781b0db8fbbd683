"""torch's own tests of collectives, with shm in Gloo's place.

They are those in torch's wheel, ``torch.testing._internal.distributed.distributed_test``, without
those of DistributedDataParallel: each on three ranks, forked from this process, over Gloo and over
shm. ::

    python -m tests.conformance.collectives                 # all
    python -m tests.conformance.collectives --only gather   # some by name, with tracebacks

It ends with 1 if a test fails over shm that isn't in ``DIFFERENCES``, fails otherwise than is said
there, or is there and passes.
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
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType

from tests.conformance.differences import (
    Difference,
    Differences,
    Result,
    conclude,
    joined,
    result_of,
)

WORLD_SIZE = 3
TIMEOUT_SECONDS = 120

_REFUSED = (
    "torch's function refuses every backend but Gloo by its name; the group's own method works"
)
_NO_GPU = "it needs a GPU for each rank"
_IN_ALL_TO_ALL = ("line 23 of _test_all_to_all_helper(): IndexError: list index out of range",)
DIFFERENCES = Differences(
    on_purpose={
        "test_monitored_barrier_gloo": Difference(
            _REFUSED, ("line 12: ValueError: monitored_barrier is only implemented for GLOO",)
        ),
        "test_monitored_barrier_gloo_subgroup": Difference(
            _REFUSED, ("line 15: ValueError: monitored_barrier is only implemented for GLOO",)
        ),
        "test_monitored_barrier_gloo_rank_0_timeout": Difference(
            "the same error, in other words",
            ('line 6: AssertionError: "Rank 0 timed out',),
        ),
    },
    untestable={
        "test_SyncBatchNorm_process_group": Difference(
            "it needs torchvision", ("line 8: NameError: name 'torchvision'",)
        ),
        "test_all_to_all_cuda": Difference(_NO_GPU, _IN_ALL_TO_ALL),
        "test_all_to_all_cuda_complex": Difference(_NO_GPU, _IN_ALL_TO_ALL),
        "test_all_to_all_full_group_cuda": Difference(_NO_GPU, _IN_ALL_TO_ALL),
        "test_batch_isend_irecv_mixed_backend_err": Difference(
            "it needs NCCL", ("line 7: RuntimeError: Distributed package doesn't have NCCL",)
        ),
        "test_batch_isend_irecv_op_err": Difference(
            _NO_GPU, ("line 7: IndexError: list index out of range",)
        ),
        "test_new_subgroups_with_group_param": Difference(
            "it needs four ranks", ("line 11: ValueError: Rank 3 is out of range.",)
        ),
    },
)


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
    except BaseException as end:
        result = result_of(end, name)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(tuple(result)))
    # A rank that fails keeps its connections, so that the others fail of themselves.
    if result.outcome == "failed":
        time.sleep(1)
    os._exit(0)


def judge(processes: dict[int, int], folder: Path) -> Result:
    """Wait for the ranks, ending them when time is up, and return what came of the test."""
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
            results.append(Result(*pickle.loads(path.read_bytes())))
        else:
            log = (folder / f"log-{rank}").read_text(errors="replace")
            late = "did not end" if rank in left.values() else "was killed"
            results.append(Result("failed", [f"rank {rank}: TimeoutError: it {late}"], log))
    return joined(results)


def main() -> int:
    """Run the tests over Gloo and shm, print what came of them, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the tests' names")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    tests = load()
    from lockstep.comm import register_backends

    register_backends()
    names = names_of_tests(tests, only)
    wrong = [] if only else DIFFERENCES.not_among(names)
    counts: dict[str, Counter[str]] = {"gloo": Counter(), "shm": Counter()}
    print(f"{len(names)} tests of collectives, on {WORLD_SIZE} ranks", flush=True)
    for name in names:
        over_gloo = run(tests, name, "gloo")
        over_shm = run(tests, name, "shm") if over_gloo.outcome != "skipped" else over_gloo
        judgement = DIFFERENCES.judge(name, over_shm, over_gloo)
        counts["gloo"][over_gloo.outcome] += 1
        counts["shm"][judgement.kind] += 1
        if not judgement.is_meant:
            wrong.append(f"{name}: {judgement.told}")
        if over_gloo.outcome == "failed":
            print(f"{name}: fails over gloo: {' | '.join(over_gloo.errors)}")
        if judgement.kind not in ("passed", "skipped"):
            print(f"{name}: over shm: {judgement.kind}: {judgement.told}")
        if only and over_shm.outcome == "failed":
            print(over_shm.details)
        sys.stdout.flush()
    for backend, count in counts.items():
        print(f"{backend}: " + ", ".join(f"{n} {kind}" for kind, n in count.most_common()))
    return conclude(wrong)


if __name__ == "__main__":
    sys.exit(main())
