"""How the processes of one host meet, and let in nobody else.

Each rank listens on a Unix socket whose name it draws and tells the others through the store,
together with a secret that is this group's alone. Whoever connects must be a process of the same
user (the kernel says so) and know the secret. Names are in Linux's abstract namespace: they
vanish with the socket, and no file is left whatever happens.
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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from lockstep.comm.shm.lines import receive_message, send_message
from lockstep.errors import RendezvousFailed

_SECRET_BYTES = 32
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_INTRODUCTION = struct.Struct(f"<{_SECRET_BYTES}sqq")  # secret, rank, pid
# Whoever doesn't introduce itself this soon after connecting isn't one of us.
_INTRODUCTION_SECONDS = 5.0
# So many may be connected and not yet introduced; of more, the first are turned away.
_MAX_STRANGERS = 64
_RETRY_SECONDS = 0.01
# How often who waits looks whether another rank has given up.
_LOOK_SECONDS = 0.5
# The note of a rank that could not join.
_GIVEN_UP = "given up"


class Peer(NamedTuple):
    """The lines to another rank.

    Attributes:
        pid: Its process.
        signals: For meetings: who has called what, and what went wrong.
        letters: For messages from one rank to another.
        memory: For the descriptors of memory to share.
        slots: The descriptor of its slots.
    """

    pid: int
    signals: socket.socket
    letters: socket.socket
    memory: socket.socket
    slots: int

    def close(self) -> None:
        """Close all of them."""
        for line in (self.signals, self.letters, self.memory):
            line.close()
        os.close(self.slots)


class _Door:
    """Where this rank meets the others.

    Args:
        rank: Which of the ranks this is.
        size: How many there are.
        secret: What only they know.
        slots: The descriptor of this rank's slots, which all are to get.
        deadline: When the last one must have come.
        check: Raises if another rank has given up.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        secret: bytes,
        slots: int,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._rank = rank
        self._size = size
        self._secret = secret
        self._slots = slots
        self._deadline = deadline

    def call_on(self, other: int, name: str) -> Peer:
        """Connect to rank ``other``, which listens as ``name``."""
        opened = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
        line = opened[0]
        try:
            self._reach(line, other, name)
            if not _is_same_user(line):
                raise RendezvousFailed(f"Rank {other} is a process of another user.")
            theirs = []
            for _ in range(2):
                mine, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                opened.append(mine)
                theirs.append(given)
            try:
                self._introduce(line, *(given.fileno() for given in theirs))
            finally:
                for given in theirs:
                    given.close()
            message, descriptors = receive_message(line, _INTRODUCTION.size, 3)
            found = self._who(message, descriptors, 1)
            if found is None or found[0] != other:
                _close(descriptors)
                self._give_others_time_to_say_why()
                raise RendezvousFailed(
                    f"Rank {other} has closed the line that rank {self._rank} reached it by."
                    if not message
                    else f"What answers for rank {other} doesn't know the secret."
                )
            line.settimeout(None)
            _, letters, memory = opened
            return Peer(found[1], line, letters, memory, descriptors[0])
        except BaseException:
            for each in opened:
                each.close()
            raise

    def _give_others_time_to_say_why(self) -> None:
        until = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < until:
            self._check()
            time.sleep(_RETRY_SECONDS)

    def _reach(self, line: socket.socket, other: int, name: str) -> None:
        while True:
            line.settimeout(_left(self._deadline))
            try:
                line.connect(f"\0{name}")
            except BlockingIOError:
                # As many as there is room for have connected, and it hasn't looked at them yet.
                if time.monotonic() > self._deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
            except ConnectionRefusedError as error:
                raise RendezvousFailed(
                    f"Rank {other} can't be reached from rank {self._rank}: it is on another "
                    "host, in another network namespace, or gone. Ranks that share memory are on "
                    "one host; use lockstep.init() or the backend 'gloo' for several."
                ) from error
            else:
                return

    def answer(self, listener: socket.socket, peers: dict[int, Peer]) -> None:
        """Let in those who call, until all are in ``peers``; turn away whoever isn't a rank."""
        # A stranger that connects and says nothing must not keep the others waiting.
        strangers: dict[int, tuple[socket.socket, float]] = {}
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        listener.setblocking(False)

        def dismiss(descriptor: int) -> socket.socket:
            poll.unregister(descriptor)
            return strangers.pop(descriptor)[0]

        try:
            while len(peers) < self._size - 1:
                now = time.monotonic()
                if now > self._deadline:
                    raise TimeoutError("they didn't come")
                for descriptor, (_, since) in list(strangers.items()):
                    if now - since > _INTRODUCTION_SECONDS or len(strangers) > _MAX_STRANGERS:
                        dismiss(descriptor).close()
                ready = poll.poll(min(_LOOK_SECONDS, _left(self._deadline)) * 1000)
                if not ready:
                    self._check()
                for descriptor, _ in ready:
                    if descriptor != listener.fileno():
                        found = self._hear(dismiss(descriptor), peers)
                        if found is not None:
                            peers[found[0]] = found[1]
                        continue
                    try:
                        line, _ = listener.accept()
                    except (BlockingIOError, ConnectionAbortedError):
                        continue
                    if _is_same_user(line):
                        line.setblocking(False)
                        strangers[line.fileno()] = line, now
                        poll.register(line, select.POLLIN)
                    else:
                        line.close()
        finally:
            for line, _ in strangers.values():
                line.close()

    def _hear(self, line: socket.socket, peers: dict[int, Peer]) -> tuple[int, Peer] | None:
        """Let in who has said something, if it is a rank that isn't here yet."""
        descriptors: list[int] = []
        try:
            message, descriptors = receive_message(line, _INTRODUCTION.size + 1, 3)
            found = self._who(message, descriptors, 3)
            if found is None or found[0] in peers or not self._rank < found[0] < self._size:
                raise ConnectionRefusedError
            line.settimeout(None)
            self._introduce(line)
        except ConnectionError:
            _close(descriptors)
            line.close()
            return None
        except BaseException:
            _close(descriptors)
            line.close()
            raise
        slots, *ends = descriptors
        letters, memory = (socket.socket(fileno=end) for end in ends)
        return found[0], Peer(found[1], line, letters, memory, slots)

    def _introduce(self, line: socket.socket, *ends: int) -> None:
        words = _INTRODUCTION.pack(self._secret, self._rank, os.getpid())
        send_message(line, words, [self._slots, *ends])

    def _who(
        self, message: bytes, descriptors: list[int], num_descriptors: int
    ) -> tuple[int, int] | None:
        """Return the rank and the process of who sent ``message``, or None for a stranger."""
        if len(message) != _INTRODUCTION.size:
            return None
        secret, other, pid = _INTRODUCTION.unpack(message)
        if not hmac.compare_digest(secret, self._secret):
            return None
        if len(descriptors) != num_descriptors:
            # The kernel drops those that there is no room for.
            raise OSError(
                errno.EMFILE, f"Too many open files to take those of rank {other} (ulimit -n)"
            )
        return other, pid


def join(store: dist.Store, rank: int, size: int, slots: int, timeout: float) -> dict[int, Peer]:
    """Connect to every other rank of the group; every one of them must call it.

    Args:
        store: Where the ranks of this group, and nobody else, leave notes.
        rank: Which of them this is.
        size: How many there are.
        slots: The descriptor of this rank's slots, which all are to get.
        timeout: Seconds until the last one must have come.

    Raises:
        RendezvousFailed: If they don't all come, or one can't be reached.
    """
    deadline = time.monotonic() + timeout
    peers: dict[int, Peer] = {}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"lockstep-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(size + _MAX_STRANGERS)
            if rank == 0:
                store.set("secret", secrets.token_hex(_SECRET_BYTES))
            store.set(f"address/{rank}", name)
            secret = bytes.fromhex(_read(store, "secret", deadline))
            door = _Door(rank, size, secret, slots, deadline, partial(_check_others, store))
            # Towards the lower ranks first, then from the higher ones: rank 0 only answers, so
            # there is always one who doesn't wait for another.
            for other in range(rank):
                peers[other] = door.call_on(other, _read(store, f"address/{other}", deadline))
            door.answer(listener, peers)
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


def _read(store: dist.Store, key: str, deadline: float) -> str:
    # Not store.wait(): it would not see that another rank has given up, and torch's TCPStore
    # prints warnings if it is interrupted.
    pause = _RETRY_SECONDS / 32
    while not store.check([key]):
        _check_others(store)
        if time.monotonic() > deadline:
            raise TimeoutError("they didn't come")
        time.sleep(pause)
        pause = min(2 * pause, _RETRY_SECONDS)
    return bytes(store.get(key)).decode()


def give_up(store: dist.Store, rank: int, error: BaseException) -> None:
    """Tell the others that ``rank`` won't join, and why, so that they don't wait for it."""
    with suppress(RuntimeError):
        if not store.check([_GIVEN_UP]):
            store.set(_GIVEN_UP, f"rank {rank} could not join: {error}")


def _check_others(store: dist.Store) -> None:
    if store.check([_GIVEN_UP]):
        raise RendezvousFailed(f"No rank can join: {bytes(store.get(_GIVEN_UP)).decode()}")


def _left(deadline: float) -> float:
    """The seconds that are left; a little even if there are none, and no more than poll takes."""
    return min(max(0.001, deadline - time.monotonic()), 1e6)


def _is_same_user(line: socket.socket) -> bool:
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
