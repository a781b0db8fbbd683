"""Messages between two processes: through a file in memory for each direction, and a socket.

A file takes any number of messages, so a send never waits for the receiver, and two ranks may both
send first and receive then. A byte through the socket tells the receiver that messages have been
added; the first of them brings the file, and the last message there is a fault.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

import torch

from lockstep.comm.messages import HEADER, Mailbox, Message, header_of
from lockstep.comm.shm.barrier import FAILURES, Fault, loss_in_words
from lockstep.comm.shm.memory import bytes_of, no_room, release, take_room
from lockstep.comm.shm.sockets import receive_message, send_message, wait_for
from lockstep.comm.transport import Transport
from lockstep.errors import CollectiveFailed, CollectiveTimeout, PeerLost, SharedMemoryFull

_NOTICE = b"\0"
_FAULT_BYTES = 8192
# After how many bytes that were read their memory is given back.
_RELEASED_BYTES = 256 * 1024


class _MessageFile:
    """A file in memory that one rank appends messages to, and another reads them from, once.

    Positions only grow, so the two need not agree on any: what was read is a hole in the file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._position = self._released = 0

    def append(self, header: bytes, contents: memoryview) -> None:
        """Append a message.

        Raises:
            SharedMemoryFull: If there isn't enough memory; then nothing is appended.
        """
        start, num_bytes = self._position, len(header) + len(contents)
        take_room(num_bytes)
        try:
            for part in (memoryview(header), contents):
                while part:
                    written = os.pwrite(self.descriptor, part, self._position)
                    self._position += written
                    part = part[written:]
        except BaseException as error:
            self._position = start
            os.ftruncate(self.descriptor, start)
            if isinstance(error, OSError):
                raise no_room(num_bytes, error) from error
            raise

    def read(self, source: int) -> Message | None:
        """Return the next message, which is from ``source``; None if none is complete."""
        header = os.pread(self.descriptor, HEADER.size, self._position)
        if len(header) < HEADER.size:
            return None
        tag, num_bytes, dtype = HEADER.unpack(header)
        contents = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        end, rest = self._position + HEADER.size + num_bytes, bytes_of(contents)
        while rest:
            count = os.preadv(self.descriptor, [rest], end - len(rest))
            if not count:
                return None
            rest = rest[count:]
        self._position = end
        if end - self._released > _RELEASED_BYTES:
            release(self.descriptor, self._released, end - self._released)
            self._released = end
        return Message(source, tag, dtype.rstrip(b"\0").decode(), contents)


class SocketMailbox(Mailbox):
    """The mailbox of a rank whose peers are processes of this host.

    Args:
        transport: The ranks; it is broken off when a message doesn't come.
        sockets: By rank, the sockets to the peers.
    """

    def __init__(self, transport: Transport, sockets: Mapping[int, socket.socket]) -> None:
        super().__init__(transport.rank, transport.members)
        self._transport = transport
        self._sockets = dict(sockets)
        self._faults: dict[int, Fault] = {}
        self._outgoing: dict[int, _MessageFile] = {}
        self._incoming: dict[int, _MessageFile] = {}
        # Held while files are written, read or closed: messages stay in order. Reentrant: a group
        # that is dropped is closed by whichever thread collects it.
        self._lock = threading.RLock()

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Send a flat tensor; it is copied, and may be written to again."""
        if destination == self._rank:
            contents = tensor.view(torch.uint8).clone()
            self._deliver(Message(self._rank, tag, str(tensor.dtype), contents))
            return
        try:
            with self._lock:
                self._file_for(destination).append(header_of(tensor, tag), bytes_of(tensor))
                # If the socket is full, the receiver has notices to read yet.
                with suppress(BlockingIOError):
                    self._sockets[destination].send(_NOTICE, socket.MSG_DONTWAIT)
        except OSError as error:
            # A peer that is gone may have sent a fault before.
            while destination not in self._ended and self._read(destination):
                pass
            raise self._lost(destination, "send") from error

    def _file_for(self, peer: int) -> _MessageFile:
        if peer not in self._outgoing:
            try:
                descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC)
            except OSError as error:
                raise no_room(HEADER.size, error) from error
            try:
                send_message(self._sockets[peer], _NOTICE, [descriptor])
            except BaseException:
                os.close(descriptor)
                raise
            self._outgoing[peer] = _MessageFile(descriptor)
        return self._outgoing[peer]

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        peers: dict[int, int] = {}
        for peer, connection in self._sockets.items():
            descriptor = connection.fileno()
            if descriptor >= 0 and peer not in self._ended:
                poll.register(descriptor, select.POLLIN)
                peers[descriptor] = peer
        for descriptor, _ in wait_for(poll, seconds):
            self._read(peers[descriptor])

    def _read(self, peer: int) -> bool:
        """Deliver messages of ``peer``; return False if it has sent no notice, or the last one."""
        with self._lock:
            try:
                notice, descriptors = receive_message(
                    self._sockets[peer], _FAULT_BYTES, 1, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return False
            except OSError:
                notice, descriptors = b"", []
            if descriptors:
                self._incoming[peer] = _MessageFile(descriptors[0])
            file = self._incoming.get(peer)
            if file is None and notice == _NOTICE:
                raise SharedMemoryFull(
                    "A message came, but not the memory that it is in: too many files are open. "
                    "Raise the limit (ulimit -n)."
                )
            while file is not None and (message := file.read(peer)) is not None:
                self._deliver(message)
            if notice == _NOTICE:
                return True
            if notice:
                self._faults[peer] = Fault.decode(notice)
            # A rank that leaves in good order is missed only where it is the one to send.
            self._ended.setdefault(peer, bool(notice) and self._faults[peer].kind == "left")
            return False

    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        if (error := self._transport.error()) is not None:
            return error
        lost, fault = self._members[rank], self._faults.get(rank)
        if fault is not None and fault.kind in FAILURES:
            return self._transport.break_off(fault.error(operation, lost))
        text = loss_in_words([lost], self._members[self._rank], operation, fault)
        if fault is not None:
            text += " What it has to send, it must send before."
        return self._transport.break_off(PeerLost(text, [lost], operation))

    def _overdue(self, error: CollectiveTimeout) -> CollectiveFailed:
        # The message may come yet, and would be taken for the answer to the next recv.
        return self._transport.break_off(error)

    def end(self, fault: Fault) -> None:
        """Tell all peers why this rank sends nothing more."""
        for connection in self._sockets.values():
            with suppress(OSError):
                connection.send(fault.encode(), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Send and receive nothing more."""
        with self._lock:
            self._is_closed = True
            for file in (*self._outgoing.values(), *self._incoming.values()):
                os.close(file.descriptor)
            self._outgoing.clear()
            self._incoming.clear()

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have held it."""
        self._lock = threading.RLock()
