"""Gradients that are summed where they are needed: by the rank that updates them, or when read.

Each rank leaves its gradients where the others read them, and at the end of a backward all meet
once. Afterwards any rank can take the mean of any gradient, by itself: the owner of a part of the
parameters sums this part, to update it, and nobody sums the rest, unless the program looks at
``parameter.grad``.

Note [Buffers of a bucket]: a rank that is through with a step may be in the next backward while
another one still reads gradients of the last. Each rank notes in its buffer when it won't read any
more: when zero_grad() has dropped the gradients, or all are summed. A rank that doesn't see that of
all others within a moment makes a second buffer, and leaves gradients in the two by turns. That is
enough, since a rank comes to the meeting of one backward only after it has read all that it ever
will of the one before. Processors that may show others the note before the reads are over have two
from the start.
"""

from __future__ import annotations

import functools
import itertools
import operator
import platform
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import (
    PendingShares,
    reduction_for,
    start_all_reduce,
    uncompiled,
    zero_buffer,
)
from lockstep.grad.bucket import Bucket, gradient_of, set_gradient
from lockstep.grad.diagnostics import naming

# Where parameters begin in memory, in elements: whole cache lines.
ALIGNMENT = 64
# Meetings are counted up to this, which all dtypes of gradients have.
_NUM_NUMBERS = 64
# How long to wait for others to read gradients before more memory is taken, once, and how often to
# look.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 0.05, 50e-6
# Whether a processor's reads are over when the others see what it writes afterwards.
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


class DeferredParameter(nn.Parameter):
    """A parameter whose gradient is summed over the ranks when it is read for the first time.

    Copies, and what is unpickled, are plain parameters.
    """

    _deferred: tuple[weakref.ref[DeferredBucket], int] | None

    @property
    @uncompiled
    def grad(self) -> torch.Tensor | None:
        """The gradient: the mean over the ranks, once it is reduced."""
        found = bucket_of(self)
        return gradient_of(self) if found is None else found[0].read(found[1])

    @grad.setter
    @uncompiled
    def grad(self, gradient: torch.Tensor | None) -> None:
        set_gradient(self, gradient)
        if (found := bucket_of(self)) is not None:
            found[0].drop_at(found[1])

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """As that of a plain parameter."""
        return repr(nn.Parameter(self.data, self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter."""
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(data, self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what makes a plain parameter."""
        deferred = vars(self).pop("_deferred", None)
        try:
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        finally:
            if deferred is not None:
                self._deferred = deferred


def bucket_of(parameter: torch.Tensor) -> tuple[DeferredBucket, int] | None:
    """Return the bucket that sums the gradient of ``parameter`` where needed, and its position."""
    reference, position = getattr(parameter, "_deferred", None) or (None, 0)
    bucket = None if reference is None else reference()
    return None if bucket is None else (bucket, position)


def pending_bucket_of(parameter: torch.Tensor) -> tuple[DeferredBucket, int] | None:
    """The same if the gradient is yet to be summed; None if it is in ``parameter.grad``."""
    found = bucket_of(parameter)
    return found if found is not None and found[0].pending[found[1]] else None


def lacks_gradient(parameter: torch.Tensor) -> bool:
    """Whether ``parameter.grad`` is None, without a look at it."""
    return gradient_of(parameter) is None and pending_bucket_of(parameter) is None


# Ranks may be threads.
_lock = threading.Lock()
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[DeferredBucket]] = (
    weakref.WeakKeyDictionary()
)


class DeferredBucket(Bucket):
    """A bucket whose gradients are left for all ranks to read, in a group whose ranks can.

    While a gradient is pending, nobody has summed it on this rank, and its parameter has none for
    autograd: if it is read, or added to, it is summed before.
    """

    is_deferred = True
    num_notes = 1  # the number of the last backward whose gradients this rank has read

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        accumulated: memoryview,
        start: int,
        tail_size: int,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(
            named,
            accumulated,
            start=start,
            tail_size=tail_size,
            buffers_from=group,
            alignment=ALIGNMENT,
        )
        self._note_at = self._numel + tail_size
        # Gradients that the program has read, by position, and those of them that were there before
        # this backward, or were read in its midst: such a gradient stays the same tensor.
        self._read: dict[int, weakref.ref[torch.Tensor]] = {}
        self._held: dict[int, torch.Tensor] = {}
        # Whether all ranks have come to the meeting that let them read the last backward's buffer.
        self._has_met, self._met_at = False, 0
        self._number = 0  # of such meetings
        with _lock:
            _by_group.setdefault(group, weakref.WeakSet()).add(self)
        self.group = group
        self.pending = bytearray(len(named))
        self._factor: torch.Tensor | None = None  # by which means are multiplied
        self._shares: list[torch.Tensor] = []
        self._shared: PendingShares | None = None
        # The memory of this backward, and that of the one before if there are two. Other ranks may
        # read the buffers for a while after this bucket is gone.
        self._memories = [self._memory_in(self._buffer)]
        self._buffers = [self._buffer]
        weakref.finalize(self, group.keep, self._buffers).atexit = False  # type: ignore[attr-defined]
        reference = weakref.ref(self)
        for position, parameter in enumerate(self._parameters):
            parameter._deferred = reference, position  # type: ignore[attr-defined]

    def offset_of(self, position: int) -> int:
        """Return where the gradient at ``position`` begins, in elements."""
        return self._offsets[position]

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Its parameters, by position."""
        return self._parameters

    @property
    def numel(self) -> int:
        """The number of elements of all gradients, with those that align them."""
        return self._numel

    def has_layout(self, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> bool:
        """Whether these are all its parameters, and their gradients are side by side like that."""
        same = len(parameters) == len(self._parameters)
        return (
            same
            and all(map(operator.is_, parameters, self._parameters))
            and [*offsets] == self._offsets[:-1]
        )

    def gradients_of_ranks(self) -> list[torch.Tensor]:
        """Return the gradients of the last backward by rank, if they aren't summed."""
        return [share[: self._numel] for share in self._shares]

    def are_all_pending(self) -> bool:
        """Whether nobody has read or dropped any gradient of the last backward on this rank."""
        return 0 not in self.pending

    def begin(self) -> None:
        """A backward begins: leave its gradients in the buffer of the last but one."""
        self.settle()
        self._note_read()
        for position, read in self._read.items():
            gradient = gradient_of(self._parameters[position])
            if gradient is not None and gradient is read():
                self._held[position] = gradient
        if self._has_met:  # or nobody else knows of this buffer
            self._has_met = False
            self._free_memory()
        self._read, self._factor, self._shares, self._is_open = {}, None, [], True
        self._use(self._memories[0])

    def _free_memory(self) -> None:
        """Put memory first that no rank reads any more. See Note [Buffers of a bucket]."""
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
        """Whether all ranks are through with the gradients of the last backward."""
        if len(self._shares) == 1:  # all summed; this rank's own
            return True
        return all(share[self._note_at].real.item() == self._number for share in self._shares)

    def _note_read(self) -> None:
        """Tell the others that this rank won't read gradients of the last backward any more."""
        if self._has_met:
            with torch.inference_mode():
                self._buffer[self._note_at] = self._number

    def settle(self) -> None:
        """Sum the gradients that nobody has read yet: more may be added to them."""
        for position in itertools.compress(range(len(self.pending)), self.pending[:]):
            # Autograd may have begun to add, if this is in a hook that is told of it.
            more = gradient_of(self._parameters[position])
            summed = self._sum(position)
            if more is not None:
                with torch.no_grad():
                    summed.add_(more)

    def read(self, position: int) -> torch.Tensor | None:
        """Return the gradient at ``position`` to the program, which may keep and change it."""
        parameter, view = self._parameters[position], self._views[position]
        gradient = gradient_of(parameter)
        if self.pending[position]:
            gradient = self._sum(position)
            if 1 not in self.pending:
                self._note_read()
        elif gradient is view:  # which all ranks will read
            with torch.inference_mode(False), torch.no_grad():
                gradient = view.clone()
            set_gradient(parameter, gradient)
        if gradient is not None:
            self._read[position] = weakref.ref(gradient)
            if self._is_open:
                self._held[position] = gradient
        return gradient

    def drop_at(self, position: int) -> None:
        """The program has set another gradient at ``position``, or none."""
        if self.pending[position]:
            self.pending[position] = 0
            if 1 not in self.pending:
                self._note_read()

    def _sum(self, position: int) -> torch.Tensor:
        """Sum the gradient at ``position``, which the parameter has from now on; return it."""
        view = self._views[position]
        with torch.inference_mode(False), torch.no_grad():
            gradient = torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
        self._sum_to(gradient, position)
        return gradient

    def _sum_to(self, gradient: torch.Tensor, position: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            flat = gradient.as_strided((gradient.numel(),), (1,))
            self.sum_into(flat, self._offsets[position])
        self.pending[position] = 0
        set_gradient(self._parameters[position], gradient)

    def drop_pending(self) -> None:
        """Set all gradients to None."""
        self.pending[:] = bytes(len(self.pending))
        self._note_read()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        deque(map(set_gradient, self._parameters, itertools.repeat(None)), maxlen=0)

    def sum_into(self, target: torch.Tensor, start: int) -> None:
        """Write the mean over the ranks of the elements from ``start`` on to ``target``, flat."""
        op = dist.ReduceOp.AVG if self._is_averaged else dist.ReduceOp.SUM
        stop = start + target.numel()
        with torch.inference_mode():
            sources = [share[start:stop] for share in self._shares]
            reduction_for(op, target.dtype).into(target, sources)
            if self._factor is not None:
                target.mul_(self._factor)

    def new_sum(self, start: int, stop: int) -> torch.Tensor:
        """Return the means over the ranks of the elements from ``start`` to ``stop``."""
        total = self._buffer.new_empty(stop - start)
        self.sum_into(total, start)
        return total

    def scale_means(self, factor: torch.Tensor) -> None:
        """Multiply the means, which nobody has read yet, by ``factor``."""
        self._factor = factor if self._factor is None else self._factor * factor

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # The parameters may be there still. When the interpreter ends, what is made is never freed
        # in good order, and torch aborts. Shown by test_a_program_may_end_with_gradients_unread.
        if not is_ending():
            with suppress(Exception):
                self.settle()

    def finish(self) -> None:
        """All ranks' backwards have succeeded: the gradients are those of its parameters.

        Until now they were this rank's own ones, in the buffer.
        """
        grown = self.accumulated.tobytes()
        if self._held or 0 in grown:
            for position in itertools.compress(range(len(grown)), grown):
                self.use_as_grad(position)
        else:  # as in most steps
            self._drop_gradients()
            self.pending[:] = grown

    def use_as_grad(self, position: int) -> None:
        """Make the mean the gradient of a parameter, of one that this rank didn't use too."""
        held, view = self._held.get(position), self._views[position]
        if held is not None and held.shape == view.shape and held.stride() == view.stride():
            self._sum_to(held, position)
            self._read[position] = weakref.ref(held)
        else:
            set_gradient(self._parameters[position], None)
            self.pending[position] = 1

    def drop(self) -> None:
        """Drop the gradients of this backward: it failed, here or on another rank."""
        for position, gradient in self._held.items():
            parameter = self._parameters[position]
            if self.accumulated[position] and gradient_of(parameter) is gradient:
                set_gradient(parameter, None)
        super().drop()

    def reset(self) -> None:
        """Drop the state of a backward: it is over."""
        super().reset()
        self._held, self._is_open = {}, False

    def launch(self, group: dist.ProcessGroup, *, average: bool = False) -> None:
        """Let all ranks read the gradients."""
        self.has_left, self._is_averaged = True, average
        shared: Any = group
        with _lock:
            others = [*_by_group[group]]
        for bucket in others:  # other ranks may have dropped it, and keep its memory for a while
            if bucket._has_met and shared.num_shared - bucket._met_at > shared.NUM_KEPT - 3:
                bucket.settle()
        self._shared = PendingShares(group, self._buffer)

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait until all ranks' gradients can be read, and take their facts together."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        with naming(self.parameter_names, group):
            shared.wait()
            self._has_met, self._shares = True, shared.shares
            self._number = (self._number + 1) % _NUM_NUMBERS
            self._met_at = group.num_shared  # type: ignore[attr-defined]
            if not self._shares:  # a rank lacks shared memory
                op = dist.ReduceOp.AVG if self._is_averaged else dist.ReduceOp.SUM
                start_all_reduce(group, self._gradients, op).wait()
                start_all_reduce(group, self.tail).wait()
                self._shares = [self._buffer]
        self.tail = functools.reduce(
            operator.add, [s[self._numel : self._note_at] for s in self._shares]
        )

    def failed_ranks(self, divisor: int) -> tuple[int, int]:
        """Return how many ranks' backwards failed, and the sum of their numbers."""
        return super().failed_ranks(1)  # the facts are always added up
