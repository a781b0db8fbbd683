"""Rows of tables that lookups with ``max_norm`` have scaled in place, which all ranks take over.

torch scales a row when it is looked up, if its norm is larger than ``max_norm``. Each rank looks up
other rows, and notes those that have changed. At the end of a backward all ranks take them over, so
that their tables are equal in every bit before an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import all_gather_rows
from lockstep.errors import ModelError


class RenormedRows:
    """The rows of a model's tables that this rank has scaled since ranks last exchanged them.

    A table is any parameter that may be looked up. All ranks have the same ones, in one order.

    Attributes:
        noted: By the id() of a table, the rows that each lookup has changed.
        is_always_told: Whether the ranks exchange rows in each backward.
    """

    def __init__(self) -> None:
        self._tables: list[tuple[str, nn.Parameter]] = []
        self.noted: dict[int, list[torch.Tensor]] = {}
        # Ranks don't read each other's facts at once if the model isn't on the CPU alone, and don't
        # know then whether another one has noted some.
        self._is_on_cpu, self.is_always_told = True, False

    def find(self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Take those of the parameters ``named``, of ``module``, that may be looked up."""
        self._tables = [(n, p) for n, p in named if p.dim() == 2 and p.is_floating_point()]
        ids = {id(table) for _, table in self._tables}
        self.noted = {key: rows for key, rows in self.noted.items() if key in ids}
        self._is_on_cpu = all(parameter.device.type == "cpu" for _, parameter in named)
        self.is_always_told |= not self._is_on_cpu and has_max_norm(module)

    def table_of(self, weight: torch.Tensor) -> nn.Parameter | None:
        """Return the table that has the memory of ``weight``, if there is one."""
        tables = (table for _, table in self._tables if _is_same(table, weight))
        if torch.jit.is_tracing():  # it would record that shapes are compared
            return next(tables, None)
        return next((table for table in tables if table.shape == weight.shape), None)

    def has_table_of(self, shape: torch.Size) -> bool:
        """Whether a table has this shape."""
        return any(table.shape == shape for _, table in self._tables)

    def refuse_untold(self) -> None:
        """Raise if a lookup is about to scale rows, and the other ranks couldn't know of them."""
        if not self._is_on_cpu and not self.is_always_told:
            raise ModelError(
                "F.embedding() is called with max_norm, in a parallel model that isn't on the CPU "
                "alone: other ranks would not know that there are scaled rows to take over. Use "
                "nn.Embedding(max_norm=...) or nn.EmbeddingBag, of which all ranks know."
            )

    def note(self, table: nn.Parameter, rows: torch.Tensor) -> None:
        """Note that a lookup has changed ``rows`` of ``table``, if any."""
        if len(rows):
            self.noted.setdefault(id(table), []).append(rows)

    def are_noted(self) -> list[bool]:
        """Return for each table whether lookups have scaled rows of it on this rank."""
        return [id(table) in self.noted for _, table in self._tables]

    def changed_one_of(self, parameters: Collection[torch.Tensor]) -> tuple[str, list[int]] | None:
        """Return the name and the noted rows of a table among ``parameters``, if there is one."""
        ids = {*map(id, parameters)} if self.noted else ()
        for name, table in compress(self._tables, self.are_noted()):
            if id(table) in ids:
                return name, torch.cat(self.noted[id(table)]).unique().tolist()
        return None

    def exchange(self, group: dist.ProcessGroup, are_noted: Sequence[bool]) -> None:
        """Have all ranks take over the rows that any has noted. Every rank must call it; it blocks.

        If several ranks have scaled a row, they may have done so several times each, after which
        its last bits differ. That of the first such rank counts.

        Args:
            group: The ranks.
            are_noted: For each table whether any rank has noted rows of it.
        """
        for _, table in compress(self._tables, are_noted):
            # Not as a write that autograd counts: what has saved the table (a layer that is tied to
            # it, say) may have a second backward, as it may in one process.
            values = table.data
            noted = self.noted.pop(id(table), [])
            rows = torch.cat(noted).unique() if noted else _no_rows(values)
            by_rank = all_gather_rows(group, rows, values[rows])
            for theirs, scaled in reversed(by_rank):
                values[theirs] = scaled


def refusal_of_tables(module: nn.Module, left_out: Collection[str] = ()) -> ModelError | None:
    """Return why the ranks' lookups in a table of ``module`` can't be those of one process.

    The tables ``left_out`` by name are each rank's own.
    """
    norms: dict[int, tuple[str, tuple[float, float]]] = {}
    for name, each in module.named_modules():
        place = f"{name}.weight" if name else "weight"
        if place in left_out:
            continue
        if isinstance(each, torch.jit.TopLevelTracedModule) and _scales_rows(each):
            where = f"{name!r}, a part" if name else "The model"
            return ModelError(
                f"{where} that was traced, looks up a table with max_norm: nobody sees which rows "
                "its lookups scale, and the ranks' tables would become different. Leave it to "
                "Python, or give it to torch.compile()."
            )
        is_scripted = getattr(each, "original_name", None) in ("Embedding", "EmbeddingBag")
        if is_scripted and getattr(each, "max_norm", None) is not None:
            return ModelError(
                f"{place!r} has max_norm={each.max_norm}, in a scripted module: nobody sees which "
                "rows its lookups scale, and the ranks' tables would become different. Leave the "
                "module to Python, or give it to torch.compile()."
            )
        if not isinstance(each, nn.Embedding | nn.EmbeddingBag):
            continue
        if each.scale_grad_by_freq:  # a frozen table may be trained later
            return ModelError(
                f"{place!r} has scale_grad_by_freq=True: torch would divide a row's gradient by "
                "the number of its lookups on this rank, and not by that in the whole batch. "
                "Leave it out, and weight the losses of samples instead."
            )
        if each.max_norm is not None:
            norm = (each.max_norm, each.norm_type)
            first, other = norms.setdefault(id(each.weight), (place, norm))
            if other != norm:
                return ModelError(
                    f"{place!r} is the table of {first!r} too, which has max_norm and norm_type "
                    f"{other}, and here {norm}: which of them scales a row last would depend on "
                    "the rank that looks it up. Give both the same."
                )
    return None


def _scales_rows(traced: torch.jit.ScriptModule) -> bool:
    return "embedding_renorm" in str(getattr(traced, "inlined_graph", ""))


def has_max_norm(module: nn.Module) -> bool:
    """Whether lookups in an embedding in ``module`` scale rows."""
    tables = (each for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag))
    return any(table.max_norm is not None for table in tables)


def _is_same(table: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``weight`` begins where the memory of ``table`` begins, or is it."""
    if table is weight:
        return True
    where, other = table.untyped_storage()._cdata, weight.untyped_storage()._cdata
    return where == other and table.storage_offset() == weight.storage_offset()


def _no_rows(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=values.device)


def renormed_rows(
    weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale the rows that are looked up, in place, as torch does; return those that have changed.

    Raises:
        IndexError: If there is no such row.
    """
    weight = weight.detach()
    rows = indices.detach().reshape(-1).unique().long()
    before = weight.index_select(0, rows)
    torch.embedding_renorm_(weight, indices, max_norm, norm_type)
    after = weight.index_select(0, rows)
    # In bits: NaN is unequal to itself.
    changed: torch.Tensor = rows[(before.view(torch.uint8) != after.view(torch.uint8)).any(1)]
    return changed
