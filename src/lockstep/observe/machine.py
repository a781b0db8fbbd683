"""What this machine has that matters to ranks: processors, memory, devices, backends."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import SHM, Segment, check_room
from lockstep.errors import InitError, LockstepError
from lockstep.launcher import num_cores
from lockstep.world import Starter, accelerator, backend_of, detect, num_accelerators

# Variables that make a difference to ranks, by the beginnings of their names.
_VARIABLES = (
    *("CUDA_VISIBLE", "GLIBC_", "GLOO_", "LOCKSTEP_", "MALLOC_", "MASTER_", "MKL_", "NCCL_"),
    *("OMP_", "TORCH_"),
)
_OF_STARTERS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")


class Gpu(NamedTuple):
    """A GPU, or an accelerator of another kind, that torch can use."""

    name: str
    memory_bytes: int | None  # None if torch doesn't say
    unreachable: list[int]  # the other GPUs whose memory it can't read


class Machine(NamedTuple):
    """The facts that :func:`lockstep.observe.doctor` judges."""

    versions: dict[str, str]
    requirement: str  # of torch
    num_cores: int  # that this process may use
    num_host_cores: int
    quota: float | None  # how many cores' time a control group grants, if it limits that
    room_bytes: int  # of memory that may still be taken
    dev_shm_bytes: int | None  # the size of /dev/shm, if there is one
    num_files: int | None  # how many files a process may have open; None if there is no limit
    gpus: list[Gpu]
    kind: str  # of the GPUs, as torch names their devices; "cuda" if there are none
    has_gpu_driver: bool  # whether the system has files of NVIDIA GPUs
    cuda: str | None  # the version for which torch is built
    backends: dict[str, str]  # by name, why it can't be used; "" if it can
    shows_pages: bool  # whether processes can see which pages of memory they have written
    starter: Starter
    starter_error: str
    variables: dict[str, str]  # of the environment, that make a difference
    host: str
    address: str  # of the host's name; "" if it has none


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Return the bytes that this process has now: resident and, of a device, allocated and most."""
    found = {}
    with suppress(OSError), open("/proc/self/statm") as file:
        found["resident"] = int(file.read().split()[1]) * resource.getpagesize()
    if device.type not in ("cpu", "meta"):
        with suppress(RuntimeError):  # not every kind counts
            found["device"] = torch.accelerator.memory_allocated(device)
            found["device_peak"] = torch.accelerator.max_memory_allocated(device)
    return found


def look(environ: Mapping[str, str]) -> Machine:
    """Gather the facts; nothing is started."""
    starter, starter_error = Starter.NOTHING, ""
    try:
        starter = detect(environ).starter
    except InitError as error:
        starter_error = str(error)
    host, address = socket.gethostname(), ""
    with suppress(OSError):
        address = socket.gethostbyname(host)
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = (name for name in metadata.requires("torch-lockstep") or () if name[:5] == "torch")
    return Machine(
        versions=_versions(),
        requirement=next(required, ""),
        num_cores=num_cores(),
        num_host_cores=os.cpu_count() or 1,
        quota=_quota(),
        room_bytes=check_room(0),
        dev_shm_bytes=_size_of("/dev/shm"),
        num_files=None if most_files == resource.RLIM_INFINITY else most_files,
        gpus=_gpus(),
        kind=accelerator() or "cuda",
        has_gpu_driver=any(Path("/dev").glob("nvidia[0-9]*")),
        cuda=torch.version.cuda,
        backends=_backends(),
        shows_pages=_shows_pages(),
        starter=starter,
        starter_error=starter_error,
        variables={
            name: value
            for name, value in sorted(environ.items())
            if name.startswith(_VARIABLES) or name in _OF_STARTERS
        },
        host=host,
        address=address,
    )


def _versions() -> dict[str, str]:
    found = {
        "lockstep": metadata.version("torch-lockstep"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        platform.system(): platform.release(),
    }
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _quota() -> float | None:
    """How many cores' time the control group grants, of version 2 or 1; None if all."""
    with suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(most) / int(period)
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        most = (folder / "cpu.cfs_quota_us").read_text()
        if int(most) > 0:
            return int(most) / int((folder / "cpu.cfs_period_us").read_text())
    return None


def _size_of(folder: str) -> int | None:
    with suppress(OSError):
        found = os.statvfs(folder)
        return found.f_frsize * found.f_blocks
    return None


def _gpus() -> list[Gpu]:
    kind, number, found = accelerator(), num_accelerators(), []
    for index in range(number):
        module: Any = torch.get_device_module(kind)
        name, memory, unreachable = f"{kind} device", None, []
        with suppress(AttributeError, RuntimeError):
            name = module.get_device_name(index)
        with suppress(AttributeError, RuntimeError):
            _, memory = torch.accelerator.get_memory_info(index)
        if kind == "cuda":
            others = (other for other in range(number) if other != index)
            unreachable = [o for o in others if not torch.cuda.can_device_access_peer(index, o)]
        found.append(Gpu(name, memory, unreachable))
    return found


def _backends() -> dict[str, str]:
    lacks = "this torch is built without it"
    kind = accelerator()
    torchs = backend_of(kind) if kind is not None else None  # another package may have brought it
    return {
        SHM: _why_not_shm(),
        "gloo": "" if dist.is_gloo_available() else lacks,
        "nccl": "" if dist.is_nccl_available() else lacks,
        "mpi": "" if dist.is_mpi_available() else lacks,
        **({torchs: ""} if torchs is not None else {}),
    }


def _why_not_shm() -> str:
    try:
        segment, _ = Segment.create(1 << 16)
    except (LockstepError, OSError) as error:
        return str(error)
    segment.close()
    return ""


def _shows_pages() -> bool:
    with suppress(OSError), open("/proc/self/pagemap", "rb") as file:
        return len(file.read(8)) == 8
    return False
