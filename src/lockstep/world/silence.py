"""Stores that fall silent: their connections end, once and for all.

A process that keeps a store may be suspended, or the network cut. Torch's clients then wait for as
long as TCP tries, or for ever. A limit of the socket's own would be worse: the client would go on
with the connection, and take an answer that comes late for that to its next request.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from lockstep.comm import NoAnswer, answered
from lockstep.deadline import Deadline
from lockstep.world.network import connections

# Longer than networks are out of order that come back, and TCP waits a quarter of an hour.
SILENCE_SECONDS = 60
_TICK_SECONDS = 1.0
# In <linux/tcp.h>'s struct tcp_info, milliseconds since data was last sent, and received.
_SENT, _RECEIVED, _INFO_BYTES = struct.Struct("44xI"), struct.Struct("52xI"), 56
_log = logging.getLogger("lockstep")


def end_on_silence(address: str, port: int, seconds: float = SILENCE_SECONDS) -> None:
    """End this process's connections to the store there if it answers nothing for so long.

    Requests then fail, and so do all later ones. One that may wait, for a key that another rank is
    to set, waits on as long as the store answers others: a request for which nothing has come in
    half of the time makes a thread ask on a connection of its own.
    """
    for number, connection in connections(port):
        pause = max(1, round(seconds / 4))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, pause),
            (socket.TCP_KEEPINTVL, pause),
            (socket.TCP_USER_TIMEOUT, round(seconds * 1000)),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        inode = os.fstat(connection.fileno()).st_ino
        watch = _Watch(number, inode, address, port, seconds)
        threading.Thread(target=watch.run, name="lockstep-silence", daemon=True).start()


class _Watch:
    """Watches a connection, of which nothing is kept: it ends when its client is dropped."""

    def __init__(self, number: int, inode: int, address: str, port: int, seconds: float) -> None:
        self._number, self._inode = number, inode
        self._address, self._port, self._seconds = address, port, seconds

    def run(self) -> None:
        """Look at it again and again, until it is closed or has to be ended."""
        tick, next_question = min(_TICK_SECONDS, self._seconds / 8), Deadline(0)
        while (waits := self._waits_seconds()) is not None:
            if waits >= self._seconds / 2 and not next_question.left():
                if not self._answers():
                    self._end()
                    return
                next_question = Deadline(self._seconds / 2)
            time.sleep(tick)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket | None]:
        """A duplicate of the connection; None if that is closed."""
        with suppress(OSError):
            with socket.socket(fileno=os.dup(self._number)) as connection:
                is_same = os.fstat(connection.fileno()).st_ino == self._inode
                yield connection if is_same else None
            return
        yield None

    def _waits_seconds(self) -> float | None:
        """How long a request has been without an answer, 0 if none is; None if it is closed."""
        with self._connection() as connection:
            if connection is None:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        ((sent,), (received,)) = _SENT.unpack_from(info), _RECEIVED.unpack_from(info)
        return sent / 1000 if sent <= received else 0.0

    def _answers(self) -> bool:
        """Whether the store answers on another connection."""
        limit = timedelta(seconds=2 * self._seconds)

        def ask() -> None:
            client = partial(dist.TCPStore, self._address, self._port, is_master=False)
            client(wait_for_workers=False, timeout=limit).check([""])

        try:
            answered(ask, self._seconds / 2)
        except NoAnswer:
            return False
        except (OSError, RuntimeError):  # it is gone, which the connection tells by itself
            pass
        return True

    def _end(self) -> None:
        _log.warning(
            "The store at %s, port %d, where the ranks meet, has answered nothing for %g s, so "
            "that this process asks it no more. Was the process that keeps it suspended, or the "
            "network cut?",
            self._address,
            self._port,
            self._seconds,
        )
        # That of the question, too, for whose answer a thread waits.
        for _, connection in connections(self._port):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
