"""Tells of ranks that train apart: nothing keeps them in step, or the program parts them.

Before some of its steps, an optimizer's facts are left in the store of the default process group:
of parameters that lockstep keeps in step, the options, and some elements of values and gradients,
as a program may change these on one rank only; of others, a checksum of gradients, which are the
same on all ranks wherever something reduces them. The first rank looks whether those of
other ranks are there, and are the same. There is no collective, and no rank waits for another, but
the first one for a moment when it ends.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm import STORE_SECONDS, answered, context_of, uncompiled
from lockstep.deadline import Deadline
from lockstep.entries import has_room_for, value_in
from lockstep.torch_private import _get_default_store
from lockstep.world.devices import is_capturing
from lockstep.world.facts import (
    KeptInStep,
    checksums_of,
    first_difference,
    options_of,
    parameters_of,
)
from lockstep.world.rendezvous import is_room_in_stores
from lockstep.world.told import look_for_strangers, tell

# Facts are left before the steps 1, 2, 4, 8 and so on, and each of so many.
_INTERVAL = 64
# How long the first rank waits for the facts of others when it ends.
_TO_COMPARE_SECONDS = 0.3
# Of how many looks facts are kept in the store.
_NUM_SLOTS, _LAST_LOOK = 4, -1
# How many steps of an optimizer that nothing is known to keep in step are watched, and after how
# many the first rank looks no more whether others have come as far.
_MAX_STEPS, _MOST_STEPS = 8, 1024

# Each returns what keeps parameters of an optimizer in step, of those things that it knows.
keepers: list[Callable[[Optimizer], Iterable[KeptInStep]]] = []


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
_hooks: list[RemovableHandle] = []


@dataclass
class _NumWatched:
    """How many optimizers a rank has watched, in the context of its default group."""

    count: int = 0


def watch_optimizers(*, after_other_hooks: bool = False) -> None:
    """Watch the steps of all optimizers in this process from now on.

    Facts are to be those after other hooks, if in these ranks get gradients.
    """
    with _lock:
        if _hooks and after_other_hooks:
            _hooks.pop().remove()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))


@uncompiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    watched: _Watched | None = _watched.get(optimizer)
    if watched is None:
        with _lock:
            group = dist.group.WORLD if dist.is_initialized() else None
            earlier = _NumWatched() if group is None else context_of(group).get(_NumWatched)
            watched = _watched[optimizer] = _Watched(earlier.count)
            earlier.count += 1
    if watched.is_done:
        return
    watched.num_steps += 1
    is_power = watched.num_steps & (watched.num_steps - 1) == 0
    if is_power or watched.num_steps % _INTERVAL == 0:
        with contextlib.suppress(Exception):  # the store is gone, or has what no rank writes
            watched.is_done = True
            # A closure has yet to compute the gradients.
            has_gradients = not any(map(callable, [*args[1:], *options.values()]))
            watched.is_done = _look(optimizer, watched, has_gradients=has_gradients)


def _look(
    optimizer: Optimizer,
    watched: _Watched,
    *,
    has_gradients: bool = False,
    wait: float | None = None,
) -> bool:
    """Leave facts about ``optimizer``, and look at those of others; return whether to end that.

    The first rank may ``wait`` for those of others, for so many seconds. Parameters and gradients
    are looked at only if the optimizer ``has_gradients`` for a step.
    """
    if is_capturing():
        return False  # where nothing may be read
    if not is_room_in_stores():
        return True  # facts are added to the store's file for as long as a run takes
    parameters = parameters_of(optimizer)
    kept = [one for keeper in keepers for one in keeper(optimizer)]
    group = kept[0].group if kept else dist.group.WORLD
    if group is None:  # models may be parallel over groups of the program's own
        return bool(keepers) or look_for_strangers(optimizer, parameters)
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # a group that torch doesn't know
        return True
    if len(ranks) == 1:
        return True
    form = zlib.crc32(repr([type(optimizer).__name__, *(p.shape for p in parameters)]).encode())
    facts: dict[str, Any] = {"form": form}
    if kept:
        facts["options"] = options_of(optimizer)
        if has_gradients:
            facts["num_backwards"] = [one.num_backwards for one in kept]
            facts["samples"] = [each for one in kept for each in one.sample(watched.num_looks)]
    elif not (checksums := checksums_of(parameters)):
        return False
    else:
        facts["checksums"] = checksums
    is_first = dist.get_rank() == ranks[0]
    if kept or watched.num_steps <= _MAX_STEPS:
        _leave(watched, ranks, facts)
    if is_first:
        for step in watched.steps:
            found = _facts_of_ranks(watched, ranks, step, wait)
            are_alike = all(one["form"] == facts["form"] for one in found)
            differing = first_difference(found) if are_alike else None
            if differing is not None:
                tell(optimizer, parameters, ranks, step, differing)
                return True
    # The first rank may be ahead of those that are to be compared with it.
    return not kept and watched.num_steps >= (_MOST_STEPS if is_first else _MAX_STEPS)


def look_at_the_end() -> None:
    """Look at the options of the last steps, before the first rank takes the store with it."""
    patience = Deadline(_TO_COMPARE_SECONDS)
    with contextlib.suppress(Exception):  # whatever is gone by now
        for optimizer, watched in [*_watched.items()]:
            if not watched.is_done and watched.num_steps not in watched.steps:
                watched.num_looks = _LAST_LOOK  # alike on all ranks: a place of its own
                _look(optimizer, watched, wait=max(0.01, patience.left()))


def _leave(watched: _Watched, ranks: Sequence[int], facts: dict[str, Any]) -> None:
    watched.steps = [*watched.steps[-1:], watched.num_steps]
    facts["step"] = watched.num_steps
    key, told = _key(watched, ranks, watched.num_looks, dist.get_rank()), json.dumps(facts)
    if not has_room_for(told.encode()):
        raise ValueError("there are more options of the optimizer than can be compared")
    answered(partial(_get_default_store().set, key, told), STORE_SECONDS)
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

    def find() -> list[dict[str, Any]]:
        if wait is not None:
            with contextlib.suppress(RuntimeError):
                store.wait(keys, timedelta(seconds=wait))
        return [value_in(store.get(key)) for key in keys] if store.check(keys) else []

    found = answered(find, STORE_SECONDS)
    return found if all(facts["step"] == step for facts in found) else []


def _key(watched: _Watched, ranks: Sequence[int], slot: int, rank: int) -> str:
    among = "all" if len(ranks) == dist.get_world_size() else zlib.crc32(repr(ranks).encode())
    return (
        f"lockstep/apart/{among}/{watched.number}/{slot if slot < 0 else slot % _NUM_SLOTS}/{rank}"
    )
