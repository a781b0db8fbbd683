"""Buckets of tables, of whose gradients only the rows travel that some rank has computed.

Which parameters they are for, :class:`RowTables` knows: large ones that are looked up.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist

from lockstep.comm import (
    all_gather,
    any_rank,
    can_average,
    start_all_gather_in_place,
    start_all_reduce,
)
from lockstep.grad.bucket import Bucket, Inspect
from lockstep.grad.contents import Contents
from lockstep.grad.diagnostics import GradientLog
from lockstep.grad.memory import gradient_dtype, line_numel
from lockstep.grad.row_gradient import RowGradient, Rows, sum_of_rows
from lockstep.grad.table import GradientTable, TableSlice
from lockstep.torch_private import gradient_of, set_gradient

# After so many backwards in a row in which a rank had more of the gradient than rows, the table is
# in an ordinary bucket, which is sent while the backward goes on.
_MOST_DENSE = 3
# What a rank tells in place of a number of rows.
_DENSE = -1
_INDEX_BYTES = torch.int64.itemsize


class _RowPass:
    """What belongs to one backward of a table, besides its :class:`BucketPass`.

    Attributes:
        mine: This rank's rows, scaled, if it has rows alone.
        counts: How many rows each rank has, while the ranks tell each other.
        by_rank: All ranks' rows.
    """

    def __init__(self) -> None:
        self.mine: Rows | None = None
        self.counts: torch.Tensor | None = None
        self.by_rank: Sequence[Rows] = ()


class RowBucket(Bucket):
    """A table, of whose gradient the rows travel; where a rank has more than rows, all of it does.

    The gradient is dense to the program. Its memory is kept, so that no pages are mapped anew, and
    all of it is made zero in each backward: the program may have written anywhere, and not all that
    it writes is counted by torch (not what goes to ``p.grad.data``, or to an array of the memory).
    Shown by test_writes_past_the_count_of_writes_change_nothing.
    """

    carries_facts = False
    _rows: _RowPass

    def __init__(self, contents: Contents, group: dist.ProcessGroup) -> None:
        super().__init__(contents, group)
        # As in an ordinary bucket, whose memory is the group's: or bits would differ.
        is_scaled = contents.is_large and group.size().bit_count() == 1
        self.can_average = not is_scaled and can_average(group, contents.plan.device)
        # In how many backwards in a row all of the gradient has travelled.
        self._num_dense = 0
        self._sent_bytes = 0

    @classmethod
    def of(cls, gradients: TableSlice, group: dist.ProcessGroup) -> RowBucket:
        """Make one of ``gradients``, of which there is one."""
        ((_, parameter),) = gradients.named
        return cls(Contents(gradients, alignment=line_numel(parameter)), group)

    @property
    def num_bytes(self) -> int:
        """The size of what this rank sent in the last backward."""
        return self._sent_bytes

    @property
    def is_ordinary(self) -> bool:
        """Whether the table is to be in an ordinary bucket from now on, on all ranks."""
        return self._num_dense >= _MOST_DENSE

    def open_pass(self, scale: float) -> None:
        """Take up what belongs to a backward."""
        super().open_pass(scale)
        self._rows = _RowPass()

    def fill(self) -> None:
        """Take this rank's rows, or copy all of its gradient if it has more."""
        contents, parameter = self.contents, self.contents.parameters[0]
        gradient = gradient_of(parameter)
        found = gradient.computed_rows() if isinstance(gradient, RowGradient) else None
        if gradient is None:  # zero_grad() has dropped it, or this rank didn't use the table
            contents.accumulated[0] = 0
            self._rows.mine = self._no_rows()
        elif found is None or not contents.accumulated[0] or self.contents.now.kept:
            self._rows.mine = None
            contents.fill()
        else:
            indices, rows = found
            self._rows.mine = (
                indices,
                rows if self.contents.now.scale == 1 else rows * self.contents.now.scale,
            )
            contents.renew_views(0, 1)
            # The rows stay the gradient until there is a mean: the memory has that of the last
            # backward.

    def show_local(self, inspect: Inspect) -> None:
        """Show this rank's gradient: all of it in the memory, or its rows."""
        inspect(self.contents, None if self._rows.mine is None else self._rows.mine[1])

    def fill_failed(self) -> None:
        """Have no rows: the facts tell the others that the backward has failed here."""
        self.contents.leave_held(itertools.repeat(None))
        self._rows.mine = self._no_rows()

    def _no_rows(self) -> Rows:
        view = self.contents.memory.views[0]
        return torch.empty(0, dtype=torch.int64), view.new_empty(0, *view.shape[1:])

    def launch(self, number: int, *, is_last: bool) -> None:
        """Start to tell the other ranks how many rows there are."""
        self.contents.now.is_launched = True
        self._rows.counts = torch.zeros(self.group.size(), dtype=torch.int64)
        self._rows.counts[self.group.rank()] = (
            _DENSE if self._rows.mine is None else len(self._rows.mine[0])
        )
        self.contents.now.work = start_all_gather_in_place(self.group, self._rows.counts)

    def wait(self) -> None:
        """Wait until the ranks have told, and exchange rows, or sum whole gradients.

        All ranks come here in the order of their buckets, once all of these are launched.
        """
        super().wait()
        counts, self._rows.counts = self._rows.counts, None
        if counts is None:  # no rank uses the table, and nothing is sent
            return
        gradient = self._local_rows()
        if self._rows.mine is not None and gradient is not None and not gradient.computed_rows():
            # A hook has seen the gradient since, and may have written to it.
            indices, scale = self._rows.mine[0], self.contents.now.scale
            self._rows.mine = indices, gradient.as_dense()[indices] * scale
        numbers: list[int] = counts.tolist()
        if _DENSE in numbers:
            self._sum_whole()
        else:
            self._exchange(numbers)

    def _sum_whole(self) -> None:
        self._num_dense += 1
        memory = self.contents.memory
        if self._rows.mine is not None:
            memory.views[0].zero_().index_copy_(0, *self._rows.mine)
        self._sent_bytes = self.contents.num_bytes
        op = dist.ReduceOp.AVG if self.contents.now.is_averaged else dist.ReduceOp.SUM
        start_all_reduce(self.group, memory.buffer, op).wait()

    def _exchange(self, counts: Sequence[int]) -> None:
        """Get all ranks' rows, each rank's with room for as many as any has."""
        assert self._rows.mine is not None  # or this rank would have told so
        self._num_dense = 0
        most, rows = max(counts), self._rows.mine[1]
        width = rows[0].nbytes if len(rows) else self.contents.memory.views[0][0].nbytes
        wire = torch.empty(most * (_INDEX_BYTES + width), dtype=torch.uint8)
        self._sent_bytes = wire.nbytes
        for whole, part in zip(self._halves(wire), self._rows.mine, strict=True):
            whole[: len(part)].copy_(part)
        gathered = map(self._halves, all_gather(self.group, wire) if most else [])
        self._rows.by_rank = [(i[:n], v[:n]) for (i, v), n in zip(gathered, counts, strict=False)]
        self._rows.by_rank = self._rows.by_rank or [self._rows.mine]  # no rows on any rank

    def _halves(self, wire: torch.Tensor) -> Rows:
        """Return the room for indices in ``wire``, and that for rows behind it."""
        view = self.contents.memory.views[0]
        most = wire.nbytes // (_INDEX_BYTES + view[0].nbytes)
        indices, rows = wire.split([most * _INDEX_BYTES, wire.nbytes - most * _INDEX_BYTES])
        return indices.view(torch.int64), rows.view(view.dtype).view(most, view.shape[1])

    def finish(self) -> None:
        """Write the means of the rows to the gradient: all ranks' backwards succeeded."""
        if self._rows.by_rank:
            view = self.contents.memory.views[0]
            # Sums in a narrow dtype would be rounded once per rank.
            wide = view.dtype if view.itemsize > 2 else torch.float32
            indices, total = sum_of_rows(self._rows.by_rank, wide)
            if self.contents.now.is_averaged:
                total.div_(self.group.size())
            view.zero_().index_copy_(0, indices, total.to(view.dtype))
        if self._local_rows() is not None:
            self.contents.use_views(0, 1)
        super().finish()

    def _local_rows(self) -> RowGradient | None:
        """Return the parameter's gradient, if it is rows of this rank."""
        gradient = gradient_of(self.contents.parameters[0])
        return gradient if isinstance(gradient, RowGradient) else None

    def drop(self) -> None:
        """Drop the gradient of this backward, rows too."""
        if self.contents.accumulated[0] and self._local_rows() is not None:
            set_gradient(self.contents.parameters[0], None)
        super().drop()

    def undo(self) -> None:
        """The backward has failed here: a gradient that wasn't launched stays, whole."""
        if self.contents.now.is_launched:
            self.drop()
        self._make_dense()
        super().undo()

    def _make_dense(self) -> None:
        if (gradient := self._local_rows()) is not None:
            set_gradient(self.contents.parameters[0], gradient.as_dense())

    def end(self) -> None:
        """Drop what belongs to the backward, which is over."""
        rows: _RowPass | None = vars(self).pop("_rows", None)
        if rows is not None and rows.mine is not None:  # if a rank is lost, there is no mean
            self._make_dense()
        super().end()

    def log_filled(self, log: GradientLog) -> None:
        """Keep nothing: the memory has no gradient yet."""


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
        indices: Those of the tables.
    """

    def __init__(self, table: GradientTable, group: dist.ProcessGroup) -> None:
        self._group = group
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
        """Leave out tables whose gradients were often not rows alone; return whether there are any.

        ``order`` has the index of the parameter at each position.
        """
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
