"""The context of a process group."""

from __future__ import annotations

import gc
import weakref

import torch.distributed as dist

from lockstep.comm import context_of, in_all_groups


class Kept:
    """What a layer keeps of a group."""


def test_a_group_has_one_context_with_one_object_of_each_class() -> None:
    first, other = dist.ProcessGroup(0, 1), dist.ProcessGroup(0, 1)
    assert context_of(first).find(Kept) is None
    kept = context_of(first).get(Kept)
    assert context_of(first).get(Kept) is context_of(first).find(Kept) is kept
    made = Kept()
    assert context_of(other).get(Kept, lambda: made) is made
    assert in_all_groups(Kept) == [kept, made]


def test_a_context_ends_with_its_group() -> None:
    group = dist.ProcessGroup(0, 1)
    kept = weakref.ref(context_of(group).get(Kept))
    assert kept() is not None
    del group
    gc.collect()
    assert kept() is None
    assert in_all_groups(Kept) == []
