"""Calls on which ranks agree before they make them, over groups that don't survive a mismatch.

A rank whose guarded step has failed leaves it, and the others are to leave it at their next call.
Among ranks of one host, lockstep's own groups see to that: all raise CollectiveMismatch, and go on
together. But Gloo and NCCL take the next call of a rank for the one in which the others wait, and
between hosts a mismatch ends a group. So while a guarded step runs over such a group, its ranks
tell each other of each call before they make it, in a group of their own beside it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm.backends import shared_memory_group
from lockstep.comm.carriers import timeout_of
from lockstep.comm.context import context_of
from lockstep.comm.failures import global_rank
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.shm.memory import bytes_of
from lockstep.comm.transport import WORDS_BYTES, Signature, Transport, encoded
from lockstep.comm.work import Generation
from lockstep.errors import CollectiveFailed

# Calls of some ranks alone.
_OF_SOME = ("send", "recv")


class AgreedCalls:
    """The calls of lockstep over one group, on which its ranks agree while that is on.

    All ranks make it together, which blocks.

    Attributes:
        ranks: A group of the same ranks, which carries small tensors of the CPU.
        is_on: Whether ranks agree on calls now.
        generation: Another object after each mismatch.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._members = [global_rank(group, rank) for rank in range(group.size())]
        store = dist.PrefixStore("lockstep/agreed", group.get_group_store())
        ranks = group.rank(), group.size()
        self.ranks = shared_memory_group(store, *ranks, timeout_of(group), self._members)
        self.is_on, self.generation = False, Generation()

    def agree(self, operation: str) -> None:
        """Wait until all ranks are at this ``operation``.

        Raises:
            CollectiveMismatch: On all ranks, if one is at another one.
        """
        if not self.is_on or operation in _OF_SOME:
            return
        signature = Signature(operation)
        fingerprint, words = encoded(signature)
        try:
            if len({*self._gathered(fingerprint)}) == 1:
                return
            others = dict(zip(self._members, self._gathered(words.ljust(WORDS_BYTES)), strict=True))
        except CollectiveFailed as error:
            error.add_note(
                f"It was to see that all ranks call {operation}, in a guarded step. A rank that "
                "waits in a call that its program makes through torch.distributed doesn't come."
            )
            raise
        self.generation = Generation()
        local_name = self._members[self.ranks.rank()]
        called = {rank: call.decode(errors="replace").strip() for rank, call in others.items()}
        differing = {rank: call for rank, call in called.items() if call != called[local_name]}
        raise signature.mismatch(local_name, differing)

    def _gathered(self, word: bytes) -> list[bytes]:
        """Return those of all ranks, which are equally long, in rank order."""
        local = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        rows = [torch.empty_like(local) for _ in self._members]
        self.ranks.allgather([rows], [local]).wait()
        return [bytes(bytes_of(row)) for row in rows]


def survives_mismatches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ranks whose calls differ, with tensors on ``device``, all raise, and go on."""
    if group.size() == 1:
        return True
    return device.type == "cpu" and isinstance(getattr(group, "transport", None), Transport)


def agreed_calls_of(group: dist.ProcessGroup) -> AgreedCalls:
    """Return those of ``group``, the same ones every time."""
    calls = context_of(group).get(AgreedCalls, lambda: AgreedCalls(group))
    if isinstance(group, SharedMemoryGroup) and (of_host := group.of_this_host()) is not group:
        context_of(of_host).get(AgreedCalls, lambda: calls)
    return calls


def agree(group: dist.ProcessGroup, operation: str) -> None:
    """Before a call over ``group``, see that all ranks make it, if they are to agree on calls."""
    if (calls := context_of(group).find(AgreedCalls)) is not None:
        calls.agree(operation)


def is_agreed(group: dist.ProcessGroup) -> bool:
    """Whether ranks agree on calls over ``group`` now."""
    calls = context_of(group).find(AgreedCalls)
    return calls is not None and calls.is_on


def generation_of(group: dist.ProcessGroup | None) -> object:
    """Return an object that changes when ranks have met in different calls; None if none tells."""
    calls = None if group is None else context_of(group).find(AgreedCalls)
    return getattr(group if calls is None else calls, "generation", None)
