"""Lookups in tables of parallel models, which torch's functions for embeddings call here.

torch's ``embedding()`` and ``embedding_bag()`` give a gradient as large as the table. Here the
forward is torch's, and so is what the backward computes, but with rows numbered among those that
are looked up: the bits are the same, as long as the numbers are in the same order. Where anything
but an engine takes the gradient, it is computed as torch does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from lockstep.comm import has_compiled, uncompiled
from lockstep.errors import ModelError
from lockstep.grad import RowGradient, gradient_of
from lockstep.nn.autograd import is_compiled_backward
from lockstep.nn.backward import all_engines
from lockstep.nn.engine import Engine
from lockstep.nn.renormed import has_max_norm, renormed_rows
from lockstep.torch_private import (
    _register_builtin,
    _will_engine_execute_node,
    forward_level,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    num_dispatch_modes,
    peek_interpreter_stack,
)

_aten: Any = torch.ops.aten
_embedding, _embedding_bag = torch.embedding, torch.embedding_bag
# A gradient of more than one row in so many isn't worth to be one of rows.
_LEAST_UNTOUCHED = 4
_MAX_MODE = 2


def _engine_of(weight: object) -> Engine | None:
    """Return the engine that may reduce the gradient of ``weight`` by rows, if there is one."""
    if type(weight) is nn.Parameter:
        for engine in all_engines():
            if engine.reducer.tables.has(weight):
                return engine
    return None


def _refuse_frequencies(weight: object) -> None:
    """Raise if ``weight`` is of a parallel model, and a lookup is to divide by frequencies."""
    if torch.is_grad_enabled() and any(id(weight) in e.reducer.table.ids for e in all_engines()):
        raise ModelError(
            "A lookup has scale_grad_by_freq=True in a parallel model: torch would divide a row's "
            "gradient by the number of its lookups on this rank, and not by that in the whole "
            "batch. Leave it out, and weight the losses of samples instead."
        )


def _is_in_rows(args: tuple[Any, ...], number: int) -> bool:
    """Whether a lookup in a table, with all of a ``number`` of arguments, is one of ours.

    Not in transforms, modes and traces, which have to see the operator.
    """
    if len(args) != number or not torch.is_grad_enabled() or _engine_of(args[0]) is None:
        return False
    if num_dispatch_modes() or forward_level() >= 0 or peek_interpreter_stack() is not None:
        return False
    return not torch.jit.is_tracing() and bool(args[0].requires_grad)


@uncompiled
def embedding(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Look up rows, as ``torch.embedding()``, whose arguments it takes."""
    if len(args) > 3 and args[3]:
        _refuse_frequencies(args[0])
    if kwargs or not _is_in_rows(args, 5) or args[3] or args[4]:
        return _embedding(*args, **kwargs)
    weight, indices, padding_idx, *_ = args
    found: torch.Tensor = _Lookup.apply(weight, indices, padding_idx)  # type: ignore[no-untyped-call]
    return found


@uncompiled
def embedding_bag(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Look up bags, as ``torch.embedding_bag()``, whose arguments it takes."""
    if len(args) > 3 and args[3]:
        _refuse_frequencies(args[0])
    if kwargs or not _is_in_rows(args, 9) or args[3] or args[5]:
        return _embedding_bag(*args, **kwargs)
    weight, indices, offsets, _, mode, _, sample_weights, has_last, padding_idx = args
    if padding_idx is not None and not 0 <= padding_idx < len(weight):
        return _embedding_bag(*args)
    found: tuple[torch.Tensor, ...] = _BagLookup.apply(  # type: ignore[no-untyped-call]
        weight,
        indices,
        offsets,
        mode,
        sample_weights,
        has_last,
        -1 if padding_idx is None else padding_idx,
    )
    return found


def _takes_rows(ctx: Any) -> bool:
    """Whether the running backward gives a table its gradient for an engine to reduce by rows.

    Not if the program sees it before, wants a graph of it, or has gradients to add it to.
    """
    weight = ctx.weight
    if torch.is_grad_enabled() or is_compiled_backward() or weight._backward_hooks:
        return False
    engine = _engine_of(weight)
    if engine is None or not engine.is_syncing or engine.sees_nested_tasks:
        return False
    if gradient_of(weight) is not None or not _accumulates(ctx):
        return False
    return engine.reducer.tables.note_lookup(weight)


def _accumulates(ctx: Any) -> bool:
    """Whether the running backward accumulates the table's gradient, instead of returning it."""
    try:
        return _will_engine_execute_node(ctx.next_functions[0][0])
    except RuntimeError:  # in autograd.grad()
        return False


class _Numbered:
    """The rows that were looked up, and the indices as numbers among them.

    Attributes:
        rows: The rows, in ascending order.
        numbers: The indices.
        padding: The number of the row at ``padding_idx``; -1 if it wasn't looked up.
    """

    def __init__(self, indices: torch.Tensor, padding_idx: int) -> None:
        self.rows, numbers = indices.unique(return_inverse=True)
        self.numbers = numbers.to(indices.dtype)
        places = (self.rows == padding_idx).nonzero()
        self.padding = int(places[0]) if len(places) else -1

    def gradient(self, values: torch.Tensor, shape: torch.Size) -> RowGradient:
        """Return the gradient of a table of this ``shape``, with these ``values`` of the rows."""
        return RowGradient(self.rows.long(), values, shape)


def _numbered(ctx: Any, indices: torch.Tensor) -> _Numbered | None:
    if not _takes_rows(ctx):
        return None
    numbered = _Numbered(indices, ctx.padding_idx)
    is_worth_it = len(numbered.rows) * _LEAST_UNTOUCHED <= ctx.shape[0]
    return numbered if is_worth_it else None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        # No tensor that is saved: one that is written to meanwhile does no harm, as in torch.
        ctx.weight, ctx.shape, ctx.padding_idx = weight, weight.shape, padding_idx
        return _embedding(weight, indices, padding_idx, False, False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        num_rows, padding_idx = ctx.shape[0], ctx.padding_idx
        if (found := _numbered(ctx, indices)) is None:
            values = _aten.embedding_dense_backward(gradient, indices, num_rows, padding_idx, False)
            return values, None, None
        values = _aten.embedding_dense_backward(
            gradient, found.numbers, len(found.rows), found.padding, False
        )
        return found.gradient(values, ctx.shape), None, None


class _BagLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        mode: int,
        sample_weights: torch.Tensor | None,
        has_last: bool,
        padding_idx: int,
    ) -> tuple[torch.Tensor, ...]:
        indices, offsets = indices.contiguous(), offsets.contiguous()
        found: tuple[torch.Tensor, ...] = _aten._embedding_bag(
            weight, indices, offsets, False, mode, False, sample_weights, has_last, padding_idx
        )
        needs_table = sample_weights is not None and ctx.needs_input_grad[4]
        ctx.save_for_backward(
            indices, offsets, *found[1:], sample_weights, weight if needs_table else None
        )
        ctx.weight, ctx.shape, ctx.mode, ctx.padding_idx = weight, weight.shape, mode, padding_idx
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor, *_: object) -> Any:
        indices, offsets, bags, sizes, maxima, sample_weights, weight = ctx.saved_tensors
        table = of_samples = None
        if ctx.needs_input_grad[0]:
            num_rows, padding = ctx.shape[0], ctx.padding_idx
            found = _numbered(ctx, indices)
            if found is not None:
                num_rows, padding, indices_of = len(found.rows), found.padding, found.numbers
                if ctx.mode == _MAX_MODE:  # empty bags have none, whatever is there
                    maxima = torch.searchsorted(found.rows, maxima).clamp_(max=max(0, num_rows - 1))
            else:
                indices_of = indices
            table = _aten._embedding_bag_backward(
                gradient,
                indices_of,
                offsets,
                bags,
                sizes,
                maxima,
                num_rows,
                False,
                ctx.mode,
                False,
                sample_weights,
                padding,
            )
            if found is not None:
                table = found.gradient(table, ctx.shape)
        if ctx.needs_input_grad[4]:
            of_samples = _aten._embedding_bag_per_sample_weights_backward(
                gradient, weight, indices, offsets, bags, ctx.mode, ctx.padding_idx
            )
        return table, None, None, None, of_samples, None, None


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
