"""The memory of a bucket's gradients, and who else has it.

Note [Gradients that the program holds]: in one process a gradient that the program keeps over
``zero_grad()`` stays as it is, and one that is still in ``parameter.grad`` is the tensor that
autograd adds to. Here both are views of one memory, which every backward uses. So

- if the program has any of the former when a backward begins, the bucket takes other memory;
- a tensor that is a parameter's gradient when a backward begins, is elsewhere, and is held by the
  program too, stays that, and gets a copy of the mean.

- a process that is forked gets the gradients that there are, in memory of its own, before the fork
  returns.

Holders are told by the number of references to a view, and by the number of tensors in its memory.
Shown by test_gradients_of_the_last_step_stay_as_they_were.
"""

from __future__ import annotations

import operator
import os
import select
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import is_shared, leave_to_others, zero_buffer
from lockstep.grad.comm_hook import view_like
from lockstep.torch_private import _current_autograd_node, gradient_of, storage_use_count

# Parameters and unsummed gradients begin at multiples of this number of elements: at whole cache
# lines.
ALIGNMENT = 64
# Other gradients begin at multiples of this number of bytes, as torch's allocator aligns memory: on
# some processors the bits of a dot product depend on where numbers begin. Shown by
# test_gradients_begin_where_those_of_one_process_may_begin.
_LINE_BYTES = 64
# The references to an object in a list that sys.getrefcount() is mapped over: that of the list, and
# that of the call. A tensor that is the gradient of a parameter has one more.
_IN_A_LIST = 2


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless it has a ``grad_dtype``."""
    dtype: torch.dtype | None = (
        getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    )
    return parameter.dtype if dtype is None else dtype


def aligned(numel: int, alignment: int = ALIGNMENT) -> int:
    """Return the number of elements that a tensor of ``numel`` elements takes if it is aligned.

    If ``alignment`` is 0, it isn't, and takes no more.
    """
    return -(-max(numel, 1) // alignment) * alignment if alignment else numel


def line_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of a cache line of the gradient of ``parameter``."""
    return _LINE_BYTES // gradient_dtype(parameter).itemsize


class Memory:
    """A buffer with the gradients of a bucket and, behind them, the facts.

    Attributes:
        buffer: All of it.
        gradients: The gradients, as a tensor of one dimension.
        tail: The facts; elsewhere if a communication hook takes the buffer.
        views: The gradients, each in the shape of its parameter.
        pointers: The addresses of the views when they were made.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        gradients: torch.Tensor,
        tail: torch.Tensor,
        views: list[torch.Tensor],
    ) -> None:
        self.buffer, self.gradients, self.tail, self.views = buffer, gradients, tail, views
        self.pointers = [view.data_ptr() for view in views]
        self._storage = buffer.untyped_storage()
        self._num_uses = storage_use_count(self._storage._cdata)
        _memories.add(self)

    def is_used(self) -> bool:
        """Whether anybody has a gradient in it."""
        counts = map(sys.getrefcount, self.views)
        has_more_views = storage_use_count(self._storage._cdata) > self._num_uses
        return has_more_views or any(count > _IN_A_LIST for count in counts)

    def is_held(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Whether anybody holds a view of it, apart from those that are ``gradients``, in order.

        If all are, views of them are no matter.
        """
        has_holders, are_current = self._holders(gradients)
        return has_holders and not all(are_current)

    def has_holders(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Whether anybody holds a view of it, apart from parameters whose ``gradients`` it has."""
        return self._holders(gradients)[0]

    def _holders(self, gradients: Iterable[torch.Tensor | None]) -> tuple[bool, Sequence[bool]]:
        counts = [*map(sys.getrefcount, self.views)]
        has_more_views = storage_use_count(self._storage._cdata) > self._num_uses
        if counts.count(_IN_A_LIST) == len(counts):  # as in most steps: none is a gradient
            return has_more_views, [False]
        are_current = [*map(operator.is_, self.views, gradients)]
        has_more = sum(counts) > _IN_A_LIST * len(counts) + sum(are_current)
        return has_more_views or has_more, are_current


class BufferPlan(NamedTuple):
    """What makes the memories of a bucket.

    Attributes:
        forms: Tensors that have the gradients' shapes and strides.
        offsets: The first element of each gradient, and the one after the last.
        tail_size: The number of elements to reserve for facts.
        dtype, device: Those of the buffer.
        group: The group that allocates the buffer, in memory that it reduces in place, if any.
        is_tail_apart: Whether facts have memory of their own, since a hook may resize the buffer.
    """

    forms: Sequence[torch.Tensor]
    offsets: Sequence[int]
    tail_size: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None
    is_tail_apart: bool

    @property
    def numel(self) -> int:
        """The number of elements of the gradients, with the padding."""
        return self.offsets[-1]

    @property
    def size(self) -> int:
        """The number of elements of the buffer."""
        return self.numel if self.is_tail_apart else self.numel + self.tail_size

    def new(self) -> Memory:
        """Return a memory of zeros, in which the group reduces them, if there is one."""
        if self.group is None:
            return self.memory_in(torch.zeros(self.size, dtype=self.dtype, device=self.device))
        return self.memory_in(zero_buffer(self.group, self.size, self.dtype, self.device))

    def memory_in(self, buffer: torch.Tensor) -> Memory:
        """Return the memory in ``buffer``, which may have more elements."""
        if self.is_tail_apart:
            gradients, tail = buffer, buffer.new_zeros(self.tail_size)
        else:
            gradients, tail = buffer[: self.numel], buffer[self.numel : self.size]
        views = [
            view_like(buffer, offset, form)
            for offset, form in zip(self.offsets, self.forms, strict=False)
        ]
        return Memory(buffer, gradients, tail, views)


def held(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each of ``gradients`` of parameters whether it, or a view of it, is held too.

    The list must have the only references to them, apart from ``parameter.grad``.
    """
    storages = [gradient.untyped_storage() for gradient in gradients]
    keys = [storage._cdata for storage in storages]
    # Those of the list: autograd may compute several as views of one memory; and one is the storage
    # itself, as Python has it.
    from_list = Counter(keys)
    counts = map(sys.getrefcount, gradients)
    return [
        count > _IN_A_LIST + 1 or storage_use_count(key) > from_list[key] + 1
        for count, key in zip(counts, keys, strict=True)
    ]


def is_new(parameter: torch.Tensor) -> bool:
    """Whether autograd has just made the gradient of ``parameter``, in the node that runs here.

    Nobody holds it, though others that autograd has yet to hand out may be views of its memory.
    """
    gradient = gradient_of(parameter)
    return (
        getattr(_current_autograd_node(), "variable", None) is parameter
        and gradient is not None
        and not gradient.is_inference()
        and gradient._version == 0  # else it was there, and autograd has added to it
    )


class _Fork(threading.local):
    """A fork by this thread: the shared memories, whether they are used, and a pipe.

    The parent waits for a byte in the pipe, so that it changes no gradient that the child has yet
    to copy.
    """

    memories: Sequence[tuple[Memory, bool]] = ()
    pipe: tuple[int, int] | None = None


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()
_fork = _Fork()
# The longest that a fork waits for the child to copy gradients.
_COPY_SECONDS = 10.0


def _before_fork() -> None:
    shared = [memory for memory in list(_memories) if is_shared(memory.buffer)]
    _fork.memories = [(memory, memory.is_used()) for memory in shared]
    _fork.pipe = os.pipe() if any(is_used for _, is_used in _fork.memories) else None


def _after_fork_in_parent() -> None:
    pipe, _fork.pipe, _fork.memories = _fork.pipe, None, ()
    if pipe is not None:
        os.close(pipe[1])
        has_copied = select.poll()
        has_copied.register(pipe[0])
        has_copied.poll(_COPY_SECONDS * 1000)
        os.close(pipe[0])


def _after_fork_in_child() -> None:
    for memory, is_used in _fork.memories:
        leave_to_others(memory.buffer, keeps=is_used)
    pipe, _fork.pipe, _fork.memories = _fork.pipe, None, ()
    if pipe is not None:
        os.write(pipe[1], b"1")
        os.close(pipe[0])
        os.close(pipe[1])


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
