"""Unix sockets that carry messages and, with them, file descriptors.

Not ``socket.send_fds`` and ``socket.recv_fds``: in Python 3.11 they drop the flags they are given.
"""

from __future__ import annotations

import array
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def send_message(
    connection: socket.socket,
    message: bytes,
    descriptors: Sequence[int] = (),
    flags: int = 0,
    address: str | None = None,
) -> None:
    """Send one message and copies of ``descriptors``, to ``address`` if there is no connection."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([message], [rights] if descriptors else [], flags, address)


def receive_message(
    connection: socket.socket, num_bytes: int, num_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return one message, and the descriptors that came with it, which the caller must close.

    The kernel drops descriptors for which this process has no room.
    """
    message, descriptors, _ = receive_from(connection, num_bytes, num_descriptors, flags)
    return message, descriptors


def receive_from(
    connection: socket.socket, num_bytes: int, num_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """As :func:`receive_message`; also return the sender's user, if SO_PASSCRED is set, or -1."""
    descriptors, user = array.array("i"), -1
    ancillary_bytes = socket.CMSG_SPACE(num_descriptors * descriptors.itemsize)
    ancillary_bytes += socket.CMSG_SPACE(_CREDENTIALS.size)
    # Closed on exec, so that a program that is started keeps neither socket nor memory alive.
    flags |= socket.MSG_CMSG_CLOEXEC
    try:
        message, ancillary, _, _ = connection.recvmsg(num_bytes, ancillary_bytes, flags)
    except ConnectionResetError:
        # The peer closed its end without reading everything. The kernel reports that once, before
        # what the peer had sent. Shown by test_what_was_sent_is_read_though_the_sender_went.
        message, ancillary, _, _ = connection.recvmsg(num_bytes, ancillary_bytes, flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, user, _ = _CREDENTIALS.unpack(data)
    return message, descriptors.tolist(), user


def wait_for(poll: select.poll, seconds: float) -> list[tuple[int, int]]:
    """Return the descriptors in ``poll`` with an event, waiting up to ``seconds`` for one."""
    # The most that poll() takes is 24 days.
    return poll.poll(min(seconds, 1e6) * 1000)


def shut_down(connection: socket.socket) -> None:
    """End a connection for both sides, whichever process or thread waits on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
