"""How the processes of one host connect, and let in nobody else.

Each rank listens on a Unix socket whose random name it puts into the store, and rank 0 adds a
secret. Whoever connects must be a process of the same user (the kernel says so) and know the
secret. The names are in Linux's abstract namespace: they vanish with the socket, and no file is
left whatever happens.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.deadline import Deadline
from lockstep.comm.shm.memory import map_segment
from lockstep.comm.shm.sockets import is_same_user, receive_message, send_message, shut_down
from lockstep.errors import RendezvousFailed

_SECRET_BYTES = 32
_INTRODUCTION = struct.Struct(f"<{_SECRET_BYTES}sq")  # secret, rank
# The most connections that are open and not introduced yet; beyond that the oldest is closed.
_MAX_STRANGERS = 64
_RETRY_SECONDS = 0.01
# How often a rank that waits checks whether another rank has given up.
_CHECK_SECONDS = 0.5
# The most that poll() takes is 24 days.
_LONGEST_WAIT_SECONDS = 1e6
# The key under which a rank that can't connect says why.
_GIVEN_UP = "given up"


class Peer(NamedTuple):
    """The connections to another rank.

    Attributes:
        barrier: The socket of the barrier.
        mailbox: The socket of point-to-point messages.
        memory: The socket that descriptors of shared memory are sent through.
        slots: The peer's slots, as bytes.
    """

    barrier: socket.socket
    mailbox: socket.socket
    memory: socket.socket
    slots: torch.Tensor

    def end(self) -> None:
        """End barrier and messages for both sides, whichever threads wait for them."""
        shut_down(self.barrier)
        shut_down(self.mailbox)

    def close(self) -> None:
        """Close the sockets."""
        for connection in (self.barrier, self.mailbox, self.memory):
            connection.close()


class _Handshake:
    """One rank's part in connecting the ranks of a group; see :func:`connect`."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, slots: int, deadline: Deadline
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._slots = slots
        self._deadline = deadline
        self._secret = b""

    def run(self, peers: dict[int, Peer]) -> None:
        """Connect to all other ranks, and put them into ``peers`` one by one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"lockstep-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(self._size + _MAX_STRANGERS)
            listener.setblocking(False)
            if self._rank == 0:
                self._store.set("secret", secrets.token_hex(_SECRET_BYTES))
            self._store.set(f"address/{self._rank}", name)
            self._secret = bytes.fromhex(self._read("secret"))
            # To the lower ranks first, then from the higher ones: rank 0 only accepts, so there
            # is always a rank that doesn't wait for another.
            for other in range(self._rank):
                peers[other] = self._call(other, self._read(f"address/{other}"))
            self._accept_all(listener, peers)

    def _read(self, key: str) -> str:
        # Not store.wait(): it would not see that another rank has given up, and torch's TCPStore
        # prints warnings if it is interrupted.
        pause = _RETRY_SECONDS / 32
        while not self._store.check([key]):
            self._check_others()
            if not self._deadline.left():
                raise TimeoutError("they didn't come")
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS)
        return bytes(self._store.get(key)).decode()

    def _check_others(self) -> None:
        if self._store.check([_GIVEN_UP]):
            reason = bytes(self._store.get(_GIVEN_UP)).decode()
            raise RendezvousFailed(f"No rank can join: {reason}")

    def _call(self, other: int, name: str) -> Peer:
        """Connect to a lower rank, which listens as ``name``."""
        with ExitStack() as ours:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(connection)
            self._reach(connection, other, name)
            if not is_same_user(connection):
                raise RendezvousFailed(f"Rank {other} is a process of another user.")
            mailbox, its_mailbox = map(ours.enter_context, _socketpair())
            memory, its_memory = map(ours.enter_context, _socketpair())
            self._introduce(connection, its_mailbox.fileno(), its_memory.fileno())
            its_mailbox.close()
            its_memory.close()
            message, descriptors = receive_message(connection, _INTRODUCTION.size, 3)
            if self._identify(message, descriptors, 1) != other:
                _close(descriptors)
                # The rank that closed it may be about to tell why.
                grace = Deadline(_CHECK_SECONDS)
                while grace.left():
                    self._check_others()
                    time.sleep(_RETRY_SECONDS)
                raise RendezvousFailed(
                    f"Rank {other} has closed the line that rank {self._rank} reached it by."
                    if not message
                    else f"What answers for rank {other} doesn't know the secret."
                )
            connection.settimeout(None)
            peer = Peer(connection, mailbox, memory, map_segment(descriptors[0]))
            ours.pop_all()
            return peer

    def _reach(self, connection: socket.socket, other: int, name: str) -> None:
        while True:
            left = self._deadline.left()
            connection.settimeout(min(max(left, 0.001), _LONGEST_WAIT_SECONDS))
            try:
                return connection.connect(f"\0{name}")
            except BlockingIOError:
                # The listener's queue is full.
                if not left:
                    raise
                time.sleep(_RETRY_SECONDS)
            except ConnectionRefusedError as error:
                raise RendezvousFailed(
                    f"Rank {other} can't be reached from rank {self._rank}: it is on another "
                    "host, in another network namespace, or gone. Ranks that share memory are on "
                    "one host; use lockstep.init() or the backend 'gloo' for several."
                ) from error

    def _accept_all(self, listener: socket.socket, peers: dict[int, Peer]) -> None:
        """Let in the higher ranks, and turn away whoever is none."""
        # All of them are waited for at once: one that is silent must not keep the others waiting.
        strangers: dict[int, socket.socket] = {}
        try:
            while len(peers) < self._size - 1:
                if not self._deadline.left():
                    raise TimeoutError("they didn't come")
                while len(strangers) > _MAX_STRANGERS:
                    strangers.pop(next(iter(strangers))).close()
                poll = select.poll()
                for descriptor in (listener.fileno(), *strangers):
                    poll.register(descriptor, select.POLLIN)
                ready = poll.poll(min(_CHECK_SECONDS, self._deadline.left()) * 1000)
                if not ready:
                    self._check_others()
                for descriptor, _ in ready:
                    if descriptor != listener.fileno():
                        self._hear(strangers.pop(descriptor), peers)
                        continue
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        if is_same_user(connection):
                            strangers[connection.fileno()] = connection
                        else:
                            connection.close()
        finally:
            for connection in strangers.values():
                connection.close()

    def _hear(self, connection: socket.socket, peers: dict[int, Peer]) -> None:
        """Let in who has sent something, if it is a higher rank that isn't here yet."""
        descriptors: list[int] = []
        try:
            message, descriptors = receive_message(connection, _INTRODUCTION.size + 1, 3)
            other = self._identify(message, descriptors, 3)
            if other is None or other in peers or not self._rank < other < self._size:
                raise ConnectionRefusedError
            slots = map_segment(descriptors.pop(0))
            connection.settimeout(None)
            self._introduce(connection)
        except BaseException as error:
            _close(descriptors)
            connection.close()
            if isinstance(error, ConnectionError):
                return
            raise
        mailbox, memory = (socket.socket(fileno=end) for end in descriptors)
        peers[other] = Peer(connection, mailbox, memory, slots)

    def _introduce(self, connection: socket.socket, *ends: int) -> None:
        send_message(connection, _INTRODUCTION.pack(self._secret, self._rank), [self._slots, *ends])

    def _identify(self, message: bytes, descriptors: list[int], num_descriptors: int) -> int | None:
        """Return the rank that sent the introduction ``message``, or None for a stranger."""
        if len(message) != _INTRODUCTION.size:
            return None
        secret, other = _INTRODUCTION.unpack(message)
        if not hmac.compare_digest(secret, self._secret):
            return None
        if len(descriptors) != num_descriptors:
            raise OSError(
                errno.EMFILE, f"Too many open files to take those of rank {other} (ulimit -n)"
            )
        return int(other)


def connect(store: dist.Store, rank: int, size: int, slots: int, timeout: float) -> dict[int, Peer]:
    """Connect to every other rank of the group; every one of them must call it.

    Args:
        store: A store that is this group's alone.
        rank: This rank.
        size: The number of ranks.
        slots: The descriptor of this rank's slots, which all others are sent.
        timeout: Seconds until the last rank must have come.

    Raises:
        RendezvousFailed: If not all ranks come, or one can't be reached.
    """
    peers: dict[int, Peer] = {}
    try:
        _Handshake(store, rank, size, slots, Deadline(timeout)).run(peers)
    except BaseException as error:
        give_up(store, rank, error)
        for peer in peers.values():
            peer.close()
        if isinstance(error, RendezvousFailed) or not isinstance(error, OSError | RuntimeError):
            raise
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise RendezvousFailed(
                f"Rank {rank} of {size} can't share memory with the others: {error}. Raise the "
                "limit on open files (ulimit -n)."
            ) from error
        absent = sorted(set(range(size)) - set(peers) - {rank})
        raise RendezvousFailed(
            f"Rank {rank} of {size} waited up to {timeout:g} s for rank"
            f"{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} to share memory "
            f"with it: {error}. See whether they started, and whether all ran as one user."
        ) from error
    return peers


def give_up(store: dist.Store, rank: int, error: BaseException) -> None:
    """Tell the others that ``rank`` won't connect, and why, so that they don't wait for it."""
    with suppress(RuntimeError):
        if not store.check([_GIVEN_UP]):
            store.set(_GIVEN_UP, f"rank {rank} could not join: {error}")


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
