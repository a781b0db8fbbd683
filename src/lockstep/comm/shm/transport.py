"""The transport between processes of one host."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.shm.barrier import Fault, SocketBarrier, farewell
from lockstep.comm.shm.connect import connect
from lockstep.comm.shm.mailbox import SocketMailbox
from lockstep.comm.shm.memory import map_memory
from lockstep.comm.transport import Address, Failure, Transport
from lockstep.errors import SharedMemoryFull

# The number of views that are kept, most of which map a peer's memory. A process may map 65,530.
_MAX_VIEWS = 4096


class ShmTransport(Transport):
    """Processes of one Linux host that map each other's memory.

    Every rank of the group creates it. Each has one segment: an address is an offset in it, and
    the slots are at its beginning. Ranks map each other's slots when they connect, and other
    memory, which :meth:`empty` makes, when it is first announced.

    ``store`` is this group's alone, and ``timeout`` the seconds to wait for the others to connect.
    Errors name ranks by ``members``, their numbers in the whole run; by default 0 to ``size - 1``.

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
        self._segment, slots, self._peers = connect(store, rank, size, 2 * self.slot_bytes, timeout)
        sockets = {members[r]: self._peers[r].barrier for r in sorted(self._peers)}
        barrier = SocketBarrier(members[rank], sockets, members)
        super().__init__(rank, members, barrier.exchange)
        self._barrier = barrier
        self.mailbox = SocketMailbox(self, {r: peer.mailbox for r, peer in self._peers.items()})
        self._slots = {rank: slots, **{r: peer.slots for r, peer in self._peers.items()}}
        self._views: dict[tuple[int, int, torch.dtype, int], torch.Tensor] = {}

    def at(self, rank: int, address: Address, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return, as a flat tensor, what ``rank`` announced to have at ``address``.

        Of this rank itself, only slots: other memory is the caller's, who has it at hand.
        """
        assert isinstance(address, int)
        key = (rank, address, dtype, numel)
        view = self._views.get(key)
        if view is None:
            num_bytes = numel * dtype.itemsize
            if self.is_staged(address):
                view = self._slots[rank][address:][:num_bytes].view(dtype)
            else:
                offset = address % mmap.PAGESIZE
                descriptor = self._peers[rank].memory
                try:
                    memory = map_memory(descriptor, address - offset, offset + num_bytes)
                except SharedMemoryFull:
                    self._views.clear()  # of memory that the peers may have given back
                    memory = map_memory(descriptor, address - offset, offset + num_bytes)
                view = memory[offset:][:num_bytes].view(dtype)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def find(self, tensor: torch.Tensor) -> Address | None:
        """Return where the others reach a contiguous ``tensor``, or None if they don't."""
        start = self._segment.offset_at.get(tensor.untyped_storage().data_ptr())
        if start is None:
            return None
        return start + int(tensor.storage_offset()) * tensor.element_size()

    def lend(self, tensor: torch.Tensor) -> Address | None:
        """As :meth:`find`; the others may read the memory after this rank has left, too."""
        self._segment.lent.add(tensor.untyped_storage().data_ptr())
        return self.find(tensor)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes, that :meth:`find` will find while a tensor uses it."""
        self.check_open()
        return self._segment.add(num_bytes)

    def _report(self, failure: Failure) -> None:
        self._end(Fault.of(failure))

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
        peers, self._peers, self._slots = self._peers, {}, {}  # whose descriptors close once
        for peer in peers.values():
            peer.close()
        self._segment.close()
        self._views.clear()

    def after_fork(self) -> None:
        """In a forked child, close everything.

        A connection ends only when the last process that has it open closes it: a child that
        outlives its parent (a loader's worker, say) would hide from the others that it died.
        """
        self.mailbox.renew_lock()
        self.close()
