"""What the supervisors of several hosts tell each other, over the store of their agents.

It is little: how many ranks each has, that one of them has failed, and that each is done. A
failure then ends the ranks of all hosts, even those that don't communicate, and every host
tells of the same first one.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.errors import LaunchError
from lockstep.launcher.handover import Outcome

if TYPE_CHECKING:
    from torch.distributed import Store

_MEET_SECONDS = 60.0  # the hosts have met; what is left is to import torch
_LISTEN_SECONDS = 1.0
_SETTLE_SECONDS = 6.0  # longer than the ranks of another host take to be ended
_POLL_SECONDS = 0.05


class Peers:
    """The supervisors of the other hosts.

    Attributes:
        host: The number of this one.
        sizes: How many ranks each host has.
    """

    def __init__(self, environ: Mapping[str, str], num_hosts: int, num_ranks: int) -> None:
        """Meet them, at the store that the agent has put into ``environ``.

        Raises:
            LaunchError: If they don't all come.
        """
        self._environ = environ
        self.host = int(environ["RANK"])
        self._where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        # A client of the store has no threads, so the ranks may be forked afterwards.
        self._store = self._connect()
        # The listener has a connection of its own, as a waiting one is locked; made now, because
        # to connect to a store that is gone takes as long as one may take to come.
        self._heard = self._connect()
        self._store.set(f"size/{self.host}", str(num_ranks))
        try:
            self.sizes = [int(self._store.get(f"size/{host}")) for host in range(num_hosts)]
        except RuntimeError as error:
            raise LaunchError(
                f"The {num_hosts} hosts have met at {self._where}, but not all of them started "
                f"their ranks within {_MEET_SECONDS:.0f} seconds. What went wrong is said there."
            ) from error
        self._notice, self._notifier = os.pipe()
        self._stopped = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def fileno(self) -> int:
        """A descriptor that becomes readable when another host has failed."""
        return self._notice

    def descriptors(self) -> tuple[int, int]:
        """What a rank must not hold open."""
        return self._notice, self._notifier

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

    def _settle(self, outcome: Outcome, interrupted: Callable[[], bool]) -> Outcome:
        if outcome.exit_status:
            message = outcome.message or f"the launcher of host {self.host} was ended."
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
        keys = [f"failure/{host}" for host in range(len(self.sizes))]
        failures = [
            Outcome(**{**json.loads(self._store.get(key)), "results": ()})
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

    def _connect(self) -> Store:
        from torch.distributed import PrefixStore, TCPStore

        return PrefixStore(
            "lockstep",
            TCPStore(
                self._environ["MASTER_ADDR"],
                int(self._environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=_MEET_SECONDS),
            ),
        )
