"""Sharded optimizers after steps in shards, whose bits don't depend on how elements are divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lockstep.comm import context_of
from lockstep.errors import ModelError
from lockstep.optim.flat import FlatParameters
from lockstep.same_bits import StepsInShards

# In others torch computes the last elements of a tensor, which no vector has, in another way.
_DTYPES = (torch.float32, torch.float64)


def refuse_other_bits(optimizer: Optimizer, flats: Sequence[FlatParameters]) -> None:
    """Raise ModelError if the update's bits depend on the number of ranks, after steps in shards.

    Parameters that one rank updates whole have the bits of an optimizer that isn't sharded.
    """
    cut = [flat for flat in flats if not flat.keeps_whole]
    if not any(context_of(flat.process_group).find(StepsInShards) for flat in cut):
        return
    kind, why = type(optimizer).__name__, None
    if any(group.get("fused") for group in optimizer.param_groups):
        why = "with fused=True"
    for flat in cut:
        if (dtype := flat.parameters[0].dtype) not in _DTYPES:
            why = why or f"of parameters in {str(dtype).removeprefix('torch.')}"
    if why is not None:
        raise ModelError(
            f"This {kind} is sharded, and its gradients come from steps in shards(): {why}, torch "
            "computes the last elements of a tensor in another way than the others, so that the "
            "bits would depend on the number of ranks. Leave the optimizer unsharded, or keep "
            "parameters in float32 and leave fused out."
        )
