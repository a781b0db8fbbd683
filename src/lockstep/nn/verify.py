"""Verifies that all ranks have the same model and the same options."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.comm import differing_facts
from lockstep.errors import ModelError, ModelMismatch
from lockstep.grad import gradient_dtype

_REMEDIES = {
    "tensors": "Build the same model on every rank before making it parallel.",
    "options": "Give the same options on every rank.",
}


def check_same_model(
    module: nn.Module,
    group: dist.ProcessGroup,
    options: Mapping[str, object] | None = None,
    refusal: ModelError | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Raise on every rank unless all have the same model, the same options, and no refusal.

    The same model means the same names, shapes, dtypes, memory layouts and frozen parameters. All
    ranks must call it; it blocks. If nothing differs, it costs one all-reduce of 64 bytes.

    Args:
        module: The model.
        group: The ranks.
        options: Further values that must be the same.
        refusal: The reason why this rank can't go on, and so no rank can.
        left_out: Names of parameters and buffers that may differ.

    Raises:
        ModelMismatch: Naming the first difference with both sides, or another rank's refusal.
        ModelError: This rank's ``refusal``, if there was one.
    """
    facts = {
        "refusal": str(refusal or ""),
        "tensors": {k: v for k, v in _descriptions(module).items() if k not in left_out},
        "options": {name: str(value) for name, value in (options or {}).items()},
    }
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    by_rank = differing_facts(group, facts, device)
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(by_rank):
        if theirs["refusal"]:
            raise ModelMismatch(f"Rank {rank} can't go on, so no rank can: {theirs['refusal']}")
    for subject, remedy in _REMEDIES.items():
        for rank, theirs in enumerate(by_rank):
            first, other = by_rank[0][subject], theirs[subject]
            if [*other.items()] != [*first.items()]:
                raise ModelMismatch(f"{_first_difference(first, other, rank)}.\n{remedy}")


def _first_difference(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    for name in [*first, *other]:
        if first.get(name) != other.get(name):
            return (
                f"{name!r} is {other.get(name, 'not there')} on rank {rank} and "
                f"{first.get(name, 'not there')} on rank 0"
            )
    return f"rank {rank} registers its parameters and buffers in another order than rank 0"


def _descriptions(module: nn.Module) -> dict[str, str]:
    """Describe what must be the same, as ``{"fc.weight": "a parameter (50, 320) float32"}``."""
    found = {}
    for name, parameter in module.named_parameters():
        kind = "a parameter" if parameter.requires_grad else "a frozen parameter"
        found[name] = f"{kind} {_form(parameter)}"
        dtype = parameter.dtype if is_lazy(parameter) else gradient_dtype(parameter)
        if parameter.requires_grad and dtype != parameter.dtype:
            found[name] += f" with a gradient of {_name_of(dtype)}"
    for name, buffer in module.named_buffers():
        found[name] = f"a buffer {_form(buffer)}"
    return found


def _form(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "of no shape yet"
    form = f"{tuple(tensor.shape)} {_name_of(tensor.dtype)}"
    # A gradient has the memory layout of its parameter, and an all-reduce sums memory.
    is_dense = tensor.layout is not torch.strided or tensor.is_contiguous()
    return form if is_dense else f"{form} with strides {tensor.stride()}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
