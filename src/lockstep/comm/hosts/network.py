"""Bytes between hosts, through Gloo: what dtype they are, and what is done with them, is ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllToAllOptions, BroadcastOptions, GatherOptions, ScatterOptions

from lockstep.comm.transport import Signature, fingerprint
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed, PeerLost
from lockstep.torch_private import AllgatherOptions

_FAULT = "fault"
_FAULTS = {kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, CollectiveMismatch)}
# Longer than any description of a call.
_DESCRIPTION_BYTES = 512


class Network:
    """A Gloo group, which carries flat tensors as bytes.

    Args:
        store: A store that is this group's alone.
        ranks: The ranks in it, as the whole run numbers them, in order.
        rank: Which of them this is, as the whole run numbers it.
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

    def agree(self, call: Signature, timeout: float) -> None:
        """Make sure that all call the same.

        Raises:
            CollectiveMismatch: On all of them, if they don't.
        """
        mine = fingerprint(call)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if all(bytes(theirs) == mine for theirs in self._told(own, call, timeout)):
            return
        words = str(call).encode()[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES)
        told = self._told(torch.frombuffer(bytearray(words), dtype=torch.uint8), call, timeout)
        calls = [bytes(theirs).decode(errors="replace").strip() for theirs in told]
        accounts = [f"rank {r} called {text}" for r, text in zip(self._ranks, calls, strict=True)]
        raise CollectiveMismatch(
            f"{'; '.join(accounts)}. All ranks must make the same calls in the same order: look "
            "for a branch that only some of them take.",
            [r for r, text in zip(self._ranks, calls, strict=True) if text != str(call)],
            call.operation,
        )

    def _told(self, own: torch.Tensor, call: Signature, timeout: float) -> list[list[int]]:
        everyone = torch.empty(self.size, own.numel(), dtype=torch.uint8, device="cpu")
        self.all_gather(everyone.view(-1), own, call, timeout)
        rows: list[list[int]] = everyone.tolist()
        return rows

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, call: Signature, timeout: float
    ) -> None:
        """Have all tensors, of one size, one after the other."""
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        self.finish(
            lambda: self.group._allgather_base(_bytes(output), _bytes(tensor), options),
            call,
            timeout,
        )

    def broadcast(self, tensor: torch.Tensor, root: int, call: Signature, timeout: float) -> None:
        """Have what the ``root``-th has."""
        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=timeout)
        self.finish(lambda: self.group.broadcast([_bytes(tensor)], options), call, timeout)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        call: Signature,
        timeout: float,
    ) -> None:
        """Have all tensors, of one size, on the ``root``-th, which gives ``outputs``."""
        options = GatherOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=timeout)
        lists = [[_bytes(output) for output in outputs]] if outputs else []
        self.finish(lambda: self.group.gather(lists, [_bytes(tensor)], options), call, timeout)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        call: Signature,
        timeout: float,
    ) -> None:
        """Have the i-th of the tensors that the ``root``-th gives, all of one size, on the i-th."""
        options = ScatterOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=timeout)
        lists = [[_bytes(part) for part in inputs]] if inputs else []
        self.finish(lambda: self.group.scatter([_bytes(output)], lists, options), call, timeout)

    def all_to_all(
        self,
        output: torch.Tensor,
        output_numels: Sequence[int],
        tensor: torch.Tensor,
        numels: Sequence[int],
        call: Signature,
        timeout: float,
    ) -> None:
        """Send the i-th part of ``tensor`` to the i-th rank, and have what all send to this one."""
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout)
        size = tensor.element_size()
        self.finish(
            lambda: self.group.alltoall_base(
                _bytes(output),
                _bytes(tensor),
                [numel * size for numel in output_numels],
                [numel * size for numel in numels],
                options,
            ),
            call,
            timeout,
        )

    def name_of(self, rank: int) -> int:
        """What the whole run calls this group's ``rank``."""
        return self._ranks[rank]

    def finish(
        self,
        start: Callable[[], dist.Work],
        call: Signature,
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
            # Whoever failed first has said why before it let go of its connections.
            told = self._told_fault()
            if told is not None:
                kind = _FAULTS.get(told["kind"], PeerLost)
                raise kind(told["text"], told["ranks"], call.operation) from error
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

    def break_off(self, error: PeerLost | CollectiveTimeout | CollectiveMismatch) -> None:
        """Tell the other hosts why this one goes no further."""
        if self._told_fault() is None:
            told = {"kind": type(error).__name__, "text": str(error), "ranks": error.ranks}
            with contextlib.suppress(RuntimeError):
                self._store.set(_FAULT, json.dumps(told))
        self.close()

    def _told_fault(self) -> dict[str, Any] | None:
        """What broke the group, if a rank has said so."""
        try:
            if self._store.check([_FAULT]):
                told: dict[str, Any] = json.loads(bytes(self._store.get(_FAULT)))
                return told
        except RuntimeError:
            # The store went with the rank that held it.
            return None
        return None

    def close(self) -> None:
        """Let go of the connections; who waits at their other ends learns that they are gone."""
        self._group = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Gloo's.

        Raises:
            GroupClosed: If it was closed.
        """
        if self._group is None:
            raise GroupClosed("This process group was destroyed, or has failed before.")
        return self._group


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)
