"""Several hosts: where they meet, and the store at which they do.

The store is torch's own, held by the host that the endpoint belongs to, and nothing that is read
from it is executed. Whoever reaches the endpoint can write to it, as with torchrun: it belongs
into a network that its users trust.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.errors import BadLaunch, LaunchError
from lockstep.launcher.job import Meeting
from lockstep.launcher.processes import fork_helper, reap

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_BACKLOG = 1024  # every rank may connect before the store accepts the first
_CONNECT_SECONDS = 5.0  # to make a connection; no signal is heard while the store makes its own
_RETRY_SECONDS = 0.2
_STORE_TIMEOUT = timedelta(seconds=60)


def check_meeting(
    *, num_hosts: int, host: int | None, endpoint: str | None, run_id: str, timeout_seconds: int
) -> Meeting:
    """The meeting that the options of ``lockstep run`` ask for.

    Raises:
        BadLaunch: If they contradict each other, or the endpoint isn't one.
    """
    if endpoint is None:
        raise BadLaunch(
            f"--nnodes {num_hosts} needs --rdzv-endpoint HOST:PORT as well: the name or address "
            "of the first host and a port that is free there, the same on every host."
        )
    if host is not None and host >= num_hosts:
        raise BadLaunch(
            f"--node-rank {host} is too much for --nnodes {num_hosts}: hosts are counted from 0 "
            f"to {num_hosts - 1}."
        )
    address, _, port = endpoint.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadLaunch(
            f"--rdzv-endpoint {endpoint} isn't of the form HOST:PORT, as in first-host:29500."
        )
    return Meeting(num_hosts, host, address.strip("[]"), int(port), run_id, timeout_seconds)


class StoreHolder:
    """A process of this host that holds a store open until this one ends or closes it.

    It is a process because a store has threads, and who forks ranks must have none.

    Attributes:
        pid: The process.
        lifeline: A descriptor that ranks must not hold open; its end is the process's.
    """

    def __init__(self, listener: socket.socket, meeting: Meeting) -> None:
        listening, self.lifeline = os.pipe()

        def hold() -> None:
            store = open_store(1, meeting.address)
            os.read(0, 1)
            del store

        self.pid = fork_helper(hold, listening, listener.fileno())
        os.close(listening)

    def close(self) -> None:
        """End the process."""
        os.close(self.lifeline)
        reap(self.pid)


def open_store(listener: int, address: str = "127.0.0.1") -> TCPStore:
    """A store that answers at ``listener``, a socket that listens; it has threads.

    It is given a bound socket because it would bind one to every interface.
    """
    from torch.distributed import TCPStore

    with socket.socket(fileno=listener) as borrowed:
        port = borrowed.getsockname()[1]
        borrowed.detach()
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def hold_store(meeting: Meeting) -> StoreHolder | None:
    """Hold the store open if that is this host's part, else return None.

    It is that of host 0 or, of hosts without numbers, of the one that can bind the endpoint.

    Raises:
        LaunchError: If it is, but the endpoint can't be bound.
    """
    if meeting.host not in (0, None):
        return None
    try:
        with _listener(meeting) as listener:
            return StoreHolder(listener, meeting)
    except OSError as error:
        if meeting.host is None:  # it is another host's, or another launcher's of this one
            return None
        raise LaunchError(
            f"Host 0 can't listen at the rendezvous endpoint {meeting.endpoint}: "
            f"{error.strerror}. Give a name or an address of this host and a port that is free."
        ) from error


def _listener(meeting: Meeting) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        meeting.address, meeting.port, type=socket.SOCK_STREAM
    )[0]
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        if meeting.host is None or error.errno != errno.EADDRNOTAVAIL:
            raise
    # The others may know this host by an address that only a router has.
    return socket.create_server(("", meeting.port), backlog=_BACKLOG)


def connect(meeting: Meeting, deadline: float) -> TCPStore:
    """Connect to the store, which may not be there yet. A client of it has no threads.

    Raises:
        LaunchError: If it doesn't answer until ``deadline``.
    """
    from torch.distributed import TCPStore

    while True:
        try:
            # The store's own attempts warn of each that fails, and hear no signal.
            where = (meeting.address, meeting.port)
            socket.create_connection(where, timeout=_CONNECT_SECONDS).close()
            store = TCPStore(
                *where,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CONNECT_SECONDS),
            )
        except (OSError, RuntimeError) as error:
            if time.monotonic() >= deadline:
                reason = str(error).strip().partition("\n")[0]
                raise LaunchError(
                    f"Nobody answered at the rendezvous endpoint {meeting.endpoint} as host 0 "
                    f"does within {meeting.timeout_seconds} seconds: {reason}. Is 'lockstep run' "
                    "given on the first host too, is the name right, and does no firewall keep "
                    "the port shut?"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            store.set_timeout(_STORE_TIMEOUT)
            return store
