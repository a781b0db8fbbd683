"""Meetings: every rank tells every other what it calls, and waits for them to tell it.

A line is a Unix socket. That one is read tells that the other rank has arrived, that what it
wrote to memory before is to be seen now (on every processor: these are system calls), and, by
its end, that the other rank's process has died.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TypedDict

from lockstep.comm.shm.lines import shut_down
from lockstep.comm.transport import FINGERPRINT_BYTES, Signature, fingerprint
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerLost

# A rank looks this often whether the others have come before it goes to sleep. Being woken
# costs 35 us, a look 0.5 us and one that yields 1 us; 0.2 ms of looking is all that waiting costs.
_LOOKS = 200
# From this look on it yields its core in between: the one that it waits for may be queued for the
# same core, behind it. Where there are more ranks than cores that is so from the start.
_LOOKS_BEFORE_YIELDING = 20

_PLACE = struct.Struct("<q")
_ARRIVAL_BYTES = FINGERPRINT_BYTES + _PLACE.size
# Longer than any note, which is cut to fit.
_MESSAGE_BYTES = 8192

# How long a rank that has found a mismatch waits to hear what the other one called. It is there,
# as it has told that it called something else.
_ACCOUNT_SECONDS = 1.0

# How long a rank waits on when one that has arrived already ends without a word. It may have gone
# on to its own end after this meeting, and then all others will be here in no time.
_LAST_COMER_SECONDS = 0.3

# What poll() takes ends with 24 days.
_LONGEST_SLEEP_SECONDS = 1e6


class Note(TypedDict):
    """What a rank tells the others when it is not just arriving."""

    kind: str  # "called", "left", or the name of an error class
    text: str
    ranks: list[int]


_FAULTS: dict[str, type[PeerLost | CollectiveTimeout | CollectiveMismatch]] = {
    kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, CollectiveMismatch)
}


def fault_told(
    note: Note, peer: int, operation: str
) -> PeerLost | CollectiveTimeout | CollectiveMismatch:
    """The error that ``peer`` tells of."""
    fault = _FAULTS.get(note["kind"], PeerLost)
    return fault(f"{note['text']} (Rank {peer} said so.)", note["ranks"], operation)


class Signals:
    """This rank's lines to the others, for meetings.

    Ranks go by their numbers in the whole run here, since that is how they are spoken of.

    Args:
        rank: Which rank this is.
        lines: A line to each of the others.
        members: All of them, in the order in which the group numbers them.
    """

    def __init__(
        self, rank: int, lines: Mapping[int, socket.socket], members: Sequence[int]
    ) -> None:
        self._rank = rank
        self._lines = dict(lines)
        self._index = {member: index for index, member in enumerate(members)}
        self._sends = [line.send for line in self._lines.values()]
        self._receives = [
            (peer, self._index[peer], line.recv_into) for peer, line in self._lines.items()
        ]
        self._received = bytearray(_MESSAGE_BYTES)
        self._fingerprint = memoryview(self._received)[:FINGERPRINT_BYTES]
        self._places = [0] * len(members)
        # Those who have said why they send nothing more.
        self._explained: dict[int, Note] = {}
        has_core_each = len(os.sched_getaffinity(0)) > len(lines)
        self._yields_from = _LOOKS_BEFORE_YIELDING if has_core_each else 0

    def exchange(self, call: Signature, place: int, timeout: float) -> list[int]:
        """Tell all others ``place``, and return what they tell, once all have called ``call``.

        Raises:
            PeerLost: If a rank is gone.
            CollectiveTimeout: If one doesn't come within ``timeout`` seconds.
            CollectiveMismatch: If one makes another call.
        """
        mine = fingerprint(call)
        arrival = mine + _PLACE.pack(place)
        for send in self._sends:
            try:
                send(arrival)
            except OSError:
                # It is gone. What it left in the line, read below, may tell why.
                continue
        places = self._places.copy()
        places[self._index[self._rank]] = place
        pending: dict[int, socket.socket] = {}
        looks = 0
        for peer, index, receive in self._receives:
            while looks < _LOOKS:
                try:
                    count = receive(self._received, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    looks += 1
                    if looks > self._yields_from:
                        os.sched_yield()
                    continue
                except OSError:
                    count = self._read(peer)
                if count != _ARRIVAL_BYTES or self._fingerprint != mine:
                    self._explain(call, peer, count)
                places[index] = _PLACE.unpack_from(self._received, FINGERPRINT_BYTES)[0]
                break
            else:
                pending[peer] = self._lines[peer]
        if pending:
            self._sleep(call, mine, pending, places, timeout)
        return places

    def _sleep(
        self,
        call: Signature,
        mine: bytes,
        pending: dict[int, socket.socket],
        places: list[int],
        timeout: float,
    ) -> None:
        """Wait without using a core until everyone in ``pending`` has arrived."""
        poll = select.poll()
        peers = {line.fileno(): peer for peer, line in self._lines.items()}
        if -1 in peers:
            raise PeerLost("The group was closed meanwhile.", [self._rank], call.operation)
        for descriptor, peer in peers.items():
            # Of those who have arrived only the end matters: what they send is for later.
            poll.register(descriptor, select.POLLIN if peer in pending else 0)
        dead: list[int] = []
        deadline = time.monotonic() + timeout
        while pending:
            left = deadline - time.monotonic()
            ready = poll.poll(max(0.0, min(left, _LONGEST_SLEEP_SECONDS) * 1000))
            if not ready and left <= 0:
                if dead:
                    self._raise_lost(call, dead)
                self._report_overdue(call, sorted(pending), timeout)
            for descriptor, _ in ready:
                peer = peers[descriptor]
                if peer not in pending:
                    poll.unregister(descriptor)
                    if self._died(call, peer):
                        dead.append(peer)
                        deadline = min(deadline, time.monotonic() + _LAST_COMER_SECONDS)
                    continue
                count = self._read(peer)
                if count < 0:
                    continue
                if count != _ARRIVAL_BYTES or self._fingerprint != mine:
                    self._explain(call, peer, count)
                place = _PLACE.unpack_from(self._received, FINGERPRINT_BYTES)[0]
                places[self._index[peer]] = place
                del pending[peer]
                poll.modify(descriptor, 0)

    def _read(self, peer: int) -> int:
        """Return how many bytes came from ``peer``: -1 for nothing yet, 0 for nothing any more."""
        line = self._lines[peer]
        try:
            try:
                return line.recv_into(self._received, 0, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                # It went without reading everything. The kernel says so once, and before what it
                # had sent is read, which may tell why.
                return line.recv_into(self._received, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return -1
        except OSError:
            return 0

    def _died(self, call: Signature, peer: int) -> bool:
        """Read ``peer``'s line to its end; return whether it ended without a word.

        Raises:
            CollectiveFailed: If ``peer`` tells of what went wrong.
        """
        while (count := self._read(peer)) > 0:
            if count != _ARRIVAL_BYTES:
                note = self._note(count)
                if note["kind"] in _FAULTS:
                    self._raise_what_was_told(call, peer, note)
                # It left, or found a mismatch with one whose call is still to be read here.
                self._explained[peer] = note
        return count == 0 and peer not in self._explained

    def _report_overdue(self, call: Signature, ranks: list[int], timeout: float) -> None:
        text = (
            f"{_named(ranks)} did not come to {call} within the timeout of {timeout:g} s: stopped, "
            "busy with something else, or ended without it. See what it does there."
        )
        self.announce(Note(kind="CollectiveTimeout", text=text, ranks=ranks))
        raise CollectiveTimeout(text, ranks, call.operation)

    def _explain(self, call: Signature, peer: int, count: int) -> None:
        """Raise what it means that ``peer`` has sent something else than that it has arrived."""
        if count == _ARRIVAL_BYTES:
            self._compare_accounts(call, peer)
        if count > 0:
            note = self._note(count)
            if note["kind"] != "left":
                self._raise_what_was_told(call, peer, note)
            self._explained[peer] = note
        # Whoever is gone may have gone because of another one, who is to be named then.
        dead = [other for other in self._lines if self._died(call, other)]
        if dead:
            self._raise_lost(call, dead)
        self._raise_lost(call, [peer], self._explained.get(peer))

    def _raise_lost(self, call: Signature, ranks: list[int], left: Note | None = None) -> None:
        is_gone, it, its = ("are", "them", "Their") if len(ranks) > 1 else ("is", "it", "Its")
        text = f"{_named(ranks)} {is_gone} gone; rank {self._rank} waited for {it} in {call}. "
        if left is not None:
            text += why_it_left(left)
        else:
            text += f"{its} process ended or was killed: what it wrote last tells why."
        self.announce(Note(kind="PeerLost", text=text, ranks=ranks))
        raise PeerLost(text, ranks, call.operation)

    def _raise_what_was_told(self, call: Signature, peer: int, note: Note) -> None:
        if note["kind"] == "called":
            # It found the mismatch first; its arrival in that other call came before this.
            self._raise_mismatch(call, {peer: note["text"]})
        if note["kind"] == CollectiveMismatch.__name__:
            # Another one may compare its call with this rank's, and wait to hear of it.
            self._announce_call(call)
        # Passed on: who hears next that this rank is gone must not take it for the cause.
        self.announce(note)
        raise fault_told(note, peer, call.operation)

    def _compare_accounts(self, call: Signature, peer: int) -> None:
        """Tell what this rank called, hear what ``peer`` did, and raise the difference."""
        self._announce_call(call)
        poll = select.poll()
        poll.register(self._lines[peer], select.POLLIN)
        deadline = time.monotonic() + _ACCOUNT_SECONDS
        account = "something else"
        while (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            count = self._read(peer)
            if count == 0:
                break
            if count > 0 and count != _ARRIVAL_BYTES:
                note = self._note(count)
                account = note["text"] if note["kind"] == "called" else account
                break
        self._raise_mismatch(call, {peer: account}, announced=True)

    def _raise_mismatch(
        self, call: Signature, accounts: Mapping[int, str], announced: bool = False
    ) -> None:
        if not announced:
            self._announce_call(call)
        theirs = "; ".join(f"rank {peer} called {text}" for peer, text in accounts.items())
        raise CollectiveMismatch(
            f"Rank {self._rank} called {call}; {theirs}. All ranks must make the same calls in "
            "the same order: look for a branch that only some of them take.",
            list(accounts),
            call.operation,
        )

    def _announce_call(self, call: Signature) -> None:
        self.announce(Note(kind="called", text=str(call), ranks=[self._rank]))

    def announce(self, note: Note) -> None:
        """Tell every other rank something that isn't an arrival; whoever is gone doesn't hear."""
        message = written(note)
        for line in self._lines.values():
            try:
                line.send(message, socket.MSG_DONTWAIT)
            except OSError:
                continue

    def _note(self, count: int) -> Note:
        note: Note = json.loads(self._received[:count])
        return note

    def interrupt(self) -> None:
        """Make every wait here, in whichever thread, end as if the others had gone."""
        for line in self._lines.values():
            shut_down(line)

    def close(self) -> None:
        """Close the lines."""
        for line in self._lines.values():
            line.close()


def leaving(rank: int) -> Note:
    """What ``rank``, which is this one, tells the others when it leaves."""
    # What has ended, or is ending, the program; Python itself has set it.
    error = getattr(sys, "last_value", None)
    text = "" if error is None else traceback.format_exception_only(error)[0].strip()
    return Note(kind="left", text=text, ranks=[rank])


def why_it_left(note: Note) -> str:
    """What to say of a rank that has told that it leaves."""
    if note["text"]:
        return f"It ended with an exception: {note['text']}"
    return (
        "It left the group in good order: its program ended, or it called destroy_process_group. "
        "Make all ranks take equally many steps, as with the parts of "
        "lockstep.data.epoch_shares(), or put their loops into 'with lockstep.join(model):', and "
        "leave after the last step."
    )


def written(note: Note) -> bytes:
    """What to send for ``note``."""
    # A character takes up to six bytes.
    note["text"] = note["text"][: _MESSAGE_BYTES // 8]
    # Never as long as an arrival, by which they are told apart.
    return json.dumps(note).encode().ljust(_ARRIVAL_BYTES + 1)


def _named(ranks: list[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
