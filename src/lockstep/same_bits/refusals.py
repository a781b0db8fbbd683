"""Models that have no steps in shards, as their bits would depend on the number of ranks."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.comm import join_state_of
from lockstep.errors import ModelError
from lockstep.grad import gradient_dtype
from lockstep.nn import DataParallel, ParallelState, SyncBatchNorm, state_of

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def check(state: ParallelState, module: nn.Module, *, are_parts_known: bool) -> None:
    """Raise ModelError if steps of ``module`` can't be divided into shards.

    ``are_parts_known`` is whether it had the same parts when it was checked last.
    """
    why = _of_state(state) or _of_parameters(module)
    if why is None and not are_parts_known:
        why = _of_modules(module)
    if why is not None:
        raise ModelError(f"shards() can't take this {type(module).__name__}: {why}")


def _of_state(state: ParallelState) -> str | None:
    if not state.is_syncing:
        return (
            "it is in no_sync() or accumulate(), which a loop over shards needs no more: it adds "
            "up the gradients of all shards itself."
        )
    if state.options.ignored:
        return (
            f"each rank has {sorted(state.options.ignored)[0]!r} for itself "
            "(_ddp_params_and_buffers_to_ignore), so its value depends on the number of ranks."
        )
    for engine in state.engines:
        if engine.reducer.comm_hook is not None or engine.buffers.hook is not None:
            return "a communication hook reduces its gradients or buffers, in an order of its own."
        if join_state_of(engine.process_group) is not None:
            return "it is in join(), and each rank has as many steps as all others here."
        if engine.reducer.table.has_unreduced:
            return (
                "it has gradients that were added up under no_sync() and not reduced. Call "
                "zero_grad(), or reduce them, before the loop over shards."
            )
    return None


def _of_modules(module: nn.Module) -> str | None:
    for name, each in module.named_modules():
        where = f"its part {name!r}" if name else "it"
        if isinstance(each, nn.SyncBatchNorm | SyncBatchNorm):
            return (
                f"{where} is a SyncBatchNorm, whose statistics are of all ranks' samples at once, "
                "and a rank computes its shards one after the other. Use BatchNorm, whose "
                "statistics are of a shard's samples, or a norm that has none (GroupNorm)."
            )
        if isinstance(each, DataParallel | nn.DataParallel):
            return f"{where} is a DataParallel, which cuts the shards once more. Leave it out."
        if isinstance(each, nn.Embedding | nn.EmbeddingBag):
            if each.sparse:
                return f"{where} has sparse gradients. Make the embedding with sparse=False."
            if each.max_norm is not None:
                return (
                    f"{where} has max_norm, with which each lookup changes the table, so that what "
                    "a shard computes depends on the shards before it on its rank."
                )
        if each is not module and _is_parallel(each):
            return (
                f"{where} is parallel by itself. Make the whole model parallel, with one call of "
                "parallelize()."
            )
    return None


def _is_parallel(module: nn.Module) -> bool:
    try:
        state = state_of(module)
    except ModelError:
        return False
    return not state.is_wrapped and state.module() is module


def _of_parameters(module: nn.Module) -> str | None:
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            return f"{name!r} is on meta, where nothing is computed."
        dtype = gradient_dtype(parameter)
        if parameter.requires_grad and dtype not in _DTYPES:
            known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            return (
                f"the gradient of {name!r} is {str(dtype).removeprefix('torch.')}, and may be one "
                f"of {known}."
            )
    return None
