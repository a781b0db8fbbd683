"""The ranks of several hosts, and the networks between all of them and between their leaders.

Networks are Gloo's. Tensors travel as bytes: Gloo doesn't know all of torch's dtypes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.arguments import flattened
from lockstep.comm.messages import HEADER, Message, MessageWork, header_of
from lockstep.comm.shm.barrier import Fault
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.transport import WORDS_BYTES, Ranks, Signature, encoded
from lockstep.errors import (
    CollectiveFailed,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
    RendezvousFailed,
)
from lockstep.torch_private import AllgatherOptions

# The key of what broke a network.
_FAULT = "fault"


class HostsTransport(Ranks):
    """Ranks of several hosts; those of one host reach each other's memory.

    Attributes:
        hosts: The ranks of each host.
        positions: By rank, the index of its host, and its index among the ranks of that.
        host: The index of this host.
        local: The transport between the ranks of this host.
        everyone: The network of all ranks.
        leaders: The network of the first ranks of the hosts; None on the others.

    Args:
        store: A store that is this group's alone.
        rank: This rank.
        hosts: The ranks of each host.
        timeout: How many seconds to wait for the others to connect.
        members: The ranks as the whole run numbers them, for errors.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        hosts: Sequence[Sequence[int]],
        timeout: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self.hosts = hosts
        self.positions = {r: (h, i) for h, ranks in enumerate(hosts) for i, r in enumerate(ranks)}
        self.rank, self.size = rank, len(self.positions)
        members = list(members or range(self.size))
        self._name = members[rank]
        self.host, index = self.positions[rank]
        own = [members[r] for r in hosts[self.host]]
        own_store = dist.PrefixStore(f"{self.host}/", store)
        self.local = ShmTransport(own_store, index, len(own), timeout, own)
        everyone = dist.PrefixStore("everyone/", store)
        self.everyone = self.mailbox = Network(everyone, members, self._name, timeout)
        self.leaders: Network | None = None
        if index == 0:
            leaders = [members[ranks[0]] for ranks in hosts]
            leaders_store = dist.PrefixStore("leaders/", store)
            self.leaders = Network(leaders_store, leaders, self._name, timeout)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes, that the ranks of this host reduce in place."""
        return self.local.empty(num_bytes)

    def break_off(self, error: CollectiveFailed) -> CollectiveFailed:
        """Take no further part because of ``error``, which all ranks are to raise."""
        first = self.local.break_off(error)
        for network in self._networks():
            network.break_off(error)
        return first

    def check_open(self) -> None:
        """Raise the error that broke this group, if one did."""
        self.local.check_open()

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and release all resources."""
        self.local.leave()
        for network in self._networks():
            network.close()

    def after_fork(self) -> None:
        """Have later calls raise GroupClosed, in a forked child."""
        self.local.after_fork()

    def _networks(self) -> list[Network]:
        return [self.everyone] if self.leaders is None else [self.everyone, self.leaders]


class Network:
    """A Gloo group, which carries flat tensors, and messages between two ranks, as bytes.

    Args:
        store: A store that is this group's alone.
        ranks: The ranks in it, as the whole run numbers them, in order.
        rank: This rank, as the whole run numbers it.
        timeout: How many seconds to wait for the others to connect.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self._store = store
        self._ranks = list(ranks)
        self.rank, self.size = self._ranks.index(rank), len(ranks)
        limit, kind = timedelta(seconds=timeout), dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=limit)
        group = dist.ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        self._group: dist.ProcessGroup | None = group

    def agree(self, signature: Signature, timeout: float) -> None:
        """Make sure that all ranks make the same call.

        Raises:
            CollectiveMismatch: On all of them, if they don't.
        """
        mine, words = encoded(signature)
        own = torch.frombuffer(bytearray(mine + words.ljust(WORDS_BYTES)), dtype=torch.uint8)
        everyone = own.new_empty(self.size, len(own))
        arguments = (everyone.view(-1), own, AllgatherOptions())
        self.run("_allgather_base", *arguments, signature=signature, timeout=timeout)
        is_same = (everyone[:, : len(mine)] == own[: len(mine)]).all(1).tolist()
        if not all(is_same):
            calls = [bytes(row[len(mine) :]).decode(errors="replace") for row in everyone.tolist()]
            others = {
                rank: call.strip()
                for rank, call, same in zip(self._ranks, calls, is_same, strict=True)
                if not same
            }
            raise signature.mismatch(self._ranks[self.rank], others)

    def run(self, method: str, *arguments: Any, signature: Signature, timeout: float) -> None:
        """Carry out a collective of Gloo's, whose last argument is its options.

        Every rank of this network must call it.

        Raises:
            CollectiveFailed: If the others don't do their part of ``signature`` in time.
        """
        arguments[-1].timeout = timedelta(seconds=timeout)
        everyone = range(self.size)
        self._finish(
            lambda: getattr(self._open(), method)(*arguments), signature, timeout, everyone
        )

    def start_send(
        self, tensor: torch.Tensor, destination: int, tag: int, timeout: timedelta
    ) -> dist.Work:
        """Start sending ``tensor``, which may be written to again at once.

        Gloo takes the message when the other side expects it.
        """
        flat = flattened(tensor)
        header = torch.frombuffer(bytearray(header_of(flat, tag)), dtype=torch.uint8)
        message = torch.cat([header, flat.view(torch.uint8)])
        work = self._open().send([message], destination, tag)
        signature = Signature("send", flat.dtype, flat.shape)

        # Gloo reads the message until it is taken, so the work keeps it.
        def complete(seconds: float, message: torch.Tensor = message) -> int:
            self._finish(lambda: work, signature, seconds, [destination])
            return destination

        return MessageWork(complete, lambda: False, [], timeout)

    def start_receive(
        self, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta
    ) -> dist.Work:
        """Receive the next message of ``source``, or of any rank, into ``tensor``."""
        # Gloo matches messages with receives itself, and accepts one that is too short.
        message = torch.empty(HEADER.size + tensor.nbytes, dtype=torch.uint8, device="cpu")
        if source is None:
            work, sources = self._open().recv_anysource([message], tag), range(self.size)
        else:
            work, sources = self._open().recv([message], source, tag), range(source, source + 1)
        signature = Signature("recv", tensor.dtype, (tensor.numel(),))

        def complete(seconds: float) -> int:
            self._finish(lambda: work, signature, seconds, sources)
            sender = int(work._source_rank()) if source is None else source
            _, num_bytes, dtype = HEADER.unpack(bytes(message[: HEADER.size].tolist()))
            contents = message[HEADER.size :][:num_bytes]
            received = Message(sender, tag, dtype.rstrip(b"\0").decode(), contents)
            received.copy_to(tensor, self._ranks[sender], "recv")
            return sender

        return MessageWork(complete, work.is_completed, [tensor], timeout)

    def _finish(
        self,
        start: Callable[[], dist.Work],
        signature: Signature,
        timeout: float,
        ranks: Sequence[int],
    ) -> None:
        """Start an operation, and wait until ``ranks`` have done their part of it.

        Raises:
            CollectiveFailed: If they don't.
        """
        try:
            start().wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            # The rank that failed first has said why before it closed its connections.
            if (told := self._told_fault()) is not None:
                raise told.error(signature.operation) from error
            names = [self._ranks[rank] for rank in ranks if rank != self.rank]
            kind: type[CollectiveFailed] = PeerLost
            text = (
                f"One of the ranks {names}, on other hosts, was lost in {signature}: what it wrote "
                "last tells why."
            )
            if "timed out" in str(error).lower():
                kind = CollectiveTimeout
                text = (
                    f"Not all of the ranks {names}, on other hosts, came to {signature} within "
                    f"{timeout:g} s. See what they do there."
                )
            raise kind(f"{text} Gloo says: {error}", names, signature.operation) from error

    def break_off(self, error: CollectiveFailed) -> None:
        """Tell the other hosts why this one goes no further."""
        if self._told_fault() is None:
            with suppress(RuntimeError):
                self._store.set(_FAULT, Fault.of(error).encode().decode())
        self.close()

    def _told_fault(self) -> Fault | None:
        # The store is gone with the rank that held it.
        with suppress(RuntimeError):
            if self._store.check([_FAULT]):
                return Fault.decode(bytes(self._store.get(_FAULT)))
        return None

    def close(self) -> None:
        """Close the connections; ranks that wait at their other ends learn of it."""
        self._group = None

    def _open(self) -> dist.ProcessGroup:
        """Return Gloo's process group, or raise GroupClosed."""
        if self._group is None:
            raise GroupClosed("This process group was destroyed, or has failed before.")
        return self._group


def ranks_by_host(store: dist.Store, rank: int, size: int, timeout: float) -> list[list[int]]:
    """Return the ranks of each host, both in order; every rank must call it.

    Ranks are of one host here if they can share memory: if they run on one kernel, in one
    network namespace (containers often don't), and as one user.

    Raises:
        RendezvousFailed: If a rank doesn't come within ``timeout`` seconds.
    """
    store.set(f"host/{rank}", _this_host())
    keys = [f"host/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RendezvousFailed(
            f"Rank {rank} waited {timeout:g} s for the ranks {absent} to join the group. See "
            "whether they started, and whether they create the same groups in the same order."
        ) from error
    hosts: dict[bytes, list[int]] = {}
    for other, key in enumerate(keys):
        hosts.setdefault(bytes(store.get(key)), []).append(other)
    return list(hosts.values())


def _this_host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else socket.gethostname()
    network = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
    return f"{kernel} {network} {os.geteuid()}"
