"""Several hosts: they meet through ``torch.distributed.elastic``, and each runs a supervisor.

torch's agent starts one worker on each host, which is our supervisor. So the ranks of several
hosts are watched, labelled and ended as those of one are. The agent has a thread of its own,
because it may wait for other hosts inside a call that no signal interrupts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import tempfile
import threading
import time
from dataclasses import dataclass

from lockstep.errors import BadLaunch, LaunchError
from lockstep.launcher.handover import (
    Descriptors,
    job_file,
    supervisor_command,
    supervisor_environment,
)
from lockstep.launcher.job import Job
from lockstep.launcher.signals import SignalPipe
from lockstep.launcher.verdict import ended_by

_SUPERVISOR_PATIENCE_SECONDS = 15
_PROBE_SECONDS = 0.2


@dataclass(frozen=True)
class Meeting:
    """Where and how the hosts meet.

    Attributes:
        host: The number of this host, or None to have one given.
        address, port: Where the first host listens for the others.
        run_id: What tells this run from others that meet there.
        timeout_seconds: How long to wait for the others.
    """

    host: int | None
    address: str
    port: int
    run_id: str
    timeout_seconds: int

    @property
    def endpoint(self) -> str:
        """As it is given on the command line."""
        return f"{self.address}:{self.port}"


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
    return Meeting(host, address.strip("[]"), int(port), run_id, timeout_seconds)


def run_on_several_hosts(job: Job, meeting: Meeting) -> int:
    """Run ``job`` here as the part of one host, and return the exit code of the run.

    Raises:
        LaunchError: If the hosts don't meet in time.
    """
    signals = SignalPipe()
    lifeline = os.pipe()
    own = Descriptors(job_file(job), lifeline[0])
    os.environ.update(supervisor_environment(os.environ, job))
    agent = _Agent(job, meeting, supervisor_command(own, through_proc=True))
    agent.start()
    while not agent.ended.is_set():
        select.select([signals.fileno(), agent.bell], [], [])
        if signals.is_pending():
            os.close(lifeline[1])  # the supervisor ends its ranks, and the agent with it
            _wait_for_children()
            number = signals.pending[0]
            with contextlib.suppress(OSError):
                os.write(2, f"lockstep: {ended_by(number)}\n".encode())
            # The agent may be inside a call that doesn't return.
            os._exit(128 + number)
    return agent.exit_code()


def _wait_for_children() -> None:
    deadline = time.monotonic() + _SUPERVISOR_PATIENCE_SECONDS
    with contextlib.suppress(ChildProcessError):  # there are none any more, or none yet
        while time.monotonic() < deadline:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            time.sleep(_PROBE_SECONDS / 4)


class _Agent(threading.Thread):
    """torch's agent of this host, in a thread. ``bell`` becomes readable when it has ended."""

    def __init__(self, job: Job, meeting: Meeting, command: list[str]) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.bell, self._ringer = os.pipe()
        self._job, self._meeting, self._command = job, meeting, command
        self._status = 0
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            _probe(self._meeting)
            self._status = _launch(self._job, self._meeting, self._command)
        except BaseException as error:  # for the main thread to raise
            self._error = error
        finally:
            self.ended.set()
            os.write(self._ringer, b".")

    def exit_code(self) -> int:
        """What the supervisor ended with.

        Raises:
            LaunchError: If there never was one.
        """
        if self._error is None:
            return self._status
        if isinstance(self._error, LaunchError):
            raise self._error
        reason = str(self._error).strip().splitlines() or [type(self._error).__name__]
        raise LaunchError(
            f"{self._job.num_hosts} hosts didn't meet at {self._meeting.endpoint} within "
            f"{self._meeting.timeout_seconds} seconds: {reason[0]} Give 'lockstep run' on every "
            "host, with the same --nnodes, --rdzv-endpoint and --rdzv-id; --rdzv-timeout changes "
            "how long they wait."
        ) from self._error


def _launch(job: Job, meeting: Meeting, command: list[str]) -> int:
    # It warns of what it does by design here, and tells of failures that we tell of.
    logging.disable(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    timeout = meeting.timeout_seconds
    configs: dict[str, int] = {"timeout": timeout}
    if meeting.host is None:
        configs |= {"read_timeout": timeout, "join_timeout": timeout}
    else:
        configs["rank"] = meeting.host
    with tempfile.TemporaryDirectory(prefix="lockstep-") as directory:
        config = LaunchConfig(
            min_nodes=job.num_hosts,
            max_nodes=job.num_hosts,
            nproc_per_node=1,  # the supervisor
            run_id=meeting.run_id,
            rdzv_backend="c10d" if meeting.host is None else "static",
            rdzv_endpoint=meeting.endpoint,
            rdzv_configs=configs,
            max_restarts=0,
            local_addr=_own_address(meeting),
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            shutdown_timeout=_SUPERVISOR_PATIENCE_SECONDS,
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    return 0


def _probe(meeting: Meeting) -> None:
    """Wait until someone listens at the endpoint, unless this host is the one to do so.

    torch would wait as well, but not tell that it was the endpoint that couldn't be reached.
    """
    if meeting.host == 0 or (meeting.host is None and _is_here(meeting)):
        return
    deadline = time.monotonic() + meeting.timeout_seconds
    while True:
        try:
            left = max(_PROBE_SECONDS, deadline - time.monotonic())
            socket.create_connection((meeting.address, meeting.port), timeout=left).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"Nobody answered at the rendezvous endpoint {meeting.endpoint} within "
                    f"{meeting.timeout_seconds} seconds: {error}. Is 'lockstep run' given on the "
                    "first host too, is the name right, and does no firewall keep the port shut?"
                ) from error
            time.sleep(_PROBE_SECONDS)
        else:
            return


def _is_here(meeting: Meeting) -> bool:
    """Whether the endpoint is an address of this host: then a socket can be bound to it."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            meeting.address, 0, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as candidate:
                candidate.bind(address)
                return True
    return False


def _own_address(meeting: Meeting) -> str | None:
    """The address that this host has for the others: that from which it reaches the endpoint.

    torch would look up the host's name, which often leads nowhere, or back to loopback.
    """
    with contextlib.suppress(OSError):
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            meeting.address, meeting.port, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: sends nothing
            return str(probe.getsockname()[0])
    return None
