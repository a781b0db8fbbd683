"""What lockstep keeps of a process group on this rank: one context, which ends with the group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

T = TypeVar("T")


class GroupContext:
    """One object of each class that a layer keeps of a group; lower layers know no such class.

    - ``join_state``: the ``join()`` that is entered, and the updates of sharded optimizers
    - ``agreed_calls``: another group of its ranks, in which they agree on calls over it
    - ``grad.deferred``: the buckets whose gradients other ranks may read
    - ``nn.backward``: the BackwardSync, which has the engines
    - ``nn.mean``: the models that all ranks are known to have alike
    - ``same_bits.between_steps``: whether models have taken steps in shards
    - ``checkpoint.saving``: the save that is going on
    - ``world.apart``: how many optimizers are watched, in the default group

    None of these holds the group, as it would never end then.
    """

    def __init__(self) -> None:
        self._objects: dict[type[Any], Any] = {}

    def get(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the object of the class ``kind``; ``make``, or the class, makes it if need be."""
        found: T | None = self._objects.get(kind)
        # Another thread of this rank may make one at the same time: the first one counts.
        return found if found is not None else self._objects.setdefault(kind, (make or kind)())

    def find(self, kind: type[T]) -> T | None:
        """Return the object of the class ``kind``, if there is one."""
        return self._objects.get(kind)


# Ranks may be threads. Reentrant: while one has it, the garbage collector may end a bucket or an
# engine, which ask for contexts, too.
_lock = threading.RLock()
# By the id() of a group, as each collective asks: a WeakKeyDictionary takes five times as long. The
# reference drops the entry with the group, before another object can have its id().
_contexts: dict[int, tuple[weakref.ref[ProcessGroup], GroupContext]] = {}


def context_of(group: ProcessGroup) -> GroupContext:
    """Return the context of ``group``, the same one every time."""
    key = id(group)
    found = _contexts.get(key)
    if found is None:
        reference = weakref.ref(group, lambda _: _contexts.pop(key, None))
        with _lock:
            found = _contexts.setdefault(key, (reference, GroupContext()))
    return found[1]


def in_all_groups(kind: type[T]) -> list[T]:
    """Return the objects of the class ``kind`` of all groups in this process."""
    with _lock:
        contexts = [context for _, context in list(_contexts.values())]
    return [found for each in contexts if (found := each.find(kind)) is not None]
