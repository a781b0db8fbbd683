"""The order in which gradients become ready, on which the ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm import broadcast_tensors
from lockstep.grad.table import GradientTable


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
