"""Messages between single ranks, through a line for each pair of them.

A small one goes through the line itself; a large one is put into memory of its own, and its
descriptor goes. What a line can't take now is sent by a thread as soon as it can: a send never
waits for the receiver, so two ranks may both send first and receive then.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from lockstep.comm.mail import Expected, Letter, Mailbox
from lockstep.comm.shm.lines import receive_message, send_message, shut_down
from lockstep.comm.shm.memory import Segment, map_segment
from lockstep.errors import CollectiveFailed, CollectiveTimeout

# Half of what a line holds by default, and less than what copying once more would cost.
_INLINE_BYTES = 32 * 1024
_HEAD_BYTES = 256


class _Parcel:
    """A message on its way: its head, and its contents or the memory that holds them."""

    def __init__(self, tensor: torch.Tensor, tag: int) -> None:
        contents = tensor.view(torch.uint8)
        self._segment: Segment | None = None
        inline = contents.numel() <= _INLINE_BYTES
        head = {"tag": tag, "dtype": str(tensor.dtype), "bytes": contents.numel()}
        self._message = json.dumps(head).encode().ljust(_HEAD_BYTES)
        if inline:
            self._message += bytes(contents.numpy())
        else:
            self._segment, memory = Segment.create(contents.numel())
            memory.copy_(contents)

    def put(self, line: socket.socket) -> bool:
        """Send it if the line takes it now."""
        descriptors = [] if self._segment is None else [self._segment.descriptor]
        try:
            send_message(line, self._message, descriptors, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """Let go of its memory, which whoever got it still has."""
        if self._segment is not None:
            self._segment.close()


class Letters(Mailbox):
    """The mailbox of a rank whose peers are processes of this host.

    Args:
        rank: Which rank this is.
        lines: A line to each of the others.
        lost: Makes the error to raise when a rank is gone.
    """

    def __init__(
        self,
        rank: int,
        lines: Mapping[int, socket.socket],
        lost: Callable[[int, str], CollectiveFailed],
    ) -> None:
        super().__init__()
        self._rank = rank
        self._lines = dict(lines)
        self._lost = lost
        self._gone: set[int] = set()
        self._outgoing = threading.Condition()
        self._waiting: dict[int, deque[_Parcel]] = {peer: deque() for peer in lines}
        self._sender: threading.Thread | None = None
        self._to_self: list[Letter] = []
        self._is_closed = False

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; it is copied, and may be written to again."""
        if destination == self._rank:
            contents = tensor.view(torch.uint8).clone()
            with self._changed:
                self._sort(Letter(self._rank, tag, str(tensor.dtype), contents))
                self._changed.notify_all()
            return
        parcel = _Parcel(tensor, tag)
        with self._outgoing:
            try:
                if not self._waiting[destination] and parcel.put(self._lines[destination]):
                    return
            except OSError as error:
                parcel.drop()
                raise self._lost(destination, f"send to rank {destination}") from error
            self._waiting[destination].append(parcel)
            if self._sender is None:
                self._sender = threading.Thread(
                    target=self._send_waiting, name="lockstep-letters", daemon=True
                )
                self._sender.start()

    def _send_waiting(self) -> None:
        """Send what the lines didn't take at first, then end."""
        while True:
            with self._outgoing:
                busy = {self._lines[peer]: peer for peer, queue in self._waiting.items() if queue}
                if not busy or self._is_closed:
                    self._sender = None
                    return
            _, writable, _ = select.select([], list(busy), [], 0.1)
            with self._outgoing:
                for line in writable:
                    queue = self._waiting[busy[line]]
                    try:
                        while queue and queue[0].put(line):
                            queue.popleft()
                    except OSError:
                        # It is gone, which whoever waits for it learns there.
                        while queue:
                            queue.popleft().drop()

    def _sources(self, expected: Expected) -> Sequence[int]:
        if expected.source is None:
            return sorted(self._lines)
        return [expected.source] if expected.source != self._rank else []

    def _overdue(self, expected: Expected, seconds: float) -> Exception:
        sources = list(self._sources(expected))
        return CollectiveTimeout(
            f"Nothing came to rank {self._rank} within {seconds:g} s in {expected}. See what the "
            "sender does, and whether it sends with this tag.",
            sources,
            "recv",
        )

    def _look(self, sources: Sequence[int], seconds: float) -> list[Letter]:
        if self._is_closed:
            raise self._lost(self._rank, "recv")
        live = {line: peer for peer, line in self._lines.items() if peer not in self._gone}
        gone = [peer for peer in sources if peer in self._gone]
        ready: list[socket.socket] = []
        if not gone or len(gone) < len(sources):
            ready, _, _ = select.select(list(live), [], [], seconds)
        letters = []
        for line in ready:
            letter = self._open(live[line], line)
            if letter is not None:
                letters.append(letter)
        if not letters and sources and all(peer in self._gone for peer in sources):
            raise self._lost(sources[0], "recv")
        return letters

    def _open(self, peer: int, line: socket.socket) -> Letter | None:
        try:
            message, descriptors = receive_message(
                line, _HEAD_BYTES + _INLINE_BYTES, 1, socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return None
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._gone.add(peer)
            return None
        head = json.loads(message[:_HEAD_BYTES])
        if descriptors:
            contents = map_segment(descriptors[0])[: head["bytes"]]
        elif head["bytes"]:
            contents = torch.frombuffer(bytearray(message[_HEAD_BYTES:]), dtype=torch.uint8)
        else:
            contents = torch.empty(0, dtype=torch.uint8)
        return Letter(peer, head["tag"], head["dtype"], contents)

    def flush(self) -> None:
        """Give what is still to be sent a moment to leave."""
        deadline = time.monotonic() + 1.0
        while (sender := self._sender) is not None and time.monotonic() < deadline:
            sender.join(0.05)

    def interrupt(self) -> None:
        """Make every wait here end as if the others had gone."""
        for line in self._lines.values():
            shut_down(line)

    def close(self) -> None:
        """Close the lines; what is still to be sent is dropped."""
        self._is_closed = True
        for line in self._lines.values():
            line.close()
        for queue in self._waiting.values():
            while queue:
                queue.popleft().drop()
