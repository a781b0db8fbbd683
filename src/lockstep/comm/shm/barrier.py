"""A barrier over sockets: every rank tells every other its call, and waits for their calls.

Receiving a message means that the peer has arrived and that its earlier writes to memory are
visible (on every processor: these are system calls); end-of-file, that its process has died.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from lockstep.comm.failures import loss
from lockstep.comm.transport import (
    FAILURES,
    FINGERPRINT_BYTES,
    MISMATCH_SECONDS,
    Failure,
    Signature,
    encoded,
)
from lockstep.deadline import LOOK_SECONDS, Deadline
from lockstep.entries import value_in
from lockstep.errors import CollectiveFailed, LockstepError, PeerLost

# A rank polls this often before it sleeps. Being woken costs 35 us, a poll 0.5 us and one that
# yields the core 1 us, so polling costs at most 0.2 ms.
_POLLS = 200
# From this poll on it yields its core in between: the peer may be queued for the same core. If
# there are more ranks than cores, that is so from the start.
_POLLS_BEFORE_YIELDING = 20

_ADDRESS = struct.Struct("<q")
# A message is an arrival (the fingerprint of a call, an address, the call in words) or a fault,
# with this in place of a fingerprint.
_NO_CALL = bytes(FINGERPRINT_BYTES)
_HEADER_BYTES = FINGERPRINT_BYTES + _ADDRESS.size
# Longer than any call in words, and any fault, which are cut to fit.
_MESSAGE_BYTES = 8192

# How long a rank waits on when a peer that had arrived dies silently. The peer may have gone on
# to the end of its program after this barrier, and then all others arrive very soon.
_LAST_COMER_SECONDS = 0.3

_KINDS: dict[str, type[Failure]] = {kind.__name__: kind for kind in FAILURES}


class Fault(NamedTuple):
    """The reason for which a rank takes no further part, as it tells the others."""

    kind: str  # "left", or the name of an error class
    text: str  # the exception that ends the program, or the error's text
    ranks: Sequence[int]

    @classmethod
    def of(cls, error: CollectiveFailed) -> Fault:
        """Return the fault of a rank that raises ``error``, without the peer that reported it."""
        text = re.sub(r" \(Rank \d+ said so\.\)$", "", str(error))
        return cls(type(error).__name__, text, error.ranks)

    @classmethod
    def decode(cls, encoded: bytes | bytearray) -> Fault:
        """Return the fault that :meth:`encode` has made ``encoded`` of."""
        try:
            kind, text, ranks = value_in(encoded)
            return cls(str(kind), str(text), [*map(int, ranks)])
        except (ValueError, TypeError, OverflowError):
            return cls("left", "A rank told of a fault, in words that can't be read.", ())

    def encode(self) -> bytes:
        """Return the fault as JSON, with the text cut to fit into a message."""
        # A character takes up to six bytes.
        return json.dumps(self._replace(text=self.text[: _MESSAGE_BYTES // 8])).encode()

    def error(self, operation: str, peer: int | None = None) -> Failure:
        """Return the error to raise in ``operation``, where ``peer`` has reported the fault."""
        source = "" if peer is None else f" (Rank {peer} said so.)"
        kind = _KINDS.get(self.kind, PeerLost)
        return kind(f"{self.text}{source}", tuple(self.ranks), operation)


class SocketBarrier:
    """This rank's end of a group's barrier: a socket to each peer.

    Ranks are numbered as in the whole run; ``members`` are all of them, in the group's order.
    """

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], members: Sequence[int]
    ) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._nowhere: dict[int, int | None] = dict.fromkeys(members)
        self._received = bytearray(_MESSAGE_BYTES)
        self._fingerprint = memoryview(self._received)[:FINGERPRINT_BYTES]
        # The faults of peers that have left.
        self._farewells: dict[int, Fault] = {}
        has_core_each = len(os.sched_getaffinity(0)) > len(sockets)
        self._yields_from = _POLLS_BEFORE_YIELDING if has_core_each else 0

    def exchange(
        self, signature: Signature, address: int, deadline: Deadline, others: dict[int, object]
    ) -> list[int]:
        """Tell all peers ``address``, and return every rank's, once all have made a call.

        The calls that aren't this one are put into ``others``, in words.

        Raises:
            PeerLost: If a rank is gone.
            CollectiveTimeout: If one doesn't arrive before the deadline.
        """
        mine, words = encoded(signature)
        arrival = mine + _ADDRESS.pack(address) + words
        for connection in self._sockets.values():
            try:
                connection.send(arrival)
            except OSError:
                # The peer is gone. Its last message, read below, may tell why.
                continue
        addresses = self._nowhere.copy()
        addresses[self._rank] = address
        polls = 0
        for peer, connection in self._sockets.items():
            while polls < _POLLS:
                try:
                    count = connection.recv_into(self._received, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    polls += 1
                    if polls > self._yields_from:
                        os.sched_yield()
                    continue
                except OSError:
                    count = self._read(peer)
                if count <= 0 or self._fingerprint != mine:
                    others[peer] = self._other_call(signature, peer, count)
                addresses[peer] = _ADDRESS.unpack_from(self._received, FINGERPRINT_BYTES)[0]
                break
        if None in addresses.values():
            self._sleep(signature, addresses, deadline, others)
        return list(addresses.values())  # type: ignore[arg-type]

    def _sleep(
        self,
        signature: Signature,
        addresses: dict[int, int | None],
        deadline: Deadline,
        others: dict[int, object],
    ) -> None:
        """Wait, without using a core, until ``addresses`` has that of every peer."""
        poll = select.poll()
        peers = {connection.fileno(): peer for peer, connection in self._sockets.items()}
        if -1 in peers:
            raise PeerLost("The group was closed meanwhile.", [self._rank], signature.operation)
        for descriptor, peer in peers.items():
            # Of peers that have arrived only end-of-file matters: their messages are for later.
            poll.register(descriptor, select.POLLIN if addresses[peer] is None else 0)
        dead: list[int] = []
        mine, sooner = encoded(signature)[0], Deadline(math.inf)
        deadline.restart()
        while absent := [member for member, address in addresses.items() if address is None]:
            if others and not signature.is_guarded(others.values()):
                sooner.bring_forward(Deadline(MISMATCH_SECONDS))
            left = min(deadline.left(), sooner.left())
            ready = wait_for(poll, min(left, LOOK_SECONDS))
            if not ready and not left:
                if dead:
                    raise self._loss(signature, dead)
                causes = "stopped, busy with something else"
                raise signature.overdue(sorted(absent), deadline.seconds, causes)
            for descriptor, _ in ready:
                peer = peers[descriptor]
                if addresses[peer] is not None:
                    poll.unregister(descriptor)
                    if self._died(signature, peer):
                        dead.append(peer)
                        sooner.bring_forward(Deadline(_LAST_COMER_SECONDS))
                    continue
                count = self._read(peer)
                if count < 0:
                    continue
                if count == 0 or self._fingerprint != mine:
                    others[peer] = self._other_call(signature, peer, count)
                addresses[peer] = _ADDRESS.unpack_from(self._received, FINGERPRINT_BYTES)[0]
                poll.modify(descriptor, 0)

    def _read(self, peer: int) -> int:
        """Return how many bytes came from ``peer``: -1 for none yet, 0 at end-of-file."""
        for _ in range(2):
            try:
                return self._sockets[peer].recv_into(self._received, 0, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                # The peer closed its end without reading everything. The kernel reports that
                # once, before the peer's last messages, which may tell why.
                continue
            except BlockingIOError:
                return -1
            except OSError:
                break
        return 0

    def _died(self, signature: Signature, peer: int) -> bool:
        """Read ``peer``'s socket to its end; return whether that came without a farewell."""
        while (count := self._read(peer)) > 0:
            if self._fingerprint == _NO_CALL:
                self._hear(signature, peer, count)
        return count == 0 and peer not in self._farewells

    def _hear(self, signature: Signature, peer: int, count: int) -> None:
        """Raise the failure that ``peer`` reports, or note that it has left."""
        fault = Fault.decode(self._received[_HEADER_BYTES:count])
        if fault.kind != "left":
            raise fault.error(signature.operation, peer)
        self._farewells[peer] = fault

    def _other_call(self, signature: Signature, peer: int, count: int) -> str:
        """Return the call, in words, that ``peer`` made instead; raise if it made none."""
        if count > 0 and self._fingerprint != _NO_CALL:
            return self._received[_HEADER_BYTES:count].decode(errors="replace")
        if count > 0:
            self._hear(signature, peer, count)
        # The peer may have ended because of another one that died, which is to be named then.
        dead = [other for other in self._sockets if self._died(signature, other)]
        if dead:
            raise self._loss(signature, dead)
        raise self._loss(signature, [peer], self._farewells.get(peer))

    def _loss(self, signature: Signature, ranks: list[int], left: Fault | None = None) -> PeerLost:
        operation, advice = signature.operation, advice_after(left, ranks)
        return loss(ranks, self._rank, operation, advice, call=str(signature))

    def announce(self, fault: Fault) -> None:
        """Send ``fault`` to every peer that isn't gone."""
        message = bytes(_HEADER_BYTES) + fault.encode()
        for connection in self._sockets.values():
            with suppress(OSError):
                connection.send(message, socket.MSG_DONTWAIT)


def farewell(rank: int) -> Fault:
    """Return the fault of this rank, ``rank``, when it leaves in good order."""
    # The exception that ends the program; Python itself has set it.
    error = getattr(sys, "last_value", None)
    lines = [] if error is None else traceback.format_exception_only(error)
    # With what was noted of it first, unless that only repeats what can be read with help.
    lines = lines[: 1 if isinstance(error, LockstepError) else 2]
    return Fault("left", " ".join(line.strip() for line in lines), [rank])


def advice_after(left: Fault | None, ranks: Sequence[int]) -> str:
    """Return the reason why ``ranks`` are gone, for an error; ``left``: their farewell."""
    if left is None:
        its = "Their" if len(ranks) > 1 else "Its"
        return f"{its} process ended or was killed: what it wrote last tells why."
    if left.text:
        return f"It ended with an exception: {left.text}"
    return (
        "It left the group in good order: its program ended, or it called destroy_process_group. "
        "Make all ranks take equally many steps, as with lockstep.DataLoader, or put their loops "
        "into 'with lockstep.join(model):', and leave after the last step. If it stopped by a "
        "break, return or sys.exit() of its own, let all ranks decide together when to stop: if "
        "lockstep.reduce(stop, 'max'): break."
    )


def wait_for(poll: select.poll, seconds: float) -> list[tuple[int, int]]:
    """Return the descriptors in ``poll`` with an event, waiting up to ``seconds`` for one."""
    # The most that poll() takes is 24 days.
    return poll.poll(min(seconds, 1e6) * 1000)
