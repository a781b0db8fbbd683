"""Which parameters are tables whose gradients travel by rows: large ones that are looked up."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from lockstep.comm import any_rank
from lockstep.grad.bucket import Bucket
from lockstep.grad.memory import gradient_dtype
from lockstep.grad.row_bucket import RowBucket
from lockstep.grad.table import GradientOrder, GradientTable

# From this size on. Below it, finding the rows takes longer than all of the gradient.
MIN_TABLE_BYTES = 8 * 2**20


class RowTables:
    """The tables of a reducer whose gradients travel by rows; the same ones on every rank.

    In the first backward none does: it shows which parameters are looked up. Those that are so on
    any rank do from the second one on, until they have had other gradients too, several times.

    Args:
        table: All parameters.
        group: The ranks.

    Attributes:
        order: The order of all gradients, on which ranks agree before.
        indices: Those of the tables.
    """

    def __init__(self, table: GradientTable, group: dist.ProcessGroup) -> None:
        self._group, self.order = group, GradientOrder(table, group)
        # By id(), the index of each parameter that may be one. Facts of failures are read on a CPU.
        is_on_cpu = all(parameter.device.type == "cpu" for _, parameter in table.named)
        may_be = [index for index, (_, p) in enumerate(table.named) if is_on_cpu and _may_be(p)]
        self._candidates = {id(table.named[index][1]): index for index in may_be}
        self._looked_up: set[int] = set()  # on this rank
        self.indices: set[int] = set()

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of ``parameter`` may travel by rows, in some backward."""
        return id(parameter) in self._candidates

    def note_lookup(self, parameter: torch.Tensor) -> bool:
        """Note that ``parameter`` is looked up; return whether its gradient may be of rows now."""
        index = self._candidates[id(parameter)]
        self._looked_up.add(index)
        return index in self.indices

    def agree(self) -> None:
        """Agree on the tables that are looked up. Every rank must call it; it blocks."""
        if self._candidates:
            are_used = [index in self._looked_up for index in self._candidates.values()]
            found = any_rank(self._group, are_used)
            pairs = zip(self._candidates.values(), found, strict=True)
            self.indices = {index for index, is_used in pairs if is_used}

    def leave_out(self, buckets: Iterable[Bucket], order: Collection[int]) -> bool:
        """Take out tables that have other gradients too; return whether there are any.

        ``order`` has the index of the parameter at each position.
        """
        if not self.indices:
            return False
        positions = [
            b.contents.start for b in buckets if isinstance(b, RowBucket) and b.is_ordinary
        ]
        gone = {index for position, index in enumerate(order) if position in positions}
        self.indices -= gone
        return bool(gone)


def _may_be(parameter: torch.nn.Parameter) -> bool:
    return (
        type(parameter) is torch.nn.Parameter
        and parameter.dim() == 2
        and parameter.is_floating_point()
        and parameter.itemsize > 1
        and gradient_dtype(parameter) is parameter.dtype
        and parameter.nbytes >= MIN_TABLE_BYTES
        and parameter.is_contiguous()
    )
