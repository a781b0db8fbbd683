"""The rendezvous of the ranks: a store that all of them reach, and a roll call.

On one host, the store is a file in memory, which no other user can open: that of ``lockstep run``
or, under ``mpiexec`` and ``srun``, that of rank 0. With an address, or several hosts, the store is
at a port, held open by rank 0 or by the launcher's agent. Anyone who reaches the port can read and
write all of the store, so nothing that is read from it is ever executed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lockstep.comm import STORE_SECONDS, answered, this_kernel
from lockstep.deadline import Deadline
from lockstep.entries import name_in, text_in
from lockstep.errors import ContradictoryInit, InitError, RendezvousFailed
from lockstep.memory_files import files_in_memory, memory_file, name_of
from lockstep.run_status import stat_fields
from lockstep.world.environment import Placement, Starter, detect
from lockstep.world.network import addresses, first_reached, is_local, resolved
from lockstep.world.silence import end_on_silence

# By this name torch.distributed has a function of the module.
_torch_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
_Answer = TypeVar("_Answer")

_RETRY_SECONDS = 0.05
_TRY_SECONDS = 5.0
# Names of the processes that start MPI's ranks on a host, as their parent or grandparent.
_MPI_DAEMONS = ("hydra_pmi_proxy", "orted", "prted", "orterun", "prterun", "mpiexec", "mpirun")

# Kept for later calls of init(), which are given the same address, as a port can be listened on
# once; and the files of stores: this process's own by name, and others by path.
_held_open: dict[tuple[str, int], dist.TCPStore] = {}
_open_files: dict[str, int] = {}


def meet(place: Placement, timeout: timedelta) -> dist.Store:
    """Connect to the store of this run, and open it first if that is this rank's part.

    Every rank calls it; it waits for no rank but the one that opens the store.

    Raises:
        RendezvousFailed: If the store can't be reached within ``timeout``.
        InitError: If the starter told no way to find it.
    """
    if place.store_path is not None:
        return _file_store(_open_file(place.store_path), timeout)
    if place.master is not None:
        if place.rank != 0 or place.agent_hosts_store:
            store = _connect(place, [place.master[0]], place.master[1], timeout)
            # A launcher's store outlives a restart, and what ranks have written that have ended.
            is_anew = place.agent_hosts_store and place.attempt
            return dist.PrefixStore(f"attempt/{place.attempt}", store) if is_anew else store
        if place.master not in _held_open:
            _held_open[place.master] = _open_store(place, *place.master, timeout)
            name = _name_of_port(*place.master)
            # It only names this process, to another one that claims to be rank 0.
            with contextlib.suppress(OSError):
                _open_files[name] = memory_file(f"{name}-{os.getpid()}")
        return _held_open[place.master]
    if place.on_one_host:
        return _meet_by_name(place, timeout)
    if place.starter in (Starter.OPEN_MPI, Starter.MPICH):
        return _meet_through_mpi(place, timeout)
    raise InitError(
        f"{place.starter.value} started {place.world_size} ranks but told them no address to "
        "meet at. Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there."
    )


def use_store_of_run(environ: Mapping[str, str]) -> None:
    """Have ``torch.distributed.init_process_group()``, too, find the store in a file of this run.

    By itself it would open one at the run's port, for all users and hosts, to read and to write.
    ``environ`` has the variables of ``lockstep run``.
    """
    place = detect(environ)
    open_at_port: Callable[..., dist.Store] = _torch_rendezvous._create_c10d_store

    def create_store(
        host: str, port: int, rank: int, size: int, timeout: timedelta, *rest: Any
    ) -> dist.Store:
        if place.store_path is None or place.master is None or port != place.master[1]:
            return open_at_port(host, port, rank, size, timeout, *rest)
        return dist.PrefixStore("torch", _file_store(_open_file(place.store_path), timeout))

    _torch_rendezvous._create_c10d_store = create_store


def claim(store: dist.Store, place: Placement, timeout: timedelta) -> None:
    """Be this rank in ``store``, where processes meet, and let no other process be it.

    Raises:
        ContradictoryInit: If a process is this rank already.
    """
    key, this_process = _claim_of(place.rank), _claimant(_process(os.getpid()))

    def claimed() -> str:
        other = name_in(store.compare_set(key, "", this_process))
        if not (is_another := _is_another(other, place)):
            # In place of a process that has ended: the run was restarted.
            store.set(key, this_process)
        return other if is_another else ""

    if other := ask(place, claimed, timeout):
        raise _twice(other, place)


def ask(place: Placement, call: Callable[[], _Answer], timeout: timedelta) -> _Answer:
    """Return ``call()``, which asks the store where the ranks meet.

    Raises:
        RendezvousFailed: If there is no answer within ``timeout``, or the store is gone.
    """
    try:
        return answered(call, timeout.total_seconds() + STORE_SECONDS)
    except RuntimeError as error:
        drop_full_stores(error)
        raise RendezvousFailed(
            f"rank {place.rank} lost the store where the ranks meet: {first_line(error)}"
        ) from error


def _claim_of(rank: int) -> str:
    return f"lockstep/claim/{rank}"


def _claimant(process: str) -> str:
    """A process of this host among those of all: its host's name is for messages alone."""
    return f"{socket.gethostname()}/{this_kernel('pid')}/{process}"


def _parts(claimant: str) -> list[str]:
    """The name of its host, its kernel and namespace, and the process; "" for what isn't there."""
    return [*claimant.rsplit("/", 2), "", ""][:3]


def _process(pid: int) -> str:
    """The process id, and the start time, which another process of this id doesn't have."""
    return f"{pid}-{stat_fields(pid)[19]}"


def _is_another(who: str, place: Placement) -> bool:
    """Whether ``who`` is another process that runs; of other hosts' only the store tells it."""
    _, where, process = _parts(who)
    if where != this_kernel("pid"):
        # A rank's store ends with the run. A launcher's outlives a restart, after which ranks may
        # be on other hosts, or in other containers, than before.
        return not place.agent_hosts_store and place.store_path is None
    with contextlib.suppress(OSError, ValueError):  # it has ended, or something else wrote this
        pid = int(process.partition("-")[0])
        return pid != os.getpid() and _process(pid) == process
    return False


def _twice(first: str, place: Placement) -> ContradictoryInit:
    """The error of this process, which came after ``first``: see :func:`_claimant`."""
    host, where, process = _parts(first)
    if host == socket.gethostname() and where != this_kernel("pid"):
        host += " (another host or container of this name)"
    return ContradictoryInit(
        f"Rank {place.rank} of {place.world_size} was claimed by two processes: process "
        f"{process.partition('-')[0]} on {host}, which came first, and process {os.getpid()} on "
        f"{socket.gethostname()}, this one. Give each process a rank of its own, from 0 on; and "
        "if they are of different runs, give each run a MASTER_ADDR and MASTER_PORT of its own. "
        "'lockstep run', torchrun, srun and mpiexec do. A program that a rank starts inherits its "
        "environment variables, and so its rank: start it without them."
    )


def roll_call(store: dist.Store, place: Placement, timeout: timedelta, note: str) -> Sequence[str]:
    """Wait until every rank has called this and return their notes, in the order of ranks.

    Raises:
        RendezvousFailed: Naming the ranks that have not come within ``timeout``, or have ended.
    """
    keys = [f"present/{rank}" for rank in range(place.world_size)]
    seconds = timeout.total_seconds()
    deadline, left, ended = Deadline(seconds), [*range(place.world_size)], list[int]()

    def is_over() -> bool:
        while left and store.check([keys[left[-1]]]):
            left.pop()
        if left:  # those that came and have ended since are no hindrance
            gone = ended_ranks(store, place)
            ended[:] = [rank for rank in gone if not store.check([keys[rank]])]
        return not left or bool(ended)

    def call() -> list[str | None]:
        store.set(keys[place.rank], note)
        deadline.until(is_over, _RETRY_SECONDS)
        notes = [text_in(store.get(key)) if store.check([key]) else None for key in keys]
        notes[place.rank] = note  # whatever somebody else has written there since
        return notes

    notes = ask(place, call, timeout)
    if ended:
        who = f"rank {', '.join(map(str, ended))}"
        raise RendezvousFailed(
            f"rank {place.rank} waited for {place.world_size} ranks, but the process of {who} has "
            "ended without having come. Look at what it wrote: did its program leave early?",
            ended,
        )
    absent = [rank for rank, note in enumerate(notes) if note is None]
    if not absent:
        return [note for note in notes if note is not None]
    raise RendezvousFailed(
        f"rank {place.rank} waited {seconds:g} s for {place.world_size} ranks, but did not see "
        f"rank {', '.join(map(str, absent))}. Look at the output of those ranks; if they only "
        "start slowly, give init() a longer timeout.",
        absent,
    )


def tell_of_end(where: dist.Store | int, attempt: int, rank: int) -> None:
    """Tell the ranks of a run that the process of one has ended, in the store where they meet.

    Args:
        where: The store, or the descriptor of its file, which is left open.
        attempt: How often the run was started again.
        rank: Whose process it was.

    Raises:
        RuntimeError: If the store is gone.
    """
    if isinstance(where, int) and not _is_room_in([where]):
        return  # see drop_full_stores
    store = _file_store(where, timedelta(minutes=1)) if isinstance(where, int) else where
    store.set(_end_of(attempt, str(rank)), "")
    store.set(_end_of(attempt, "any"), "")


def ended_ranks(store: dist.Store, place: Placement) -> list[int]:
    """The ranks whose processes have ended, as far as their launchers tell of it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not store.check([_end_of(place.attempt, "any")]):
        return []
    ranks = range(place.world_size)
    return [rank for rank in ranks if store.check([_end_of(place.attempt, str(rank))])]


def _end_of(attempt: int, rank: str) -> str:
    return f"lockstep/ended/{attempt}/{rank}"


def _open_store(place: Placement, host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Hold the store open on this rank; on loopback, if that is where the ranks meet."""
    options: dict[str, Any] = {"multi_tenant": True}
    try:
        address = host
        if host in ("localhost", "::1") or host.startswith("127."):
            # Told 127.0.0.1, a TCPStore listens on every interface unless it is handed a socket.
            found, backlog = resolved(host, port), max(128, place.world_size)
            family, where = found.get("127.0.0.1") or next(iter(found.values()))
            listener = socket.create_server(where, family=family, backlog=backlog)
            address, port, *_ = listener.getsockname()
            options = {"master_listen_fd": listener.detach()}
        options |= {"is_master": True, "wait_for_workers": False, "timeout": timeout}
        return dist.TCPStore(address, port, place.world_size, **options)
    except (OSError, RuntimeError) as error:
        # Not asked at the port: another program may listen there, and never answer.
        if (first := _file_of_rank_0(_name_of_port(host, port))) is not None:
            raise _twice(_maker_of(first), place) from error
        raise RendezvousFailed(
            f"rank 0 could not open a store at {host}:{port} ({first_line(error)}). Choose "
            "another MASTER_PORT, or start with 'lockstep run', which finds a free one."
        ) from error


def _connect(
    place: Placement, hosts: Sequence[str], port: int, timeout: timedelta
) -> dist.TCPStore:
    """Connect to rank 0's store, at the first of these names or addresses that answers."""
    deadline = Deadline(timeout.total_seconds())

    def connect() -> dist.TCPStore:
        # Torch tries the addresses of a name one after the other, and warns of each that fails.
        while True:
            try:
                found = [address for host in hosts for address in resolved(host, port)]
                there = first_reached(found, port, min(_TRY_SECONDS, deadline.left()))
            except OSError:
                if not deadline.left():
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                client = partial(dist.TCPStore, there, port, place.world_size, is_master=False)
                store = client(timeout=timeout, wait_for_workers=False)
                end_on_silence(there, port)
                return store

    try:
        # In another thread: torch handles no signal meanwhile.
        return answered(connect, timeout.total_seconds() + STORE_SECONDS)
    except (OSError, RuntimeError) as error:
        raise RendezvousFailed(
            f"rank {place.rank} of {place.world_size} could not reach the store at "
            f"{' or '.join(f'{host}:{port}' for host in hosts)} "
            f"within {timeout.total_seconds():g} s. Is rank 0 running, and can this host reach "
            f"that host and port? ({first_line(error)})"
        ) from error


def _meet_by_name(place: Placement, timeout: timedelta) -> dist.Store:
    """Find the store of rank 0, a file in its memory, among its open files.

    Another user could take a bound or created name first, and then read the store or keep the
    ranks apart, but has no access to the open files of this user's processes. They end with the
    process, so a run that was killed leaves none that a later run could mistake for its own.
    """
    name = _name_of(place.job_id or _launching_process())
    if place.rank == 0:
        if name not in _open_files:
            try:
                # The process id distinguishes this file from those that its forks inherit.
                _open_files[name] = memory_file(f"{name}-{os.getpid()}")
            except OSError as error:
                raise RendezvousFailed(f"rank 0 can't open a store: {error.strerror}.") from error
            # Only now: of two processes that do this at once, one at least sees the other.
            if (first := _file_of_rank_0(name, but=os.getpid())) is not None:
                os.close(_open_files.pop(name))
                raise _twice(_maker_of(first), place)
        return _file_store(_open_files[name], timeout)
    deadline = Deadline(timeout.total_seconds())
    while (path := _file_of_rank_0(name)) is None:
        if not deadline.left():
            raise RendezvousFailed(
                f"rank {place.rank} did not find rank 0 on this host, though "
                f"{place.starter.value} started {place.world_size} ranks here. Did rank 0 fail, "
                "does it run as another user, or did it not call init()?"
            )
        time.sleep(_RETRY_SECONDS)
    return _file_store(_open_file(path), timeout)


def _open_file(path: str) -> int:
    """The file at ``path``, which is kept open, since the process that made it may end first."""
    if path not in _open_files:
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            why = "Its launcher, or rank 0, has ended, or runs as another user."
            if not os.path.exists("/proc/self"):
                why = "There is no /proc here, in which ranks of a host find it: mount it."
            raise RendezvousFailed(
                f"the store of the run, {path}, can't be opened: {error.strerror}. {why}"
            ) from error
        atexit.register(drop_full_stores)
        if _open_files.setdefault(path, opened) != opened:  # another thread was first
            os.close(opened)
    return _open_files[path]


def _file_store(descriptor: int, timeout: timedelta) -> dist.Store:
    # torch opens the file by its path for each operation.
    store = dist.FileStore(f"/proc/self/fd/{descriptor}", -1)  # -1: it isn't removed
    store.set_timeout(timeout)
    return store


def drop_full_stores(error: Exception | None = None) -> None:
    """Have no store read its file any more if that is as large as files may be.

    The last entry may be there in part. Torch's store waits for the rest for ever, in each request
    and when it is dropped: the processor is busy, and no other rank gets the file. Shown by
    test_a_full_store_is_dropped.

    Raises:
        RendezvousFailed: From ``error``, if there is one, and such a file.
    """
    why = "" if error is None else reason_of_full_store(error)
    for descriptor in _full_files():
        with open(os.devnull, "r+b", buffering=0) as nothing:
            os.dup2(nothing.fileno(), descriptor, inheritable=False)
    if why:
        raise RendezvousFailed(why) from error


def reason_of_full_store(error: BaseException) -> str:
    """Return why ``error`` came, if a store is as large as files may be, which torch doesn't name.

    Else return "".
    """
    if not _full_files() or not isinstance(error, Exception):
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return (
        f"The store where the ranks meet is full: {first_line(error)}. It is a file in memory, and "
        f"this process may have files of {limit} bytes. Raise that limit (ulimit -f)."
    )


def _full_files() -> list[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return [
        descriptor
        for descriptor in _open_files.values()
        if limit != resource.RLIM_INFINITY and os.fstat(descriptor).st_size >= limit
    ]


def is_room_in_stores() -> bool:
    """Whether files of stores are smaller than half of what they may have."""
    return _is_room_in(_open_files.values())


def _is_room_in(descriptors: Iterable[int]) -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    return limit == resource.RLIM_INFINITY or 2 * max(sizes, default=0) < limit


def _name_of(job: str) -> str:
    return f"lockstep-{hashlib.sha256(job.encode()).hexdigest()}"


def _name_of_port(host: str, port: int) -> str:
    return _name_of(f"rank 0 at {host}:{port}")


def _file_of_rank_0(name: str, but: int | None = None) -> str | None:
    """The path of the file that a process has made by this name, other than the process ``but``."""
    for pid, path in files_in_memory(f"{name}-"):
        with contextlib.suppress(OSError):  # the process has just ended
            is_by_it = name_of(path) == f"{name}-{pid}"
            # Root can read all processes, but must not take the file of a stranger.
            if is_by_it and pid != but and os.stat(path).st_uid == os.geteuid():
                return path
    return None


def _maker_of(path: str) -> str:
    """The process whose open file is at ``path``, as one that claims a rank."""
    return _claimant(Path(path).parts[2])


def _launching_process() -> str:
    """The process id and start time of the MPI daemon above this process, or of its parent.

    MPICH gives its jobs no name. The start time distinguishes processes that had the same id.
    """
    ancestor = os.getppid()
    while ancestor > 1 and Path(f"/proc/{ancestor}/comm").read_text().strip() not in _MPI_DAEMONS:
        ancestor = int(stat_fields(ancestor)[1])
    return _process(ancestor if ancestor > 1 else os.getppid())


def _meet_through_mpi(place: Placement, timeout: timedelta) -> dist.TCPStore:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no library of MPI
        raise InitError(
            f"{place.starter.value} started ranks on several hosts but told them no address to "
            "meet at. Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, or "
            "install mpi4py: pip install 'torch-lockstep[mpi]'."
        ) from error
    # Not a name, which may be resolved otherwise elsewhere, or nowhere.
    local = [address for address in addresses() if not is_local(address)] or [*addresses()]
    store = _open_store(place, local[0], 0, timeout) if place.rank == 0 else None
    found, port = MPI.COMM_WORLD.bcast((local, store.port) if store else None)
    return store or _connect(place, found, port, timeout)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text; torch appends the stack of C++."""
    return str(error).strip().partition("\n")[0]
