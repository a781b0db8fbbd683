"""Tells of ranks that train apart: nothing keeps their parameters in step, or their options differ.

Before some of its steps, an optimizer's facts are left in the store of the default process group:
of parameters that lockstep keeps in step, the options; of others, a checksum of gradients, which
are the same on all ranks wherever something reduces them. The first rank looks whether those of
other ranks are there, and are the same. There is no collective, and no rank waits for another, but
the first one for a moment when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm import bytes_of, uncompiled
from lockstep.torch_private import _get_default_store
from lockstep.world.environment import detect

_log = logging.getLogger("lockstep")

# Facts are left before the steps 1, 2, 4, 8 and so on, and each of so many.
_INTERVAL = 64
# How long the first rank waits for the facts of others when it ends.
_PATIENCE_SECONDS = 0.3
# Of how many looks facts are kept in the store.
_NUM_SLOTS, _LAST_LOOK = 4, -1
# How many steps of an optimizer that nothing is known to keep in step are watched, and after how
# many the first rank looks no more whether others have come as far.
_MAX_STEPS, _MOST_STEPS = 8, 1024
# Of how many gradients, and of how many of their elements, there is a checksum.
_NUM_GRADIENTS, _NUM_ELEMENTS = 8, 4096
# Options that mean the same on all ranks. Others may be what an optimizer remembers of its part.
_OPTIONS = (
    "lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "alpha", "rho", "eps",
    "maximize",
)  # fmt: skip
# Modules of libraries that train ranks together in another way than torch.distributed's.
_OTHERS = ("horovod", "mpi4py", "deepspeed", "jax")
# Classes whose parameters, or parts of them, other code keeps in step.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "PipelineStage"}
_slot: Any = torch.Tensor.grad
_gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = _slot.__get__

# Each returns the process group whose ranks keep parameters in step, of those that it knows.
keepers: list[Callable[[Sequence[torch.Tensor]], Iterable[dist.ProcessGroup]]] = []


@dataclass
class _Watched:
    """An optimizer that steps.

    Attributes:
        number: Its number among those of this rank.
        num_steps: How many steps it has begun.
        is_done: Whether it isn't watched any more.
        steps: The last two before which facts were left in the store.
        num_looks: How often that was done.
    """

    number: int
    num_steps: int = 0
    is_done: bool = False
    steps: list[int] = field(default_factory=list)
    num_looks: int = 0


_lock = threading.Lock()
_watched: Any = WeakIdKeyDictionary()
_hooks: list[object] = []
# How many optimizers a rank has watched, by its default group; ranks may be threads.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_told: Any = WeakIdKeyDictionary()  # first parameters of optimizers of which was told


def watch_optimizers() -> None:
    """Watch the steps of all optimizers in this process from now on."""
    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))


@uncompiled
def _before_step(optimizer: Optimizer, *_: object) -> None:
    watched: _Watched | None = _watched.get(optimizer)
    if watched is None:
        with _lock:
            group = dist.group.WORLD if dist.is_initialized() else None
            number = 0 if group is None else _numbers.get(group, 0)
            watched = _watched[optimizer] = _Watched(number)
            if group is not None:
                _numbers[group] = number + 1
    if watched.is_done:
        return
    watched.num_steps += 1
    is_power = watched.num_steps & (watched.num_steps - 1) == 0
    if is_power or watched.num_steps % _INTERVAL == 0:
        with contextlib.suppress(RuntimeError):  # the store is gone
            watched.is_done = True
            watched.is_done = _look(optimizer, watched)


def _look(optimizer: Optimizer, watched: _Watched, wait: float | None = None) -> bool:
    """Leave facts about ``optimizer``, and look at those of others; return whether to end that.

    The first rank may ``wait`` for those of others, for so many seconds.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False  # where nothing may be read
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    group = next((one for keeper in keepers for one in keeper(parameters)), dist.group.WORLD)
    if group is None:
        return _look_for_strangers(optimizer, parameters)
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # a group that torch doesn't know
        return True
    form = zlib.crc32(repr([type(optimizer).__name__, *(p.shape for p in parameters)]).encode())
    facts: dict[str, Any] = {"form": form}
    is_kept = any(one for keeper in keepers for one in keeper(parameters))
    if is_kept:
        facts["options"] = _options_of(optimizer)
    elif not (checksums := _checksums_of(parameters)):
        return False
    else:
        facts["gradients"] = checksums
    if len(ranks) == 1:
        return True
    is_first = dist.get_rank() == ranks[0]
    if is_kept or watched.num_steps <= _MAX_STEPS:
        _leave(watched, ranks, facts)
    if is_first:
        for step in watched.steps:
            found = _facts_of_ranks(watched, ranks, step, wait)
            are_alike = all(one["form"] == facts["form"] for one in found)
            differing = _first_difference(found) if are_alike else None
            if differing is not None:
                _tell(optimizer, parameters, ranks, step, differing)
                return True
    # The first rank may be ahead of those that are to be compared with it.
    return not is_kept and watched.num_steps >= (_MOST_STEPS if is_first else _MAX_STEPS)


def look_at_the_end() -> None:
    """Look at the options of the last steps, before the first rank takes the store with it."""
    end = time.monotonic() + _PATIENCE_SECONDS
    with contextlib.suppress(Exception):  # whatever is gone by now
        for optimizer, watched in [*_watched.items()]:
            if not watched.is_done and watched.num_steps not in watched.steps:
                watched.num_looks = _LAST_LOOK  # alike on all ranks: a place of its own
                _look(optimizer, watched, wait=max(0.01, end - time.monotonic()))


def _leave(watched: _Watched, ranks: Sequence[int], facts: dict[str, Any]) -> None:
    watched.steps = [*watched.steps[-1:], watched.num_steps]
    facts["step"] = watched.num_steps
    key = _key(watched, ranks, watched.num_looks, dist.get_rank())
    _get_default_store().set(key, json.dumps(facts))
    watched.num_looks += 1


def _facts_of_ranks(
    watched: _Watched, ranks: Sequence[int], step: int, wait: float | None
) -> list[dict[str, Any]]:
    """Return the facts of all ranks before ``step``, by rank; none if some aren't there.

    A key that is there stays, with later facts: to get one that isn't would wait for it.
    """
    store = _get_default_store()
    slot = watched.num_looks - len(watched.steps) + watched.steps.index(step)
    if wait is not None:
        if step != watched.num_steps:
            return []
        slot = _LAST_LOOK
    keys = [_key(watched, ranks, slot, rank) for rank in ranks]
    if wait is not None:
        with contextlib.suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=wait))
    if not store.check(keys):
        return []
    found = [json.loads(store.get(key)) for key in keys]
    return found if all(facts["step"] == step for facts in found) else []


def _key(watched: _Watched, ranks: Sequence[int], slot: int, rank: int) -> str:
    among = "all" if len(ranks) == dist.get_world_size() else zlib.crc32(repr(ranks).encode())
    return (
        f"lockstep/apart/{among}/{watched.number}/{slot if slot < 0 else slot % _NUM_SLOTS}/{rank}"
    )


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: _number(group[name]) for name in _OPTIONS if name in group}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [*map(_number, value)]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, bool | int | float) else None


def _checksums_of(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the position of some parameters with their gradients' checksum.

    None for parameters of which each rank has a part, as DTensors.
    """
    if any(type(p) is not nn.Parameter and type(p) is not torch.Tensor for p in parameters):
        return []
    found = []
    for position, parameter in enumerate(parameters):
        gradient = _gradient_of(parameter)
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            part = gradient.detach().reshape(-1)[:_NUM_ELEMENTS].cpu().contiguous()
            found.append([position, zlib.crc32(bytes_of(part.view(torch.uint8)))])
        if len(found) == _NUM_GRADIENTS:
            break
    return found


def _first_difference(by_rank: Sequence[dict[str, Any]]) -> Any:
    """Return what differs: a parameter's position, or a group, an option and its values by rank."""
    for found in zip(*(facts.get("gradients", ()) for facts in by_rank), strict=False):
        same_place = len({position for position, _ in found}) == 1
        if same_place and len({checksum for _, checksum in found}) > 1:
            return found[0][0]
    for index, groups in enumerate(zip(*(f.get("options", ()) for f in by_rank), strict=False)):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if len({json.dumps(value) for value in values}) > 1:  # NaN is like NaN
                return index, name, values
    return None


def _tell(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    ranks: Sequence[int],
    step: int,
    differing: Any,
) -> None:
    kind = type(optimizer).__name__
    if isinstance(differing, tuple):
        index, name, values = differing
        other = next(
            i for i, each in enumerate(values) if json.dumps(each) != json.dumps(values[0])
        )
        _log.warning(
            "The options of this %s differ between the ranks: %r of group %d is %s on rank %d and "
            "%s on rank %d at step %d, so that the replicas part, although their gradients are the "
            "same. Set it alike on all ranks: a scheduler that is given a loss or a metric, such "
            "as ReduceLROnPlateau, needs that of all ranks, lockstep.reduce(loss).",
            kind, name, index, values[0], ranks[0], values[other], ranks[other], step,
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
        kind, step, _name_of(optimizer, differing), len(ranks),
    )  # fmt: skip


def _look_for_strangers(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Tell of ranks that have not met, and return whether there is no more to look for."""
    if not any(_gradient_of(parameter) is not None for parameter in parameters):
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
    own = {*map(id, parameters)}
    modules = (
        value
        for value in gc.get_objects()
        if type(value).__name__ in _WRAPPERS and isinstance(value, nn.Module)
    )
    return any(id(parameter) in own for module in modules for parameter in module.parameters())
