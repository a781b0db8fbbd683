"""Writes the last snapshot of a run whose ranks have ended as a checkpoint.

The launcher, which holds the snapshots, starts it where ranks were asked to stop and didn't come to
the end of a step. It is a process of its own: the launcher goes on listening to signals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint import Snapshot, merged, save_snapshots, tensor_names
from lockstep.errors import CheckpointError
from lockstep.launcher import SnapshotHeader, SnapshotMemory, WrittenOut
from lockstep.resume.checkpoints import LOADER, LOCAL, STATE, step_of
from lockstep.resume.seeds import seed_step
from lockstep.resume.snapshots import checksum_of
from lockstep.tree import decode

# What ranks may have of their own: see local_values().
_LOCAL_KINDS = ("module", "tensor", "generator")


class _Of(NamedTuple):
    """One rank's snapshot."""

    header: SnapshotHeader
    snapshot: Snapshot
    values: dict[str, Any]  # those of steps()


def main() -> None:
    """Write what is in the descriptors on the command line; print what came of it as JSON."""
    memories = [SnapshotMemory(pair) for pair in json.loads(sys.argv[1])]
    try:
        found = write_out(memories)
    except (OSError, CheckpointError, ValueError) as error:
        found = WrittenOut(error=str(error))
    print(json.dumps(found._asdict()), flush=True)


def write_out(memories: Sequence[SnapshotMemory]) -> WrittenOut:
    """Write the newest snapshot that all ranks have, unless a checkpoint is as new.

    Args:
        memories: Those of all ranks, in the order of ranks.

    Raises:
        CheckpointError: If it can't be written.
        OSError: The same.
    """
    every = [{header.step for header in memory.headers().values()} for memory in memories]
    for step in sorted(set.intersection(*every), reverse=True):
        found = [_read(memory, step) for memory in memories]
        whole = [each for each in found if each is not None]
        if len(whole) == len(memories):
            return _written(whole)
    return WrittenOut()


def _read(memory: SnapshotMemory, step: int) -> _Of | None:
    """Return a snapshot, None if it isn't as it was written."""
    slot, header = memory.of_step(step)
    texts = memory.texts(slot, header)
    tensors = torch.frombuffer(memory.view(slot), dtype=torch.uint8)[: header.tensor_bytes]
    if texts is None or checksum_of(tensors) != header.tensor_checksum:
        return None
    places, rest = map(json.loads, texts)
    whole = merged(places, rest["places"], rest["options"])
    return _Of(header, Snapshot(whole, tensors), rest["values"])


def _written(every: Sequence[_Of]) -> WrittenOut:
    first = every[0]
    step, path = first.values["step"], first.header.path
    if not path:
        return WrittenOut(step)
    ranks = [each.header.rank for each in every]
    if ranks != [*range(len(every))] or {each.header.path for each in every} != {path}:
        return WrittenOut(step, path, "the ranks here aren't all ranks of one run over steps()")
    if step_of(Path(path)) >= step:
        return WrittenOut(step, path)
    snapshots = [each.snapshot for each in every]
    seed, apart = first.values["seed"], _apart(snapshots)
    local = [_local(snapshot, snapshots[0]) | _taken(snapshot, apart) for snapshot in snapshots]
    save_snapshots(
        Path(path),
        snapshots,
        {STATE: first.values | {"ranks": len(every), "apart": apart}},
        {LOCAL: local},
        lambda rank: seed_step(seed, step, rank),
    )
    return WrittenOut(step, path, is_new=True)


def _apart(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the names of states that differ between ranks."""
    names = [
        name
        for name, thing in snapshots[0].facts["things"].items()
        if thing["kind"] == "state" or name == LOADER
    ]
    return [
        name for name in names if not all(_is_alike(each, snapshots[0], name) for each in snapshots)
    ]


def _is_alike(snapshot: Snapshot, first: Snapshot, name: str) -> bool:
    mine, theirs = (each.facts["things"][name]["tree"] for each in (snapshot, first))
    return mine == theirs and all(_is_equal(snapshot, first, key) for key in tensor_names(mine))


def _taken(snapshot: Snapshot, names: Sequence[str]) -> dict[str, Any]:
    """Take things out of a snapshot, and return their states."""
    trees = {name: snapshot.facts["things"].pop(name)["tree"] for name in names}
    return {name: decode(tree, snapshot.read) for name, tree in trees.items()}


def _local(snapshot: Snapshot, first: Snapshot) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank that aren't those of rank 0."""
    things = snapshot.facts["things"].values()
    keys = [
        key
        for thing in things
        if thing["kind"] in _LOCAL_KINDS
        for key in tensor_names(thing["tree"])
    ]
    return {
        key: snapshot.read(key)
        for key in dict.fromkeys(keys)
        if key not in first.entries or not _is_equal(snapshot, first, key)
    }


def _is_equal(snapshot: Snapshot, first: Snapshot, key: str) -> bool:
    if snapshot.entries[key].header != first.entries[key].header:
        return False
    pairs = zip(snapshot.ranges(key), first.ranges(key), strict=True)
    return all(
        torch.equal(mine.elements.view(torch.uint8), theirs.elements.view(torch.uint8))
        for mine, theirs in pairs
    )


if __name__ == "__main__":
    main()
