"""The ranks of one host that are processes."""

from __future__ import annotations

import itertools
import os
import socket
import weakref
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.shm.joining import give_up, join
from lockstep.comm.shm.letters import Letters
from lockstep.comm.shm.lines import receive_message, send_message
from lockstep.comm.shm.memory import Segment, map_segment
from lockstep.comm.shm.signals import Note, Signals, fault_told, leaving, why_it_left
from lockstep.comm.transport import Address, Signature, Transport
from lockstep.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
    SharedMemoryFull,
)

# Large enough that meetings are nothing beside the copying, small enough to stay in the cache.
_SLOT_BYTES = 1024 * 1024
# So that a view of any dtype in a slot, or in memory of its own, begins on a cache line.
_ALIGNMENT = 64
# A place is a segment's number and an offset in it. The slots are segment 0.
_OFFSET_BITS = 40
_MAX_VIEWS = 512
# How many segments that are no longer used are told of with a new one.
_MAX_RETIRED = 512

_Fault = PeerLost | CollectiveTimeout | CollectiveMismatch

_teams: weakref.WeakSet[ShmTransport] = weakref.WeakSet()


class ShmTransport(Transport):
    """Processes of one Linux host that have mapped each other's memory.

    Every rank of the group creates it. Its slots are memory of each rank that all others map
    when they join; of other memory that :meth:`empty` makes, the others get the descriptor when
    it is first announced in a meeting.

    Args:
        store: A store that is this group's alone.
        rank: Which of the ranks this is.
        size: How many there are.
        timeout: How many seconds to wait for the others to join.
        members: What they are called in the whole run, by which errors name them; by default
            they are all of it.

    Raises:
        RendezvousFailed: If they don't all come, or one is on another host.
        SharedMemoryFull: If there is no memory for the slots.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.slot_bytes = _SLOT_BYTES
        self._process = os.getpid()
        members = self._members = list(members or range(size))
        # This rank, as errors name it.
        self._name = members[rank]
        try:
            slots, memory = Segment.create(2 * _SLOT_BYTES)
        except SharedMemoryFull as error:
            give_up(store, rank, error)
            raise
        try:
            peers = join(store, rank, size, slots.descriptor, timeout)
        finally:
            slots.close()
        signals = {members[r]: peers[r].signals for r in sorted(peers)}
        self._signals = Signals(self._name, signals, members)
        letters = {r: peer.letters for r, peer in peers.items()}
        self._letters = Letters(rank, members, letters, self._lost, self.break_off)
        self.mailbox = self._letters
        self._memory_lines = {r: peer.memory for r, peer in peers.items()}
        # By rank and number, the segments of others (and of this rank: its slots).
        self._mapped = {(rank, 0): memory}
        self._turn = 0
        self._views: dict[tuple[int, int, torch.dtype, int], torch.Tensor] = {}
        self._own: dict[int, Segment] = {}
        self._number_at: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._announced: set[int] = set()
        self._retired: deque[int] = deque()
        self._fault: _Fault | None = None
        self._is_closed = False
        # Whether check_open() has something to raise: most calls ask no more than this.
        self._is_broken = False
        _teams.add(self)
        slots_of_others = {r: peer.slots for r, peer in peers.items()}
        try:
            while slots_of_others:
                r, descriptor = slots_of_others.popitem()
                self._mapped[r, 0] = map_segment(descriptor)
        except BaseException:
            for descriptor in slots_of_others.values():
                os.close(descriptor)
            self.close()
            raise

    def stage(self, dtype: torch.dtype, numel: int) -> tuple[Address, torch.Tensor]:
        """Return the next slot's place, and the slot as a flat tensor to write to."""
        # After a fault, others may still be reading what a slot holds, however late they are.
        # Shown by test_a_rank_that_was_stopped_gets_no_wrong_sum.
        if self._is_broken:
            self.check_open()
        self._turn = 1 - self._turn
        place = self._turn * _SLOT_BYTES
        return place, self.at(self.rank, place, dtype, numel)

    def exchange(self, call: Signature, place: Address, timeout: float) -> Sequence[Address]:
        """Wait until every rank has made the same call; return the places they announce."""
        assert isinstance(place, int)
        if self._is_broken:
            self.check_open()
        try:
            number = place >> _OFFSET_BITS
            if number and number not in self._announced:
                self._hand_out(number)
            return self._signals.exchange(call, place, timeout)
        except (PeerLost, CollectiveTimeout, CollectiveMismatch) as error:
            raise self.break_off(error) from None
        except BaseException as error:
            # This rank doesn't come to the meeting, or goes from it before its end (at Ctrl-C,
            # say). Its next arrival would be taken for the one to this meeting.
            self._give_up(call.operation, error)
            raise

    def at(self, rank: int, place: Address, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return, as a flat tensor, what ``rank`` announced to have at ``place``.

        Of this rank itself, only slots: other memory is the caller's, who has it at hand.
        """
        assert isinstance(place, int)
        key = (rank, place, dtype, numel)
        view = self._views.get(key)
        if view is None:
            number, offset = place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)
            if (rank, number) not in self._mapped:
                try:
                    self._take_segments(rank)
                except BaseException as error:
                    self._give_up("a collective on shared memory", error)
                    raise
            whole = self._mapped[rank, number]
            view = whole[offset : offset + numel * dtype.itemsize].view(dtype)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def find(self, tensor: torch.Tensor) -> Address | None:
        """Return where the others reach a contiguous ``tensor``, or None if they don't."""
        number = self._number_at.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return None
        return (number << _OFFSET_BITS) + int(tensor.storage_offset()) * tensor.element_size()

    def is_staged(self, place: Address) -> bool:
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
        retired = [self._retired.popleft() for _ in range(min(len(self._retired), _MAX_RETIRED))]
        message = b"".join(n.to_bytes(8, "little") for n in (number, *retired))
        for line in self._memory_lines.values():
            try:
                send_message(line, message, [self._own[number].descriptor])
            except ConnectionError:
                # It is gone, as the meeting will tell.
                continue
        # Who has mapped it needs no descriptor, and is all who ever will.
        self._own[number].close()
        self._announced.add(number)
        self._announced.difference_update(retired)

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
            if not descriptors:
                # The kernel drops those that there is no room for.
                raise SharedMemoryFull(
                    f"Rank {self._members[rank]}'s memory can't be mapped: too many files are "
                    "open. Raise the limit (ulimit -n)."
                )
            numbers = [
                int.from_bytes(message[i : i + 8], "little") for i in range(0, len(message), 8)
            ]
            self._mapped[rank, numbers[0]] = map_segment(descriptors[0])
            for number in numbers[1:]:
                self._mapped.pop((rank, number), None)
                self._views.clear()

    def check_open(self) -> None:
        """Raise what broke this team, if something did."""
        if self._process != os.getpid():
            raise GroupClosed(
                f"This process group belongs to process {self._process}, and was inherited by "
                f"process {os.getpid()} in a fork. Create one in each process that needs one."
            )
        if self._is_closed:
            raise GroupClosed(
                f"Rank {self._name} has destroyed this process group. Call destroy_process_group() "
                "after the last collective."
            )
        fault = self._fault
        if fault is not None:
            raise type(fault)(str(fault), fault.ranks, fault.operation)

    def _lost(self, rank: int, operation: str, note: Note | None) -> CollectiveFailed:
        """What to raise when the line for letters to ``rank`` has ended, with these last words."""
        try:
            self.check_open()
        except CollectiveFailed as error:
            return error
        lost = self._members[rank]
        text = f"Rank {lost} is gone; rank {self._name} waited for it in {operation}. "
        if note is None:
            text += "Its process ended or was killed: what it wrote last tells why."
        elif note["kind"] == "left":
            text += f"{why_it_left(note)} What it has to send, it must send before."
        else:
            return self.break_off(fault_told(note, lost, operation), note)
        return self.break_off(PeerLost(text, [lost], operation))

    def break_off(self, error: CollectiveFailed, note: Note | None = None) -> CollectiveFailed:
        """Take no further part, and see that all who wait for this rank learn why.

        Args:
            error: What happened.
            note: What to tell the others, if that isn't the error's own text.

        Returns:
            What to raise: what broke the group first.
        """
        if not self._is_broken:
            self._fault = error if isinstance(error, _Fault) else PeerLost(str(error), [self._name])
            self._is_broken = True
        fault = self._fault
        if not self._is_closed and fault is not None:
            if note is None:
                note = Note(kind=type(fault).__name__, text=str(fault), ranks=list(fault.ranks))
            self._signals.announce(note)
            self._signals.interrupt()
            self._letters.part(note)
        try:
            self.check_open()
        except CollectiveFailed as first:
            return first
        return error

    def _give_up(self, operation: str, error: BaseException) -> None:
        """Break the group because of something that concerns this rank alone."""
        if not self._is_broken:
            text = f"Rank {self._name} could not go on with {operation}: {error!r}"
            self.break_off(PeerLost(text, [self._name], operation))

    def abort(self, why: str = "") -> None:
        """Make every wait of this rank, and of the others, end with an error."""
        if not self._is_broken:
            self.break_off(
                PeerLost(f"Rank {self._name} has aborted the group.{why}", [self._name], "abort")
            )

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and let go of everything."""
        if self._is_closed:
            return
        if self._process == os.getpid():
            has_failed = self._is_broken
            note = leaving(self._name)
            if not has_failed:
                self._signals.announce(note)
                self._letters.flush()
            # Whichever thread still waits here is to learn that it is this rank that has left.
            self._is_closed = self._is_broken = True
            if not has_failed:
                self._letters.part(note)
            self._signals.interrupt()
            self._letters.interrupt()
        self.close()

    def close(self) -> None:
        """Close all descriptors and forget all memory, without a word to the others."""
        self._is_closed = self._is_broken = True
        self._signals.close()
        self._letters.close()
        self._close_memory()

    def _close_memory(self) -> None:
        for line in self._memory_lines.values():
            line.close()
        for number in list(self._own):
            segment = self._own.pop(number, None)
            if segment is not None:
                segment.close()
        self._number_at.clear()
        self._mapped.clear()
        self._views.clear()

    def forget(self) -> None:
        """Close everything in a forked child, without ending the lines of its parent."""
        self._is_closed = self._is_broken = True
        self._signals.close()
        self._letters.forget()
        self._close_memory()


def _forget_in_child() -> None:
    # A line ends only when the last process that has it open closes it: a forked child that
    # outlived its parent (a loader's worker, say) would hide from the others that it died.
    for team in list(_teams):
        team.forget()


os.register_at_fork(after_in_child=_forget_in_child)
