"""Messages between single ranks, through a line for each pair of them.

A small one goes through the line itself; a large one is put into memory of its own, and its
descriptor goes. What a line can't take now is sent by a thread as soon as it can: a send never
waits for the receiver, so two ranks may both send first and receive then.
"""

from __future__ import annotations

import errno
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
from lockstep.comm.shm.signals import Note, written
from lockstep.errors import CollectiveFailed, SharedMemoryFull

# Half of what a line holds by default, and less than what copying once more would cost.
_INLINE_BYTES = 32 * 1024
_HEAD_BYTES = 256
# What a head says in place of a dtype when a note follows, the last thing that a rank sends.
_NOTE = "note"
# How long to wait before trying again what the kernel has no room for.
_RETRY_SECONDS = 0.01


class _Parcel:
    """A message on its way: its head, and its contents or the memory that holds them."""

    def __init__(self, tensor: torch.Tensor, tag: int) -> None:
        contents = tensor.view(torch.uint8)
        self._segment: Segment | None = None
        self._message = _head(tag, str(tensor.dtype), contents.numel())
        if contents.numel() <= _INLINE_BYTES:
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
        except OSError as error:
            # More descriptors are on their way than a user may have open.
            if error.errno == errno.ETOOMANYREFS:
                return False
            raise
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
        members: What the group's ranks are called in the whole run.
        lines: A line to each of the others.
        lost: Makes the error to raise when a rank is gone, from that rank, the operation, and
            what it said last, if it said something.
        break_off: Ends the group because of an error, and returns what to raise.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        lines: Mapping[int, socket.socket],
        lost: Callable[[int, str, Note | None], CollectiveFailed],
        break_off: Callable[[CollectiveFailed], CollectiveFailed],
    ) -> None:
        super().__init__(rank, members)
        self._lines = dict(lines)
        self._lost = lost
        self._break_off = break_off
        # Held while lines are read, so that letters of one sender stay in order.
        self._reading = threading.Lock()
        self._held: list[Letter] = []
        self._gone: dict[int, Note | None] = {}
        # Held while lines are written to, or closed. Reentrant: a group that nobody has any more
        # is closed by whichever thread comes to collect it.
        self._outgoing = threading.RLock()
        self._waiting: dict[int, deque[_Parcel]] = {peer: deque() for peer in lines}
        self._sender: threading.Thread | None = None
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
        try:
            with self._outgoing:
                queue = self._waiting[destination]
                if not queue and parcel.put(self._lines[destination]):
                    return
                queue.append(parcel)
                if self._sender is None:
                    self._sender = threading.Thread(
                        target=self._send_waiting, name="lockstep-letters", daemon=True
                    )
                    self._sender.start()
        except OSError as error:
            parcel.drop()
            note = self._last_words(destination)
            raise self._lost(destination, "send", note) from error

    def _send_waiting(self) -> None:
        """Send what the lines didn't take at first, then end."""
        while True:
            poll = select.poll()
            with self._outgoing:
                busy = {peer for peer, queue in self._waiting.items() if queue}
                if not busy or self._is_closed:
                    self._sender = None
                    return
                peers = {self._lines[peer].fileno(): peer for peer in busy}
            for descriptor in peers:
                poll.register(descriptor, select.POLLOUT)
            ready = poll.poll(100)
            with self._outgoing:
                moved = [self._put_waiting(peers[descriptor]) for descriptor, _ in ready]
            if ready and not any(moved):
                time.sleep(_RETRY_SECONDS)

    def _put_waiting(self, peer: int) -> bool:
        """Send what the line to ``peer`` takes now; return whether that was anything."""
        queue, moved = self._waiting[peer], False
        try:
            while queue and queue[0].put(self._lines[peer]):
                queue.popleft()
                moved = True
        except OSError:
            # It is gone, which whoever waits for it learns there.
            self._drop_waiting(peer)
        return moved

    def _drop_waiting(self, peer: int) -> None:
        queue = self._waiting[peer]
        while queue:
            queue.popleft().drop()

    def _sources(self, expected: Expected) -> Sequence[int]:
        if expected.source is None:
            return sorted(self._lines)
        return [expected.source] if expected.source != self._rank else []

    def _overdue(self, expected: Expected, seconds: float) -> CollectiveFailed:
        # What was to come may come yet, and would be taken for the answer to the next recv.
        return self._break_off(super()._overdue(expected, seconds))

    def _look(self, sources: Sequence[int], seconds: float) -> list[Letter]:
        if not sources:  # from this rank itself, of which no line tells
            seconds = min(seconds, _RETRY_SECONDS)
        deadline = time.monotonic() + seconds
        poll = select.poll()
        live: dict[int, int] = {}
        for peer, line in self._lines.items():
            descriptor = line.fileno()
            if descriptor >= 0 and peer not in self._gone:
                poll.register(descriptor, select.POLLIN)
                live[descriptor] = peer
        if self._held or self._failed(sources) is not None:
            deadline = 0.0
        ready = poll.poll(max(0.0, min(deadline - time.monotonic(), 1e6) * 1000))
        with self._reading:
            letters, self._held = self._held, []
            for descriptor, _ in ready:
                letter = self._open(live[descriptor])
                if letter is not None:
                    letters.append(letter)
        if not letters:
            self._check_sources(sources)
        return letters

    def _failed(self, sources: Sequence[int]) -> int | None:
        """One of ``sources`` for which there is no point in waiting any more."""
        if self._is_closed:
            return self._rank
        gone = [peer for peer in sources if peer in self._gone]
        # One of several may have left in good order, and another one send.
        for peer in gone:
            note = self._gone[peer]
            if note is None or note["kind"] != "left":
                return peer
        return gone[0] if gone and len(gone) == len(sources) else None

    def _check_sources(self, sources: Sequence[int]) -> None:
        failed = self._failed(sources)
        if failed is not None:
            raise self._lost(failed, "recv", self._gone.get(failed))

    def _last_words(self, peer: int) -> Note | None:
        """What a rank that is gone has said last; letters that come before are kept."""
        with self._reading:
            while peer not in self._gone and (letter := self._open(peer)) is not None:
                self._held.append(letter)
        return self._gone.get(peer)

    def _open(self, peer: int) -> Letter | None:
        try:
            message, descriptors = receive_message(
                self._lines[peer], _HEAD_BYTES + _INLINE_BYTES, 1, socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return None
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._gone.setdefault(peer, None)
            return None
        head = json.loads(message[:_HEAD_BYTES])
        tag, dtype, num_bytes = head["tag"], head["dtype"], head["bytes"]
        if dtype == _NOTE:
            self._gone[peer] = json.loads(message[_HEAD_BYTES:])
            return None
        contents = torch.empty(0, dtype=torch.uint8, device="cpu")
        error = None
        if 0 < num_bytes <= _INLINE_BYTES:
            contents = torch.frombuffer(bytearray(message[_HEAD_BYTES:]), dtype=torch.uint8)
        elif num_bytes:
            try:
                contents = _mapped(descriptors)[:num_bytes]
            except SharedMemoryFull as full:
                error = full
        return Letter(peer, tag, dtype, contents, error)

    def flush(self) -> None:
        """Give what is still to be sent a moment to leave."""
        deadline = time.monotonic() + 1.0
        while (sender := self._sender) is not None and time.monotonic() < deadline:
            if sender is threading.current_thread():
                return
            sender.join(0.05)

    def part(self, note: Note) -> None:
        """Tell everyone why this rank sends nothing more, and end the lines."""
        words = written(note)
        message = _head(0, _NOTE, len(words)) + words
        with self._outgoing:
            for peer, line in self._lines.items():
                self._drop_waiting(peer)
                try:
                    line.send(message, socket.MSG_DONTWAIT)
                except OSError:
                    continue
        self.interrupt()

    def interrupt(self) -> None:
        """Make every wait here end as if the others had gone."""
        for line in self._lines.values():
            shut_down(line)

    def close(self) -> None:
        """Close the lines; what is still to be sent is dropped."""
        with self._outgoing:
            self._is_closed = True
            for peer, line in self._lines.items():
                line.close()
                self._drop_waiting(peer)

    def forget(self) -> None:
        """As :meth:`close`, in a forked child, where other threads' locks are never released."""
        self._outgoing = threading.RLock()
        self.close()


def _head(tag: int, dtype: str, num_bytes: int) -> bytes:
    return json.dumps({"tag": tag, "dtype": dtype, "bytes": num_bytes}).encode().ljust(_HEAD_BYTES)


def _mapped(descriptors: list[int]) -> torch.Tensor:
    if not descriptors:
        # The kernel drops those that there is no room for.
        raise SharedMemoryFull(
            "A message came, but not the memory that it is in: too many files are open. Raise "
            "the limit (ulimit -n), or send fewer large tensors at a time."
        )
    return map_segment(descriptors[0])
