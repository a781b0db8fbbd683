"""Deferred gradients: each is summed by the rank that updates it, or by ranks that read it.

Each rank leaves its gradients in a buffer that the other ranks can read. At the end of a backward
there is one barrier, and from then on each rank can compute the mean of any gradient on its own.
The owner of a part of the parameters sums the gradients of this part to update it. No rank sums the
others, unless the program reads ``parameter.grad``.

Note [Buffers of a bucket]: a rank may begin the next backward while another rank still reads
gradients of the last one. So each rank writes a note to its buffer when it won't read any more of
them: when zero_grad() has dropped them, or when all are summed. A rank that doesn't find the notes
of all ranks within _PATIENCE_SECONDS makes a second buffer, and its backwards take turns between
the two. Two are enough, since a rank comes to the barrier of one backward only after its last read
of the gradients of the one before. On processors that may show the note to others before the reads
are over, buckets have two buffers from the start.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import (
    SharedMemoryGroup,
    all_gather,
    bytes_of,
    is_shared,
    reduction_for,
    share,
    start_all_reduce,
    zero_buffer,
)
from lockstep.errors import CollectiveFailed
from lockstep.grad.bucket import TOLD
from lockstep.grad.memory import gradient_dtype, gradient_of, set_gradient
from lockstep.grad.unsummed import UnsummedBucket
from lockstep.torch_private import _InferenceMode

# Behind its gradients a bucket has two numbers of 8 bytes and, in the last bucket, a byte for each
# parameter: whether the gradient has grown on this rank. The first number is that of the last
# backward whose gradients this rank has read; the second is 0 or, if its backward has failed, the
# number of this rank plus one, or -1 if the reducer is to tell something.
_NUMBER_BYTES, _NUM_NUMBERS = 8, 2
_READ, _FAILED = range(_NUM_NUMBERS)
# How long to wait for the notes of the other ranks before a second buffer is made, and how long
# between two looks at them.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 0.05, 50e-6
# Whether the processor completes earlier reads before others see a later write.
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
# The most combinations of the ranks' buffers of which views are kept.
_MOST_COMBINATIONS = 8


# By first and last position, each rank's elements.
_Parts = dict[tuple[int, int], list[torch.Tensor]]


class _Facts(NamedTuple):
    """What a rank tells behind the gradients of a bucket; in memory that it shares."""

    numbers: memoryview
    has_grown: memoryview
    memory: torch.Tensor  # in which they are

    @classmethod
    def in_memory(cls, memory: torch.Tensor, num_bytes: int) -> _Facts:
        """Find them in ``memory``, the end of a buffer."""
        data, start = bytes_of(memory), _NUMBER_BYTES * _NUM_NUMBERS
        return cls(data[:start].cast("q"), data[start:num_bytes], memory)


def facts_numel(num_parameters: int, itemsize: int) -> int:
    """Return the number of elements that facts about ``num_parameters`` take in a bucket."""
    return -(-(_NUMBER_BYTES * _NUM_NUMBERS + num_parameters) // itemsize)


# Ranks may be threads.
_lock = threading.Lock()
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[DeferredBucket]] = (
    weakref.WeakKeyDictionary()
)


def _sum_before_fork() -> None:
    """Sum unsummed gradients, as other processes will change what a child would sum them from."""
    with _lock:
        buckets = [bucket for own in _by_group.values() for bucket in own]
    for bucket in buckets:
        if is_shared(bucket._buffer):
            bucket.sum_unsummed()


os.register_at_fork(before=_sum_before_fork)


class DeferredBucket(UnsummedBucket):
    """A bucket of deferred gradients, in a group whose ranks can read each other's memory.

    A gradient is unsummed until this rank has summed it. It is summed before the program reads it,
    and before autograd adds to it.
    """

    carries_facts = True
    group: SharedMemoryGroup

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        accumulated: memoryview,
        start: int,
        group: dist.ProcessGroup,
        num_parameters: int,
    ) -> None:
        # Whether this backward's barrier is still to come, in the group's generation.
        self._waits, self._generation = False, group.generation  # type: ignore[attr-defined]
        self._facts_bytes = _NUMBER_BYTES * _NUM_NUMBERS + num_parameters
        # By the address of their memory; and those of all ranks, by rank.
        self._known_facts: dict[int, _Facts] = {}
        self._facts: list[_Facts] = []
        super().__init__(named, accumulated, start, group, num_parameters)
        # Gradients that the program has read, by position. If they were there before this backward,
        # or were read during it, they are kept.
        self._read: dict[int, weakref.ref[torch.Tensor]] = {}
        # Whether the last backward's barrier is over, from which on other ranks read this buffer;
        # and the group's num_shared at that time.
        self._has_met, self._met_at, self._has_noted = False, 0, False
        self._number = 0  # of such barriers
        with _lock:
            self._of_group = _by_group.setdefault(group, weakref.WeakSet())
            self._of_group.add(self)
        self._factor: torch.Tensor | None = None  # of gradient clipping, for all means
        self._shares: list[torch.Tensor] = []  # the buffers of all ranks, by rank
        # By the addresses of all ranks' buffers, views of them by their first and last position;
        # and those of the current buffers.
        self._kept_parts: dict[tuple[int, ...], _Parts] = {}
        self._parts: _Parts = {}
        # The memory of this backward, and that of the one before if there are two. Other ranks may
        # read the buffers for a while after this bucket is gone.
        self._memories = [self._memory_in(self._buffer)]
        self._buffers = [self._buffer]
        weakref.finalize(self, group.keep, self._buffers).atexit = False  # type: ignore[attr-defined]

    @staticmethod
    def tail_size_of(
        parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, num_parameters: int
    ) -> int:
        """Return the number of elements that the facts take."""
        return facts_numel(num_parameters, gradient_dtype(parameters[0]).itemsize)

    def gradients_of_ranks(self) -> list[torch.Tensor]:
        """Return each rank's gradients of the last backward, by rank."""
        return [share[: self.numel] for share in self._shares]

    def begin(self) -> None:
        """Prepare for a backward: find a buffer that no other rank reads any more."""
        self.sum_unsummed()
        self._note_read()
        for position, read in self._read.items():
            gradient = gradient_of(self.parameters[position])
            if gradient is not None and gradient is read():
                self.now.kept[position] = gradient
        if self._has_met:  # else no other rank has read this buffer
            self._has_met = False
            self._free_memory()
        self._read, self._factor, self._shares = {}, None, []
        self._use(self._memories[0])

    def _free_memory(self) -> None:
        """Make the first of the memories one that no rank reads. See Note [Buffers of a bucket]."""
        if len(self._memories) == 1:
            end = time.monotonic() + _PATIENCE_SECONDS
            while _KEEPS_ORDER and time.monotonic() < end:
                if self._is_read_by_all():
                    return
                time.sleep(_PAUSE_SECONDS)
            first = self._buffer
            buffer = zero_buffer(self.group, len(first), first.dtype, first.device)
            self._buffers.append(buffer)
            self._memories.append(self._memory_in(buffer))
        self._memories.reverse()

    def _is_read_by_all(self) -> bool:
        """Whether no rank will read gradients of the last backward any more."""
        if len(self._shares) == 1:  # the buffer of this rank alone, which has been all-reduced
            return True
        return all(facts.numbers[_READ] == self._number for facts in self._facts)

    def _note_read(self) -> None:
        """Note for the other ranks that this one won't read their last gradients any more."""
        if self._has_met and not self._has_noted:
            self._has_noted = True
            self._facts_behind(self._buffer).numbers[_READ] = self._number

    def _facts_behind(self, buffer: torch.Tensor) -> _Facts:
        """Return the facts behind the gradients of a rank, which are in ``buffer``."""
        pointer = buffer.data_ptr()
        facts = self._known_facts.get(pointer)
        if facts is None:
            facts = _Facts.in_memory(buffer[self.numel :], self._facts_bytes)
            self._known_facts[pointer] = facts
        return facts

    def sum_unsummed(self) -> None:
        """Sum the unsummed gradients, before others are added to them."""
        for position in itertools.compress(range(len(self.unsummed)), self.unsummed[:]):
            # In a hook of the parameter, autograd has added the next gradient already.
            more = gradient_of(self.parameters[position])
            summed = self._sum(position)
            if more is not None:
                with torch.no_grad():
                    summed.add_(more)

    def read(self, position: int) -> torch.Tensor | None:
        """Return the gradient at ``position``, which the program may keep and change."""
        parameter, view = self.parameters[position], self._views[position]
        gradient = gradient_of(parameter)
        if self.unsummed[position]:
            gradient = self._sum(position)
            if 1 not in self.unsummed:
                self._note_read()
        elif gradient is view:  # in the buffer, which other ranks will read
            with _InferenceMode(False), torch.no_grad():
                gradient = view.clone()
            set_gradient(parameter, gradient)
        if gradient is not None:
            self._read[position] = weakref.ref(gradient)
            if self._pass is not None:
                self._pass.kept[position] = gradient
        return gradient

    def drop_at(self, position: int) -> None:
        """Drop the unsummed gradient at ``position``: the program has set ``parameter.grad``."""
        if self.unsummed[position]:
            self.unsummed[position] = 0
            if 1 not in self.unsummed:
                self._note_read()

    def _sum(self, position: int) -> torch.Tensor:
        """Sum the gradient at ``position``, make it that of the parameter, and return it."""
        view = self._views[position]
        with _InferenceMode(False), torch.no_grad():
            gradient = torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
        self._sum_to(gradient, position)
        return gradient

    def _sum_to(self, gradient: torch.Tensor, position: int) -> None:
        with _InferenceMode(False), torch.no_grad():
            like = self._views[position]
            has_layout = gradient.shape == like.shape and gradient.stride() == like.stride()
            total = gradient if has_layout else torch.empty_like(like)
            self.sum_into(total.as_strided((total.numel(),), (1,)), self.offsets[position])
            if total is not gradient:
                gradient.copy_(total)
        self.unsummed[position] = 0
        set_gradient(self.parameters[position], gradient)

    def drop_unsummed(self) -> None:
        """Drop the gradients, all of which are unsummed: the parameters have none besides."""
        self.unsummed[:] = bytes(len(self.unsummed))
        self._note_read()

    def sum_into(self, target: torch.Tensor, start: int, *, is_often: bool = False) -> None:
        """Write means over the ranks to ``target``, of one dimension: from element ``start`` on."""
        op = dist.ReduceOp.AVG if self._is_averaged else dist.ReduceOp.SUM
        stop = start + target.numel()
        with _InferenceMode(True):
            parts = self._parts.get((start, stop))
            if parts is None:
                parts = [share[start:stop] for share in self._shares]
                if is_often:
                    self._parts[start, stop] = parts
            reduction_for(op, target.dtype).into(target, parts)
            if self._factor is not None:
                target.mul_(self._factor)

    def part_of_mean(self, position: int, start: int, stop: int) -> torch.Tensor:
        """Return some elements of an unsummed gradient, which each rank can compute on its own."""
        view, offset = self._views[position], self.offsets[position]
        if view.is_contiguous():
            return self.new_sum(offset + start, offset + stop)
        every = self.new_sum(offset, offset + view.numel())
        return every.as_strided(view.shape, view.stride()).reshape(-1)[start:stop]

    def own_range(self) -> tuple[int, int]:
        """Return the first element that this rank sums for all, and the one after its last."""
        size = -(-self.numel // self.group.size())
        first = self.group.rank() * size
        return first, min(first + size, self.numel)

    def scale_means(self, factor: torch.Tensor) -> None:
        """Multiply all means, of which none is computed yet, by ``factor``."""
        self._factor = factor if self._factor is None else self._factor * factor

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # The parameters may live on, and need their gradients. Not when the interpreter ends: torch
        # aborts over tensors that are made then. Shown by
        # test_a_program_may_end_with_gradients_unread.
        if not is_ending():
            with suppress(Exception):
                self.sum_unsummed()

    def finish(self) -> None:
        """Make the gradients unsummed: all ranks' backwards have succeeded.

        Until now, each parameter had this rank's own gradient, in the buffer.
        """
        grown = self.accumulated.tobytes()
        if self.now.kept or 0 in grown:
            for position in itertools.compress(range(len(grown)), grown):
                self.use_as_grad(position)
        else:  # as in most steps
            deque(map(set_gradient, self.parameters, itertools.repeat(None)), maxlen=0)
            self.unsummed[:] = grown

    def use_as_grad(self, position: int) -> None:
        """Set the gradient of a parameter that any rank used: to the mean, once it is summed."""
        kept = self.now.kept.get(position)
        if kept is not None and kept.shape == self._views[position].shape:
            self._sum_to(kept, position)
            self._read[position] = weakref.ref(kept)
        else:
            set_gradient(self.parameters[position], None)
            self.unsummed[position] = 1

    def end(self) -> None:
        """Drop what belongs to the backward, which is over."""
        self.leave()
        super().end()

    def undo_copies(self) -> None:
        """Undo the scaling of gradients by a backward that has failed."""
        self.leave()
        super().undo_copies()

    def launch(self, group: dist.ProcessGroup, *, average: bool = False) -> None:
        """Leave the gradients: :meth:`wait` is the barrier after which all ranks may read them."""
        self.now.is_launched, self._is_averaged, self._waits = True, average, True
        self._generation = self.group.generation

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait until all ranks have left their gradients."""
        if not self._waits:
            return
        self._sum_old(self.group)
        try:
            self._shares = share(group, self._buffer)
        except CollectiveFailed:
            self._waits = False
            raise
        self._waits = False
        self._has_met, self._has_noted, self._met_at = True, False, self.group.num_shared
        self._number += 1
        if len(self._known_facts) > len(self._shares) * _MOST_COMBINATIONS:
            self._known_facts = {}
        self._facts = [*map(self._facts_behind, self._shares)]
        if not self._shares:
            self._send(group)
        if len(self._kept_parts) > _MOST_COMBINATIONS:
            self._kept_parts = {}
        addresses = tuple(share.data_ptr() for share in self._shares)
        self._parts = self._kept_parts.setdefault(addresses, {})

    def leave(self) -> None:
        """Let the other ranks pass the barrier, although an error keeps this one from it.

        Not after a mismatch, after which no rank comes to it. See Note [Mismatches] in
        comm/work.py. Shown by test_an_error_in_one_model_keeps_no_rank_waiting_in_another_one.
        """
        waits, self._waits = self._waits, False
        if waits and self.group.generation is self._generation:
            self._has_met, self._has_noted, self._met_at = True, False, self.group.num_shared
            self._number += 1
            self._note_read()
            self.group.start_share(self._buffer)

    def _send(self, group: dist.ProcessGroup) -> None:
        """Reduce the gradients, and gather the facts: a rank lacks shared memory."""
        op = dist.ReduceOp.AVG if self._is_averaged else dist.ReduceOp.SUM
        start_all_reduce(group, self._gradients, op).wait()
        own = torch.frombuffer(bytearray(bytes_of(self.tail)), dtype=torch.uint8)
        parts = all_gather(group, own)
        self._facts = [_Facts.in_memory(part, self._facts_bytes) for part in parts]
        self._shares = [self._buffer]

    def _sum_old(self, group: SharedMemoryGroup) -> None:
        """Sum gradients that another rank will not keep for long.

        Another rank may have dropped its part of a bucket, and keeps that memory for the next
        NUM_KEPT barriers only.
        """
        if len(self._of_group) == 1:
            return
        with _lock:
            buckets = [*self._of_group]
        for bucket in buckets:
            if bucket._has_met and group.num_shared - bucket._met_at > group.NUM_KEPT - 3:
                bucket.sum_unsummed()

    def write_facts(
        self, accumulated: bytearray, failed_rank: int | None, fractions: Sequence[float]
    ) -> None:
        """Write which gradients have grown on this rank, or that its backward failed."""
        own = self._facts_behind(self._buffer)
        own.numbers[_FAILED] = -bool(fractions[TOLD]) if failed_rank is None else 1 + failed_rank
        own.has_grown[:] = accumulated if failed_rank is None else bytes(len(accumulated))

    def used_by_any(self) -> list[bool]:
        """Return for each position whether any rank had a gradient."""
        return [*map(any, zip(*(facts.has_grown for facts in self._facts), strict=True))]

    def failed_ranks(self, divisor: int) -> tuple[int, int]:
        """Return on how many ranks the backward failed, and the sum of the numbers of these."""
        failed = [f.numbers[_FAILED] - 1 for f in self._facts if f.numbers[_FAILED] > 0]
        return len(failed), sum(failed)

    def is_any_set(self, fraction: int, *, on_gpu: bool = False) -> bool:
        """Whether any rank has set TOLD, the only fraction that it has."""
        return any(facts.numbers[_FAILED] < 0 for facts in self._facts)
