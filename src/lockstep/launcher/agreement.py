"""The agreement between the launchers of several hosts: who lives, who failed first, who ends.

They talk through the store where they met, which host 0 holds open. A thread of each counts up a
number of its own there, and looks at the others': a host whose number stands still is lost, and so
is host 0 if the store doesn't answer. Each tells there the failure of its ranks, the signal that
ended it, or that its ranks are done. So a failure ends the ranks of all hosts, even if they don't
communicate, and every host reports the same cause. Nothing that is read there is executed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch.distributed as dist

from lockstep.comm import Deadline
from lockstep.launcher.failures import Outcome, signal_name

_TALK_SECONDS = 0.25
_LOOK_SECONDS = 0.5  # between two looks at whether the other hosts live
_LEAVE_SECONDS = 3.0  # for other hosts to read the outcome
_HASTY_LEAVE_SECONDS = 1.0  # the same, if this host is interrupted
_SETTLE_SECONDS = 6.0  # longer than the ranks of another host take to be ended
# Once something has failed, a host that is silent for this long is what failed.
_SILENT_SECONDS = 3.0
_POLL_SECONDS = 0.05


class Agreement:
    """What this host knows of the others while its ranks run, and the outcome for all of them.

    Args:
        store: Where the hosts have met.
        number: The number of this host.
        names: Every host's name.
        patience_seconds: How long a host may be silent while all goes well.

    Attributes:
        notice: A descriptor that becomes readable when the ranks of this host are to be ended, by
            the signal whose number is the byte to read or, if that is 0, as another host failed.
    """

    def __init__(
        self, store: dist.Store, number: int, names: Sequence[str], patience_seconds: float
    ) -> None:
        self.notice, self._notifier = os.pipe()
        self._store, self._number, self._names = store, number, names
        self._patience_seconds = patience_seconds
        self._hosts = range(len(names))
        self._interruption: tuple[int, float] | None = None  # the signal, and when it came
        self._is_noticed, self._lock = False, threading.Lock()
        self._is_over = threading.Event()
        self._is_store_gone = False
        self._num_rounds = 0  # of talk that the store has answered
        self._signs = [0] * len(names)  # each host's number, when the store answered last
        self._silent_seconds = [0.0] * len(names)
        works = self._talk, self._look
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def show_life(store: dist.Store, number: int) -> None:
        """Show the others that the host of this ``number`` lives."""
        store.add(f"alive/{number}", 1)

    def interrupt(self, number: int, at_seconds: float) -> None:
        """Have the ranks of all hosts end by this signal, which came to this launcher."""
        if not self._is_noticed:
            self._interruption = number, at_seconds

    def _talk(self) -> None:
        """Show the others that this host lives, and hear of them."""
        keys = [f"alive/{host}" for host in self._hosts]
        try:
            while not self._is_over.wait(_TALK_SECONDS):
                self.show_life(self._store, self._number)
                self._tell_interruption()
                if not self._is_noticed and self._store.check(["failed"]):
                    interruption = self._told_interruption()
                    self._notify(max(0, interruption.exit_status - 128) if interruption else 0)
                if self._num_rounds % 4 == 0:  # it is as many answers as there are hosts
                    self._signs = [int(sign) for sign in self._store.multi_get(keys)]
                self._num_rounds += 1
        except (RuntimeError, ValueError):  # the store has ended, and so has its host
            self._is_store_gone = True
            self._notify(0)

    def _look(self) -> None:
        """See how long nothing was heard of each host, and end the ranks if it is too long."""
        silences = [_Silence() for _ in self._hosts]
        while not self._is_over.wait(_LOOK_SECONDS):
            of_store = silences[0].seconds(self._num_rounds)
            self._silent_seconds = [
                of_store if host == 0 else silences[host].seconds(self._signs[host], of_store)
                for host in self._hosts
            ]
            if self._lost(self._patience_seconds):
                self._notify(0)

    def _lost(self, patience_seconds: float) -> list[int]:
        """The other hosts that have been silent for longer."""
        silent = enumerate(self._silent_seconds)
        return [h for h, s in silent if s > patience_seconds and h != self._number]

    def _notify(self, number: int) -> None:
        with self._lock:
            if not self._is_noticed:
                self._is_noticed = True
                os.write(self._notifier, bytes([number]))

    def settle(self, outcome: Outcome, interrupted: Callable[[], bool]) -> Outcome:
        """The outcome of the run: the first failure on any host that no other one explains.

        ``outcome`` is that of this host's ranks. ``interrupted()`` tells whether this host has to
        end without waiting for the others.
        """
        agreed = list[Outcome]()

        def agree() -> None:
            with contextlib.suppress(RuntimeError):  # the store has ended
                agreed.append(self._agree(outcome, interrupted))

        # In a thread, as a request to a store that the network has lost isn't answered for many
        # minutes. Shown by test_store_that_does_not_answer_is_not_waited_for.
        thread = threading.Thread(target=agree, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            has_failed = outcome.exit_status or interrupted() or self._is_noticed
            if 0 in self._lost(_SILENT_SECONDS if has_failed else self._patience_seconds):
                break
        self._is_over.set()
        if agreed:
            return agreed[0]
        return _to_blame([*filter(_is_failure, [outcome]), self._loss_of(0)])

    def _agree(self, outcome: Outcome, interrupted: Callable[[], bool]) -> Outcome:
        self._tell_interruption()
        found = [*filter(_is_failure, [outcome])]
        if found:
            self._tell(outcome)
        if outcome.suspect is not None:
            self._store.set(f"suspect/{self._number}", _encoded(outcome.suspect))
        self._store.set(f"done/{self._number}", "")
        if lost := self._wait_for_others(interrupted):
            found += map(self._loss_of, lost)
            self._tell(_to_blame(found))
        if (interruption := self._told_interruption()) is not None:
            found.append(interruption)
        found += self._told_as("failure", {*self._hosts} - {self._number})
        if found and all(failure.lost_a_peer for failure in found):
            found += self._told_as("suspect", self._hosts)
        with contextlib.suppress(RuntimeError):  # the store's host has waited long enough
            self._store.add("left", 1)
            if self._number == 0:
                self._leave_last(len(self._hosts) - len(lost), interrupted)
        return _to_blame(found) if found else outcome

    def _leave_last(self, num_hosts: int, interrupted: Callable[[], bool]) -> None:
        """Wait until other hosts have left the store, which ends with this host."""
        hasty, patient = Deadline(_HASTY_LEAVE_SECONDS), Deadline(_LEAVE_SECONDS)
        while self._store.add("left", 0) < num_hosts and (
            hasty.left() or (patient.left() and not interrupted())
        ):
            time.sleep(_POLL_SECONDS)

    def _tell(self, failure: Outcome) -> None:
        self._store.set(f"failure/{self._number}", _encoded(failure))
        self._store.set("failed", "")

    def _told_as(self, kind: str, hosts: Collection[int]) -> list[Outcome]:
        """What these hosts have told under their keys of this ``kind``."""
        there = [key for host in hosts if self._store.check([key := f"{kind}/{host}"])]
        return [_decoded(bytes(self._store.get(key))) for key in there]

    def _tell_interruption(self) -> None:
        if self._interruption is not None:
            told = json.dumps([*self._interruption, self._number])
            self._store.compare_set("interrupted", "", told)  # the first one's counts
            self._store.set("failed", "")
            self._interruption = None

    def _told_interruption(self) -> Outcome | None:
        """The outcome if a signal has ended the launcher of a host, and hence all."""
        if not self._store.check(["interrupted"]):
            return None
        try:
            number, at_seconds, host = json.loads(self._store.get("interrupted"))
            where = "" if host == self._number else f" at host {host} ({self._names[host]})"
            return Outcome(
                128 + int(number) % 128,
                message=f"ended by {signal_name(number)}{where}; no rank is left running.",
                at_seconds=float(at_seconds),
            )
        except (ValueError, TypeError, IndexError):
            return Outcome(1, message="a host was ended, and told nothing that can be read.")

    def _wait_for_others(self, interrupted: Callable[[], bool]) -> list[int]:
        """Wait until all hosts are done, or some seconds after a failure; return lost ones.

        Hosts that live may run for days.
        """
        done = {host: f"done/{host}" for host in self._hosts}
        deadline, lost = Deadline(math.inf), list[int]()
        while not self._store.check([*done.values()]) and not interrupted() and deadline.left():
            if deadline.left() == math.inf and self._store.check(["failed"]):
                deadline = Deadline(_SETTLE_SECONDS)
            has_failed = deadline.left() < math.inf
            lost = self._lost(_SILENT_SECONDS if has_failed else self._patience_seconds)
            lost = [host for host in lost if not self._store.check([done[host]])]
            left = [host for host in self._hosts if host not in lost]
            if lost and (not has_failed or self._store.check([done[host] for host in left])):
                return lost
            time.sleep(_POLL_SECONDS)
        # Of several that fail, one may be done later than this.
        return [] if deadline.left() else lost

    def _loss_of(self, host: int) -> Outcome:
        seconds = self._silent_seconds[host]
        how = f"it fell silent {max(seconds, 1):.0f} seconds ago, and its ranks weren't done"
        if host == 0 and self._is_store_gone:
            how = "the store that it keeps has ended"
        return Outcome(
            1,
            message=f"host {host} ({self._names[host]}) is lost: {how}. See whether its launcher "
            "was killed or suspended, the machine restarted, or the network cut; then start the "
            "run anew on all hosts.",
            at_seconds=time.time() - seconds,
        )


class _Silence:
    """How long a number hasn't changed that somebody else counts up.

    Time in which this process was suspended, and saw nothing, doesn't count.
    """

    def __init__(self) -> None:
        self._number, self._looked_at, self._seconds = -1, time.monotonic(), 0.0

    def seconds(self, number: int, unknown_seconds: float = 0.0) -> float:
        """Look at the number, which wasn't heard of in the last ``unknown_seconds``."""
        now = time.monotonic()
        if unknown_seconds < 2 * _LOOK_SECONDS:
            self._seconds += min(now - self._looked_at, 2 * _LOOK_SECONDS)
        if number != self._number:
            self._seconds = 0.0
        self._number, self._looked_at = number, now
        return self._seconds


def _is_failure(outcome: Outcome) -> bool:
    return outcome.exit_status != 0


def _to_blame(failures: Sequence[Outcome]) -> Outcome:
    """The first of ``failures`` that isn't the consequence of another one."""
    return min(failures, key=lambda failure: (failure.lost_a_peer, failure.at_seconds))


def _encoded(failure: Outcome) -> str:
    told = failure.exit_status, failure.at_seconds, failure.lost_a_peer, failure.rank
    return json.dumps([*told, failure.message or "the launcher of another host was ended."])


def _decoded(told: bytes) -> Outcome:
    try:
        status, at_seconds, lost_a_peer, rank, message = json.loads(told)
        return Outcome(
            int(status),
            message=str(message),
            rank=None if rank is None else int(rank),
            at_seconds=float(at_seconds),
            lost_a_peer=bool(lost_a_peer),
        )
    except (ValueError, TypeError):
        return Outcome(1, message="another host failed, and told nothing that can be read.")
