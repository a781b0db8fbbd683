"""From a starter's environment variables to a rank's placement, and back; pure functions."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from platform import libc_ver

from lockstep.errors import InitError

RUN_ID = "LOCKSTEP_RUN_ID"
# "PORT:PATH": ranks told to use the store at this port use the store in this file instead.
STORE = "LOCKSTEP_STORE"
RESTARTS = "LOCKSTEP_RESTARTS"
SNAPSHOTS = "LOCKSTEP_SNAPSHOTS"
ALIKE = "LOCKSTEP_ALIKE_FAILURES"
GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACE = "lo"

# SLURM gives no port. Ports below those that Linux gives out at random (32768 and up) are free
# of everything but long-lived services.
_SLURM_FIRST_PORT, _SLURM_NUM_PORTS = 20_000, 10_000


class Starter(Enum):
    """The program that started this process; the value is its name in messages."""

    LOCKSTEP = "lockstep run"
    TORCHRUN = "torchrun"  # or any program that sets the variables of torch's env:// method
    OPEN_MPI = "Open MPI's mpiexec"
    MPICH = "MPICH's mpiexec"
    SLURM = "srun"
    THREADS = "lockstep.launch(ranks='threads')"
    PROCESS_GROUP = "a process group that was there already"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Placement:
    """This process's rank and where it meets the others, as its starter gave them.

    The local rank and world size are None if the starter doesn't tell them: then the ranks
    compare their hosts.
    """

    starter: Starter
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    master: tuple[str, int] | None = None  # host and port of the store, if it is at a port
    job_id: str | None = None  # the run's name, by which the ranks of one host find rank 0
    store_path: str | None = None  # the file with the store, if it is in a file
    agent_hosts_store: bool = False  # the starter's agent holds the store open, not rank 0
    attempt: int = 0  # how often the ranks were started again, at the same store
    one_device_per_task: bool = False  # each rank was given a GPU of its own and sees no other

    @property
    def on_one_host(self) -> bool:
        """Whether the starter says that all ranks are on this host."""
        return self.local_world_size == self.world_size


# Names of the variables with the rank, the world size, and the local ones of both.
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
# Each starter with variables that it always sets, the innermost first: torchrun inside a SLURM job
# is torchrun, and a rank of MPI is one even if srun started MPI's daemons.
_STARTERS = (
    (Starter.LOCKSTEP, (RUN_ID,), _TORCH),
    (Starter.TORCHRUN, ("RANK", "WORLD_SIZE"), _TORCH),
    (Starter.OPEN_MPI, ("OMPI_COMM_WORLD_RANK",), _OMPI),
    (Starter.MPICH, ("PMI_RANK", "PMI_SIZE"), _PMI),
    # The batch script of a SLURM job has SLURM_PROCID too; only srun's processes are a step.
    (Starter.SLURM, ("SLURM_PROCID", "SLURM_STEP_ID"), _SLURM),
)
_OPEN_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")


def detect(environ: Mapping[str, str]) -> Placement:
    """The starter of this process and its rank, according to ``environ``.

    Raises:
        InitError: If the variables of a starter are incomplete, not numbers, or contradict
            each other.
    """
    place = _detect(environ)
    _check_range("RANK", place.rank, place.world_size)
    if place.local_world_size is not None and place.local_world_size > place.world_size:
        raise InitError(
            f"LOCAL_WORLD_SIZE is {place.local_world_size}, but there can't be more ranks on this "
            f"host than in the world of {place.world_size}. Start the ranks with 'lockstep run', "
            "which counts them."
        )
    if place.local_rank is not None and place.local_world_size is not None:
        _check_range("LOCAL_RANK", place.local_rank, place.local_world_size)
    return place


def _detect(environ: Mapping[str, str]) -> Placement:
    rows = (row for row in _STARTERS if all(name in environ for name in row[1]))
    row = next(rows, None)
    if row is None:
        return Placement(Starter.NOTHING)
    starter, _, (rank, size, local_rank, local_size) = row
    is_torchs = rank == "RANK"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing and is_torchs:
        raise InitError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}. Start the script "
            "with 'lockstep run' or torchrun, which set them all, or unset RANK and WORLD_SIZE "
            "to run on one rank."
        )
    if starter is Starter.SLURM and size not in environ:
        size = "SLURM_NTASKS"
    place = Placement(
        starter,
        _number(environ, rank),
        _number(environ, size),
        _number_or_none(environ, local_rank),
        _number_or_none(environ, local_size),
        None if missing else (environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")),
    )
    if starter is Starter.OPEN_MPI:
        job_ids = (environ[name] for name in _OPEN_MPI_JOBS if name in environ)
        return replace(place, job_id=next(job_ids, None))
    if starter is Starter.SLURM:
        return _with_slurm_step(place, environ)
    if not is_torchs:
        return place
    port, _, path = environ.get(STORE, "").partition(":")
    attempt, _ = restarts_of(environ)
    return replace(
        place,
        attempt=attempt,
        job_id=environ.get(RUN_ID) or environ.get("TORCHELASTIC_RUN_ID"),
        # A torchrun inside such a run inherits the variable, but has a port of its own.
        store_path=path if port == environ["MASTER_PORT"] else None,
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def rank_environment(
    place: Placement, num_threads: int, node: int = 0, num_nodes: int = 1
) -> dict[str, str]:
    """The variables that ``lockstep run`` sets for one rank; :func:`detect` reverses it.

    They are those of torchrun, so that scripts written for it run unchanged, and two of our own.
    """
    assert place.master is not None
    assert place.job_id is not None
    host, port = place.master
    return {
        RUN_ID: place.job_id,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # Whether the launcher has opened a store at the port, and no rank has to.
        "TORCHELASTIC_USE_AGENT_STORE": str(place.store_path is None),
        "TORCHELASTIC_RUN_ID": place.job_id,
        "OMP_NUM_THREADS": str(num_threads),
        **({} if num_nodes == 1 else {"GROUP_WORLD_SIZE": str(num_nodes)}),
        **({} if place.store_path is None else {STORE: f"{port}:{place.store_path}"}),
        **(gloo_environment() if place.on_one_host else {}),
    }


def restart_environment(
    restarts: int, descriptors: Sequence[int], num_alike: int = 0
) -> dict[str, str]:
    """The variables for a rank of a launcher that restarts; :func:`restarts_of` reverses it.

    Args:
        restarts: How often the ranks were started anew.
        descriptors: The two files in memory that keep this rank's snapshots. With several hosts
            two more follow, for copies of those of a rank of another host.
        num_alike: How often the failure before has come, at the same step.
    """
    snapshots = ",".join(map(str, descriptors))
    return {RESTARTS: str(restarts), SNAPSHOTS: snapshots, ALIKE: str(num_alike)}


def restarts_of(environ: Mapping[str, str]) -> tuple[int, tuple[int, ...]]:
    """How often this rank was started anew, and the descriptors for its snapshots, if any.

    torchrun tells the number too.

    Raises:
        InitError: If they aren't numbers.
    """
    name = RESTARTS if RESTARTS in environ else "TORCHELASTIC_RESTART_COUNT"
    descriptors = [part for part in environ.get(SNAPSHOTS, "").split(",") if part]
    if not all(part.isdecimal() for part in descriptors):
        raise InitError(
            f"The environment variable {SNAPSHOTS} is {environ[SNAPSHOTS]!r}, but numbers are "
            "needed, as 'lockstep run --restarts' sets it. Unset it."
        )
    return _number_or_none(environ, name) or 0, tuple(map(int, descriptors))


def alike_failures_of(environ: Mapping[str, str]) -> int:
    """How often the failure has come that the ranks were started anew for, at the same step."""
    return _number_or_none(environ, ALIKE) or 0


def num_visible_gpus(environ: Mapping[str, str], num_gpus: int) -> int:
    """The number of this host's ``num_gpus`` GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    return min(num_gpus, len([name for name in visible.split(",") if name.strip()]))


def is_dumb_terminal(environ: Mapping[str, str]) -> bool:
    """Whether a terminal can't draw over what it shows."""
    return environ.get("TERM", "dumb") == "dumb"


def gloo_environment(interface: str = _LOOPBACK_INTERFACE) -> dict[str, str]:
    """The variables that keep Gloo's sockets to one interface, by default loopback."""
    return {GLOO_INTERFACES: interface}


def gloo_interfaces(environ: Mapping[str, str]) -> list[str]:
    """The network interfaces that Gloo is to use, as the user or a starter has named them."""
    return [name for name in environ.get(GLOO_INTERFACES, "").split(",") if name]


def allocator_environment() -> dict[str, str]:
    """The variables with which glibc keeps freed memory for the next step, or gets it in few pages.

    By default, depending on the heap's layout, it may return much of it to the kernel in every
    step and page it in again, which takes up to a third of a step on the CPU. Blocks above 32 MiB,
    such as the gradient of a large table, are returned in every step whatever the variables say,
    but for one with which no block is, at the price of all that a program ever frees. They come
    back in huge pages instead, of which there are 512 times fewer, where the kernel gives them to
    those who ask (``madvise`` in /sys/kernel/mm/transparent_hugepage/enabled). See "malloc" in
    benchmarks/RESULTS.md. The variables have to be set before a process begins; other C libraries
    ignore them.

    Source: ``mallopt(3)``, and "Memory Allocation Tunables" in glibc's manual.
    """
    return {
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
        "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def pages_in_large_blocks(environ: Mapping[str, str]) -> bool:
    """Whether glibc was told nothing of blocks above 32 MiB, and maps each anew, page by page."""
    is_told = "hugetlb=" in environ.get("GLIBC_TUNABLES", "")
    return not is_told and environ.get("MALLOC_MMAP_MAX_") != "0" and libc_ver()[0] == "glibc"


def quiet_environment() -> dict[str, str]:
    """The variables with which torch's stores tell of lost connections by their errors alone.

    By default each line that goes wrong is logged as well, with 20 lines of stack; with this, only
    errors that torch logs are, such as those of NCCL's watchdog. Torch reads it when it is loaded.
    """
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"}


@contextmanager
def quiet_profiler(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let torch's profiler, if it is first started within, say nothing by itself on stderr.

    It reads once what it is to say. What a user has set is left alone.
    """
    if (name := "KINETO_LOG_LEVEL") in environ:
        yield
        return
    environ[name] = "6"  # above all of its messages
    try:
        yield
    finally:
        del environ[name]


def _with_slurm_step(place: Placement, environ: Mapping[str, str]) -> Placement:
    """``place`` with the hosts and GPUs of the step."""
    # "2(x3),1" tasks per node are [2, 2, 2, 1].
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, repeat in counts for _ in range(int(repeat or 1))]
    node = _number_or_none(environ, "SLURM_NODEID")
    place = replace(
        place,
        local_world_size=tasks[node] if node is not None and node < len(tasks) else None,
        job_id=f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}",
        one_device_per_task=environ.get("SLURM_GPUS_PER_TASK", "").split(":")[-1] == "1",
    )
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if place.master is not None or place.on_one_host or not nodes:
        return place
    port = _SLURM_FIRST_PORT + zlib.crc32(str(place.job_id).encode()) % _SLURM_NUM_PORTS
    return replace(place, master=(_first_slurm_host(nodes), port))


def _first_slurm_host(nodes: str) -> str:
    """``"gpu[003-007,9],login"`` -> ``"gpu003"``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise InitError(f"SLURM_STEP_NODELIST={nodes!r} names no host. Set MASTER_ADDR instead.")
    return "".join(part or "" for part in match.groups())


def _check_range(name: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise InitError(
            f"{name} is {rank}, but must be from 0 to {size - 1} in a world of {size}. Start the "
            "ranks with 'lockstep run', which numbers them."
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise InitError(
            f"The environment variable {name} is {text!r}, but a whole number from 0 up is "
            "needed. Start the script with 'lockstep run', which sets it."
        )
    return int(text)


def _number_or_none(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if name in environ else None
