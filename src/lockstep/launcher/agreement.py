"""The agreement between the launchers of several hosts: who lives, who failed first, who ends.

They talk through the store where they met, which host 0 holds open. A thread of each counts up a
number of its own there, and looks at the others': a host whose number stands still is lost, and so
is host 0 if the store doesn't answer. If a launcher is killed, the kernel ends its connection,
which host 0 sees and tells. Each tells there the failure of its ranks, the signal that ended it, or
that its ranks are done. So a failure ends the ranks of all hosts, even if they don't communicate,
and every host reports the same cause: the first by the clock of host 0, which writes the time there
again and again. Nothing that is read there is executed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from socket import socket

import torch.distributed as dist

from lockstep.deadline import Deadline
from lockstep.entries import MOST_WORDS, value_in
from lockstep.errors import LaunchError
from lockstep.launcher.failures import JobOutcome, first_failure
from lockstep.launcher.restarts import START_AGAIN
from lockstep.printable import signal_name
from lockstep.world import has_ended

_TALK_SECONDS = 0.25
_READ_SECONDS = 1.0  # between two readings of all hosts' numbers, as long as all goes well
_LOOK_SECONDS = 0.5  # between two looks at whether the other hosts live
_LEAVE_SECONDS = 3.0  # for other hosts to read the outcome
_HASTY_LEAVE_SECONDS = 1.0  # the same, if this host is interrupted
_SETTLE_SECONDS = 6.0  # longer than the ranks of another host take to be ended
# Once something has failed, a host that is silent for this long is what failed.
_SILENT_SECONDS = 3.0
# The same, of a launcher whose connection has ended: what is between hosts may end one too.
_GONE_SECONDS = 1.0
# The clocks of two hosts drift apart: by less than a network's delay in so many readings.
_NUM_READINGS = 60
_POLL_SECONDS = 0.05


class Agreement:
    """What this host knows of the others while its ranks run, and the outcome for all of them.

    Args:
        store: Where the hosts have met.
        number: The number of this host.
        names: Every host's name.
        patience_seconds: How long a host may be silent while all goes well.
        lines: On host 0, the connections of the other launchers to the store, by their numbers.
        check: Raises LaunchError if the run is to be ended, as the store has grown too large.
        clock: The seconds since some time, which need not be the same on every host.

    Attributes:
        notice: A descriptor that becomes readable when the ranks of this host are to be ended, by
            the signal whose number is the byte to read or, if that is 0, as another host failed.
            SIGKILL may come after another one: at once.
    """

    def __init__(
        self,
        store: dist.Store,
        number: int,
        names: Sequence[str],
        patience_seconds: float,
        *,
        lines: Mapping[int, socket] | None = None,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notice, self._notifier = os.pipe()
        self._store, self._number, self._names = store, number, names
        self._patience_seconds = patience_seconds
        self._hosts, self._lines, self._clock = range(len(names)), lines or {}, clock
        self._ended: Collection[int] = []  # the hosts whose launchers' connections have ended
        self._offsets: deque[float] = deque(maxlen=_NUM_READINGS)  # of host 0's clock
        # The signal that came to this launcher, and when; None once that is told.
        self._interruption: tuple[int, float] | None = None
        self._interrupted_by = 0  # the first signal that came to this launcher or was heard of
        self._heard: JobOutcome | None = None  # of the signal that ended another launcher
        self._check, self._refused = check, list[JobOutcome]()
        self._is_hurried = False
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
    def show_life(
        store: dist.Store,
        number: int,
        ended: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show the others that the host of this ``number`` lives.

        Host 0 shows also the time, and the hosts whose launchers' connections have ``ended``.
        """
        if number == 0:
            store.set("keeper", json.dumps([clock(), *ended]))
        store.add(f"alive/{number}", 1)

    def interrupt(self, number: int) -> None:
        """Have the ranks of all hosts end by this signal, which came to this launcher."""
        if not self._interrupted_by and not self._is_noticed:
            self._interruption = number, self._clock()
        self._interrupted_by = self._interrupted_by or number

    def hurry(self) -> None:
        """Have the ranks of all hosts end at once."""
        self._is_hurried = True

    def _talk(self) -> None:
        """Show the others that this host lives, and hear of them."""
        next_read = Deadline(0)
        try:
            while not self._is_over.wait(_TALK_SECONDS):
                self.show_life(self._store, self._number, self._ended, self._clock)
                self._tell_interruption()
                if self._refused:
                    self._store.set("failed", "")
                self._hear_of_ends()
                is_new, is_ending = self._num_rounds < 8, self._ended or self._is_noticed
                if not next_read.left() or is_new or is_ending:
                    next_read = Deadline(_READ_SECONDS)  # it is as many answers as there are hosts
                    self._read_signs()
                self._num_rounds += 1
        except (RuntimeError, ValueError, TypeError):  # the store has ended, and so has its host
            self._is_store_gone = True
            self._notify(0)

    def _hear_of_ends(self) -> None:
        """Hear whether the ranks of all hosts are to be ended, or are to be ended at once."""
        if not self._is_noticed:
            if self._lost():
                self._store.set("failed", "")
            if self._store.check(["failed"]):
                self._heard = self._told_interruption()
                number = max(0, self._heard.exit_status - 128) if self._heard else 0
                self._interrupted_by = self._interrupted_by or number
                self._notify(number)
        elif not self._is_hurried and self._store.check(["hurry"]):
            self._is_hurried = True
            os.write(self._notifier, bytes([signal.SIGKILL]))

    def _read_signs(self) -> None:
        keys = [f"alive/{host}" for host in self._hosts]
        keeper, *signs = self._store.multi_get(["keeper", *keys])
        self._signs = [int(sign) for sign in signs]
        at_seconds, *ended = value_in(keeper)
        if self._number:
            self._ended = [int(host) for host in ended]
            # The time was written before it is read, by the length of a round at most: the greatest
            # difference is the nearest.
            self._offsets.append(float(at_seconds) - self._clock())

    def _look(self) -> None:
        """See how long nothing was heard of each host, and end the ranks if it is too long."""
        silences = [_Silence() for _ in self._hosts]
        while not self._is_over.wait(_LOOK_SECONDS):
            if self._number == 0:
                self._ended = [host for host, line in self._lines.items() if has_ended(line)]
            of_store = silences[0].seconds(self._num_rounds)
            self._silent_seconds = [
                of_store if host == 0 else silences[host].seconds(self._signs[host], of_store)
                for host in self._hosts
            ]
            if not self._refused:
                try:
                    self._check()
                except LaunchError as error:
                    found = JobOutcome(1, message=str(error), at_seconds=self._clock())
                    self._refused.append(found)
            if self._lost() or self._refused:
                self._notify(0)

    def _lost(self, patience_seconds: float | None = None) -> list[int]:
        """The other hosts that have been silent for longer, or a while after their connections."""
        patience = self._patience_seconds if patience_seconds is None else patience_seconds
        return [
            host
            for host, seconds in enumerate(self._silent_seconds)
            if seconds > (min(patience, _GONE_SECONDS) if host in self._ended else patience)
            and host != self._number
        ]

    def _notify(self, number: int) -> None:
        with self._lock:
            if not self._is_noticed:
                self._is_noticed = True
                os.write(self._notifier, bytes([number]))

    def settle(self, outcome: JobOutcome, signals: Callable[[], Sequence[int]]) -> JobOutcome:
        """The outcome of the run: the first failure on any host that no other one explains.

        ``outcome`` is that of this host's ranks. ``signals()`` returns those that came to this
        launcher since it was called last. The first ends the ranks of all hosts; Ctrl-C after it
        ends them at once, and this host doesn't wait for them.
        """
        agreed = list[JobOutcome]()

        def agree() -> None:
            with contextlib.suppress(RuntimeError):  # the store has ended
                agreed.append(self._agree(outcome))

        # In a thread, as a request to a store that the network has lost isn't answered for many
        # minutes. Shown by test_store_that_does_not_answer_is_not_waited_for.
        thread = threading.Thread(target=agree, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            for number in signals():
                is_ending = self._interrupted_by or self._is_noticed
                if is_ending and signal.SIGINT in (number, self._interrupted_by):
                    self.hurry()
                self.interrupt(number)
            has_failed = outcome.exit_status or self._interrupted_by or self._is_noticed
            if 0 in self._lost(_SILENT_SECONDS if has_failed else None):
                break
        self._is_over.set()
        if agreed:
            return agreed[0]
        return first_failure([*filter(_is_failure, [outcome]), self._heard or self._loss_of(0)])

    def _agree(self, outcome: JobOutcome) -> JobOutcome:
        self._tell_interruption()
        found = [*filter(_is_failure, [outcome]), *self._refused]
        if outcome.rank is None and outcome.exit_status == 128 + self._interrupted_by:
            found = []  # it is told as the interruption of the host where the signal came first
        if found:
            self._tell(first_failure(found))
        if outcome.suspect is not None:
            self._store.set(f"suspect/{self._number}", self._encoded(outcome.suspect))
        self._store.set(f"done/{self._number}", "")
        if lost := self._wait_for_others():
            found += map(self._loss_of, lost)
            self._tell(first_failure(found))
        self._tell_interruption()
        if (interruption := self._told_interruption()) is not None:
            found.append(interruption)
        found += self._told_as("failure", {*self._hosts} - {self._number})
        if found and all(failure.lost_a_peer for failure in found):
            found += self._told_as("suspect", self._hosts)
        with contextlib.suppress(RuntimeError):  # the store's host has waited long enough
            self._store.add("left", 1)
            if self._number == 0:
                self._leave_last(len(self._hosts) - len(lost))
        # Ranks that have saved were asked to stop: that is no other cause.
        saved = [each for each in found if each.exit_status == START_AGAIN]
        if saved and all(each.rank is None and each.lost_host is None for each in found):
            return saved[0]
        return first_failure(found) if found else outcome

    def close(self) -> None:
        """Close what the notices came through; the outcome is settled."""
        for thread in self._threads:
            thread.join(_LEAVE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.notice)
            os.close(self._notifier)

    def _leave_last(self, num_hosts: int) -> None:
        """Wait until other hosts have left the store, which ends with this host."""
        hasty, patient = Deadline(_HASTY_LEAVE_SECONDS), Deadline(_LEAVE_SECONDS)
        while self._store.add("left", 0) < num_hosts and (
            hasty.left() or (patient.left() and not self._is_hurried)
        ):
            time.sleep(_POLL_SECONDS)

    def _tell(self, failure: JobOutcome) -> None:
        self._store.set(f"failure/{self._number}", self._encoded(failure))
        self._store.set("failed", "")

    def _encoded(self, failure: JobOutcome) -> str:
        at_seconds = failure.at_seconds + self._offset()
        told = failure.exit_status, at_seconds, failure.lost_a_peer, failure.rank
        more = failure.reason, failure.is_of_start, failure.lost_host
        message = failure.message or "the launcher of another host was ended."
        return json.dumps([*told, message[:MOST_WORDS], *more])

    def _decoded(self, told: bytes) -> JobOutcome:
        failure = decoded(told)
        return replace(failure, at_seconds=failure.at_seconds - self._offset())

    def _offset(self) -> float:
        """What to add to this host's clock to have that of host 0, by which causes are ordered."""
        return max(self._offsets, default=0.0)

    def _told_as(self, kind: str, hosts: Collection[int]) -> list[JobOutcome]:
        """What these hosts have told under their keys of this ``kind``."""
        there = [key for host in hosts if self._store.check([key := f"{kind}/{host}"])]
        return [self._decoded(bytes(self._store.get(key))) for key in there]

    def _tell_interruption(self) -> None:
        if self._interruption is not None:
            number, at_seconds = self._interruption
            at_seconds += self._offset()
            tell_interruption(self._store, number, at_seconds, self._number)
            self._interruption = None
        if self._is_hurried:
            self._store.set("hurry", "")

    def _told_interruption(self) -> JobOutcome | None:
        """The outcome if a signal has ended the launcher of a host, and hence all."""
        names = self._names.__getitem__
        return told_interruption(self._store, self._number, names, self._offset())

    def _wait_for_others(self) -> list[int]:
        """Wait until all hosts are done, or some seconds after a failure; return lost ones.

        Hosts that live may run for days.
        """
        done = {host: f"done/{host}" for host in self._hosts}
        deadline, lost = Deadline(math.inf), list[int]()
        while not self._store.check([*done.values()]) and not self._is_hurried and deadline.left():
            if deadline.left() == math.inf and self._store.check(["failed"]):
                deadline = Deadline(_SETTLE_SECONDS)
            has_failed = deadline.left() < math.inf
            lost = self._lost(_SILENT_SECONDS if has_failed else None)
            lost = [host for host in lost if not self._store.check([done[host]])]
            left = [host for host in self._hosts if host not in lost]
            if lost and (not has_failed or self._store.check([done[host] for host in left])):
                return lost
            time.sleep(_POLL_SECONDS)
        # Of several that fail, one may be done later than this.
        return [] if deadline.left() else lost

    def _loss_of(self, host: int) -> JobOutcome:
        seconds = self._silent_seconds[host]
        how = f"it fell silent {max(seconds, 1):.0f} seconds ago, and its ranks weren't done"
        if host == 0 and self._is_store_gone:
            how = "the store that it keeps has ended"
        if host in self._ended:
            how = "the connection of its launcher has ended, and its ranks weren't done"
        return JobOutcome(
            1,
            message=f"host {host} ({self._names[host]}) is lost: {how}. See whether its launcher "
            "was killed or suspended, the machine restarted, or the network cut; then start the "
            "run anew on all hosts.",
            at_seconds=self._clock() - seconds,
            lost_host=host,
            reason=f"host {host} is lost",
        )


def tell_interruption(store: dist.Store, number: int, at_seconds: float, host: int) -> None:
    """Tell all hosts that a signal came to this ``host``, when by the clock of host 0."""
    told = json.dumps([number, at_seconds, host])
    store.compare_set("interrupted", "", told)  # the first one's counts
    store.set("failed", "")


def told_interruption(
    store: dist.Store, number_here: int, name: Callable[[int], str], offset: float = 0.0
) -> JobOutcome | None:
    """The outcome if a signal came to the launcher of a host; None if none did.

    Host 0's clock is by ``offset`` ahead of that of this host, whose number is ``number_here``.
    """
    if not store.check(["interrupted"]):
        return None
    try:
        number, at_seconds, host = value_in(store.get("interrupted"))
        where = "" if host == number_here else f" at host {host} ({name(host)})"
        return JobOutcome(
            128 + int(number) % 128,
            message=f"ended by {signal_name(number)}{where}; no rank is left running.",
            at_seconds=float(at_seconds) - offset,
        )
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
        return JobOutcome(1, message="a host was ended, and told nothing that can be read.")


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


def _is_failure(outcome: JobOutcome) -> bool:
    return outcome.exit_status != 0


def decoded(told: bytes) -> JobOutcome:
    """What a host has told of a failure."""
    try:
        status, at_seconds, lost_a_peer, rank, message, *more = value_in(told)
        reason, is_of_start, lost_host = more or ("", False, None)
        return JobOutcome(
            int(status),
            message=str(message),
            rank=None if rank is None else int(rank),
            at_seconds=float(at_seconds),
            lost_a_peer=bool(lost_a_peer),
            reason=str(reason),
            is_of_start=bool(is_of_start),
            lost_host=None if lost_host is None else int(lost_host),
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        return JobOutcome(1, message="another host failed, and told nothing that can be read.")
