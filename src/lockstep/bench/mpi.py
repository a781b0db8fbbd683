"""The same all-reduce by MPI: ranks of their own, started by mpiexec, that answer in JSON.

What runs in a rank is below, behind ``python -m lockstep.bench.mpi PLAN ANSWER``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.bench.figures import MPI, Case, Outcome
from lockstep.bench.plan import Plan

# Many times what the slowest machine needs for the largest sizes.
_TIMEOUT_SECONDS = 1800.0
_PATIENCE_SECONDS = 5.0

# What Open MPI wants to be told before it starts ranks as root, as in a container, or more of
# them than there are cores. Other MPIs don't look.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}


def measure_with_mpi(plan: Plan, num_ranks: int, mpiexec: str) -> Outcome:
    """Measure the all-reduces of ``plan``; if that can't be, the outcome says why.

    Args:
        plan: What to measure.
        num_ranks: On how many processes.
        mpiexec: The command that starts them.
    """
    why = _obstacle(mpiexec)
    if why:
        return _skipped(num_ranks, why)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [mpiexec, "-n", str(num_ranks), sys.executable, "-m", __name__]
        why = _run([*command, json.dumps(asdict(plan)), str(answer)])
        if why or not answer.exists():
            return _skipped(num_ranks, why or f"{mpiexec} ended well, but its ranks said nothing.")
        told = json.loads(answer.read_text())
    return Outcome([Case(**case) for case in told["cases"]], implementation=told["implementation"])


def _skipped(num_ranks: int, why: str) -> Outcome:
    return Outcome([], [f"MPI, {num_ranks} ranks: {why}"])


def _obstacle(mpiexec: str) -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py isn't installed. To compare with MPI: pip install 'torch-lockstep[mpi]'"
    if shutil.which(mpiexec) is None:
        return f"there is no command {mpiexec!r}. Install Open MPI or MPICH, or give --mpiexec."
    return ""


def _run(command: Sequence[str]) -> str:
    """Run mpiexec to its end; return what went wrong, or ``""``."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
        # Ctrl-C is for the caller, who then ends it, and waits for it.
        start_new_session=True,
    ) as started:
        try:
            _, said = started.communicate(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{command[0]} was still not done after {_TIMEOUT_SECONDS:g} s."
        finally:
            _end(started)
    if started.returncode == 0:
        return ""
    lines = [line for line in said.splitlines() if line.strip(" -")]
    reason = next((line for line in lines if "Error" in line), lines[-1] if lines else "no word")
    return f"{command[0]} ended with exit code {started.returncode}: {reason.strip()}"


def _end(started: subprocess.Popen[str]) -> None:
    if started.poll() is not None:
        return
    started.terminate()  # and mpiexec ends its ranks
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(_PATIENCE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)


class _MpiRanks:
    """The ranks of an MPI communicator."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._world = mpi.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def meet(self) -> None:
        self._world.Barrier()

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        everyone = self._world.allgather(list(seconds))
        return [max(theirs) for theirs in zip(*everyone, strict=True)]


def _measure(plan: Plan) -> dict[str, object] | None:
    """What each rank does; rank 0 returns the answer."""
    import torch
    from mpi4py import MPI as mpi  # noqa: N811

    from lockstep.bench.turns import Contender, take_turns

    torch.set_num_threads(1)
    ranks = _MpiRanks(mpi)
    cases = []
    for num_bytes in plan.num_bytes:
        tensor = torch.empty(num_bytes // 4)
        call = partial(mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE, tensor)
        contender = Contender(MPI, partial(tensor.fill_, 1.0), call)
        seconds = take_turns(ranks, [contender], num_bytes, plan.rounds)
        cases.append(asdict(Case("all_reduce", ranks.size, num_bytes, seconds)))
    implementation = mpi.Get_library_version().strip("\0\n ").split(",")[0].splitlines()[0]
    return (
        {"cases": cases, "implementation": " ".join(implementation.split())}
        if ranks.rank == 0
        else None
    )


def _main() -> None:
    plan, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    found = _measure(Plan(tuple(plan["operations"]), tuple(plan["num_bytes"]), plan["rounds"]))
    if found is not None:
        answer.write_text(json.dumps(found))


if __name__ == "__main__":
    _main()
