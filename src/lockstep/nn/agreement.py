"""Whether all ranks built the same model, and if not, where they differ."""

from __future__ import annotations

import hashlib
import json

import torch.distributed as dist
from torch import nn

from lockstep.comm import all_gather_bytes
from lockstep.errors import ModelMismatch

# Each tensor's name, and what about it must be the same on all ranks.
_Description = dict[str, str]


def check_same_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise on every rank unless all have the same names, shapes, dtypes and frozen parameters.

    All ranks must call it. Mostly it costs one all-gather of 32 bytes.

    Raises:
        ModelMismatch: Naming the first parameter or buffer that differs, with both sides.
    """
    description = json.dumps(describe(module)).encode()
    device = next(module.parameters()).device
    digests = all_gather_bytes(group, hashlib.sha256(description).digest(), device)
    if len(set(digests)) == 1:
        return
    descriptions = [json.loads(payload) for payload in all_gather_bytes(group, description, device)]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    difference = first_difference(descriptions[0], descriptions[other], other)
    raise ModelMismatch(
        f"{difference}.\nBuild the same model on every rank before making it parallel."
    )


def describe(module: nn.Module) -> _Description:
    """What the ranks must agree on: ``{"fc.weight": "a parameter (50, 320) float32"}``."""
    description: _Description = {}
    for name, parameter in module.named_parameters():
        kind = "a parameter" if parameter.requires_grad else "a frozen parameter"
        description[name] = f"{kind} {tuple(parameter.shape)} {_name(parameter.dtype)}"
    for name, buffer in module.named_buffers():
        description[name] = f"a buffer {tuple(buffer.shape)} {_name(buffer.dtype)}"
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


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
