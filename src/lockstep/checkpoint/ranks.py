"""Exchanges between the ranks of a save or load; a single rank exchanges with itself."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from lockstep import errors
from lockstep.comm import (
    ALONE,
    all_gather_json,
    device_of_facts,
    differing_facts,
    global_rank,
)
from lockstep.nn import finish_failed, refuse_in_replica
from lockstep.world import group_or_all


class Ranks:
    """The ranks of ``process_group``; by default all of them.

    Attributes:
        group: The group, or a stand-in for a rank that is alone.
        group_or_none: The group, None for a rank that is alone.
        rank: This rank, in the group.
        size: The number of ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        refuse_in_replica("lockstep.save() or load")
        self.group_or_none = group = group_or_all(process_group)
        self.group: Any = ALONE if group is None else group
        self.rank, self.size = self.group.rank(), self.group.size()
        self._device = torch.device("cpu")
        if group is not None:
            finish_failed(group)
            self._device = device_of_facts(group)

    def gather(self, error: Exception | None, value: object = None) -> list[Any]:
        """Return every rank's ``value``, of what JSON keeps, unless one has an ``error``.

        Every rank calls it; it blocks. An error is raised on every rank: as it is where it
        happened, and on the others as one of the same class, if that is about checkpoints.
        """
        text = None if error is None else [type(error).__name__, str(error)]
        answers = all_gather_json(self.group, [text, value], self._device)
        if error is not None:
            error.add_note(f"(rank {self.rank} of {self.size})")
            raise error
        for rank, (found, _) in enumerate(answers):
            if found is not None:
                kind = getattr(errors, found[0], errors.CheckpointError)
                kind = kind if issubclass(kind, errors.CheckpointError) else errors.CheckpointError
                told = kind(f"Rank {rank}: {found[1]}")
                told.rank = rank if self.group is ALONE else global_rank(self.group, rank)
                raise told
        return [value for _, value in answers]

    def check_same(self, facts: dict[str, Any], what: str) -> None:
        """Raise CheckpointMismatch, on every rank, if ``facts`` differ; every rank calls it."""
        every = differing_facts(self.group, facts, self._device)
        for rank, theirs in enumerate(every):
            if theirs != every[0]:
                where, mine, other = _difference(every[0], theirs, "")
                raise errors.CheckpointMismatch(
                    f"What the ranks {what} differs at {where.removeprefix('.')!r}: {mine} on rank "
                    f"0, and {other} on rank {rank}. Give the same on every rank."
                )


def _difference(mine: Any, theirs: Any, path: str) -> tuple[str, str, str]:
    """Return the path at which two values differ first, and both values there."""
    if type(mine) is type(theirs) is dict and mine.keys() == theirs.keys():
        for key in mine:
            if mine[key] != theirs[key]:
                inner = path if key in ("dict", "tuple", "pairs") else f"{path}.{key}"
                return _difference(mine[key], theirs[key], inner)
    if type(mine) is type(theirs) is list and len(mine) == len(theirs):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b:
                return _difference(a, b, f"{path}.{index}")
    if type(mine) is type(theirs) is dict and (only := sorted(mine.keys() ^ theirs.keys())):
        have = f"{only[0]!r} is there", f"{only[0]!r} isn't there"
        return path, *(have if only[0] in mine else have[::-1])
    return path, json.dumps(mine)[:80], json.dumps(theirs)[:80]
