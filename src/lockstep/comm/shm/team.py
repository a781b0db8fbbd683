"""The ranks of one host that are processes."""

from __future__ import annotations

import itertools
import os
import socket
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.call import Call
from lockstep.comm.shm.joining import join
from lockstep.comm.shm.letters import Letters
from lockstep.comm.shm.lines import receive_message, send_message
from lockstep.comm.shm.memory import Segment, map_segment
from lockstep.comm.shm.signals import Signals
from lockstep.comm.team import Place, Team
from lockstep.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
)

# Large enough that meetings are nothing beside the copying, small enough to stay in the cache.
_SLOT_BYTES = 1024 * 1024
# So that a view of any dtype in a slot, or in memory of its own, begins on a cache line.
_ALIGNMENT = 64
# A place is a segment's number and an offset in it. The slots are segment 0.
_OFFSET_BITS = 40
_MAX_VIEWS = 512

_teams: weakref.WeakSet[ShmTeam] = weakref.WeakSet()


class ShmTeam(Team):
    """Processes of one Linux host that have mapped each other's memory.

    Every rank of the group creates it. Its slots are memory of each rank that all others map
    when they join; of other memory that :meth:`empty` makes, the others get the descriptor when
    it is first announced in a meeting.

    Args:
        store: A store that is this group's alone.
        rank: Which of the ranks this is.
        size: How many there are.
        timeout: How many seconds to wait for the others to join.

    Raises:
        RendezvousFailed: If they don't all come, or one is on another host.
        SharedMemoryFull: If there is no memory for the slots.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.slot_bytes = _SLOT_BYTES
        self._process = os.getpid()
        slots, memory = Segment.create(2 * _SLOT_BYTES)
        try:
            peers = join(store, rank, size, slots.descriptor, timeout)
        finally:
            slots.close()
        self._signals = Signals(rank, {r: peer.signals for r, peer in peers.items()})
        self.mailbox = Letters(rank, {r: peer.letters for r, peer in peers.items()}, self._lost)
        self._memory_lines = {r: peer.memory for r, peer in peers.items()}
        # By rank and number, the segments of others (and of this rank: its slots).
        self._mapped = {(r, 0): map_segment(peer.slots) for r, peer in peers.items()}
        self._mapped[rank, 0] = memory
        self._turn = 0
        self._views: dict[tuple[int, int, torch.dtype, int], torch.Tensor] = {}
        self._own: dict[int, Segment] = {}
        self._number_at: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._announced: set[int] = set()
        self._retired: list[int] = []
        self._fault: CollectiveFailed | None = None
        self._is_closed = False
        _teams.add(self)

    def stage(self, dtype: torch.dtype, numel: int) -> tuple[Place, torch.Tensor]:
        """Return the next slot's place, and the slot as a flat tensor to write to."""
        self._turn = 1 - self._turn
        place = self._turn * _SLOT_BYTES
        return place, self.at(self.rank, place, dtype, numel)

    def meet(self, call: Call, place: Place, timeout: float) -> Sequence[Place]:
        """Wait until every rank has made the same call; return the places they announce."""
        assert isinstance(place, int)
        self.check_open()
        number = place >> _OFFSET_BITS
        if number and number not in self._announced:
            self._hand_out(number)
        try:
            return self._signals.exchange(call, place, timeout)
        except (PeerLost, CollectiveTimeout, CollectiveMismatch) as error:
            self._fault = self._fault or error
            self.check_open()
            raise

    def at(self, rank: int, place: Place, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return, as a flat tensor, what ``rank`` announced to have at ``place``.

        Of this rank itself, only slots: other memory is the caller's, who has it at hand.
        """
        assert isinstance(place, int)
        key = (rank, place, dtype, numel)
        view = self._views.get(key)
        if view is None:
            number, offset = place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)
            if (rank, number) not in self._mapped:
                self._take_segments(rank)
            whole = self._mapped[rank, number]
            view = whole[offset : offset + numel * dtype.itemsize].view(dtype)
            if number:
                return view
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Return where the others reach a contiguous ``tensor``, or None if they don't."""
        number = self._number_at.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return None
        return (number << _OFFSET_BITS) + int(tensor.storage_offset()) * tensor.element_size()

    def is_staged(self, place: Place) -> bool:
        """Whether ``place``, of any rank, is in a slot."""
        assert isinstance(place, int)
        return place < 1 << _OFFSET_BITS

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes, that :meth:`find` will find while a tensor uses it."""
        self.check_open()
        number = next(self._numbers)
        team = weakref.ref(self)

        def retire() -> None:
            alive = team()
            if alive is not None:
                alive._retire(number)

        segment, tensor = Segment.create(num_bytes, when_unused=retire)
        self._own[number] = segment
        self._number_at[segment.pointer] = number
        return tensor

    def _retire(self, number: int) -> None:
        segment = self._own.pop(number, None)
        if segment is not None and self._process == os.getpid():
            self._number_at.pop(segment.pointer, None)
            segment.free()
            self._retired.append(number)

    def _hand_out(self, number: int) -> None:
        """Give the others a segment before it is announced, and tell which are no longer used."""
        retired, self._retired = self._retired, []
        message = b"".join(n.to_bytes(8, "little") for n in (number, *retired[:512]))
        self._retired = retired[512:] + self._retired
        for line in self._memory_lines.values():
            try:
                send_message(line, message, [self._own[number].descriptor])
            except OSError:
                # It is gone, as the meeting will tell.
                continue
        self._announced.add(number)

    def _take_segments(self, rank: int) -> None:
        """Map what ``rank`` has handed out, and let go of what it no longer uses."""
        line = self._memory_lines[rank]
        while True:
            try:
                message, descriptors = receive_message(line, 8192, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not message:
                return
            numbers = [
                int.from_bytes(message[i : i + 8], "little") for i in range(0, len(message), 8)
            ]
            self._mapped[rank, numbers[0]] = map_segment(descriptors[0])
            for number in numbers[1:]:
                self._mapped.pop((rank, number), None)

    def check_open(self) -> None:
        """Raise what broke this team, if something did."""
        if self._process != os.getpid():
            raise GroupClosed(
                f"This process group belongs to process {self._process}, and was inherited by "
                f"process {os.getpid()} in a fork. Create one in each process that needs one."
            )
        if self._is_closed:
            raise GroupClosed(
                f"Rank {self.rank} has destroyed this process group. Call destroy_process_group() "
                "after the last collective."
            )
        fault = self._fault
        if isinstance(fault, PeerLost | CollectiveTimeout | CollectiveMismatch):
            raise type(fault)(str(fault), fault.ranks, fault.operation)

    def _lost(self, rank: int, operation: str) -> CollectiveFailed:
        """What to raise when the line for letters to ``rank`` has ended."""
        try:
            self.check_open()
        except CollectiveFailed as error:
            return error
        note = self._signals.told(rank)
        reason = "Its process ended or was killed: what it wrote last tells why."
        if note is not None:
            reason = "It has left the group." if note["kind"] == "left" else note["text"]
        text = f"Rank {rank} is gone; rank {self.rank} waited for it in {operation}. {reason}"
        self._signals.announce("PeerLost", text, [rank])
        self._fault = PeerLost(text, [rank], operation)
        return PeerLost(text, [rank], operation)

    def abort(self) -> None:
        """Make every wait of this rank, and of the others, end with an error."""
        if self._process != os.getpid() or self._is_closed:
            return
        text = f"Rank {self.rank} has aborted the group."
        self._signals.announce("PeerLost", text, [self.rank])
        self._fault = self._fault or PeerLost(text, [self.rank], "abort")
        self._signals.interrupt()
        self.mailbox.interrupt()

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and let go of everything."""
        if self._is_closed:
            return
        if self._process == os.getpid():
            self._signals.announce("left", "", [self.rank])
            self.mailbox.flush()
        self.close()

    def close(self) -> None:
        """Close all descriptors and forget all memory, without a word to the others."""
        self._is_closed = True
        self._signals.close()
        self.mailbox.close()
        for line in self._memory_lines.values():
            line.close()
        for segment in self._own.values():
            segment.close()
        self._number_at.clear()
        self._mapped.clear()
        self._views.clear()


def _close_in_child() -> None:
    # A line ends only when the last process that has it open closes it: a forked child that
    # outlived its parent (a loader's worker, say) would hide from the others that it died.
    for team in list(_teams):
        team.close()


os.register_at_fork(after_in_child=_close_in_child)
