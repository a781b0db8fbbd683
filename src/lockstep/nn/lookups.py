"""Lookups in tables of parallel models, which torch's functions for embeddings call here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from lockstep.comm import has_compiled, uncompiled
from lockstep.errors import ModelError
from lockstep.nn.backward import all_engines
from lockstep.nn.renormed import has_max_norm, renormed_rows
from lockstep.nn.row_lookups import embedding, embedding_bag
from lockstep.torch_private import _register_builtin, get_unwrapped, is_functorch_wrapped_tensor


@uncompiled
def renorm(
    weight: torch.Tensor, input: torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> None:
    """Scale the rows of ``weight`` that are looked up, in place, as torch does.

    If it is a table of a parallel model, the rows that have changed are noted for the other ranks.
    """
    _break_graph(weight)
    inner = weight
    while is_functorch_wrapped_tensor(inner):
        inner = get_unwrapped(inner)
    found = [(engine, engine.renormed.table_of(inner)) for engine in all_engines()]
    tables = [(engine, table) for engine, table in found if table is not None]
    if not tables:
        torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
        return
    if inner is not weight:
        raise ModelError(
            "A transform of torch.func is about to scale rows of a parallel model's table, in a "
            "lookup with max_norm: nobody sees which, and the ranks' tables would become "
            "different. Give the function a copy of the table, as weight.detach().clone()."
        )
    if torch.jit.is_tracing():
        raise ModelError(
            "torch.jit.trace() is about to record a lookup with max_norm in a parallel model's "
            "table: nobody would see which rows it scales when it runs, and the ranks' tables "
            "would become different. Trace a copy, as copy.deepcopy(model)."
        )
    for engine, _ in tables:
        engine.renormed.refuse_untold()
    rows = renormed_rows(weight, input, max_norm, norm_type)
    for engine, table in tables:
        engine.renormed.note(table, rows)


def _break_graph(weight: torch.Tensor) -> None:
    """Have torch.compile break its graph at a lookup in what may be a table of a parallel model.

    It calls this with a tensor that has the shape of the table, and no values. What it compiled
    would scale rows without :func:`renorm`.
    """
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    dynamo: Any = sys.modules.get("torch._dynamo.exc")
    if fake is None or dynamo is None or not isinstance(weight, fake.FakeTensor):
        return
    if any(engine.renormed.has_table_of(weight.shape) for engine in all_engines()):
        raise dynamo.Unsupported("a lookup with max_norm in a table of a parallel model")


def watch_lookups(module: nn.Module) -> None:
    """Have torch's functions for embeddings call :func:`renorm` in place of their own.

    What was compiled before ``module`` became parallel is compiled again, if its lookups scale
    rows: they may be in a graph.
    """
    functional: Any = nn.functional
    if functional._no_grad_embedding_renorm_ is not renorm:
        functional._no_grad_embedding_renorm_ = renorm
        _register_builtin(renorm, "aten::_no_grad_embedding_renorm_")  # scripted code has torch's
    if torch.embedding is not embedding:
        library: Any = torch
        library.embedding, library.embedding_bag = embedding, embedding_bag
        # Scripted code has torch's.
        _register_builtin(embedding, "aten::embedding")
        _register_builtin(embedding_bag, "aten::embedding_bag")
    if has_compiled() and has_max_norm(module):
        sys.modules["torch._dynamo"].reset()
