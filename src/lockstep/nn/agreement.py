"""Whether all ranks built the same model, and if not, where they differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.comm import all_gather_bytes, have_same
from lockstep.errors import ModelError, ModelMismatch
from lockstep.grad import gradient_dtype

# Each tensor's name, and what about it must be the same on all ranks.
_Description = dict[str, str]


def check_same_model(
    module: nn.Module,
    group: dist.ProcessGroup,
    options: Mapping[str, object] | None = None,
    refusal: ModelError | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Raise on every rank unless all have the same model, the same options, and no objection.

    The same model is the same names, shapes, dtypes, memory order and frozen parameters. All
    ranks must call it. Mostly it costs one all-reduce of 64 bytes.

    Args:
        module: This rank's model.
        group: The ranks to compare.
        options: What else they must agree on.
        refusal: Why this rank can't go on, for the others to know that they can't either.
        left_out: Names of parameters and buffers in which they may differ.

    Raises:
        ModelMismatch: Naming the first parameter, buffer or option that differs, with both
            sides, or the refusal of another rank.
        ModelError: This rank's ``refusal``, if there was one.
    """
    facts = {
        "refusal": str(refusal or ""),
        "tensors": {k: v for k, v in describe(module).items() if k not in left_out},
        "options": {name: str(value) for name, value in (options or {}).items()},
    }
    payload = json.dumps(facts).encode()
    carrier = next((t.device for t in [*module.parameters(), *module.buffers()]), None)
    device = carrier or torch.device("cpu")
    if not have_same(group, payload, device):
        all_facts = [json.loads(theirs) for theirs in all_gather_bytes(group, payload, device)]
        _raise_difference(all_facts, refusal)
    if refusal is not None:
        raise refusal


def _raise_difference(facts: list[dict[str, _Description]], refusal: ModelError | None) -> None:
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(facts):
        if theirs["refusal"]:
            raise ModelMismatch(f"Rank {rank} can't go on, so no rank can: {theirs['refusal']}")
    for subject, todo in (
        ("tensors", "Build the same model on every rank before making it parallel."),
        ("options", "Give the same options on every rank."),
    ):
        for rank, theirs in enumerate(facts):
            if list(theirs[subject].items()) != list(facts[0][subject].items()):
                difference = first_difference(facts[0][subject], theirs[subject], rank)
                raise ModelMismatch(f"{difference}.\n{todo}")


def describe(module: nn.Module) -> _Description:
    """What the ranks must agree on: ``{"fc.weight": "a parameter (50, 320) float32"}``."""
    description: _Description = {}
    for name, parameter in module.named_parameters():
        kind = "a parameter" if parameter.requires_grad else "a frozen parameter"
        description[name] = f"{kind} {_form(parameter)}"
        if parameter.requires_grad and not is_lazy(parameter):
            of = gradient_dtype(parameter)
            if of != parameter.dtype:
                description[name] += f" with a gradient of {str(of).removeprefix('torch.')}"
    for name, buffer in module.named_buffers():
        description[name] = f"a buffer {_form(buffer)}"
    return description


def first_difference(first: _Description, other: _Description, rank: int) -> str:
    """Say where rank 0's description and that of ``rank`` part ways."""
    for name in [*first, *other]:
        if first.get(name) != other.get(name):
            return (
                f"{name!r} is {other.get(name, 'not there')} on rank {rank} and "
                f"{first.get(name, 'not there')} on rank 0"
            )
    return f"rank {rank} registers its parameters and buffers in another order than rank 0"


def _form(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "of no shape yet"
    form = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    # Gradients lie in memory as their parameters do, and what is summed is memory.
    ordered = tensor.layout is not torch.strided or tensor.is_contiguous()
    return form if ordered else f"{form} with strides {tensor.stride()}"
