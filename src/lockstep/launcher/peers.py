"""What the supervisors of several hosts tell each other, over the store where they meet.

It is little: which number each has and how many ranks, that one of them has failed, and that
each is done. A failure then ends the ranks of all hosts, even those that don't communicate, and
every host tells of the same first one.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from lockstep.errors import LaunchError
from lockstep.launcher.handover import Outcome
from lockstep.launcher.job import Meeting, check_num_ranks
from lockstep.launcher.meeting import connect, hold_store

_LISTEN_SECONDS = 1.0
_SETTLE_SECONDS = 6.0  # longer than the ranks of another host take to be ended
_POLL_SECONDS = 0.05


class Peers:
    """The supervisors of the other hosts.

    Attributes:
        host: The number of this one.
        sizes: How many ranks each host has.
    """

    def __init__(self, meeting: Meeting, num_ranks: int) -> None:
        """Meet them.

        Raises:
            LaunchError: If they don't all come, or this host isn't one of them.
        """
        from torch.distributed import PrefixStore

        deadline = time.monotonic() + meeting.timeout_seconds
        self._where = meeting.endpoint
        self._holder = hold_store(meeting)
        # The listener has a connection of its own, as a waiting one is locked; made now, because
        # to connect to a store that is gone takes as long as one may take to come.
        self._store, self._heard = (
            PrefixStore("lockstep", connect(meeting, deadline)) for _ in range(2)
        )
        try:
            self.host = self._number(meeting)
            self._store.set(f"size/{self.host}", str(num_ranks))
            self.sizes = self._sizes(meeting, deadline)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, LaunchError):
                raise
            raise LaunchError(
                f"The hosts couldn't meet at {self._where}: the host that keeps the store there "
                "has given up, or something else than 'lockstep run' uses that port."
            ) from error
        self._notice, self._notifier = os.pipe()
        self._stopped = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def _number(self, meeting: Meeting) -> int:
        """The number of this host: the one that it was given, or the first that is free."""
        run = f"run {meeting.run_id!r} on {meeting.num_hosts} hosts"
        there = bytes(self._store.compare_set("run", "", run)).decode(errors="replace")
        if there != run:
            raise LaunchError(
                f"This is {run}, but those who meet at {self._where} are of {there}. Give the "
                "same --nnodes and --rdzv-id on every host, and each run a port of its own."
            )
        # Who holds the store comes first; without a number, it is host 0.
        free = range(0 if self._holder is not None else 1, meeting.num_hosts)
        for host in free if meeting.host is None else [meeting.host]:
            if self._store.add(f"host/{host}", 1) == 1:
                return host
        raise LaunchError(
            f"There are {meeting.num_hosts} hosts at {self._where} without this one."
            if meeting.host is None
            else f"There is a host {meeting.host} at {self._where} already. Give each host "
            "another --node-rank, or none of them any."
        )

    def _sizes(self, meeting: Meeting, deadline: float) -> list[int]:
        missing = list(range(meeting.num_hosts))
        while missing := [host for host in missing if not self._store.check([f"size/{host}"])]:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{meeting.num_hosts} hosts didn't meet at {self._where} within "
                    f"{meeting.timeout_seconds} seconds: host {', '.join(map(str, missing))} "
                    "didn't come. Give 'lockstep run' on every host, with the same --nnodes and "
                    "--rdzv-endpoint; --rdzv-timeout changes how long they wait."
                )
            # Not store.wait(), in which no signal is heard.
            time.sleep(_POLL_SECONDS)
        sizes = [self._store.get(f"size/{host}") for host in range(meeting.num_hosts)]
        return [check_num_ranks(size.decode()) for size in sizes]

    def fileno(self) -> int:
        """A descriptor that becomes readable when another host has failed."""
        return self._notice

    def descriptors(self) -> list[int]:
        """What a rank must not hold open."""
        held = [self._holder.lifeline] if self._holder is not None else []
        return [self._notice, self._notifier, *held]

    def helpers(self) -> list[int]:
        """Processes of the launcher's own, which aren't what a rank has started."""
        return [self._holder.pid] if self._holder is not None else []

    def listen(self) -> None:
        """Begin to listen for failures; that takes a thread, so fork first."""
        self._listener.start()

    def settle(self, outcome: Outcome, interrupted: Callable[[], bool]) -> Outcome:
        """Tell the others of this host's outcome, and agree on that of the run.

        Args:
            outcome: What came of this host's ranks.
            interrupted: Tells whether this host is to end now, whatever the others do.

        Returns:
            The outcome of the rank that failed first on any host; this host's if none did.
        """
        try:
            return self._settle(outcome, interrupted)
        except RuntimeError:  # the store is gone, and the host that had it
            if outcome.exit_status:
                return outcome
            return Outcome(1, message=f"the host that keeps the store, at {self._where}, is gone.")
        finally:
            self._stopped.set()
            if self._holder is not None:
                self._holder.close()

    def _settle(self, outcome: Outcome, interrupted: Callable[[], bool]) -> Outcome:
        if outcome.exit_status:
            was_ended = f"the launcher of host {self.host} was ended."
            message = was_ended if outcome.rank is None else outcome.message
            told = asdict(replace(outcome, results=(), message=message))
            self._store.set(f"failure/{self.host}", json.dumps(told))
            self._store.set("failed", "")
        self._store.add("done", 1)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._count("done") < len(self.sizes) and not interrupted():
            if self._store.check(["failed"]):
                if time.monotonic() > deadline:
                    break
            else:  # the others may run for days after this host's ranks are done
                deadline = time.monotonic() + _SETTLE_SECONDS
            time.sleep(_POLL_SECONDS)
        agreed = self._first(outcome)
        self._leave_together()
        return agreed

    def _first(self, outcome: Outcome) -> Outcome:
        keys = [f"failure/{host}" for host in range(len(self.sizes)) if host != self.host]
        failures = [outcome] if outcome.exit_status else []
        failures += [
            _told(self._store.get(key).decode(errors="replace"))
            for key in keys
            if self._store.check([key])
        ]
        return min(failures, key=lambda failure: failure.blame, default=outcome)

    def _leave_together(self) -> None:
        """The store ends with its host, so nobody leaves before all have read."""
        deadline = time.monotonic() + _LISTEN_SECONDS
        with contextlib.suppress(RuntimeError):  # its host saw the last one leave before us
            self._store.add("left", 1)
            while self._count("left") < len(self.sizes) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _count(self, key: str) -> int:
        return self._store.add(key, 0)

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            while not self._stopped.is_set():
                if self._heard.check(["failed"]):
                    break
                self._stopped.wait(_LISTEN_SECONDS / 4)
        # Also if the store is gone: then its host is.
        with contextlib.suppress(OSError):
            os.write(self._notifier, b".")


def _told(text: str) -> Outcome:
    """The outcome of another host, of which nothing is taken but what it must be."""
    try:
        told = json.loads(text)
        return Outcome(
            int(told["exit_status"]),
            message=str(told["message"]),
            rank=None if told["rank"] is None else int(told["rank"]),
            at_seconds=float(told["at_seconds"]),
            lost_a_peer=bool(told["lost_a_peer"]),
        )
    except (ValueError, TypeError, KeyError):
        return Outcome(1, message="another host failed, and told nothing that can be read.")
