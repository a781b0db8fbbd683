"""Unix sockets that carry messages and, with them, descriptors.

Not ``socket.send_fds`` and ``socket.recv_fds``: in Python 3.11 they drop the flags they are given.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence


def send_message(
    line: socket.socket, message: bytes, descriptors: Sequence[int] = (), flags: int = 0
) -> None:
    """Send one message and copies of ``descriptors``."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    line.sendmsg([message], [rights] if descriptors else [], flags)


def receive_message(
    line: socket.socket, num_bytes: int, num_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return one message, and the descriptors that came with it, which the caller must close."""
    descriptors = array.array("i")
    room = socket.CMSG_LEN(num_descriptors * descriptors.itemsize)
    # Closed on exec, so that a program that is started doesn't keep the line, or memory, alive.
    flags |= socket.MSG_CMSG_CLOEXEC
    try:
        message, ancillary, _, _ = line.recvmsg(num_bytes, room, flags)
    except ConnectionResetError:
        # The other side went without reading everything. The kernel says so once, and before
        # what had been sent is read. Shown by test_what_was_sent_is_read_though_the_sender_went.
        message, ancillary, _, _ = line.recvmsg(num_bytes, room, flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, descriptors.tolist()


def shut_down(line: socket.socket) -> None:
    """End a line for both sides, whichever process or thread waits there."""
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
