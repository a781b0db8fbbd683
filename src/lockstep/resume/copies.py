"""Copies of snapshots in the memory of another host: what a host had is lost with it.

Each rank sends its snapshots to that of the same number on the next host, in whose memory they have
two slots as well. A copy is in the slot that the original is in, and is whole as late as that: its
header is written last. It travels through the ranks' process group, in pieces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from lockstep.checkpoint import Ranks
from lockstep.comm import check_room, send_and_receive
from lockstep.errors import CheckpointDamaged, SharedMemoryFull
from lockstep.launcher import SnapshotMemory
from lockstep.resume.snapshots import is_as_written

_PIECE_BYTES = 16 << 20  # which a transport may copy
_TAG = 0x636F7079
_log = logging.getLogger("lockstep")


class Has(NamedTuple):
    """What snapshots a rank has.

    Attributes:
        local: The steps of its own.
        copies: The step and the key of each copy of those of the rank before.
        key: That of its own, "" if it has no memory for any.
        distance: How many ranks further on its copies are; 0 if there are none.
    """

    local: list[int]
    copies: list[tuple[int, str]]
    key: str
    distance: int


class Copies:
    """This rank's part in them.

    Args:
        ranks: All ranks.
        local: The slots of this rank's snapshots.
        copies: Those for copies of another rank's.
        distance: How many ranks each host has.
    """

    def __init__(
        self, ranks: Ranks, local: SnapshotMemory, copies: SnapshotMemory, distance: int
    ) -> None:
        self._group, self._local, self._copies = ranks.group, local, copies
        self.distance = distance
        self._keeper = (ranks.rank + distance) % ranks.size  # which has copies of this rank's
        self._source = (ranks.rank - distance) % ranks.size  # of whose there are copies here
        self._sent: int | None = None  # the step of the last one
        self._has_room = True

    def update(self) -> float:
        """Let the keeper have the newest whole snapshot; return the seconds that took.

        Every rank calls it; it blocks.
        """
        start = time.perf_counter()
        newest = self._local.newest()
        is_new = newest is not None and newest.step != self._sent
        self._move(self._local, newest.step if newest is not None and is_new else None)
        self._sent = None if newest is None else newest.step
        return time.perf_counter() - start

    def usable(self) -> list[tuple[int, str]]:
        """Return the step and the key of each copy that is as its rank wrote the original."""
        return [
            (header.step, header.key.hex())
            for slot, header in self._copies.headers().items()
            if header.rank == self._source and is_as_written(self._copies, slot, header)
        ]

    def fetch(self, step: int, every: Sequence[Has]) -> None:
        """Bring the snapshot of ``step`` back to each rank that has none. Every rank calls it.

        Raises:
            CheckpointDamaged: If it isn't whole here then.
        """
        lacks = [step not in each.local for each in every]
        source = every[self._source]
        self._move(self._copies, step if lacks[self._source] else None, back=True)
        assert source.distance == self.distance
        if step not in (header.step for header in self._local.headers().values()):
            raise CheckpointDamaged(f"The snapshot after step {step} didn't come from its copy.")

    def discard(self, every: Sequence[Has], *, but: Collection[int] = ()) -> None:
        """Discard the copies of the program's snapshots that the ranks don't go on from."""
        for slot, header in self._copies.headers().items():
            if header.key.hex() == every[self._source].key and header.step not in but:
                self._copies.discard(slot)

    def close(self) -> None:
        """Leave the memory to the launcher."""
        self._copies.close()

    def _move(self, memory: SnapshotMemory, step: int | None, *, back: bool = False) -> None:
        """Send a snapshot, if any, to where copies are or, ``back``, to where they are from."""
        to, source = self._keeper, self._source
        target = self._local if back else self._copies
        if back:
            to, source = source, to
        slot, page = 0, bytes(SnapshotMemory.PAGE_BYTES)
        body = torch.empty(0, dtype=torch.uint8)
        if step is not None:
            slot, header = memory.of_step(step)
            page = memory.page(slot)
            body = torch.frombuffer(memory.view(slot)[: header.num_bytes], dtype=torch.uint8)
        told = torch.frombuffer(bytearray([*page, slot]), dtype=torch.uint8)
        heard = torch.empty_like(told)
        send_and_receive(self._group, told, to, heard, source, _TAG)
        *its_page, its_slot = heard.tolist()
        expected = SnapshotMemory.header_in(bytes(its_page))
        num_bytes = 0 if expected is None else expected.num_bytes
        room = None if expected is None else self._room(target, its_slot, num_bytes)
        for at in range(0, max(len(body), num_bytes), _PIECE_BYTES):
            size = max(0, min(_PIECE_BYTES, num_bytes - at))
            piece = torch.empty(size, dtype=torch.uint8) if room is None else room[at : at + size]
            send_and_receive(self._group, body[at : at + _PIECE_BYTES], to, piece, source, _TAG)
        if room is not None:
            target.put_page(its_slot, bytes(its_page))

    def _room(self, target: SnapshotMemory, slot: int, num_bytes: int) -> torch.Tensor | None:
        """Return the memory of a slot, whole no more; None if there is none."""
        target.discard(slot)
        try:
            if target.capacity(slot) < num_bytes:
                check_room(num_bytes)
            memory = target.room(slot, num_bytes)[:num_bytes]
        except (OSError, SharedMemoryFull) as error:
            if self._has_room:
                self._has_room = False
                _log.warning(
                    "There is no room for copies of rank %s's snapshots: %s. If its host is lost, "
                    "the run goes on from the newest checkpoint.",
                    self._source,
                    str(error),  # the error itself would keep the group, in its frames
                )
            return None
        return torch.frombuffer(memory, dtype=torch.uint8)


def steps_of_all(every: Sequence[Has], *, with_copies: bool) -> list[int]:
    """Return the steps of which each rank has a snapshot, or another one a copy; newest first."""
    found: list[set[int]] = []
    can_copy = with_copies and all(each.distance for each in every)
    for rank, each in enumerate(every):
        keeper = every[(rank + each.distance) % len(every)]
        copies = {step for step, key in keeper.copies if key == each.key} if can_copy else set()
        found.append({*each.local} | copies)
    return sorted(set.intersection(*found), reverse=True)
