"""The transport between processes of one host."""

from __future__ import annotations

import itertools
import os
import socket
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from lockstep.comm.shm.barrier import Fault, SocketBarrier, farewell
from lockstep.comm.shm.connect import connect
from lockstep.comm.shm.mailbox import SocketMailbox
from lockstep.comm.shm.memory import Segment, map_segment, receive_message, send_message
from lockstep.comm.transport import Address, Signature, Transport
from lockstep.errors import CollectiveFailed, SharedMemoryFull

# An address is the number of a segment and an offset in it. The slots are segment 0.
_OFFSET_BITS = 40
_MAX_VIEWS = 512
# The most segments that a message reports as no longer used.
_MAX_RETIRED = 512


class ShmTransport(Transport):
    """Processes of one Linux host that map each other's memory.

    Every rank of the group creates it. All ranks map each other's slots when they connect; of
    other memory, which :meth:`empty` makes, they get the descriptor before it is first announced.

    Args:
        store: A store that is this group's alone.
        rank: This rank.
        size: The number of ranks.
        timeout: How many seconds to wait for the others to connect.
        members: The ranks as the whole run numbers them, for errors; by default 0 to ``size - 1``.

    Raises:
        RendezvousFailed: If not all ranks come, or one is on another host.
        SharedMemoryFull: If there is no memory for the slots.
    """

    mailbox: SocketMailbox
    _INHERITED = (
        "This process group belongs to process {}, and was inherited by process {} in a fork. "
        "Create one in each process that needs one."
    )

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: float,
        members: Sequence[int] | None = None,
    ) -> None:
        members = list(members or range(size))
        super().__init__(rank, members)
        slots, peers = connect(store, rank, size, 2 * self.slot_bytes, timeout)
        self._peers = peers
        sockets = {members[r]: peers[r].barrier for r in sorted(peers)}
        self._barrier = SocketBarrier(self._name, sockets, members)
        self.mailbox = SocketMailbox(self, {r: peer.mailbox for r, peer in peers.items()})
        # By rank and number, the mapped segments of others, and this rank's slots.
        self._mapped = {(rank, 0): slots, **{(r, 0): peer.slots for r, peer in peers.items()}}
        self._views: dict[tuple[int, int, torch.dtype, int], torch.Tensor] = {}
        # This rank's other segments, by number, and their numbers by address.
        self._own: dict[int, Segment] = {}
        self._number_at: dict[int, int] = {}
        self._numbers = itertools.count(1)
        # The numbers of segments that the others are to unmap.
        self._retired: deque[int] = deque()

    def _arrive(
        self, signature: Signature, address: Address, timeout: float, others: dict[int, object]
    ) -> Sequence[Address]:
        assert isinstance(address, int)
        number = address >> _OFFSET_BITS
        if number and self._own[number].descriptor >= 0:
            self._hand_out(number)
        return self._barrier.exchange(signature, address, timeout, others)

    def at(self, rank: int, address: Address, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return, as a flat tensor, what ``rank`` announced to have at ``address``.

        Of this rank itself, only slots: other memory is the caller's, who has it at hand.
        """
        assert isinstance(address, int)
        key = (rank, address, dtype, numel)
        view = self._views.get(key)
        if view is None:
            number, offset = address >> _OFFSET_BITS, address & ((1 << _OFFSET_BITS) - 1)
            if (rank, number) not in self._mapped:
                try:
                    self._take_segments(rank)
                except BaseException as error:
                    self.give_up(error)
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

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes, that :meth:`find` will find while a tensor uses it."""
        self.check_open()
        number = next(self._numbers)
        reference = weakref.ref(self)

        def retire() -> None:
            transport = reference()
            if transport is not None:
                transport._retire(number)

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
        """Send the others a segment before it is announced, and which they may unmap."""
        retired = [self._retired.popleft() for _ in range(min(len(self._retired), _MAX_RETIRED))]
        message = array("q", (number, *retired)).tobytes()
        for peer in self._peers.values():
            # A peer that is gone is the barrier's to report.
            with suppress(ConnectionError):
                send_message(peer.memory, message, [self._own[number].descriptor])
        # Every rank that will ever map it has been sent it.
        self._own[number].close()

    def _take_segments(self, rank: int) -> None:
        """Map the segments that ``rank`` has handed out, and unmap those it no longer uses."""
        while True:
            try:
                message, descriptors = receive_message(
                    self._peers[rank].memory, 8192, 1, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            if not message:
                return
            if not descriptors:
                raise SharedMemoryFull(
                    f"Rank {self.members[rank]}'s memory can't be mapped: too many files are "
                    "open. Raise the limit (ulimit -n)."
                )
            new, *retired = array("q", message)
            self._mapped[rank, new] = map_segment(descriptors[0])
            for number in retired:
                self._mapped.pop((rank, number), None)
                self._views.clear()

    def break_off(self, error: CollectiveFailed) -> CollectiveFailed:
        """Take no further part because of ``error``, and tell all ranks that wait for this one."""
        if not self._is_broken:
            self._end(Fault.of(self._break(error)))
        return self.error() or error

    def _end(self, fault: Fault) -> None:
        """Tell the others why this rank takes no further part, and end all waits."""
        self._barrier.announce(fault)
        self.mailbox.end(fault)
        for peer in self._peers.values():
            peer.end()

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and let go of everything."""
        if self._is_closed:
            return
        # A thread that still waits here is to learn that it is this rank that has left.
        was_broken, self._is_closed, self._is_broken = self._is_broken, True, True
        if not was_broken:
            self._end(farewell(self._name))
        for peer in self._peers.values():  # also if the group broke halfway
            peer.end()
        self.close()

    def close(self) -> None:
        """Close all descriptors and unmap all memory, without a word to the others."""
        self._is_closed = self._is_broken = True
        self.mailbox.close()
        for peer in self._peers.values():
            peer.close()
        for number in list(self._own):
            segment = self._own.pop(number, None)
            if segment is not None:
                segment.close()
        self._peers, self._mapped = {}, {}
        self._number_at.clear()
        self._views.clear()

    def after_fork(self) -> None:
        """In a forked child, close everything.

        A connection ends only when the last process that has it open closes it: a child that
        outlives its parent (a loader's worker, say) would hide from the others that it died.
        """
        self.mailbox.renew_lock()
        self.close()
