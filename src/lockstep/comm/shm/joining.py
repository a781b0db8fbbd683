"""How the processes of one host meet, and let in nobody else.

Each rank listens on a Unix socket whose name it draws and tells the others through the store,
together with a secret that is this group's alone. Whoever connects must be a process of the same
user (the kernel says so) and know the secret. Names are in Linux's abstract namespace: they
vanish with the socket, and no file is left whatever happens.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lockstep.comm.shm.lines import receive_message, send_message
from lockstep.errors import RendezvousFailed

_SECRET_BYTES = 32
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# Whoever doesn't introduce itself this soon after connecting isn't one of us.
_INTRODUCTION_SECONDS = 5.0


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


class _Offer(NamedTuple):
    """What one side gives the other: two lines' ends, or none, and its slots."""

    slots: int
    lines: tuple[int, ...] = ()


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
    if rank == 0:
        store.set("secret", secrets.token_hex(_SECRET_BYTES))
    peers: dict[int, Peer] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"lockstep-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(size)
        store.set(f"address/{rank}", name)
        try:
            secret = _read(store, "secret", deadline)
            # Towards the lower ranks first, then from the higher ones: rank 0 only answers, so
            # there is always one who doesn't wait for another.
            for other in range(rank):
                peers[other] = _connect(store, other, rank, secret, slots, deadline)
            while len(peers) < size - 1:
                found = _answer(listener, rank, size, secret, slots, deadline)
                if found is not None:
                    peers[found[0]] = found[1]
        except (OSError, RuntimeError) as error:
            absent = sorted(set(range(size)) - set(peers) - {rank})
            for peer in peers.values():
                for line in (peer.signals, peer.letters, peer.memory):
                    line.close()
                os.close(peer.slots)
            if isinstance(error, RendezvousFailed):
                raise
            raise RendezvousFailed(
                f"Rank {rank} of {size} waited up to {timeout:g} s for rank"
                f"{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} to share memory "
                f"with it: {error}. See whether they started, and whether all ran as one user."
            ) from error
    return peers


def _read(store: dist.Store, key: str, deadline: float) -> str:
    store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    return bytes(store.get(key)).decode()


def _connect(
    store: dist.Store, other: int, rank: int, secret: str, slots: int, deadline: float
) -> Peer:
    name = _read(store, f"address/{other}", deadline)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            line.connect(f"\0{name}")
        except ConnectionRefusedError as error:
            raise RendezvousFailed(
                f"Rank {other} can't be reached from rank {rank}: it is on another host, in "
                "another network namespace, or gone. Ranks that share memory are on one host; "
                "use lockstep.init() or the backend 'gloo' for several."
            ) from error
        line.settimeout(max(0.001, deadline - time.monotonic()))
        if not _is_same_user(line):
            raise RendezvousFailed(f"Rank {other} is a process of another user.")
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        try:
            theirs = tuple(there.fileno() for _, there in ends)
            _introduce(line, secret, rank, _Offer(slots, theirs))
        finally:
            for _, there in ends:
                there.close()
        introduced = _hear(line, secret)
        if introduced is None or introduced[0] != other:
            raise RendezvousFailed(f"What answers for rank {other} doesn't know the secret.")
        _, pid, offer = introduced
        line.settimeout(None)
        return Peer(pid, line, ends[0][0], ends[1][0], offer.slots)
    except BaseException:
        line.close()
        raise


def _answer(
    listener: socket.socket, rank: int, size: int, secret: str, slots: int, deadline: float
) -> tuple[int, Peer] | None:
    """Let the next one in, if it is one of the ranks."""
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    line, _ = listener.accept()
    line.settimeout(_INTRODUCTION_SECONDS)
    introduced = None
    try:
        if _is_same_user(line):
            introduced = _hear(line, secret)
        if introduced is None:
            return None
        other, pid, offer = introduced
        if not rank < other < size or len(offer.lines) != 2:
            for descriptor in (offer.slots, *offer.lines):
                os.close(descriptor)
            introduced = None
            return None
        _introduce(line, secret, rank, _Offer(slots))
        line.settimeout(None)
        letters, memory = (socket.socket(fileno=descriptor) for descriptor in offer.lines)
        return other, Peer(pid, line, letters, memory, offer.slots)
    except (OSError, ValueError):
        introduced = None
        return None
    finally:
        if introduced is None:
            line.close()


def _is_same_user(line: socket.socket) -> bool:
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())


def _introduce(line: socket.socket, secret: str, rank: int, offer: _Offer) -> None:
    words = json.dumps({"secret": secret, "rank": rank, "pid": os.getpid()})
    send_message(line, words.encode(), [offer.slots, *offer.lines])


def _hear(line: socket.socket, secret: str) -> tuple[int, int, _Offer] | None:
    """Return the rank, the process and the offer of the other side, if it knows the secret."""
    words, descriptors = receive_message(line, 1024, 3)
    try:
        told = json.loads(words)
        if not hmac.compare_digest(str(told["secret"]), secret) or not descriptors:
            raise ValueError
        return int(told["rank"]), int(told["pid"]), _Offer(descriptors[0], tuple(descriptors[1:]))
    except (ValueError, KeyError, TypeError):
        for descriptor in descriptors:
            os.close(descriptor)
        return None
