"""The environments of this host's ranks, and the meeting with the launchers of other hosts.

Launchers of several hosts meet at a TCPStore, which the host at the endpoint holds open. There each
gets a number and reads the number of ranks on every host; from then on see :class:`Agreement`.
Nothing that is read from the store is executed. Anyone who reaches the endpoint can write to the
store, as with torchrun: the endpoint belongs in a network that its users trust.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import FrameType

import torch.distributed as dist

from lockstep.comm import NoAnswer, answered
from lockstep.deadline import Deadline
from lockstep.entries import name_in, text_in
from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.agreement import Agreement, tell_interruption, told_interruption
from lockstep.launcher.endpoint import (
    Company,
    NobodyComes,
    local_addresses,
    reach_endpoint,
    tell_at_other_addresses,
)
from lockstep.launcher.failures import Ended, JobOutcome, RankEnded
from lockstep.launcher.job import Job, Meeting, check_num_ranks
from lockstep.launcher.membership import Membership
from lockstep.memory_files import memory_file
from lockstep.world import (
    Placement,
    Starter,
    connection_from,
    has_ended,
    local_end,
    rank_environment,
    tell_of_end,
)

_ANY_PORT = 29500  # torch's own default
_LEAST_SECONDS = 5.0  # to meet, once the store is there
_DECIDE_SECONDS = 10.0  # for host 0 to decide on a restart, and for others to hear of it
_HEAR_SECONDS = 1.0  # for other hosts to read why this one gives up
_POLL_SECONDS = 0.05
# The descriptors that a launcher opens: the signals' pipe (2), the selector, and /proc with a file
# in it, besides logs. Alone: the ranks' store. To meet: the agreement's pipe (2), the connection to
# the store, and two to find it. To keep the store: what torch has for it, the other launchers'
# connections (each twice), and those of all ranks.
_NUM_ALWAYS, _NUM_ALONE, _NUM_TO_MEET, _NUM_TO_KEEP = 5, 1, 5, 10


class NumberTaken(Exception):
    """There is another host of this one's number, or there are as many as there may be."""


class Host:
    """This host of a run: the environments of its ranks, and its agreement with other hosts.

    Its supervisor, or that of the first of several hosts, holds the store, rather than rank 0.

    Args:
        job: What is run.
        meanwhile: Is entered while this host waits for others, and may raise RankEnded there.
        before: This host in the attempt before, if its ranks are started again.

    Attributes:
        attempt: How often the run was started again.
        world_size: The number of ranks on all hosts.
        ranks: The ranks on this host.
        environments: The variables to add for each of these ranks.
        are_alike: Whether there are several hosts, with as many ranks each.
        notice: A descriptor that becomes readable when another host has failed.

    Raises:
        LaunchError: If the hosts don't all come, or this host isn't one of them.
        Ended: If the run was ended meanwhile: a launcher by a signal, or a rank.
    """

    def __init__(
        self, job: Job, meanwhile: AbstractContextManager[None], before: Host | None = None
    ) -> None:
        self.notice: int | None = None
        self.are_alike = False
        self.attempt: int = 0 if before is None else before.attempt + 1
        self._restarts = job.restarts
        self._before = before
        self.membership: Membership | None = None if before is None else before.membership
        self._agreement: Agreement | None = None
        self._number, self._num_hosts = 0, 1
        self._lines: dict[int, socket.socket] = {}  # host 0's to the other launchers
        self._ending_signals = *processes.ENDING_SIGNALS, *job.stop_signals
        self._has_come = False  # whether other hosts know of this one
        self._store_file: int | None = None  # of the ranks of one host
        self._tellers: list[threading.Thread] = []  # of ranks that have ended
        logs = job.num_ranks if job.log_dir is not None else 0
        self._num_descriptors = _NUM_ALWAYS + logs  # that are to be opened after this
        if job.meeting is None:
            first = self._alone(job.num_ranks)
        else:
            try:
                with meanwhile:
                    first = self._meet(job.meeting, job.num_ranks)
            except RankEnded as ended:
                raise self._ended_early(ended) from None
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
        self._before = None

    def _alone(self, size: int) -> Placement:
        # Any user of this host could write to a store at a port. The ranks have one in a nameless
        # file instead, which is open in this process alone: see use_store_of_run(). The port is
        # for programs that open something there themselves.
        processes.check_descriptors(_NUM_ALONE + self._num_descriptors)
        self._store_file = memory_file("lockstep-store")
        path = f"/proc/{os.getpid()}/fd/{self._store_file}"
        run_id = uuid.uuid4().hex
        return Placement(Starter.LOCKSTEP, 0, size, 0, size, _free_port(), run_id, path)

    def _meet(self, meeting: Meeting, size: int) -> Placement:
        """The placement of the first rank on this host of several."""
        self._num_hosts, deadline = meeting.num_hosts, Deadline(meeting.timeout_seconds)
        number = self._num_descriptors + _NUM_TO_MEET
        if meeting.host in (0, None):
            number += _NUM_TO_KEEP + 2 * (meeting.num_hosts - 1)
        processes.check_descriptors(number)
        company = Company(meeting)
        # Held open as long as this is; of the others, the client has no threads.
        if self._before is None:
            self._endpoint = reach_endpoint(meeting, deadline, company)
        else:
            self._endpoint = self._before._endpoint
            meeting = meeting._replace(host=self._before._number)
        endpoint = self._endpoint
        self._root = dist.PrefixStore("lockstep", endpoint.store)
        self._store = self._store_of(self.attempt)
        come, seconds = partial(self._come, meeting, size, deadline, company), deadline.left()
        if meeting.is_elastic:
            come = partial(self._come_as_member, meeting, size, deadline, company)
            if not endpoint.is_held:  # it may wait as long as the others train
                seconds = math.inf
        processes.handle(self._ending_signals, self._end_of_meeting)
        try:
            # In another thread, so that signals are handled even if the store doesn't answer.
            sizes, names = answered(come, seconds + _LEAST_SECONDS)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, NobodyComes) and endpoint.is_held:
                tell_at_other_addresses(meeting, endpoint)
                raise
            if isinstance(error, LaunchError):
                if self._endpoint.is_held and self._has_come:
                    self._tell_others(str(error))
                raise
            why = "the host that keeps the store there has given up, or something else than "
            why += "'lockstep run' uses that port."
            if isinstance(error, NoAnswer):
                why = f"of the store there, {error}. Is its launcher suspended, or the network cut?"
            raise LaunchError(f"The hosts couldn't meet at {meeting.endpoint}: {why}") from error
        if endpoint.is_held:  # ranks beyond the limit would wait for their connections
            processes.check_descriptors(sum(sizes) + self._num_descriptors)
        patience_seconds, lines = meeting.host_timeout_seconds, self._lines
        self._agreement = Agreement(
            self._store, self._number, names, patience_seconds, lines=lines, check=endpoint.check
        )
        self.notice = self._agreement.notice
        self.are_alike = len(sizes) > 1 == len({*sizes})
        first, master = sum(sizes[: self._number]), (endpoint.address, meeting.port)
        return Placement(Starter.LOCKSTEP, first, sum(sizes), 0, size, master, meeting.run_id)

    def _come(
        self, meeting: Meeting, size: int, deadline: Deadline, company: Company
    ) -> tuple[list[int], list[str]]:
        """Tell the others of this host; return the number of ranks and the name of each host."""
        number = self._number = self._take_number_in_time(meeting, deadline)
        self._store.set(f"name/{number}", socket.gethostname())
        Agreement.show_life(self._store, number)
        self._store.set(f"end/{number}", "" if self._endpoint.is_held else local_end(meeting.port))
        self._has_come = True
        self._store.set(f"size/{number}", str(size))
        sizes = self._wait_for_sizes(meeting, deadline, company)
        return sizes, [self._name(host) for host in range(self._num_hosts)]

    def _come_as_member(
        self, meeting: Meeting, size: int, deadline: Deadline, company: Company
    ) -> tuple[list[int], list[str]]:
        """The same, where not all hosts need to come, and this one may have to wait."""
        if self.membership is None:
            self._check_run(meeting)
            is_first, kept = True, self._endpoint.is_held
            self.membership = Membership(self._root, self._store_of, meeting, kept)
            self.membership.come(size)
        else:
            is_first = False
        membership = self.membership
        self._has_come = membership.is_keeper
        self.attempt = membership.meet(self.attempt, deadline, company if is_first else None)
        self._store, self._has_come = self._store_of(self.attempt), True
        self._number, self._num_hosts = (
            membership.members.index(membership.ticket),
            len(membership.members),
        )
        lines = membership.lines
        self._lines = {n: lines[t] for n, t in enumerate(membership.members) if t in lines}
        told = [*map(membership.member, membership.members)]
        for number, member in enumerate(told):
            self._store.set(f"name/{number}", member.hostname)
        return [member.num_ranks for member in told], [member.hostname for member in told]

    def _name(self, host: int) -> str:
        return name_in(self._store.get(f"name/{host}"))

    def _is_gone(self, host: int, meeting: Meeting) -> bool:
        """Whether the launcher of another host, which has come, was ended; host 0 knows."""
        if not self._endpoint.is_held:
            return False
        if host not in self._lines:
            end = name_in(self._store.get(f"end/{host}"))
            if (line := connection_from(end, meeting.port)) is not None:
                self._lines[host] = line
        return host in self._lines and has_ended(self._lines[host])

    def _ended_early(self, ended: RankEnded) -> Ended:
        """The outcome of this host, one of whose ranks has ended, after telling the others."""
        who = f"host {self._number}" if self._has_come else "this host"
        why = (
            f"{who} ({socket.gethostname()}) has lost its rank {ended.local_rank} "
            f"before all hosts had met: {ended.outcome.message}. Start the run anew on all hosts."
        )
        if self._has_come:
            self._tell_others(why)
        return Ended(replace(ended.outcome, message=why))

    def _tell_others(self, why: str) -> None:
        """Let the others hear why there is no meeting, before the store may be gone."""
        with contextlib.suppress(RuntimeError):  # the network may be
            answered(partial(self._store.set, "given up", why), _HEAR_SECONDS)
        if self._endpoint.is_held:
            time.sleep(_HEAR_SECONDS)

    def _end_of_meeting(self, number: int, _: FrameType | None) -> None:
        """End by the signal ``number`` before there are ranks, and let other hosts hear of it."""
        if self._has_come:
            tell = partial(tell_interruption, self._store, number, 0.0, self._number)
            with contextlib.suppress(RuntimeError):
                answered(tell, _HEAR_SECONDS)
            if self._endpoint.is_held:
                time.sleep(_HEAR_SECONDS)
        os._exit(128 + number)

    def _store_of(self, attempt: int) -> dist.Store:
        """Where the launchers meet for an attempt; those of others may be late there."""
        return dist.PrefixStore(str(attempt), self._root) if attempt else self._root

    def _take_number_in_time(self, meeting: Meeting, deadline: Deadline) -> int:
        """The number of this host, as soon as there is an attempt that it can take part in.

        The launcher of a host may be started while the others still look for the one before.
        """
        while True:
            if self._restarts and self._root.check(["attempt"]):
                self.attempt = max(self.attempt, int(self._root.get("attempt")))
                self._store = self._store_of(self.attempt)
            try:
                return self._take_number(meeting)
            except NumberTaken as error:
                if not self._restarts or not deadline.left():
                    raise LaunchError(str(error)) from None
            time.sleep(_POLL_SECONDS)

    @property
    def is_one_of_several(self) -> bool:
        """Whether the run is on several hosts."""
        return self._agreement is not None

    def decide(self, text: str, *, is_restart: bool, lost: int | None) -> str:
        """Return what host 0 has decided, which gives ``text``; the outcome is settled.

        Args:
            text: Of use on host 0 alone.
            is_restart: Whether the ranks are started again: then hosts may come for that.
            lost: The host that is lost.

        Raises:
            RuntimeError: If host 0 doesn't answer.
            Ended: If a signal has ended host 0 instead: see :meth:`end_by`.
        """
        if self._agreement is None:
            return text
        if not self._endpoint.is_held:
            return text_in(self._hear_decision())
        if is_restart and self.membership is not None:
            self.membership.lose(lost)
            self._root.set("attempt", str(self.attempt + 1))
        elif is_restart:
            kept = [str(host) for host in range(self._num_hosts) if host != lost]
            self._store_of(self.attempt + 1).set("kept", " ".join(kept))
            self._root.set("attempt", str(self.attempt + 1))
        self._store.set("decision", text)
        left, deadline = self._num_hosts - 1 - (lost is not None), Deadline(_DECIDE_SECONDS)
        while not is_restart and self._store.add("heard", 0) < left and deadline.left():
            time.sleep(_POLL_SECONDS)
        return text

    def _hear_decision(self) -> bytes:
        """Return what host 0 has decided, and tell it that this host has heard of it."""
        heard = list[tuple[bytes, JobOutcome | None]]()

        def hear() -> None:
            decision, following = self._store.get("decision"), self._store_of(self.attempt + 1)
            heard.append((decision, told_interruption(following, self._number, self._name)))
            self._store.add("heard", 1)

        try:
            answered(hear, _DECIDE_SECONDS)
        except RuntimeError:
            if not heard:  # else only host 0 loses by it: it waits for longer
                raise
        decision, ended = heard[0]
        if ended is not None:
            raise Ended(ended)
        return decision

    @property
    def num_others(self) -> int:
        """How many hosts are left when one is lost."""
        return self._num_hosts - 1

    def tell_over(self, exit_status: int) -> None:
        """Tell hosts that wait to take part that the run is over."""
        if self.membership is not None and self._endpoint.is_held:
            with contextlib.suppress(RuntimeError):
                answered(partial(self.membership.tell_over, exit_status), _HEAR_SECONDS)
                time.sleep(_HEAR_SECONDS * self.membership.has_told)

    def end_by(self, number: int) -> None:
        """Tell all hosts that the signal ``number`` ends this one, and them, between attempts.

        They hear of it where they look for the decision on a restart, or meet for the next attempt.
        """
        if self._agreement is None:
            return
        following = self._store_of(self.attempt + 1)

        def tell() -> None:
            following.set(f"name/{self._number}", socket.gethostname())
            tell_interruption(following, number, 0.0, self._number)

        with contextlib.suppress(RuntimeError):
            answered(tell, _HEAR_SECONDS)
            if self._endpoint.is_held:
                self.decide("", is_restart=False, lost=None)
                time.sleep(_HEAR_SECONDS)  # for those that had heard of a restart
            else:
                answered(partial(self._store.add, "heard", 1), _HEAR_SECONDS)

    def _check_run(self, meeting: Meeting) -> None:
        """Refuse to meet the hosts of another run."""
        where, least = meeting.endpoint, meeting.least_hosts
        number = f"{least} to {meeting.num_hosts}" if meeting.is_elastic else f"{least}"
        run = f"run {meeting.run_id!r} on {number} hosts"
        run += f" with --restarts {self._restarts}" if self._restarts else ""
        there = name_in(self._store.compare_set("run", "", run))
        if there != run:
            raise LaunchError(
                f"This is {run}, but those who meet at {where} are of {there}. Give the "
                "same --nnodes, --rdzv-id and --restarts on every host, and each run a port of "
                "its own."
            )

    def _take_number(self, meeting: Meeting) -> int:
        """The number of this host: the one that it was given, or the first that is free."""
        given, where = meeting.host, meeting.endpoint
        self._check_run(meeting)
        # Without numbers, the host that holds the store is host 0.
        free = [*range(0 if self._endpoint.is_held else 1, self._num_hosts)]
        if given is None and self._store.check(["kept"]):
            kept = text_in(self._store.get("kept")).split()
            free = [host for host in free if str(host) not in kept]
        for host in free if given is None else [given]:
            if self._store.add(f"host/{host}", 1) == 1:
                return host
        raise NumberTaken(
            f"There are {self._num_hosts} hosts at {where} without this one."
            if given is None
            else f"There is a host {given} at {where} already. Give each host "
            "another --node-rank, or none of them any."
        )

    def _wait_for_sizes(self, meeting: Meeting, deadline: Deadline, company: Company) -> list[int]:
        """The number of ranks on each host."""
        missing = hosts = list(range(meeting.num_hosts))
        while missing := [host for host in missing if not self._store.check([f"size/{host}"])]:
            # One that has been there may come again when it is started.
            is_first = self._endpoint.is_held and self.attempt == 0
            if is_first and len(missing) == meeting.num_hosts - 1:
                company.check(is_held=True)
            self._endpoint.check()
            gone = [host for host in {*hosts[1:]} - {*missing} if self._is_gone(host, meeting)]
            if (ended := told_interruption(self._store, self._number, self._name)) is not None:
                raise Ended(ended)
            if self._store.check(["given up"]):
                raise LaunchError(text_in(self._store.get("given up")))
            if gone:
                raise LaunchError(
                    f"The hosts couldn't meet at {meeting.endpoint}: host {gone[0]} "
                    f"({self._name(gone[0])}) had come, and its launcher was ended while others "
                    "were waited for. Start the run anew on all hosts."
                )
            if not deadline.left():
                raise LaunchError(
                    f"{len(hosts)} hosts didn't meet at {meeting.endpoint} within "
                    f"{meeting.timeout_seconds} seconds: host {str(missing)[1:-1]} "
                    "didn't come. Give 'lockstep run' on every host, with the same --nnodes and "
                    "--rdzv-endpoint; --rdzv-timeout changes how long they wait."
                    f"{local_addresses(meeting)}"
                )
            time.sleep(_POLL_SECONDS)
        for host in hosts[1:]:
            self._is_gone(host, meeting)  # its connection is kept
        return [check_num_ranks(name_in(self._store.get(f"size/{host}"))) for host in hosts]

    def tell_of_end(self, rank: int) -> None:
        """Let ranks that wait for others hear that the process of this one has ended.

        The store may not answer, and a rank that is stopped may have locked its file: so nobody
        waits here.
        """
        where = self._endpoint.store if self._store_file is None else self._store_file
        teller = threading.Thread(
            target=_tell_of_end, args=(where, self.attempt, rank), daemon=True
        )
        self._tellers.append(teller)
        teller.start()

    def close(self) -> None:
        """Close the store of ranks that have ended."""
        if self.membership is not None:
            self.membership.close()
        for teller in self._tellers:
            teller.join(_HEAR_SECONDS)
        # As a store is freed, it opens its file once more.
        if self._store_file is not None and not any(each.is_alive() for each in self._tellers):
            os.close(self._store_file)
        if self._agreement is not None:
            self._agreement.close()

    def interrupt(self, number: int) -> None:
        """Have the ranks of all hosts end by this signal, which came to this launcher."""
        if self._agreement is not None:
            self._agreement.interrupt(number)

    def hurry(self) -> None:
        """Have the ranks of all hosts end at once."""
        if self._agreement is not None:
            self._agreement.hurry()

    def settle(self, outcome: JobOutcome, signals: Callable[[], Sequence[int]]) -> JobOutcome:
        """The outcome of the run, from that of this host's ranks: see :meth:`Agreement.settle`."""
        return outcome if self._agreement is None else self._agreement.settle(outcome, signals)


def _tell_of_end(where: dist.Store | int, attempt: int, rank: int) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # the store is gone, or full
        tell_of_end(where, attempt, rank)


def _free_port() -> tuple[str, int]:
    """An address on loopback with a port that nothing listens at."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as free:
        return "127.0.0.1", free.getsockname()[1]
    return "127.0.0.1", _ANY_PORT  # a host without such an address
