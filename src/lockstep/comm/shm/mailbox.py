"""Messages between two processes, through a socket for each pair of ranks.

The contents of a small message go through the socket; those of a large one are put into memory
of their own, whose descriptor goes. What a socket can't take now is sent by a thread as soon as
it can: a send never waits for the receiver, so two ranks may both send first and receive then.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from lockstep.comm.failures import Deadline
from lockstep.comm.messages import HEADER, Mailbox, Message, header_of
from lockstep.comm.shm.barrier import Fault
from lockstep.comm.shm.memory import Segment, map_segment
from lockstep.comm.shm.sockets import receive_message, send_message
from lockstep.errors import CollectiveFailed, CollectiveTimeout, SharedMemoryFull

# Half a socket buffer; below it a copy is cheaper than a segment.
_INLINE_BYTES = 32 * 1024
# In place of a dtype: the contents are a fault, the last message of a rank.
_FAULT = b"fault"
# How long to wait before sending again a descriptor that the kernel has no room for.
_RETRY_SECONDS = 0.01
# The most that poll() takes is 24 days.
_LONGEST_WAIT_SECONDS = 1e6


class _Outgoing:
    """A message to be sent: its header, with its contents or the memory that holds them."""

    def __init__(self, tensor: torch.Tensor, tag: int) -> None:
        contents = tensor.view(torch.uint8)
        self._segment: Segment | None = None
        self._message = header_of(tensor, tag)
        if contents.numel() <= _INLINE_BYTES:
            self._message += bytes(contents.numpy())
        else:
            self._segment, memory = Segment.create(contents.numel())
            memory.copy_(contents)

    def send(self, connection: socket.socket) -> bool:
        """Send it if the kernel takes it now; return whether it did."""
        descriptors = [] if self._segment is None else [self._segment.descriptor]
        try:
            send_message(connection, self._message, descriptors, socket.MSG_DONTWAIT)
        except OSError as error:
            # The socket is full, or more descriptors are in sockets than a user may have open.
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                return False
            raise
        self.close()
        return True

    def close(self) -> None:
        """Let go of the memory, which the receiver still has."""
        if self._segment is not None:
            self._segment.close()


class SocketMailbox(Mailbox):
    """The mailbox of a rank whose peers are processes of this host.

    ``lost`` makes the error to raise when a rank has ended, from that rank, the operation, and the
    fault that was its last message, if any. ``break_off`` breaks the group because of an error, and
    returns the error to raise.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        sockets: Mapping[int, socket.socket],
        lost: Callable[[int, str, Fault | None], CollectiveFailed],
        break_off: Callable[[CollectiveFailed], CollectiveFailed],
    ) -> None:
        super().__init__(rank, members)
        self._sockets = dict(sockets)
        self._make_loss = lost
        self._break_off = break_off
        self._faults: dict[int, Fault] = {}
        # Held from reading a message until it is delivered: messages of a peer stay in order.
        self._reading = threading.Lock()
        # Held while sockets are written to, or closed. Reentrant: a group that is dropped is
        # closed by whichever thread collects it.
        self._sending = threading.RLock()
        self._queues: dict[int, deque[_Outgoing]] = {peer: deque() for peer in sockets}
        self._sender: threading.Thread | None = None

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; it is copied, and may be written to again."""
        if destination == self._rank:
            contents = tensor.view(torch.uint8).clone()
            self._deliver(Message(self._rank, tag, str(tensor.dtype), contents))
            return
        outgoing = _Outgoing(tensor, tag)
        try:
            with self._sending:
                queue = self._queues[destination]
                if not queue and outgoing.send(self._sockets[destination]):
                    return
                queue.append(outgoing)
                if self._sender is None:
                    self._sender = threading.Thread(
                        target=self._send_queued, name="lockstep-messages", daemon=True
                    )
                    self._sender.start()
        except OSError as error:
            outgoing.close()
            # A peer that is gone may have sent a fault before.
            while destination not in self._ended and self._read(destination):
                pass
            raise self._lost(destination, "send") from error

    def _send_queued(self) -> None:
        """Send the queued messages as the sockets take them."""
        while True:
            poll = select.poll()
            with self._sending:
                busy = {self._sockets[peer].fileno(): peer for peer, q in self._queues.items() if q}
                if not busy or self._is_closed:
                    self._sender = None
                    return
            for descriptor in busy:
                poll.register(descriptor, select.POLLOUT)
            ready = poll.poll(100)
            with self._sending:
                moved = [self._send_queued_to(busy[descriptor]) for descriptor, _ in ready]
            if ready and not any(moved):
                time.sleep(_RETRY_SECONDS)

    def _send_queued_to(self, peer: int) -> bool:
        """Return whether the socket to ``peer`` has taken a message."""
        queue, moved = self._queues[peer], False
        try:
            while queue and queue[0].send(self._sockets[peer]):
                queue.popleft()
                moved = True
        except OSError:
            # The peer is gone, as whoever waits for it learns there.
            self._drop_queued(peer)
        return moved

    def _drop_queued(self, peer: int) -> None:
        queue = self._queues[peer]
        while queue:
            queue.popleft().close()

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        peers: dict[int, int] = {}
        for peer, connection in self._sockets.items():
            descriptor = connection.fileno()
            if descriptor >= 0 and peer not in self._ended:
                poll.register(descriptor, select.POLLIN)
                peers[descriptor] = peer
        for descriptor, _ in poll.poll(min(seconds, _LONGEST_WAIT_SECONDS) * 1000):
            self._read(peers[descriptor])

    def _read(self, peer: int) -> bool:
        """Deliver the next message of ``peer``; return False if there is none, or no more."""
        with self._reading:
            try:
                message, descriptors = receive_message(
                    self._sockets[peer], HEADER.size + _INLINE_BYTES, 1, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return False
            except OSError:
                message, descriptors = b"", []
            if not message:
                self._ended.setdefault(peer, False)
                return False
            tag, num_bytes, padded = HEADER.unpack_from(message)
            dtype = padded.rstrip(b"\0")
            if dtype == _FAULT:
                fault = self._faults[peer] = Fault.decode(message[HEADER.size :])
                # A rank that leaves in good order is missed only where it is the one to send.
                self._ended[peer] = fault.kind == "left"
                return False
            contents, error = torch.empty(0, dtype=torch.uint8, device="cpu"), None
            if 0 < num_bytes <= _INLINE_BYTES:
                contents = torch.frombuffer(bytearray(message[HEADER.size :]), dtype=torch.uint8)
            elif num_bytes:
                try:
                    contents = _map(descriptors)[:num_bytes]
                except SharedMemoryFull as full:
                    error = full
            self._deliver(Message(peer, tag, dtype.decode(), contents, error))
            return True

    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        return self._make_loss(rank, operation, self._faults.get(rank))

    def _overdue(self, error: CollectiveTimeout) -> CollectiveFailed:
        # The message may come yet, and would be taken for the answer to the next recv.
        return self._break_off(error)

    def flush(self) -> None:
        """Give queued messages a moment to be sent."""
        deadline = Deadline(1.0)
        while (sender := self._sender) is not None and deadline.left():
            if sender is threading.current_thread():
                return
            sender.join(0.05)

    def end(self, fault: Fault) -> None:
        """Tell all peers why this rank sends nothing more; queued messages are dropped."""
        contents = fault.encode()
        message = HEADER.pack(0, len(contents), _FAULT) + contents
        with self._sending:
            for peer, connection in self._sockets.items():
                self._drop_queued(peer)
                with suppress(OSError):
                    connection.send(message, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Send and receive nothing more; queued messages are dropped."""
        with self._sending:
            self._is_closed = True
            for peer in self._queues:
                self._drop_queued(peer)

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have held it."""
        self._sending = threading.RLock()


def _map(descriptors: list[int]) -> torch.Tensor:
    if not descriptors:
        raise SharedMemoryFull(
            "A message came, but not the memory that it is in: too many files are open. Raise "
            "the limit (ulimit -n), or send fewer large tensors at a time."
        )
    return map_segment(descriptors[0])
