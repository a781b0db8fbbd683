"""How the ranks find each other: a store that all of them reach, and a roll call.

A store is held open by rank 0, or by the launcher's agent where there is one. Its address comes
from the environment; the ranks of one host that have none (``mpiexec``, ``srun``) ask for it at
a Unix socket named after their job, and those of several hosts ask MPI, if mpi4py is there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import InitError, RendezvousFailed
from lockstep.world.environment import Placement, Starter

_LOOPBACK = "127.0.0.1"
_RETRY_SECONDS = 0.05
_SIOCGIFADDR = 0x8915  # Linux's request for an interface's IPv4 address

# What MPI's daemons on each host are called; a rank is their child or grandchild.
_MPI_DAEMONS = ("hydra_pmi_proxy", "orted", "prted", "orterun", "prterun", "mpiexec", "mpirun")


# The stores that this process holds open, by address. A port can be listened on once, and a
# process that calls init() again, after destroy_process_group(), is told the same port.
_held_open: dict[tuple[str, int], dist.TCPStore] = {}


def meet(place: Placement, timeout: timedelta) -> dist.Store:
    """Connect to the store of this run, opening it first if that is this rank's part.

    Every rank calls it; it returns when this rank is connected, whoever else is there.

    Raises:
        RendezvousFailed: If the store can't be reached within ``timeout``.
        InitError: If the starter told no way to find it.
    """
    if place.master is not None:
        if place.rank != 0 or place.agent_hosts_store:
            return _connect(place, timeout)
        if place.master not in _held_open:
            _held_open[place.master] = _open_store(place, *place.master, timeout)
        return _held_open[place.master]
    if place.on_one_host and sys.platform == "linux":
        return _meet_by_name(place, timeout)
    if place.starter in (Starter.OPEN_MPI, Starter.MPICH):
        return _meet_through_mpi(place, timeout)
    raise InitError(
        f"{place.starter.value} started {place.world_size} ranks but told them no address to "
        "meet at. Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there."
    )


def roll_call(store: dist.Store, place: Placement, timeout: timedelta, note: str) -> Sequence[str]:
    """Wait until every rank is there and return what each one noted about itself.

    Raises:
        RendezvousFailed: Naming the ranks that have not come within ``timeout``.
    """
    keys = [f"present/{rank}" for rank in range(place.world_size)]
    try:
        store.set(keys[place.rank], note)
        store.wait(keys, timeout)
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        raise RendezvousFailed(_who_is_missing(store, keys, place, timeout)) from error


def _who_is_missing(
    store: dist.Store, keys: list[str], place: Placement, timeout: timedelta
) -> str:
    try:
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as error:
        return f"rank {place.rank} lost the store where the ranks meet: {_first_line(error)}"
    return (
        f"rank {place.rank} waited {timeout.total_seconds():g} s for {place.world_size} ranks, "
        f"but did not see rank {', '.join(absent)}. Look at the output of those ranks; if "
        "they only start slowly, give init() a longer timeout."
    )


def _open_store(place: Placement, host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Hold the store open on this rank; on loopback, if that is where the ranks meet.

    A TCPStore told 127.0.0.1 listens on every interface all the same. One that is handed a
    socket does not. Shown by test_store_on_loopback_listens_nowhere_else.
    """
    listener = None
    try:
        if _is_loopback(host):
            listener = socket.create_server((host, port), backlog=max(128, place.world_size))
            port = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            place.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=listener is None,
            master_listen_fd=listener.detach() if listener else None,
        )
    except (OSError, RuntimeError) as error:
        raise RendezvousFailed(
            f"rank 0 could not open a store at {host}:{port} ({_first_line(error)}). Choose "
            "another MASTER_PORT, or start with 'lockstep run', which finds a free one."
        ) from error


def _connect(place: Placement, timeout: timedelta) -> dist.TCPStore:
    assert place.master is not None
    host, port = place.master
    try:
        return dist.TCPStore(
            host, port, place.world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        raise RendezvousFailed(
            f"rank {place.rank} of {place.world_size} could not reach the store at {host}:{port} "
            f"within {timeout.total_seconds():g} s. Is rank 0 running, and can this host reach "
            f"that host and port? ({_first_line(error)})"
        ) from error


def _meet_by_name(place: Placement, timeout: timedelta) -> dist.TCPStore:
    """Find the store's port at an abstract Unix socket named after the job.

    Such a name is gone when its process is, so a run that was killed leaves nothing that a
    later one could mistake for its own; and the kernel tells who is at the other end.
    """
    job = place.job_id or _launching_process()
    name = _name_of(job)
    deadline = time.monotonic() + timeout.total_seconds()
    if place.rank == 0:
        store = _open_store(place, _LOOPBACK, 0, timeout)
        _tell_port(name, store.port, place, deadline)
        return store
    port = _ask_port(name, place, deadline)
    located = Placement(place.starter, place.rank, place.world_size, master=(_LOOPBACK, port))
    return _connect(located, timeout)


def _name_of(job: str) -> str:
    return f"\0lockstep/{os.getuid()}/{job}"


def _tell_port(name: str, port: int, place: Placement, deadline: float) -> None:
    missing = set(range(1, place.world_size))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(place.world_size)
        while missing:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(max(deadline - time.monotonic(), 0.001))
                    if _is_same_user(peer):
                        missing.discard(int.from_bytes(peer.recv(4), "little"))
                        peer.sendall(port.to_bytes(4, "little"))
            except TimeoutError:
                raise RendezvousFailed(
                    f"rank 0 waited in vain for rank {', '.join(map(str, sorted(missing)))} of "
                    f"{place.world_size}, started by {place.starter.value} on this host."
                ) from None


def _ask_port(name: str, place: Placement, deadline: float) -> int:
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(ConnectionError, TimeoutError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking,
        ):
            asking.settimeout(max(deadline - time.monotonic(), 0.001))
            asking.connect(name)
            if _is_same_user(asking):
                asking.sendall(place.rank.to_bytes(4, "little"))
                answer = asking.recv(4)
                if answer:
                    return int.from_bytes(answer, "little")
        time.sleep(_RETRY_SECONDS)
    raise RendezvousFailed(
        f"rank {place.rank} did not find rank 0 on this host, though {place.starter.value} "
        f"started {place.world_size} ranks here. Did rank 0 fail, or did it not call init()?"
    )


def _is_same_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def _launching_process() -> str:
    """Name the MPI daemon above this process: its id, and when it started.

    MPICH gives its jobs no name. The start time tells two processes with one id apart.
    """
    pid = os.getppid()
    ancestor = pid
    while ancestor > 1:
        command, parent = _command_and_parent(ancestor)
        if command in _MPI_DAEMONS:
            pid = ancestor
            break
        ancestor = parent
    return f"{pid}-{_stat_fields(pid)[19]}"


def _command_and_parent(pid: int) -> tuple[str, int]:
    command = Path(f"/proc/{pid}/comm").read_text().strip()
    return command, int(_stat_fields(pid)[1])


def _stat_fields(pid: int) -> list[str]:
    """Fields 3 and up of /proc/PID/stat: state, parent, ...; 2 may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _meet_through_mpi(place: Placement, timeout: timedelta) -> dist.TCPStore:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise InitError(
            f"{place.starter.value} started ranks on several hosts but told them no address to "
            "meet at. Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, or "
            "install mpi4py: pip install 'torch-lockstep[mpi]'."
        ) from error
    store = _open_store(place, socket.getfqdn(), 0, timeout) if place.rank == 0 else None
    address = (socket.getfqdn(), store.port) if store else None
    host, port = MPI.COMM_WORLD.bcast(address)
    located = Placement(place.starter, place.rank, place.world_size, master=(host, port))
    return store or _connect(located, timeout)


def interface_towards(host: str) -> str | None:
    """The network interface from which this host reaches ``host``, if it can be told.

    Gloo would listen at the address that this host's own name stands for, which on many a
    machine is 127.0.0.1, where nobody else can reach it. Shown by test_two_hosts_of_a_network.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: finds a route, and sends nothing
        own_address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if answer[20:24] == own_address:
                    return name
    return None


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
