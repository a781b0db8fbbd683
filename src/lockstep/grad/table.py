"""The table of a reducer's gradients: which have grown since their reduction, and their order."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, KeysView, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import broadcast_tensors
from lockstep.grad.facts import Heard


class TableSlice(NamedTuple):
    """The gradients at consecutive positions of a table, which a bucket has.

    Attributes:
        named: Their parameters with names; of one dtype, and on one device. There may be none.
        accumulated: For each, 1 if it has grown since its last reduction: memory of the table.
        start: The position of the first one.
    """

    named: Sequence[tuple[str, torch.nn.Parameter]]
    accumulated: memoryview
    start: int


class GradientTable:
    """Parameters by position: in the order in which their gradients become ready.

    An index is the place of a parameter in ``named``, which stays; a position changes when the
    reducer learns the order.

    Args:
        named_parameters: The parameters, in the same order on every rank.
        sparse: The indices of parameters with sparse gradients.

    Attributes:
        named: The parameters with their names, by index.
        parameters: The parameters, by position.
        order: The index of the parameter at each position.
        sparse: The positions of sparse gradients, the last ones. They have no bucket.
        position_of: The position of each parameter, by its ``id()``.
        accumulated: For each position, 1 if the gradient has grown since its last reduction.
            Buckets hold views of this memory.
        row_bytes: By position, what this rank gave when the ranks last exchanged the rows of a
            sparse gradient.
        heard: What is heard of the gradients of other ranks later, on a GPU.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: Collection[int],
    ) -> None:
        self.named = list(named_parameters)
        self.row_bytes: dict[int, int] = {}
        self.heard = Heard()
        self.accumulated = bytearray(len(self.named))
        # At first in reversed registration order, which is a good guess: backward ends where
        # forward began.
        dense = [index for index in reversed(range(len(self.named))) if index not in sparse]
        self.order = [*dense, *sparse]
        self.sparse = range(len(dense), len(self.named))
        self.arrange(dense)

    def arrange(self, dense: Iterable[int]) -> None:
        """Give the dense gradients the order ``dense``, of indices."""
        accumulated = dict(zip(self.order, self.accumulated, strict=True))
        self.order[: self.sparse.start] = dense
        self.accumulated[:] = bytes(accumulated[index] for index in self.order)
        self.parameters = [self.named[index][1] for index in self.order]
        self.position_of = {id(p): position for position, p in enumerate(self.parameters)}

    def slice(self, start: int, length: int) -> TableSlice:
        """Return the gradients at ``length`` positions from ``start`` on."""
        places = slice(start, start + length)
        named = [self.named[index] for index in self.order[places]]
        return TableSlice(named, memoryview(self.accumulated)[places], start)

    def take_over(self, previous: GradientTable) -> None:
        """Continue from the state of ``previous``, a table of some of these parameters."""
        self.heard = previous.heard
        for position, p in enumerate(self.parameters):
            is_known = id(p) in previous.ids
            has_grown = previous.is_unreduced(p) if is_known else p.grad is not None
            self.accumulated[position] = has_grown

    def note_reduced(self) -> None:
        """Note that all gradients are means over the ranks."""
        self.accumulated[:] = bytes(len(self.named))

    @property
    def ids(self) -> KeysView[int]:
        """The ``id()`` of each parameter."""
        return self.position_of.keys()

    @property
    def sparse_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters with sparse gradients."""
        return self.parameters[self.sparse.start :]

    @property
    def has_unreduced(self) -> bool:
        """Whether any gradient has grown since its last reduction."""
        grown = itertools.compress(self.parameters, self.accumulated)
        return any(parameter.grad is not None for parameter in grown)

    def is_unreduced(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of ``parameter`` has grown since its last reduction."""
        return bool(self.accumulated[self.position_of[id(parameter)]])

    def name_at(self, position: int) -> str:
        """Return the name of the parameter at ``position``."""
        return self.named[self.order[position]][0]


class GradientOrder:
    """The order of a reducer's gradients, as indices, once the ranks of ``group`` agree on it.

    Buckets are made for it, and where a gradient is in its bucket may decide on the last bits of a
    sum: Gloo adds up the parts of four ranks in an order of its own for each part.
    """

    def __init__(self, table: GradientTable, group: dist.ProcessGroup) -> None:
        self._table, self._group = table, group
        self._indices: list[int] = []

    def agreed(self, arrived: Sequence[int] | None) -> list[int]:
        """Return the order of rank 0; none as long as no gradient has ``arrived`` on this rank.

        Every rank calls it; it blocks, until they agree.
        """
        if not self._indices and arrived is not None:
            missing = sorted({*self._table.order} - {*arrived}, reverse=True)
            device = self._table.parameters[0].device
            indices = torch.tensor([*arrived, *missing], device=device)
            broadcast_tensors(self._group, [indices])
            self._indices = indices.tolist()
        return self._indices

    def expect(self, indices: Sequence[int]) -> None:
        """Take what ranks have agreed on before, if it is of these parameters."""
        table = self._table
        if sorted(indices) == sorted(table.order):
            self._indices = [*indices]
            sparse = {*table.order[table.sparse.start :]}
            table.arrange(index for index in indices if index not in sparse)
