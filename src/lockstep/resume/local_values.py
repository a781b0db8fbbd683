"""What each rank has of its own: tensors, generators and states that differ from rank 0's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint import Ranks, kind_of, unwrapped
from lockstep.comm import bytes_of
from lockstep.tree import Collector


def local_values(
    ranks: Ranks, things: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return by name what isn't on this rank as on rank 0.

    Of whole states, all ranks have those that differ on any rank. Every rank calls it; it blocks.

    Args:
        ranks: All ranks.
        things: All things.
        values: More values, by names of their own.

    Returns:
        The values; and the names of things and of ``values`` that are among them as a whole.
    """
    tensors = {
        name: thing.get_state() if isinstance(thing, torch.Generator) else thing.detach()
        for name, thing in _holders(things).items()
    }
    states = {name: things[name].state_dict() for name in _with_states(things)} | {**values}
    digests = {name: _digest(value) for name, value in (tensors | states).items()}
    every = ranks.gather(None, digests)
    apart = [name for name in states if any(each[name] != every[0][name] for each in every)]
    local = {name: each for name, each in tensors.items() if digests[name] != every[0].get(name)}
    return local | {name: states[name] for name in apart}, apart


def put_local(things: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Put values back where :func:`local_values` has found them."""
    holders = _holders(things)
    # Of those that a launcher has found, a parameter may be one, which is the same on all ranks.
    for name, value in values.items():
        holder = holders.get(name, things.get(name))
        if isinstance(holder, torch.Generator):
            holder.set_state(value)
        elif isinstance(holder, torch.Tensor):
            with torch.no_grad():
                holder.copy_(value)
        elif holder is not None:
            holder.load_state_dict(value)


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


def _with_states(things: Mapping[str, Any]) -> list[str]:
    """Return the names of objects that are neither modules nor optimizers, and have a state."""
    return sorted(
        name
        for name, thing in things.items()
        if kind_of(thing) == "state" and not isinstance(thing, torch.optim.Optimizer)
    )


def _digest(value: Any) -> str:
    collector = Collector()
    found = hashlib.blake2b(json.dumps(collector.encode(value, "")).encode(), digest_size=8)
    for key, flat in collector.whole.items():
        found.update(repr(collector.headers[key]).encode())
        found.update(bytes_of(flat.cpu()))
    return found.hexdigest()
