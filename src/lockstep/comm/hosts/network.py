"""Collectives and messages between hosts, as bytes through Gloo: their dtypes are ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.arguments import flattened
from lockstep.comm.messages import HEADER, Message, MessageWork, header_of
from lockstep.comm.shm.barrier import Fault
from lockstep.comm.transport import WORDS_BYTES, Signature, encoded
from lockstep.errors import CollectiveFailed, CollectiveTimeout, GroupClosed, PeerLost
from lockstep.torch_private import AllgatherOptions

_FAULT = "fault"


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
        self.rank = self._ranks.index(rank)
        self.size = len(self._ranks)
        backend = dist.ProcessGroupGloo(
            store, self.rank, self.size, timeout=timedelta(seconds=timeout)
        )
        kind = dist.ProcessGroup.BackendType.GLOO
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
        everyone = torch.empty(self.size, len(own), dtype=torch.uint8, device="cpu")
        arguments = (everyone.view(-1), own, AllgatherOptions())
        self.run("_allgather_base", *arguments, signature=signature, timeout=timeout)
        calls = {rank: bytes(row) for rank, row in zip(self._ranks, everyone.tolist(), strict=True)}
        others = [rank for rank, call in calls.items() if not call.startswith(mine)]
        if others:
            accounts = "; ".join(
                f"rank {rank} called {call[len(mine) :].decode(errors='replace').strip()}"
                for rank, call in calls.items()
            )
            raise signature.mismatch(accounts, others)

    def run(self, method: str, *arguments: Any, signature: Signature, timeout: float) -> None:
        """Carry out a collective of Gloo's, whose last argument is its options.

        Every rank of this network must call it.

        Raises:
            CollectiveFailed: If the others don't do their part of ``signature`` in time.
        """
        arguments[-1].timeout = timedelta(seconds=timeout)
        self.finish(lambda: getattr(self.group, method)(*arguments), signature, timeout)

    def start_send(
        self, tensor: torch.Tensor, destination: int, tag: int, timeout: timedelta
    ) -> dist.Work:
        """Start sending ``tensor``, which may be written to again at once.

        Gloo takes the message when the other side expects it.
        """
        flat = flattened(tensor)
        header = torch.frombuffer(bytearray(header_of(flat, tag)), dtype=torch.uint8)
        message = torch.cat([header, flat.view(torch.uint8)])
        work = self.group.send([message], destination, tag)
        signature = Signature("send", flat.dtype, flat.shape)

        # Gloo reads the message until it is taken, so the work keeps it.
        def complete(seconds: float, message: torch.Tensor = message) -> int:
            self.finish(lambda: work, signature, seconds, [destination])
            return destination

        return MessageWork(complete, lambda: False, [], timeout)

    def start_receive(
        self, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta
    ) -> dist.Work:
        """Receive the next message of ``source``, or of any rank, into ``tensor``."""
        # Gloo matches messages with receives itself, and accepts one that is too short.
        message = torch.empty(HEADER.size + tensor.nbytes, dtype=torch.uint8, device="cpu")
        if source is None:
            work = self.group.recv_anysource([message], tag)
        else:
            work = self.group.recv([message], source, tag)
        signature = Signature("recv", tensor.dtype, (tensor.numel(),))

        def complete(seconds: float) -> int:
            self.finish(lambda: work, signature, seconds, None if source is None else [source])
            sender = int(work._source_rank()) if source is None else source
            _, num_bytes, dtype = HEADER.unpack(bytes(message[: HEADER.size].tolist()))
            contents = message[HEADER.size :][:num_bytes]
            received = Message(sender, tag, dtype.rstrip(b"\0").decode(), contents)
            received.copy_to(tensor, self._ranks[sender], "recv")
            return sender

        return MessageWork(complete, work.is_completed, [tensor], timeout)

    def finish(
        self,
        start: Callable[[], dist.Work],
        signature: Signature,
        timeout: float,
        others: Sequence[int] | None = None,
    ) -> None:
        """Start something, and wait for ``others`` (None: all) to do their part.

        Raises:
            CollectiveFailed: If they don't.
        """
        try:
            start().wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            # The rank that failed first has said why before it closed its connections.
            told = self._told_fault()
            if told is not None:
                raise told.error(signature.operation) from error
            ranks = range(self.size) if others is None else others
            names = [self._ranks[rank] for rank in ranks if rank != self.rank]
            if "timed out" in str(error).lower():
                raise CollectiveTimeout(
                    f"Not all of the ranks {names}, on other hosts, came to {signature} within "
                    f"{timeout:g} s. See what they do there. Gloo says: {error}",
                    names,
                    signature.operation,
                ) from error
            raise PeerLost(
                f"One of the ranks {names}, on other hosts, was lost in {signature}: what it wrote "
                f"last tells why. Gloo says: {error}",
                names,
                signature.operation,
            ) from error

    def break_off(self, error: CollectiveFailed) -> None:
        """Tell the other hosts why this one goes no further."""
        if self._told_fault() is None:
            with suppress(RuntimeError):
                self._store.set(_FAULT, Fault.of(error).encode().decode())
        self.close()

    def _told_fault(self) -> Fault | None:
        """What broke the group, if a rank has said so."""
        # The store is gone with the rank that held it.
        with suppress(RuntimeError):
            if self._store.check([_FAULT]):
                return Fault.decode(bytes(self._store.get(_FAULT)))
        return None

    def close(self) -> None:
        """Close the connections; ranks that wait at their other ends learn of it."""
        self._group = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Gloo's process group.

        Raises:
            GroupClosed: If it was closed.
        """
        if self._group is None:
            raise GroupClosed("This process group was destroyed, or has failed before.")
        return self._group
