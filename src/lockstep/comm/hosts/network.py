"""Bytes between hosts, through Gloo: their dtypes, and what is done with them, are ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.call import Call, fingerprint
from lockstep.comm.shm.barrier import Failure, Fault
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed, PeerLost
from lockstep.torch_private import AllgatherOptions

_FAULT = "fault"
# Longer than any description of a call.
_DESCRIPTION_BYTES = 512


class Network:
    """A Gloo group, which carries flat tensors as bytes.

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

    def agree(self, call: Call, timeout: float) -> None:
        """Make sure that all ranks make the same call.

        Raises:
            CollectiveMismatch: On all of them, if they don't.
        """
        mine = fingerprint(call)
        if all(theirs == mine for theirs in self._gather_bytes(mine, call, timeout)):
            return
        text = str(call).encode()[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES)
        gathered = self._gather_bytes(text, call, timeout)
        calls = {
            rank: theirs.decode(errors="replace").strip()
            for rank, theirs in zip(self._ranks, gathered, strict=True)
        }
        accounts = "; ".join(f"rank {rank} called {theirs}" for rank, theirs in calls.items())
        raise CollectiveMismatch(
            f"{accounts}. All ranks must make the same calls in the same order: look "
            "for a branch that only some of them take.",
            [rank for rank, theirs in calls.items() if theirs != str(call)],
            call.operation,
        )

    def _gather_bytes(self, own: bytes, call: Call, timeout: float) -> list[bytes]:
        everyone = torch.empty(self.size, len(own), dtype=torch.uint8, device="cpu")
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        arguments = (everyone.view(-1), mine, AllgatherOptions())
        self.run("_allgather_base", *arguments, call=call, timeout=timeout)
        return [bytes(row) for row in everyone.tolist()]

    def run(self, method: str, *arguments: Any, call: Call, timeout: float) -> None:
        """Carry out a collective of Gloo's, whose last argument is its options.

        Every rank of this network must call it.

        Raises:
            CollectiveFailed: If the others don't do their part of ``call`` in time.
        """
        arguments[-1].timeout = timedelta(seconds=timeout)
        self.finish(lambda: getattr(self.group, method)(*arguments), call, timeout)

    def name_of(self, rank: int) -> int:
        """What the whole run calls this group's ``rank``."""
        return self._ranks[rank]

    def finish(
        self,
        start: Callable[[], dist.Work],
        call: Call,
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
                raise told.error(call.operation) from error
            ranks = range(self.size) if others is None else others
            names = [self._ranks[rank] for rank in ranks if rank != self.rank]
            if "timed out" in str(error).lower():
                raise CollectiveTimeout(
                    f"Not all of the ranks {names}, on other hosts, came to {call} within "
                    f"{timeout:g} s. See what they do there. Gloo says: {error}",
                    names,
                    call.operation,
                ) from error
            raise PeerLost(
                f"One of the ranks {names}, on other hosts, was lost in {call}: what it wrote "
                f"last tells why. Gloo says: {error}",
                names,
                call.operation,
            ) from error

    def break_off(self, error: Failure) -> None:
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
