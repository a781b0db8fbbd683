"""The phases of a reducer, and the order and state of its gradients between backwards."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, KeysView, Sequence
from enum import Enum, auto

import torch


class Phase(Enum):
    """The state of a reducer in the course of a step."""

    IDLE = auto()  # no backward runs
    COLLECTING = auto()  # a backward runs or ends; full buckets are launched
    FAILED = auto()  # a backward has failed here, and has yet to be finished with the other ranks


class GradientOrder:
    """The parameters by position: in the order in which their gradients become ready.

    Args:
        named_parameters: The parameters, in the same order on every rank.
        sparse: The indices of parameters with sparse gradients.

    Attributes:
        named: The parameters with their names.
        row_bytes: By position, what this rank gave when the ranks last exchanged the rows of a
            sparse gradient.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: Collection[int],
    ) -> None:
        self.named = list(named_parameters)
        self.row_bytes: dict[int, int] = {}
        # Of the last backward: the indices of parameters that got no gradient; the indices of those
        # that got one, in the order in which gradients became ready; and for each position a number
        # above 0 if any rank had a gradient.
        self.unused_indices: list[int] = []
        self._last_order: list[int] | None = None
        self._used_by_any: Iterable[float] = ()
        # For each position, 1 if the gradient has grown since its last reduction: memory of which
        # buckets hold views. The last positions are those of sparse gradients, without a bucket.
        self._accumulated = bytearray(len(self.named))
        # The index of the parameter at each position. At first they are in reversed registration
        # order, which is a good guess: backward ends where forward began.
        dense = [index for index in reversed(range(len(self.named))) if index not in sparse]
        self._order = [*dense, *sparse]
        self._sparse = range(len(dense), len(self.named))
        self._rearrange(dense)

    def _rearrange(self, dense: Iterable[int]) -> None:
        """Give the dense gradients the order ``dense``, of indices."""
        accumulated = dict(zip(self._order, self._accumulated, strict=True))
        self._order[: self._sparse.start] = dense
        self._accumulated[:] = bytes(accumulated[index] for index in self._order)
        self._parameters = [self.named[index][1] for index in self._order]
        self._position_of = {id(p): position for position, p in enumerate(self._parameters)}

    @property
    def unused(self) -> Sequence[str]:
        """The names of parameters that got no gradient in the last backward on this rank."""
        return [self.named[index][0] for index in self.unused_indices]

    @property
    def unused_parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that got no gradient in the last backward on this rank."""
        return [self.named[index][1] for index in self.unused_indices]

    @property
    def reduced(self) -> list[torch.nn.Parameter]:
        """The parameters that any rank used in the last backward, in one order on all ranks."""
        return [*itertools.compress(self._parameters, self._used_by_any)]

    @property
    def sparse_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters with sparse gradients."""
        return self._parameters[self._sparse.start :]

    @property
    def ids(self) -> KeysView[int]:
        """The ``id()`` of each parameter."""
        return self._position_of.keys()

    @property
    def has_unreduced(self) -> bool:
        """Whether any gradient has grown since its last reduction."""
        grown = itertools.compress(self._parameters, self._accumulated)
        return any(parameter.grad is not None for parameter in grown)

    def is_unreduced(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of ``parameter`` has grown since its last reduction."""
        return bool(self._accumulated[self._position_of[id(parameter)]])
