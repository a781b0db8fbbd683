"""The handshake by which the processes of one host connect, and let in nobody else.

Each rank has a datagram socket whose random name it puts into the store, and rank 0 adds a secret.
Of each two ranks the higher one makes the connections and sends the lower one its ends of them;
each sends the other the descriptor of its segment. A message counts if it comes from a process of
the same user (the kernel says so) and holds the secret. The names are in Linux's abstract
namespace: they vanish with the socket, and leave no file behind.
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
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.failures import STORE_SECONDS, NoAnswer, answered, named, silent_store
from lockstep.comm.shm.barrier import wait_for
from lockstep.comm.shm.memory import Segment, map_memory, receive_message, send_message, shut_down
from lockstep.deadline import Deadline
from lockstep.entries import name_in
from lockstep.errors import RendezvousFailed

_SECRET_BYTES = 32
_INTRODUCTION = struct.Struct(f"<{_SECRET_BYTES}sq")  # secret, rank
_RETRY_SECONDS = 0.01
# How often a rank that waits checks whether another rank has given up.
_CHECK_SECONDS = 0.5
# The key in the store under which a rank that can't connect says why.
_GIVEN_UP = "given up"


class Peer(NamedTuple):
    """The connections to another rank."""

    barrier: socket.socket
    mailbox: socket.socket
    memory: int  # the descriptor of its segment
    slots: torch.Tensor  # the beginning of its segment, as bytes

    def end(self) -> None:
        """End barrier and messages for both sides, whichever threads wait for them."""
        shut_down(self.barrier)
        shut_down(self.mailbox)

    def close(self) -> None:
        """Close all descriptors."""
        self.barrier.close()
        self.mailbox.close()
        os.close(self.memory)


class _Handshake:
    """One rank's part in connecting the ranks of a group; see :func:`connect`."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, segment: Segment, deadline: Deadline
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._segment, self._deadline = segment, deadline
        # The names of other ranks' sockets, as far as they have been read.
        self._names: dict[int, str] = {}
        # This rank's ends of connections to lower ranks that haven't answered yet.
        self._offered: dict[int, list[socket.socket]] = {}
        # By rank that is still to be sent a message, its ends of the connections.
        self._outbox: dict[int, list[socket.socket]] = {}

    def run(self, peers: dict[int, Peer]) -> None:
        """Connect to all other ranks, and put them into ``peers`` one by one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as self._socket:
            try:
                self._publish()
                self._offer()
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                while True:
                    # A rank whose queue is full may itself be sending, so none is waited for.
                    for other in list(self._outbox):
                        if self._introduce(other, self._outbox[other]):
                            _close(self._outbox.pop(other))
                    if not self._outbox and len(peers) == self._size - 1:
                        return
                    pause = _RETRY_SECONDS if self._outbox else _CHECK_SECONDS
                    if wait_for(poll, min(pause, self._deadline.left())) and self._deadline.left():
                        self._receive(peers)
                        continue
                    self._check_others()
                    gone = [] if self._outbox else self._ranks_gone(peers)
                    # What a rank sent before it closed its socket is still to be read.
                    if gone and not poll.poll(0):
                        raise self._unreachable(gone[0])
            finally:
                for ends in (*self._offered.values(), *self._outbox.values()):
                    _close(ends)

    def _publish(self) -> None:
        name = f"lockstep-{secrets.token_hex(16)}"
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{name}")
        if self._rank == 0:
            self._ask("set", "secret", secrets.token_hex(_SECRET_BYTES))
        self._ask("set", f"address/{self._rank}", name)
        self._secret = bytes.fromhex(self._read("secret"))

    def _offer(self) -> None:
        """Make the connections to the lower ranks."""
        for other in range(self._rank):
            self._offered[other], self._outbox[other] = [], []
            for _ in range(2):
                mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._offered[other].append(mine)
                self._outbox[other].append(theirs)

    def _read(self, key: str) -> str:
        # Not store.wait(): it would not see that another rank has given up, and torch's TCPStore
        # prints warnings if it is interrupted.
        pause = _RETRY_SECONDS / 32
        while not self._ask("check", [key]):
            self._check_others()
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS)
        return name_in(self._ask("get", key))

    def _ask(self, request: str, *arguments: object) -> Any:
        """Make a request to the store, which may be stopped, or behind a network that is cut."""
        call = partial(getattr(self._store, request), *arguments)
        return answered(call, self._deadline.left() + STORE_SECONDS)

    def _check_others(self) -> None:
        if self._ask("check", [_GIVEN_UP]):
            reason = name_in(self._ask("get", _GIVEN_UP))
            raise RendezvousFailed(f"No rank can join: {reason}")
        if not self._deadline.left():
            raise TimeoutError("they didn't come")

    def _ranks_gone(self, peers: dict[int, Peer]) -> list[int]:
        """Return the ranks that are not in ``peers``, and whose sockets are closed."""
        gone = []
        for other in set(range(self._size)) - {self._rank} - set(peers):
            if other in self._names or self._ask("check", [f"address/{other}"]):
                # Too short for an introduction, so a rank that is there ignores it.
                with suppress(BlockingIOError):
                    try:
                        self._socket.sendto(b"", socket.MSG_DONTWAIT, self._address_of(other))
                    except ConnectionRefusedError:
                        gone.append(other)
        return gone

    def _address_of(self, other: int) -> str:
        if other not in self._names:
            self._names[other] = self._read(f"address/{other}")
        return f"\0{self._names[other]}"

    def _unreachable(self, other: int) -> RendezvousFailed:
        """The error to raise, if ``other`` doesn't say in time why it has closed its socket."""
        grace = Deadline(_CHECK_SECONDS)
        while grace.left():
            self._check_others()
            time.sleep(_RETRY_SECONDS)
        return RendezvousFailed(
            f"Rank {other} can't be reached from rank {self._rank}: it is on another "
            "host, in another network namespace, or gone. Ranks that share memory are on "
            "one host; use lockstep.init() or the backend 'gloo' for several."
        )

    def _introduce(self, other: int, ends: list[socket.socket]) -> bool:
        """Send ``other`` the segment and ``ends``, unless it can't take them now."""
        message = _INTRODUCTION.pack(self._secret, self._rank)
        descriptors = [self._segment.descriptor, *(end.fileno() for end in ends)]
        address = self._address_of(other)
        try:
            send_message(self._socket, message, descriptors, socket.MSG_DONTWAIT, address)
        except ConnectionRefusedError as error:
            raise self._unreachable(other) from error
        except OSError as error:
            # Its queue is full, or more descriptors are on their way than a user may have open.
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                return False
            raise
        return True

    def _receive(self, peers: dict[int, Peer]) -> None:
        """Take a message, if it is from a rank that isn't connected yet."""
        size, user = _INTRODUCTION.size + 1, os.getuid()
        message, descriptors = receive_message(self._socket, size, 3, user=user)
        try:
            other = self._identify(message)
            if other is None or other in peers:
                return
            ends = self._offered.get(other, [])
            if len(descriptors) != (1 if ends else 3):
                raise OSError(
                    errno.EMFILE, f"Too many open files to take those of rank {other} (ulimit -n)"
                )
            slots = map_memory(descriptors[0], 0, os.fstat(descriptors[0]).st_size)
            memory = descriptors.pop(0)
            if not ends:
                ends = [socket.socket(fileno=end) for end in descriptors]
                descriptors.clear()
                self._outbox[other] = []
            self._offered.pop(other, None)
            barrier, mailbox = ends
            peers[other] = Peer(barrier, mailbox, memory, slots)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _identify(self, message: bytes) -> int | None:
        """Return the rank that sent ``message``, or None for a stranger."""
        if len(message) != _INTRODUCTION.size:
            return None
        secret, other = _INTRODUCTION.unpack(message)
        is_rank = 0 <= other < self._size and other != self._rank
        return int(other) if hmac.compare_digest(secret, self._secret) and is_rank else None


def connect(
    store: dist.Store, rank: int, size: int, num_slot_bytes: int, timeout: float
) -> tuple[Segment, torch.Tensor, dict[int, Peer]]:
    """Connect to every other rank of the group within ``timeout`` seconds.

    Returns:
        This rank's segment, its slots, as bytes, and its peers by rank.

    Raises:
        RendezvousFailed: If not all ranks come, or one can't be reached.
        SharedMemoryFull: If there is no memory for the slots.
    """
    peers: dict[int, Peer] = {}
    try:
        segment, slots = Segment.create(num_slot_bytes)
        try:
            _Handshake(store, rank, size, segment, Deadline(timeout)).run(peers)
        except BaseException:
            segment.close()
            raise
    except BaseException as error:
        # The others are not to wait for this rank.
        with suppress(RuntimeError):
            reason = f"rank {rank} could not join: {error}"
            answered(partial(store.compare_set, _GIVEN_UP, "", reason), STORE_SECONDS)
        for peer in peers.values():
            peer.close()
        if isinstance(error, RendezvousFailed) or not isinstance(
            error, OSError | RuntimeError | ValueError
        ):
            raise
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise RendezvousFailed(
                f"Rank {rank} of {size} can't share memory with the others: {error}. Raise the "
                "limit on open files (ulimit -n)."
            ) from error
        if isinstance(error, NoAnswer | dist.DistNetworkError):
            raise silent_store(f"Rank {rank} of {size} can't join the group", error) from error
        absent = named(sorted(set(range(size)) - set(peers) - {rank})).lower()
        raise RendezvousFailed(
            f"Rank {rank} of {size} waited up to {timeout:g} s for {absent} to share memory with "
            f"it: {error}. See whether they started, and whether all ran as one user."
        ) from error
    return segment, slots, peers


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()
