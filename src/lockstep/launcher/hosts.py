"""The environments of this host's ranks, and the agreement with supervisors of other hosts.

Supervisors of several hosts meet at a TCPStore, which the host at the endpoint holds open. There
each gets a number and reads the number of ranks on every host; later each writes the failure of
its ranks, or that they are done. So a failure ends the ranks of all hosts, even if they don't
communicate, and every host reports the same first failure. A thread of each counts up a number of
its own there; a host whose number stands still is lost. Nothing that is read from the store is
executed. Anyone who reaches the endpoint can write to the store, as with torchrun: the endpoint
belongs in a network that its users trust.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter

import torch.distributed as dist

from lockstep.comm import Deadline
from lockstep.errors import LaunchError
from lockstep.launcher.failures import Outcome
from lockstep.launcher.job import Job, Meeting, check_num_ranks
from lockstep.world import Placement, Starter, first_line, rank_environment

_BACKLOG = 1024  # every rank may connect before the store accepts the first
_CONNECT_SECONDS = 5.0  # no signal is handled while the store connects
_RETRY_SECONDS = 0.2
_STORE_TIMEOUT = timedelta(seconds=60)
_LISTEN_SECONDS = 0.25
_LEAVE_SECONDS = 3.0  # for other hosts to read the outcome
_HASTY_LEAVE_SECONDS = 1.0  # the same, if this host is interrupted
_SETTLE_SECONDS = 6.0  # longer than the ranks of another host take to be ended
_POLL_SECONDS = 0.05
_LOST_SECONDS = 60.0  # longer than a machine stands still
_LOOK_SECONDS = 1.0  # between two looks at whether the other hosts live


class Host:
    """This host of a run: the environments of its ranks, and its agreement with other hosts.

    Its supervisor, or that of the first of several hosts, holds the store, rather than rank 0.

    Attributes:
        world_size: The number of ranks on all hosts.
        ranks: The ranks on this host.
        environments: The variables to add for each of these ranks.
        notice: A descriptor that becomes readable when another host has failed.

    Raises:
        LaunchError: If the hosts don't all come, or this host isn't one of them.
    """

    def __init__(self, job: Job) -> None:
        self.notice: int | None = None
        self._num_answers = 0  # of the store, while this host waits for others
        self._meeting = job.meeting
        self._number, self._num_hosts = 0, 1
        if job.meeting is None:
            first = self._alone(job.num_ranks)
        else:
            first = self._meet(job.meeting, job.num_ranks)
        self.world_size = first.world_size
        self.ranks = range(first.rank, first.rank + job.num_ranks)
        self.environments = [
            rank_environment(
                replace(first, rank=rank, local_rank=local_rank),
                job.num_threads,
                self._number,
                self._num_hosts,
            )
            for local_rank, rank in enumerate(self.ranks)
        ]

    def _alone(self, size: int) -> Placement:
        # Port 0: the kernel finds a free one, so that two runs never collide.
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        master = listener.getsockname()
        self._held: dist.TCPStore | None = _open_store(listener)
        # Any user of this host can write to a store on loopback, which is for programs that
        # expect one there. lockstep.init() uses a nameless file, open in this process alone.
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('lockstep-store')}"
        run_id = uuid.uuid4().hex
        return Placement(Starter.LOCKSTEP, 0, size, 0, size, master, run_id, path)

    def _meet(self, meeting: Meeting, size: int) -> Placement:
        """The placement of the first rank on this host of several."""
        self._num_hosts, deadline = meeting.num_hosts, Deadline(meeting.timeout_seconds)
        self._held = _hold_store(meeting)
        self._store = dist.PrefixStore("lockstep", _connect(meeting, deadline))
        try:
            self._number = self._take_number(meeting)
            self._store.set(f"name/{self._number}", socket.gethostname())
            self._store.set(f"size/{self._number}", str(size))
            sizes = self._wait_for_sizes(meeting, deadline)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, LaunchError):
                raise
            raise LaunchError(
                f"The hosts couldn't meet at {meeting.endpoint}: the host that keeps the store "
                "there has given up, or something else than 'lockstep run' uses that port."
            ) from error
        self.notice, self._notifier = os.pipe()
        threading.Thread(target=self._listen, daemon=True).start()
        first, master = sum(sizes[: self._number]), (meeting.address, meeting.port)
        return Placement(Starter.LOCKSTEP, first, sum(sizes), 0, size, master, meeting.run_id)

    def _take_number(self, meeting: Meeting) -> int:
        """The number of this host: the one that it was given, or the first that is free."""
        given, where = meeting.host, meeting.endpoint
        run = f"run {meeting.run_id!r} on {self._num_hosts} hosts"
        there = bytes(self._store.compare_set("run", "", run)).decode(errors="replace")
        if there != run:
            raise LaunchError(
                f"This is {run}, but those who meet at {where} are of {there}. Give the "
                "same --nnodes and --rdzv-id on every host, and each run a port of its own."
            )
        # Without numbers, the host that holds the store is host 0.
        free = range(0 if self._held is not None else 1, self._num_hosts)
        for host in free if given is None else [given]:
            if self._store.add(f"host/{host}", 1) == 1:
                return host
        raise LaunchError(
            f"There are {self._num_hosts} hosts at {where} without this one."
            if given is None
            else f"There is a host {given} at {where} already. Give each host "
            "another --node-rank, or none of them any."
        )

    def _wait_for_sizes(self, meeting: Meeting, deadline: Deadline) -> list[int]:
        """The number of ranks on each host."""
        missing = hosts = list(range(meeting.num_hosts))
        while missing := [host for host in missing if not self._store.check([f"size/{host}"])]:
            if not deadline.left():
                raise LaunchError(
                    f"{len(hosts)} hosts didn't meet at {meeting.endpoint} within "
                    f"{meeting.timeout_seconds} seconds: host {str(missing)[1:-1]} "
                    "didn't come. Give 'lockstep run' on every host, with the same --nnodes and "
                    "--rdzv-endpoint; --rdzv-timeout changes how long they wait."
                )
            time.sleep(_POLL_SECONDS)  # not store.wait(), which handles no signals
        return [check_num_ranks(self._store.get(f"size/{host}").decode()) for host in hosts]

    def _listen(self) -> None:
        """Wait until another host has failed, and show the others that this one lives."""
        with contextlib.suppress(RuntimeError):  # the store has ended, and so has its host
            while not self._store.check(["failed"]):
                self._store.add(f"alive/{self._number}", 1)
                time.sleep(_LISTEN_SECONDS)
        os.write(self._notifier, b".")

    def settle(self, outcome: Outcome, interrupted: Callable[[], bool]) -> Outcome:
        """The outcome of the run: that of the rank that failed first on any host.

        ``outcome`` is that of this host's ranks. ``interrupted()`` tells whether this host has to
        end without waiting for the others. If the store ends meanwhile, or doesn't answer, its host
        has failed; so has any other host that gives no sign of life.
        """
        if self._meeting is None:
            return outcome
        agreed = list[Outcome]()

        def agree() -> None:
            with contextlib.suppress(RuntimeError):  # the store has ended
                agreed.append(self._agree(outcome, interrupted))

        # In a thread, as a request to a store that the network has lost isn't answered for many
        # minutes. Shown by test_store_that_does_not_answer_is_not_waited_for.
        thread, silence = threading.Thread(target=agree, daemon=True), _Silence()
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            patience = _LEAVE_SECONDS if interrupted() else _LOST_SECONDS
            if silence.seconds(self._num_answers) > patience:
                break
        if agreed or outcome.exit_status:
            return agreed[0] if agreed else outcome
        where = self._meeting.endpoint
        return Outcome(1, message=f"the host that keeps the store, at {where}, is gone.")

    def _agree(self, outcome: Outcome, interrupted: Callable[[], bool]) -> Outcome:
        failures = [outcome] if outcome.exit_status else []
        if outcome.exit_status:
            was_ended = f"the launcher of host {self._number} was ended."
            self._tell(outcome, was_ended if outcome.rank is None else outcome.message)
        self._store.set(f"done/{self._number}", "")
        if (lost := self._wait_for_others(interrupted)) is not None:
            self._tell(lost, lost.message)
            failures.append(lost)
        for host in set(range(self._num_hosts)) - {self._number}:
            if self._store.check([f"failure/{host}"]):
                told = self._store.get(f"failure/{host}").decode(errors="replace")
                failures.append(_outcome_of_peer(told))
        with contextlib.suppress(RuntimeError):  # the store's host has waited long enough
            self._store.add("left", 1)
            if self._held is not None:
                self._leave_last(interrupted)
        by_blame = attrgetter("lost_a_peer", "at_seconds")
        ranks = [failure for failure in failures if failure.rank is not None]
        return min(ranks or failures, key=by_blame, default=outcome)

    def _leave_last(self, interrupted: Callable[[], bool]) -> None:
        """Wait until other hosts have left the store, which ends with this host."""
        hasty, patient = Deadline(_HASTY_LEAVE_SECONDS), Deadline(_LEAVE_SECONDS)
        while self._store.add("left", 0) < self._num_hosts and (
            hasty.left() or (patient.left() and not interrupted())
        ):
            self._num_answers += 1
            time.sleep(_POLL_SECONDS)

    def _tell(self, failure: Outcome, message: str | None) -> None:
        told = failure.exit_status, failure.at_seconds, failure.lost_a_peer, failure.rank
        self._store.set(f"failure/{self._number}", json.dumps([*told, message]))
        self._store.set("failed", "")

    def _wait_for_others(self, interrupted: Callable[[], bool]) -> Outcome | None:
        """Wait until all hosts are done, or some seconds after a failure.

        Return the failure of a host that is lost: those that live may run for days.
        """
        done = {host: f"done/{host}" for host in range(self._num_hosts)}
        silences = {host: _Silence() for host in done}
        deadline, next_look = Deadline(math.inf), Deadline(_LOOK_SECONDS)
        while not self._store.check([*done.values()]) and not interrupted() and deadline.left():
            if deadline.left() == math.inf and self._store.check(["failed"]):
                deadline = Deadline(_SETTLE_SECONDS)
            elif deadline.left() == math.inf and not next_look.left():
                next_look = Deadline(_LOOK_SECONDS)
                for host, silence in silences.items():
                    sign = self._store.add(f"alive/{host}", 0)
                    is_lost = silence.seconds(sign) > _LOST_SECONDS
                    if is_lost and not self._store.check([done[host]]):
                        return self._loss_of(host)
            self._num_answers += 1
            time.sleep(_POLL_SECONDS)
        return None

    def _loss_of(self, host: int) -> Outcome:
        name = self._store.get(f"name/{host}").decode(errors="replace")
        return Outcome(
            1,
            message=f"host {host} ({name}) is lost: its ranks weren't done when it fell silent, "
            f"{_LOST_SECONDS:.0f} seconds ago. See whether its launcher was killed or suspended, "
            "the machine restarted, or the network cut; then start the run anew on all hosts.",
            at_seconds=time.time(),
        )


class _Silence:
    """How long a number hasn't changed that somebody else counts up.

    Time in which this process was suspended, and saw nothing, doesn't count.
    """

    def __init__(self) -> None:
        self._number, self._looked_at, self._seconds = -1, time.monotonic(), 0.0

    def seconds(self, number: int) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, 2 * _LOOK_SECONDS)
        if number != self._number:
            self._seconds = 0.0
        self._number, self._looked_at = number, now
        return self._seconds


def _outcome_of_peer(text: str) -> Outcome:
    try:
        status, at_seconds, lost_a_peer, rank, message = json.loads(text)
        return Outcome(
            int(status),
            message=str(message),
            rank=None if rank is None else int(rank),
            at_seconds=float(at_seconds),
            lost_a_peer=bool(lost_a_peer),
        )
    except (ValueError, TypeError):
        return Outcome(1, message="another host failed, and told nothing that can be read.")


def _hold_store(meeting: Meeting) -> dist.TCPStore | None:
    """Hold the store open on host 0 or, of hosts without numbers, the one that can bind there."""
    if meeting.host not in (0, None):
        return None
    where = (meeting.address, meeting.port)
    try:
        family, *_, address = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
        try:
            listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            if meeting.host is None or error.errno != errno.EADDRNOTAVAIL:
                raise
            # The others may know this host by an address that only a router has.
            listener = socket.create_server(("", meeting.port), backlog=_BACKLOG)
    except OSError as error:
        if meeting.host is None:  # it is another host's, or another launcher's of this one
            return None
        raise LaunchError(
            f"Host 0 can't listen at the rendezvous endpoint {meeting.endpoint}: "
            f"{error.strerror}. Give a name or an address of this host and a port that is free."
        ) from error
    return _open_store(listener, meeting.address)


def _open_store(listener: socket.socket, address: str = "127.0.0.1") -> dist.TCPStore:
    """A store, which has threads, at this address alone; by itself it binds all interfaces."""
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(meeting: Meeting, deadline: Deadline) -> dist.TCPStore:
    """Connect to the store, which may not be there yet. Its client has no threads."""
    where, timeout = (meeting.address, meeting.port), timedelta(seconds=_CONNECT_SECONDS)
    while True:
        try:
            # The store's own attempts warn of each that fails, and handle no signal.
            socket.create_connection(where, timeout=_CONNECT_SECONDS).close()
            store = dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timeout)
        except (OSError, RuntimeError) as error:
            if not deadline.left():
                raise LaunchError(
                    f"Nobody answered at the rendezvous endpoint {meeting.endpoint} as host 0 "
                    f"does within {meeting.timeout_seconds} seconds: {first_line(error)}. Is "
                    "'lockstep run' given on the first host too, is the name right, and does no "
                    "firewall keep the port shut?"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            store.set_timeout(_STORE_TIMEOUT)
            return store
