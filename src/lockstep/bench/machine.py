"""What there is to know about the machine that figures are of."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from lockstep.comm.shm.memory import check_room
from lockstep.errors import SharedMemoryFull

# One that the ranks share, an ordinary one, and what a library holds on the way.
_BUFFERS_PER_RANK = 3


def machine_facts() -> dict[str, object]:
    """Return what figures depend on, for JSON."""
    return {
        "cpu": _from_proc("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lockstep": metadata.version("torch-lockstep"),
    }


def reason_to_skip(num_bytes: int, num_ranks: int) -> str:
    """Why tensors of ``num_bytes`` can't be measured here, or ``""`` if they can."""
    try:
        check_room(num_bytes * num_ranks * _BUFFERS_PER_RANK)
    except SharedMemoryFull as error:
        return str(error)
    return ""


def _from_proc(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2] for line in lines if line.startswith(name))
    return next(values, "").strip()
