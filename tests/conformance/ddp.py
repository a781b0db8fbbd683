"""torch's own tests of DistributedDataParallel, with lockstep's class in its place.

They are those in torch's wheel, ``torch.testing._internal.distributed.distributed_test``, on two
ranks over Gloo and over shm. Most of them ask for two GPUs: here "cuda" means the CPU. What fails
with torch's own class, too, can't be tested like that, and is counted apart. ::

    python -m tests.conformance.ddp                     # all
    python -m tests.conformance.ddp --only no_sync      # some by name, with tracebacks
    python -m tests.conformance.ddp --wrapper torch     # torch's own class alone

It ends with 1 if a test fails that isn't in ``DIFFERENCES``, fails otherwise than is said there, or
is there and passes.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.conformance.ddp_differences import DIFFERENCES
from tests.conformance.differences import (
    Judgement,
    Result,
    conclude,
    joined,
    result_of,
)

WORLD_SIZE = 2
TIMEOUT_SECONDS = 180
# (wrapper, transport): what is tried.
RUNS = (("torch", "gloo"), ("lockstep", "gloo"), ("lockstep", "shm"))


def main() -> int:
    """Run all, print what came of it, and return the exit code."""
    options = arguments()
    if options.transport:  # a run of its own, whose results are wanted as a file
        Path(options.into).write_text(json.dumps(run_all(options)))
        return 0
    results = {}
    for wrapper, transport in RUNS:
        if options.wrapper in (None, wrapper):
            results[wrapper, transport] = run_apart(wrapper, transport, options.only)
    return report(results, is_whole=not options.only)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the tests' names")
    parser.add_argument("--wrapper", choices=("torch", "lockstep"))
    parser.add_argument("--transport", choices=("gloo", "shm"), help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_apart(wrapper: str, transport: str, only: str) -> dict[str, Result]:
    """In an interpreter of its own: torch's module reads the backend when it is imported."""
    print(f"{wrapper}'s DistributedDataParallel over {transport}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "results"
        environment = {
            **os.environ,
            "BACKEND": "gloo",  # for what tests ask of a backend; the group is made of another
            "WORLD_SIZE": str(WORLD_SIZE),
            "TEMP_DIR": folder,
            "OMP_NUM_THREADS": "1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        arguments = ["--wrapper", wrapper, "--transport", transport, "--into", str(into)]
        command = [sys.executable, "-m", "tests.conformance.ddp", *arguments, "--only", only]
        subprocess.run(command, env=environment, check=True)
        return {name: Result(*fields) for name, fields in json.loads(into.read_text()).items()}


def report(results: dict[tuple[str, str], dict[str, Result]], *, is_whole: bool) -> int:
    """Print what came of each run, then what of it isn't as it is meant; return the exit code."""
    theirs = results.get(("torch", "gloo"), {})
    wrong: list[str] = []
    for (wrapper, transport), found in results.items():
        print(f"\n{wrapper}'s DistributedDataParallel over {transport}")
        counts: Counter[str] = Counter()
        for name, result in found.items():
            judgement = Judgement(result.outcome, result.details or " | ".join(result.errors))
            if wrapper == "lockstep":
                judgement = DIFFERENCES.judge(name, result, theirs.get(name))
            counts[judgement.kind] += 1
            if not judgement.is_meant:
                wrong.append(f"{name}, over {transport}: {judgement.told}")
            if judgement.kind != "passed":
                print(f"  {name}: {judgement.kind}: {judgement.told}")
            if result.outcome == "failed" and not is_whole:
                print(result.details)
        print("  " + ", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    if is_whole and theirs:
        wrong += DIFFERENCES.not_among(theirs)
    return conclude(wrong)


# What follows runs in the interpreter of one wrapper and one transport.


def run_all(options: argparse.Namespace) -> dict[str, Result]:
    mark_tests_that_need_gpus()
    import torch.testing._internal.distributed.distributed_test as theirs
    from torch.testing._internal.common_utils import TestCase

    base = theirs.DistributedTest._DistTestBase  # type: ignore[attr-defined]
    # Ranks wait for each other in files; on a busy machine not for ten seconds.
    theirs.Barrier.sync.__func__.__defaults__ = (None, TIMEOUT_SECONDS)

    class Case(base, TestCase):  # type: ignore[misc, valid-type]
        world_size = WORLD_SIZE

    results = {}
    for name in tests_of_wrapper(base, theirs.__name__):
        if options.only in name:
            gpus = getattr(getattr(base, name), "needs_gpus", False)
            results[name] = run_test(theirs, Case, name, options, needs_gpus=gpus)
            print("." if results[name].outcome == "passed" else "x", end="", flush=True)
    print()
    return results


def mark_tests_that_need_gpus() -> None:
    """Let torch's decorators that skip tests mark them instead."""
    from torch.testing._internal import common_distributed as common

    def mark(*_: Any, **__: Any) -> Callable[[Any], Any]:
        def decorator(test: Any) -> Any:
            test.needs_gpus = True
            return test

        return decorator

    common.skip_if_lt_x_gpu = common.nccl_skip_if_lt_x_gpu = mark
    common.require_n_gpus_for_nccl_backend = mark
    common.skip_if_no_gpu = mark()


def tests_of_wrapper(base: type, module: str) -> list[str]:
    """The tests that have to do with DistributedDataParallel, by what their code says."""
    code = {
        name: inspect.getsource(value)
        for name in dir(base)
        if callable(value := getattr(base, name)) and getattr(value, "__module__", "") == module
    }

    def mentions(name: str, seen: set[str]) -> bool:
        if re.search(r"DistributedDataParallel|DDP\(|\bJoin\(|\.join\(\)", code[name]):
            return True
        called = {other for other in re.findall(r"self\.(\w+)\(", code[name]) if other in code}
        return any(mentions(other, seen | called) for other in called - seen)

    return [name for name in code if name.startswith("test_") and mentions(name, {name})]


def run_test(
    theirs: Any, case: Any, name: str, options: argparse.Namespace, *, needs_gpus: bool
) -> Result:
    """One test on two ranks, which are forked from here: to import torch takes longer."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        for inner in ("barrier", "test_dir", "init_dir"):
            os.mkdir(os.path.join(folder, inner))
        ranks = []
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if not pid:
                result = Result("failed", [f"rank {rank}: SystemExit: in the midst of the test"])
                try:
                    result = be_rank(theirs, case, name, options, rank, folder, needs_gpus)
                finally:
                    Path(folder, f"rank{rank}").write_text(json.dumps(result))
                    os._exit(0)
            ranks.append(pid)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while ranks and time.monotonic() < deadline:
            ranks = [pid for pid in ranks if os.waitpid(pid, os.WNOHANG)[0] == 0]
            time.sleep(0.01)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        results = []
        for rank in range(WORLD_SIZE):
            file = Path(folder, f"rank{rank}")
            text = file.read_text() if file.exists() else ""
            missing = Result("failed", [f"rank {rank}: TimeoutError: it did not end, or died"])
            results.append(Result(*json.loads(text)) if text else missing)
    return joined(results)


def be_rank(
    theirs: Any,
    case: Any,
    name: str,
    options: argparse.Namespace,
    rank: int,
    folder: str,
    needs_gpus: bool,
) -> Result:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    with open(os.path.join(folder, f"output{rank}"), "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    put_in_place(theirs, options.wrapper, no_devices=needs_gpus)
    try:
        dist.init_process_group(
            options.transport,
            init_method=f"file://{folder}/store",
            world_size=WORLD_SIZE,
            rank=rank,
            timeout=timedelta(seconds=TIMEOUT_SECONDS / 3),
        )
        theirs.Barrier.barrier_id = 0
        theirs.Barrier.sync()
        test = case(name)
        test.rank, test.file_name = rank, f"{folder}/file"
        set_rng_seed()
        with the_cpu_as_gpu() if needs_gpus else contextlib.nullcontext():
            getattr(test, name)()
        return Result("passed")
    except BaseException as end:
        return result_of(end, name)


def put_in_place(theirs: Any, wrapper: str, *, no_devices: bool) -> None:
    """Let torch's tests find ``wrapper`` where torch's class is."""
    import torch
    from torch import nn

    import lockstep

    original = nn.parallel.DistributedDataParallel
    chosen = lockstep.DistributedDataParallel if wrapper == "lockstep" else original
    if no_devices:
        init = chosen.__init__

        def on_the_cpu(
            self: Any,
            module: Any,
            device_ids: Any = None,
            output_device: Any = None,
            *rest: Any,
            **more: Any,
        ) -> None:
            init(self, module, None, None, *rest, **more)

        chosen.__init__ = on_the_cpu  # type: ignore[method-assign]
    nn.parallel.DistributedDataParallel = chosen  # type: ignore[misc, assignment]
    torch.nn.parallel.distributed.DistributedDataParallel = chosen  # type: ignore[misc, assignment]
    theirs.DistributedDataParallel = chosen
    if wrapper == "lockstep":  # torch's SyncBatchNorm refuses the CPU
        nn.SyncBatchNorm = lockstep.SyncBatchNorm  # type: ignore[misc, assignment]


@contextlib.contextmanager
def the_cpu_as_gpu() -> Iterator[None]:
    """Let what is asked of GPUs be done by the CPU."""
    import torch
    from torch import nn
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def is_gpu(value: Any) -> bool:
        if isinstance(value, str):
            return value.startswith("cuda")
        return isinstance(value, torch.device) and value.type == "cuda"

    class OnTheCPU(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                return args[0]
            if function is torch.Tensor.to:
                args = (args[0], *(cpu if type(a) is int or is_gpu(a) else a for a in args[1:]))
            device = kwargs.get("device")
            if type(device) is int or is_gpu(device):
                kwargs["device"] = cpu
            return function(*args, **kwargs)

    move = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args = tuple(cpu if type(a) is int or is_gpu(a) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = cpu
        return move(self, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[misc, assignment]
    torch.cuda.device_count = lambda: WORLD_SIZE
    torch.cuda.current_device = lambda: 0
    with OnTheCPU():
        yield


if __name__ == "__main__":
    sys.exit(main())
