"""Unix sockets that carry messages and, with them, file descriptors.

Not ``socket.send_fds`` and ``socket.recv_fds``: in Python 3.11 they drop the flags they are given.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def send_message(
    connection: socket.socket, message: bytes, descriptors: Sequence[int] = (), flags: int = 0
) -> None:
    """Send one message and copies of ``descriptors``."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([message], [rights] if descriptors else [], flags)


def receive_message(
    connection: socket.socket, num_bytes: int, num_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return one message, and the descriptors that came with it, which the caller must close.

    The kernel drops descriptors for which this process has no room.
    """
    descriptors = array.array("i")
    ancillary_bytes = socket.CMSG_LEN(num_descriptors * descriptors.itemsize)
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
    return message, descriptors.tolist()


def shut_down(connection: socket.socket) -> None:
    """End a connection for both sides, whichever process or thread waits on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this process's user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())
