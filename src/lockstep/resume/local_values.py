"""What each rank has of its own: buffers, tensors and generators that differ from rank 0's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint import Ranks, kind_of, unwrapped
from lockstep.comm import bytes_of


def local_values(ranks: Ranks, things: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return by name the values on this rank that aren't those of rank 0.

    Every rank calls it; it blocks.
    """
    values = {
        name: thing.get_state() if isinstance(thing, torch.Generator) else thing.detach()
        for name, thing in _holders(things).items()
    }
    digests = {name: _digest(value) for name, value in values.items()}
    first = ranks.gather(None, digests)[0]
    return {name: value for name, value in values.items() if digests[name] != first.get(name)}


def put_local(things: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> None:
    """Put values back where :func:`local_values` has found them."""
    holders = _holders(things)
    # Of those that a launcher has found, a parameter may be one, which is the same on all ranks.
    for name, value in values.items():
        if (holder := holders.get(name)) is None:
            continue
        if isinstance(holder, torch.Generator):
            holder.set_state(value)
        else:
            with torch.no_grad():
                holder.copy_(value)


def _holders(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors and generators that gradients don't keep the same on all ranks."""
    found: dict[str, Any] = {}
    for name, thing in sorted(things.items()):
        kind = kind_of(thing)
        if kind in ("tensor", "generator"):
            found[name] = thing
        elif kind == "module":
            module: nn.Module = unwrapped(thing)
            saved = module.state_dict().keys()
            found |= {f"{name}.{key}": b for key, b in module.named_buffers() if key in saved}
    return found


def _digest(value: torch.Tensor) -> str:
    memory = bytes_of(value.cpu().contiguous().view(-1))
    return hashlib.blake2b(memory, digest_size=8).hexdigest()
