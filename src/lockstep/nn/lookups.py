"""Lookups in tables of parallel models, which torch's functions for embeddings call here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.comm import uncompiled
from lockstep.nn.backward import all_engines
from lockstep.nn.renormed import renormed_rows
from lockstep.torch_private import _register_builtin, is_functorch_wrapped_tensor


@uncompiled
def renorm(
    weight: torch.Tensor, input: torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> None:
    """Scale the rows of ``weight`` that are looked up, in place, as torch does.

    If it is a table of a parallel model, the rows that have changed are noted for the other ranks.
    """
    engines = [] if is_functorch_wrapped_tensor(weight) else all_engines()
    found = [(engine, engine.renormed.table_of(weight)) for engine in engines]
    tables = [(engine, table) for engine, table in found if table is not None]
    if not tables:
        torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
        return
    rows = renormed_rows(weight, input, max_norm, norm_type)
    for engine, table in tables:
        engine.renormed.note(table, rows)


def watch_lookups() -> None:
    """Have torch's functions for embeddings call :func:`renorm` in place of their own."""
    functional: Any = nn.functional
    if functional._no_grad_embedding_renorm_ is not renorm:
        functional._no_grad_embedding_renorm_ = renorm
        _register_builtin(renorm, "aten::_no_grad_embedding_renorm_")  # scripted code has torch's
