"""Messages between two processes: through a file in memory for each direction, and a socket.

A file takes any number of messages, so a send never waits for the receiver, and two ranks may both
send first and receive then. A byte through the socket tells the receiver that messages have been
added; the first of them brings the file, and the last message there is a fault.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

import torch

from lockstep.comm.failures import loss
from lockstep.comm.messages import HEADER, Mailbox, Message, header_of
from lockstep.comm.shm.barrier import Fault, advice_after, wait_for
from lockstep.comm.shm.memory import (
    bytes_of,
    no_room,
    receive_message,
    release,
    send_message,
    take_room,
)
from lockstep.comm.transport import Transport
from lockstep.deadline import Deadline
from lockstep.errors import CollectiveFailed, CollectiveTimeout, PeerLost, SharedMemoryFull
from lockstep.memory_files import memory_file

_NOTICE = b"\0"
_FAULT_BYTES = 8192
# Messages up to this size are appended in one call, and without a look at limits of memory.
_SMALL_BYTES = 32 * 1024
# Memory is given back when so many bytes have been read from it.
_RELEASED_BYTES = 256 * 1024
_READ_BYTES = 16 * 1024 * 1024
# How soon, and how long, to try again to send a descriptor that the kernel has no room for.
_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.01, 30.0


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
            SharedMemoryFull: If there isn't enough memory.

        After an error the file is of no more use: the reader may have read the message or not.
        """
        start, num_bytes = self._position, len(header) + len(contents)
        parts = [memoryview(header), contents]
        if num_bytes > _SMALL_BYTES:
            take_room(num_bytes)
        else:
            parts = [memoryview(header + contents)]
        try:
            for part in parts:
                while part:
                    written = os.pwrite(self.descriptor, part, self._position)
                    self._position += written
                    part = part[written:]
        except BaseException as error:
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
        end = self._position + HEADER.size + num_bytes
        if os.fstat(self.descriptor).st_size < end:
            return None
        contents = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        rest = bytes_of(contents)
        while rest:
            count = os.preadv(self.descriptor, [rest[:_READ_BYTES]], end - len(rest))
            if not count:  # the sender was interrupted
                return None
            rest = rest[count:]
            self._release(end - len(rest))
        self._position = end
        self._release(end)
        return Message(source, tag, dtype.rstrip(b"\0").decode(), contents)

    def _release(self, end: int) -> None:
        if end - self._released > _RELEASED_BYTES:
            release(self.descriptor, self._released, end - self._released)
            self._released = end


class SocketMailbox(Mailbox):
    """The mailbox of a rank whose peers are processes of this host, by rank at ``sockets``.

    When a message doesn't come, ``transport`` is broken off.
    """

    def __init__(self, transport: Transport, sockets: Mapping[int, socket.socket]) -> None:
        super().__init__(transport.rank, transport.members)
        self._transport = transport
        self._ended: dict[int, bool] = {}
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
                # The first notice fails if the peer is gone. It may take the message before the
                # second, and leave.
                self._notify(destination)
                try:
                    self._file_for(destination).append(header_of(tensor, tag), bytes_of(tensor))
                except BaseException:  # the next message brings another file
                    if (file := self._outgoing.pop(destination, None)) is not None:
                        os.close(file.descriptor)
                    raise
                with suppress(OSError):
                    self._notify(destination)
        except OSError as error:
            # A peer that is gone may have sent a fault before.
            while destination not in self._ended and self._read(destination):
                pass
            raise self._lost(destination, "send") from error

    def _notify(self, peer: int) -> None:
        # Before the file that the first notice brings, there is nothing to read. If the socket is
        # full, the receiver has notices to read yet.
        if peer in self._outgoing:
            with suppress(BlockingIOError):
                self._sockets[peer].send(_NOTICE, socket.MSG_DONTWAIT)

    def _file_for(self, peer: int) -> _MessageFile:
        if peer not in self._outgoing:
            try:
                descriptor = memory_file("lockstep")
            except OSError as error:
                raise no_room(HEADER.size, error) from error
            try:
                self._send_file(peer, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._outgoing[peer] = _MessageFile(descriptor)
        return self._outgoing[peer]

    def _send_file(self, peer: int, descriptor: int) -> None:
        limit = Deadline(_LAST_RETRY_SECONDS)
        while True:
            try:
                return send_message(self._sockets[peer], _NOTICE, [descriptor])
            except OSError as error:
                # More descriptors are in sockets than a user may have open: this rank takes its.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                if not limit.left():
                    raise no_room(HEADER.size, error) from error
            self._poll(_RETRY_SECONDS)

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
            self._take_in(peer)
            if descriptors:
                if (file := self._incoming.pop(peer, None)) is not None:
                    os.close(file.descriptor)
                self._incoming[peer] = _MessageFile(descriptors[0])
                self._take_in(peer)
            elif peer not in self._incoming and notice == _NOTICE:
                error = SharedMemoryFull(
                    "A message came, but not the memory that it is in: too many files are open. "
                    "Raise the limit (ulimit -n)."
                )
                # No later message of this peer can be received either.
                rank = self._members[self._rank]
                text = (
                    f"Rank {rank} could not take a message of rank {self._members[peer]}: {error}"
                )
                self._transport.break_off(PeerLost(text, [rank], "recv"))
                raise error
            if notice == _NOTICE:
                return True
            if notice:
                self._faults[peer] = Fault.decode(notice)
            # A rank that leaves in good order is missed only where it is the one to send.
            self._ended.setdefault(peer, bool(notice) and self._faults[peer].kind == "left")
            return False

    def _take_in(self, peer: int) -> None:
        file = self._incoming.get(peer)
        while file is not None and (message := file.read(peer)) is not None:
            self._deliver(message)

    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        if (error := self._transport.error()) is not None:
            return error
        lost, fault = self._members[rank], self._faults.get(rank)
        if fault is not None and fault.kind != "left":
            return self._transport.break_off(fault.error(operation, lost))
        advice = advice_after(fault, [lost])
        if fault is not None:
            advice += " What it has to send, it must send before."
        error = loss([lost], self._members[self._rank], operation, advice)
        return self._transport.break_off(error)

    def _overdue(self, error: CollectiveTimeout) -> CollectiveFailed:
        # The message may come yet, and would be taken for the answer to the next recv.
        return self._transport.break_off(error)

    def end(self, fault: Fault) -> None:
        """Tell all peers why this rank sends nothing more."""
        for connection in self._sockets.values():
            with suppress(OSError):
                # Room for it, however many notices the peer has yet to read.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
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
