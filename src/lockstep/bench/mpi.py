"""The same all-reduces by MPI, on ranks that mpiexec starts and that answer in JSON."""

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

from lockstep.bench.plan import MPI, Case, Plan, Report

# Many times what the slowest machine needs for the largest sizes.
_TIMEOUT_SECONDS = 1800.0
_GRACE_SECONDS = 5.0

# Open MPI refuses without these to start ranks as root, as in a container, or more ranks than
# there are cores. Other MPIs ignore them.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}
_RANK_PROGRAM = "from lockstep.bench.mpi import run_rank; run_rank()"


def measure_with_mpi(plan: Plan, num_ranks: int, mpiexec: str) -> Report:
    """Measure the all-reduces of ``plan``; if that fails, the report has the reason."""

    def skipped(reason: str) -> Report:
        return Report(plan.rounds, skipped=[f"MPI, {num_ranks} ranks: {reason}"])

    if importlib.util.find_spec("mpi4py") is None:
        return skipped(
            "mpi4py isn't installed. To compare with MPI: pip install 'torch-lockstep[mpi]'"
        )
    if shutil.which(mpiexec) is None:
        return skipped(
            f"there is no command {mpiexec!r}. Install Open MPI or MPICH, or give --mpiexec."
        )
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [mpiexec, "-n", str(num_ranks), sys.executable, "-c", _RANK_PROGRAM]
        if error := _run([*command, json.dumps(asdict(plan)), str(answer)]):
            return skipped(error)
        if not answer.exists():
            return skipped(f"{mpiexec} ended well, but its ranks said nothing.")
        told = json.loads(answer.read_text())
    cases = [Case(**case) for case in told["cases"]]
    return Report(plan.rounds, cases, mpi=told["implementation"])


def _run(command: Sequence[str]) -> str:
    """Run mpiexec to its end; return the error in words, or ``""``."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
        # Ctrl-C reaches this process alone, which then ends mpiexec and waits for it.
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{command[0]} was still not done after {_TIMEOUT_SECONDS:g} s."
        finally:
            if process.poll() is None:
                process.terminate()  # mpiexec then ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return ""
    lines = [line for line in errors.splitlines() if line.strip(" -")]
    reason = next((line for line in lines if "Error" in line), lines[-1] if lines else "no word")
    return f"{command[0]} ended with exit code {process.returncode}: {reason.strip()}"


def run_rank() -> None:
    """Measure on this MPI rank; ``sys.argv`` has the plan, and the file for rank 0's answer."""
    import torch
    from mpi4py import MPI as mpi  # noqa: N811

    from lockstep.bench.measuring import Ranks, take_turns

    plan, world = json.loads(sys.argv[1]), mpi.COMM_WORLD
    torch.set_num_threads(1)

    def slowest(seconds: list[float]) -> list[float]:
        return [max(values) for values in zip(*world.allgather(seconds), strict=True)]

    ranks = Ranks(world.Get_rank(), world.Get_size(), world.Barrier, slowest)
    cases = []
    for num_bytes in plan["num_bytes"]:
        tensor = torch.empty(num_bytes // 4)
        call = partial(world.Allreduce, mpi.IN_PLACE, tensor)
        contenders = {MPI: (partial(tensor.fill_, 1.0), call)}
        seconds = take_turns(ranks, contenders, num_bytes, plan["rounds"])
        cases.append(asdict(Case("all_reduce", ranks.size, num_bytes, seconds)))
    if ranks.rank == 0:
        name = mpi.Get_library_version().strip("\0\n ").split(",")[0].splitlines()[0]
        answer = {"cases": cases, "implementation": " ".join(name.split())}
        Path(sys.argv[2]).write_text(json.dumps(answer))
