"""Unsummed gradients: reduced so far that a rank can get at them when the program reads them."""

from __future__ import annotations

import itertools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import uncompiled
from lockstep.grad.bucket import Bucket
from lockstep.grad.contents import Contents
from lockstep.grad.diagnostics import GradientLog
from lockstep.grad.table import TableSlice
from lockstep.torch_private import gradient_of, set_gradient

# It refuses what isn't a plain parameter, unless its detach() returns one of the same class.
_MAKE_PARAMETER = nn.Parameter.__new__.__code__


class DeferredParameter(nn.Parameter):
    """A parameter whose gradient is summed over the ranks when the program first reads it.

    Its copies, unpickled ones included, are plain parameters.
    """

    _deferred: tuple[weakref.ref[UnsummedBucket], int] | None

    @property
    @uncompiled
    def grad(self) -> torch.Tensor | None:
        """The gradient: after a backward that reduces gradients, the mean over the ranks."""
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

    def detach(self) -> torch.Tensor:
        """Return a plain tensor; and to ``nn.Parameter(self)`` a parameter, as it needs."""
        plain = super().detach()
        if torch.compiler.is_compiling() or sys._getframe(1).f_code is not _MAKE_PARAMETER:
            return plain
        return plain.as_subclass(type(self))

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
        """Pickle a plain parameter."""
        deferred = vars(self).pop("_deferred", None)
        try:
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        finally:
            if deferred is not None:
                self._deferred = deferred


def bucket_of(parameter: torch.Tensor) -> tuple[UnsummedBucket, int] | None:
    """Return the bucket with the deferred gradient of ``parameter``, and the position in it."""
    reference, position = getattr(parameter, "_deferred", None) or (None, 0)
    bucket = None if reference is None else reference()
    return None if bucket is None else (bucket, position)


def unsummed_bucket_of(parameter: torch.Tensor) -> tuple[UnsummedBucket, int] | None:
    """Return the same as long as the gradient is unsummed; None if it is in ``parameter.grad``."""
    found = bucket_of(parameter)
    return found if found is not None and found[0].unsummed[found[1]] else None


def lacks_gradient(parameter: torch.Tensor) -> bool:
    """Whether ``parameter.grad`` is None, without reading it, which would sum it."""
    return gradient_of(parameter) is None and unsummed_bucket_of(parameter) is None


def part_of_gradient(parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor | None:
    """Return some elements of the gradient, of one dimension, without a collective.

    An unsummed gradient stays unsummed. None if there is none, or this rank can't know of it.
    """
    if (found := unsummed_bucket_of(parameter)) is not None:
        return found[0].part_of_mean(found[1], start, stop)
    gradient = gradient_of(parameter)
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return gradient.detach().reshape(-1)[start:stop]


def name_of(parameter: torch.Tensor) -> str:
    """Return the name of ``parameter`` for an error, or its shape if it isn't known by name."""
    if (found := bucket_of(parameter)) is not None:
        return repr(found[0].contents.parameter_names[found[1]])
    return f"a parameter of shape {[*parameter.shape]}"


class UnsummedBucket(Bucket, ABC):
    """A bucket whose gradients stay unsummed after a backward, until they are read or dropped.

    Meanwhile autograd sees no gradient on their parameters. They lie as in a sharded optimizer's
    memory.

    Args:
        contents: The gradients.
        group: The ranks.

    Attributes:
        unsummed: For each position, 1 if the gradient is unsummed.
    """

    is_deferred = True
    # Whether the facts can follow the gradients; otherwise they are behind those of other buckets.
    carries_facts = False

    def __init__(self, contents: Contents, group: dist.ProcessGroup) -> None:
        super().__init__(contents, group)
        self.unsummed = bytearray(len(contents.parameters))
        reference = weakref.ref(self)
        for position, parameter in enumerate(contents.parameters):
            parameter._deferred = reference, position  # type: ignore[attr-defined]

    @classmethod
    @abstractmethod
    def of(cls, gradients: TableSlice, group: dist.ProcessGroup, num_facts: int) -> Self:
        """Make one of ``gradients``, with room for ``num_facts`` if it is the last bucket."""

    def log_filled(self, log: GradientLog) -> None:
        """Keep nothing: the means aren't computed in the backward."""

    def when_rearranged(self) -> Self | None:
        """Return this bucket, whose order is that of the optimizer's memory."""
        return self

    def matches(self, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> bool:
        """Whether it has exactly these parameters, with gradients at these ``offsets``."""
        are_same = [*map(id, parameters)] == [*map(id, self.contents.parameters)]
        return are_same and [*offsets] == self.contents.offsets[:-1]

    def unsummed_positions(self) -> Iterator[int]:
        """Yield the positions of unsummed gradients, of which the caller may sum each."""
        return itertools.compress(range(len(self.unsummed)), self.unsummed[:])

    def are_all_unsummed(self) -> bool:
        """Whether this rank has neither read nor dropped any gradient of the last backward."""
        return 0 not in self.unsummed

    @abstractmethod
    def read(self, position: int) -> torch.Tensor | None:
        """Return the gradient at ``position``, which the program may keep and change."""

    def drop_at(self, position: int) -> None:
        """Drop the unsummed gradient at ``position``: the program has set ``parameter.grad``."""
        self.unsummed[position] = 0

    def drop_unsummed(self) -> None:
        """Drop the gradients, all of which are unsummed: the parameters have none besides."""
        self.unsummed[:] = bytes(len(self.unsummed))

    @abstractmethod
    def sum_into(self, target: torch.Tensor, start: int, *, is_often: bool = False) -> None:
        """Write means over the ranks to ``target``, of one dimension: from element ``start`` on.

        Args:
            target: For the means.
            start: The position of the first one.
            is_often: Whether the same elements are summed in most steps. Then views of them are
                kept: a function of torch whose code has left the core's caches takes 10 us.
        """

    @abstractmethod
    def local_range(self) -> tuple[int, int]:
        """Return the first element that this rank sums for all, and the one after its last."""

    def new_sum(self, start: int, stop: int) -> torch.Tensor:
        """Return the means over the ranks of the elements from ``start`` to ``stop``."""
        total = self.contents.memory.buffer.new_empty(stop - start)
        self.sum_into(total, start)
        return total

    def part_of_mean(self, position: int, start: int, stop: int) -> torch.Tensor | None:
        """Return some elements of an unsummed gradient; None if this rank hasn't got them."""
        return None

    def are_means_of_parts(self) -> bool:
        """Whether each mean has yet to be computed of what the ranks have left, and is no larger.

        Then it is finite if these are, and not so large that their sum isn't.
        """
        return False

    @abstractmethod
    def scale_means(self, factor: torch.Tensor) -> None:
        """Multiply all means, of which none has been read yet, by ``factor``."""
