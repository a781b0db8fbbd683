"""Which hosts take part in an attempt of a run on MIN to MAX of them: asked for, decided, told.

Each launcher gets a ticket when it comes, and tells of itself in the store. The host that keeps the
store has ticket 0. It alone decides who takes part in an attempt, as soon as all have come to it
that did before and still live, and writes that down; who isn't among them waits for a later
attempt. In the midst of one it looks for those that wait, and has the ranks stop at a step's end.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from lockstep.deadline import Deadline
from lockstep.errors import LaunchError
from lockstep.launcher.agreement import Agreement, told_interruption
from lockstep.launcher.endpoint import Company, local_addresses
from lockstep.launcher.failures import Ended, JobOutcome
from lockstep.launcher.job import Meeting, check_num_ranks
from lockstep.world import connection_from, has_ended, local_end

_POLL_SECONDS = 0.05
_WAIT_SECONDS = 0.5  # between two looks of a host that waits while the others train
_SILENT_SECONDS = 5.0  # after which it isn't seen to wait any more


class Candidate(NamedTuple):
    """A launcher that could take part in an attempt."""

    ticket: int
    was_there: bool = False  # whether it took part in the attempt before
    has_come: bool = True  # whether it has come to this meeting
    is_back: bool = False  # whether its host took part in an earlier attempt, by another launcher


def chosen(
    candidates: Iterable[Candidate], least: int, most: int, *, is_last_call_over: bool
) -> list[int] | None:
    """The tickets of those that take part, in the order of their numbers; None to wait for more.

    Those that were there before, then hosts that are back, then new ones, as they came.
    """
    found = [*candidates]
    if not all(each.has_come for each in found):
        return None
    found.sort(key=lambda each: (not each.was_there, not (each.was_there or each.is_back), each))
    taken = [each.ticket for each in found[:most]]
    if len(taken) == most or (len(taken) >= least and is_last_call_over):
        return taken
    return None


class Member(NamedTuple):
    """What a launcher tells of itself."""

    hostname: str
    num_ranks: int
    end: str  # the address from which it is connected to the store; "" of the one that keeps it


@dataclass
class Membership:
    """This launcher among those of a run.

    Args:
        root: The store that all attempts share.
        store_of: Returns that of an attempt.
        meeting: Where they meet.
        is_keeper: Whether this launcher keeps the store.

    Attributes:
        ticket: Its own.
        members: The tickets of those that take part, in the order of their numbers.
        lines: The keeper's connections to the others, by ticket.
        has_told: Whether launchers that wait were told that the run is over.
    """

    root: dist.Store
    store_of: Callable[[int], dist.Store]
    meeting: Meeting
    is_keeper: bool
    ticket: int = 0
    members: list[int] = field(default_factory=list)
    lines: dict[int, socket.socket] = field(default_factory=dict)
    has_told: bool = False
    _over: threading.Event = field(default_factory=threading.Event)
    _lost: set[int] = field(default_factory=set)
    _signs: dict[int, tuple[int, float]] = field(default_factory=dict)  # and when they were new

    def come(self, num_ranks: int) -> None:
        """Tell of this launcher."""
        if not self.is_keeper:
            self.ticket = self.root.add("tickets", 1)
        end = "" if self.is_keeper else local_end(self.meeting.port)
        told = Member(socket.gethostname(), num_ranks, end)
        self.root.set(f"ticket/{self.ticket}", json.dumps(told))

    def member(self, ticket: int) -> Member:
        """What a launcher has told of itself."""
        try:
            hostname, num_ranks, end = json.loads(self.root.get(f"ticket/{ticket}"))
            return Member(str(hostname), check_num_ranks(num_ranks), str(end))
        except (ValueError, TypeError, RecursionError) as error:
            raise LaunchError(f"What launcher {ticket} tells of itself can't be read.") from error

    def meet(self, attempt: int, deadline: Deadline, company: Company | None) -> int:
        """Wait for an attempt in which this launcher takes part, from this one on; return it.

        Args:
            attempt: The number of the attempt.
            deadline: Until which the keeper waits for others.
            company: To be asked whether somebody can come; None if that is known.

        Raises:
            LaunchError: If too few come.
            Ended: If the run is ended, or over, meanwhile.
        """
        if self.is_keeper:
            self.members = self._choose(attempt, deadline, company)
            return attempt
        self.store_of(attempt).set(f"come/{self.ticket}", "")
        while True:
            self.root.add(f"life/{self.ticket}", 1)
            if self.root.check(["attempt"]):
                attempt = max(attempt, int(self.root.get("attempt")))
            store = self.store_of(attempt)
            is_settled = store.check(["members"])
            if is_settled:
                members = [*map(int, json.loads(store.get("members")))]
                if self.ticket in members:
                    self.members = members
                    return attempt
            self._raise_if_ended(store)
            time.sleep(_WAIT_SECONDS if is_settled else _POLL_SECONDS)

    def _raise_if_ended(self, store: dist.Store) -> None:
        if (ended := told_interruption(store, -1, lambda host: f"number {host}")) is not None:
            raise Ended(ended)
        if store.check(["given up"]):
            raise LaunchError(store.get("given up").decode(errors="replace"))
        if self.root.check(["over"]):
            status = int(self.root.get("over"))
            words = "the run is over, and hasn't needed this host. The others ended with exit code"
            raise Ended(JobOutcome(status, message=f"{words} {status}."))

    def _choose(self, attempt: int, deadline: Deadline, company: Company | None) -> list[int]:
        """Decide who takes part."""
        meeting, store, before = self.meeting, self.store_of(attempt), self.members
        last_call = Deadline(0.0 if before else meeting.last_call_seconds)
        while True:
            candidates = self._candidates(store, before)
            if len(candidates) < meeting.least_hosts and not before:
                last_call = Deadline(meeting.last_call_seconds)
            if not deadline.left():  # of those that were there, who hasn't come is lost
                candidates = [each for each in candidates if each.has_come]
            is_over = not last_call.left()
            least, most = meeting.least_hosts, meeting.num_hosts
            found = chosen(candidates, least, most, is_last_call_over=is_over)
            if found is not None:
                self._settle(store, found)
                return found
            if company is not None and len(candidates) == 1 < least:
                company.check(is_held=True)
            self._raise_if_ended(store)
            if not deadline.left():
                raise LaunchError(
                    f"{least} to {most} hosts are needed, and {len(candidates)} met at "
                    f"{meeting.endpoint} within {meeting.timeout_seconds} seconds. Give 'lockstep "
                    "run' on every host, with the same --nnodes and --rdzv-endpoint; "
                    f"--rdzv-timeout changes how long they wait.{local_addresses(meeting)}"
                )
            time.sleep(_POLL_SECONDS)

    def _candidates(self, store: dist.Store, before: Collection[int]) -> list[Candidate]:
        found = [Candidate(0, was_there=True)]  # which is host 0 each time
        for ticket in self._living():
            was_there = ticket in before
            if not was_there and not self._waits(ticket):
                continue
            has_come = not was_there or store.check([f"come/{ticket}"])
            is_back = self.root.check([f"was there/{self.member(ticket).hostname}"])
            found.append(Candidate(ticket, was_there, has_come, is_back))
        return found

    def _living(self) -> list[int]:
        """The tickets of the other launchers that haven't ended."""
        tickets = range(1, self.root.add("tickets", 0) + 1)
        come = [each for each in tickets if self.root.check([f"ticket/{each}"])]
        return [each for each in come if each not in self._lost and not self._has_ended(each)]

    def _has_ended(self, ticket: int) -> bool:
        if ticket not in self.lines:
            line = connection_from(self.member(ticket).end, self.meeting.port)
            if line is None:  # it has ended, or something between the hosts translates addresses
                return False
            self.lines[ticket] = line
        return has_ended(self.lines[ticket])

    def _waits(self, ticket: int) -> bool:
        """Whether a launcher is seen to wait: it counts up a number of its own."""
        sign, now = self.root.add(f"life/{ticket}", 0), time.monotonic()
        known, changed_at = self._signs.get(ticket, (sign, -math.inf))
        self._signs[ticket] = sign, now if sign != known else changed_at
        return now - self._signs[ticket][1] < _SILENT_SECONDS

    def _settle(self, store: dist.Store, members: Sequence[int]) -> None:
        """Write down who takes part."""
        for number, ticket in enumerate(members):
            Agreement.show_life(store, number)  # read from now on
            self.root.set(f"was there/{self.member(ticket).hostname}", "")
        store.set("members", json.dumps([*members]))

    def lose(self, number: int | None) -> None:
        """The host of this number, if any, takes no part any more."""
        if number is not None:
            self._lost.add(self.members.pop(number))

    def when_more_come(self, act: Callable[[], None]) -> None:
        """Have ``act()`` called by a thread, again and again, while others wait to take part."""
        self._over = over = threading.Event()

        def look() -> None:
            while not over.wait(_WAIT_SECONDS):
                if self._are_waiting():
                    act()

        if self.is_keeper and len(self.members) < self.meeting.num_hosts:
            threading.Thread(target=look, daemon=True).start()

    def _are_waiting(self) -> bool:
        return any(self._waits(each) for each in self._living() if each not in self.members)

    def close(self) -> None:
        """The attempt is over: nobody is looked for any more."""
        self._over.set()

    def tell_over(self, exit_status: int) -> None:
        """Tell launchers that wait that the run is over."""
        if {*self._living()} - {*self.members}:  # one may have just come
            self.root.set("over", str(exit_status))
            self.has_told = True
