"""The order of a reducer's gradients, and what is known of each of them between backwards."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, KeysView, Sequence

import torch


class GradientOrder:
    """Parameters by position, the order in which their gradients come.

    Args:
        named_parameters: The parameters, in the same order on every rank.
        sparse: The indices of those whose gradients are sparse.

    Attributes:
        named: The parameters with their names.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: Collection[int],
    ) -> None:
        self.named = list(named_parameters)
        # Of the last backward, the indices of parameters without a gradient and of those with one,
        # in the order in which their gradients came, and at each position whether any rank has one.
        self._unused: list[int] = []
        self._last_order: list[int] | None = None
        self._used_by_any: Iterable[float] = ()
        # By position: the index of the parameter; and 1 if the gradient has grown since it was last
        # reduced, in memory that buckets hold views of. Positions of sparse gradients, for which no
        # bucket waits, are the last ones.
        self._accumulated = bytearray(len(self.named))
        # Reversed registration order is a good guess: backward ends where forward began.
        dense = [index for index in reversed(range(len(self.named))) if index not in sparse]
        self._order = [*dense, *sparse]
        self._sparse = range(len(dense), len(self.named))
        self._rearrange(dense)

    def _rearrange(self, dense: Iterable[int]) -> None:
        """Put the gradients that aren't sparse into the order ``dense``, by index."""
        accumulated = dict(zip(self._order, self._accumulated, strict=True))
        self._order[: self._sparse.start] = dense
        self._accumulated[:] = bytes(accumulated[index] for index in self._order)
        self._parameters = [self.named[index][1] for index in self._order]
        self._position_of = {id(p): position for position, p in enumerate(self._parameters)}

    @property
    def unused(self) -> Sequence[str]:
        """The names of parameters that got no gradient in the last backward on this rank."""
        return [self.named[index][0] for index in self._unused]

    @property
    def unused_parameters(self) -> Sequence[torch.nn.Parameter]:
        """The same parameters themselves."""
        return [self.named[index][1] for index in self._unused]

    @property
    def reduced(self) -> list[torch.nn.Parameter]:
        """Parameters that any rank used in the last backward, in the same order on every rank."""
        return [*itertools.compress(self._parameters, self._used_by_any)]

    @property
    def ids(self) -> KeysView[int]:
        """The ``id()`` of each parameter."""
        return self._position_of.keys()

    @property
    def has_unreduced(self) -> bool:
        """Whether a gradient has grown since it was last reduced."""
        grown = itertools.compress(self._parameters, self._accumulated)
        return any(parameter.grad is not None for parameter in grown)

    def is_unreduced(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of ``parameter`` has grown since it was last reduced."""
        return bool(self._accumulated[self._position_of[id(parameter)]])
