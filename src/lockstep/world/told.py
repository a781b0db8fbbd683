"""What the first rank tells of ranks that train apart."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.torch_private import gradient_of
from lockstep.world.environment import detect
from lockstep.world.facts import Difference

_log = logging.getLogger("lockstep")

# Modules of libraries that train ranks together in another way than torch.distributed's.
_OTHERS = ("horovod", "mpi4py", "deepspeed", "jax")
# Classes whose parameters, or parts of them, other code keeps in step.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "PipelineStage"}
_told: Any = WeakIdKeyDictionary()  # first parameters of optimizers of which was told


# What to do if parameters that lockstep keeps in step aren't the same.
_ADVICE = {
    "gradient": "The program has changed it after the backward, and not on every rank, so that the "
    "replicas part or, if the optimizer is sharded, take that of the rank which updates the "
    "parameter. Let every rank do the same to gradients: clip, filter or replace them by what is "
    "the same on all ranks.",
    "value": "The program has changed it, and not on every rank. Load, initialise and change "
    "parameters on all ranks alike, or before lockstep.parallelize(model), which gives all ranks "
    "those of rank 0.",
}


def tell(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    ranks: Sequence[int],
    step: int,
    differing: Difference,
) -> None:
    """Tell of what isn't the same on all ``ranks``, before this ``step`` of ``optimizer``."""
    kind = type(optimizer).__name__
    values = differing.by_rank
    other = next((i for i, one in enumerate(values) if _text(one) != _text(values[0])), 0)
    places = values[0], ranks[0], values[other], ranks[other], step
    if differing.kind == "option":
        _log.warning(
            "The options of this %s differ between the ranks: %r of group %d is %s on rank %d and "
            "%s on rank %d at step %d, so that the replicas part, although their gradients are the "
            "same. Set it alike on all ranks: a scheduler that is given a loss or a metric, such "
            "as ReduceLROnPlateau, needs that of all ranks, lockstep.reduce(loss).",
            kind, differing.name, differing.group, *places,
        )  # fmt: skip
        return
    if differing.kind in _ADVICE:
        _log.warning(
            "The %s of %r isn't the same on all ranks, in this %s: some elements are %s on rank %d "
            "and %s on rank %d before step %d. %s",
            differing.kind, differing.name, kind, _short(values[0]), ranks[0],
            _short(values[other]), ranks[other], step, _ADVICE[differing.kind],
        )  # fmt: skip
        return
    if parameters[0] in _told or _is_any_in_a_wrapper(parameters):
        return
    _told[parameters[0]] = True
    _log.warning(
        "Nothing keeps the parameters of this %s in step: before its step %d, the gradient of %s "
        "is another one on each of %d ranks, so that each rank trains a model of its own. Call "
        "lockstep.parallelize(model) after lockstep.init(), or average gradients before each step, "
        "with lockstep.average_gradients(model). (If each rank is to train its own, ignore this: "
        "it is said once.)",
        kind, step, _name_of(optimizer, differing.name), len(ranks),
    )  # fmt: skip


def _short(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _text(value: object) -> str:
    return json.dumps(value)  # by which NaN is like NaN


def look_for_strangers(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Tell of ranks that have not met, and return whether there is no more to look for."""
    if not any(gradient_of(parameter) is not None for parameter in parameters):
        return False
    place = detect(os.environ)
    if place.world_size > 1 and place.rank == 0 and sys.modules.keys().isdisjoint(_OTHERS):
        _tell_of_strangers(type(optimizer).__name__, place.world_size)
    return True


@functools.cache  # so that it is said once
def _tell_of_strangers(kind: str, num_ranks: int) -> None:
    _log.warning(
        "%d ranks run this program, and it steps its %s without having met the others: each rank "
        "trains a model of its own, on the same data unless the program divides it. Call "
        "lockstep.init() first, then lockstep.parallelize(model), and give the data to a "
        "lockstep.DataLoader. (If each rank is to train its own, ignore this: it is said once.)",
        num_ranks,
        kind,
    )


def _name_of(optimizer: Optimizer, position: int) -> str:
    for group in optimizer.param_groups:
        if position < len(group["params"]):
            names = group.get("param_names") or [f"its parameter {position}"]
            name = names[position] if position < len(names) else names[0]
            return f"{name} of shape {tuple(group['params'][position].shape)}"
        position -= len(group["params"])
    return "a parameter"


def _is_any_in_a_wrapper(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether torch's wrappers have one of them. It looks at all objects of the program, once."""
    ids = {*map(id, parameters)}
    modules = (
        value
        for value in gc.get_objects()
        if type(value).__name__ in _WRAPPERS and isinstance(value, nn.Module)
    )
    return any(id(parameter) in ids for module in modules for parameter in module.parameters())
