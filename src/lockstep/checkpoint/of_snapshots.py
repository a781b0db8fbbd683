"""A checkpoint made of the snapshots of all ranks, by a process that is none of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.folder import numbers_in
from lockstep.checkpoint.place import Place, explained, in_pieces
from lockstep.checkpoint.saving import Writing, random_states
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.things import OfRank
from lockstep.tree import Collector, Range, TensorName, decode


def save_snapshots(
    path: Path,
    snapshots: Sequence[Snapshot],
    values: Mapping[str, Any],
    local: Mapping[str, Sequence[Mapping[str, torch.Tensor]]],
    seed: Callable[[int], None],
) -> Path:
    """Save what the ranks had when they took their snapshots; no older checkpoint is removed.

    Args:
        path: The folder of checkpoints.
        snapshots: Those of all ranks, after the same step. What ranks have alike is rank 0's.
        values: Plain values to save along, by name.
        local: Tensors of each rank's own to save along, by name: see :class:`OfRank`.
        seed: Called with each rank, to put the random states that it is to have into this process's
            generators.

    Returns:
        The path of the checkpoint.

    Raises:
        SaveFailed: If it can't be written.
    """
    shared, size = Collector(), len(snapshots)
    things = {
        name: {key: each for key, each in thing.items() if key != "divided"}
        for name, thing in snapshots[0].facts["things"].items()
    }
    for name, value in values.items():
        things[name] = {"kind": "value", "tree": shared.encode(value, name)}
    things |= {name: {"kind": "value", "tree": None} for name in local}
    facts = {
        "lockstep": metadata.version("torch-lockstep"),
        "torch": str(torch.__version__),
        "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": size,
        "things": things,
    }
    keep = len(numbers_in(path)) + 1
    parts = _Parts()
    place = None
    try:
        place = Place(path, None)
        for rank, snapshot in enumerate(snapshots):
            collector = Collector() if rank else shared
            divided, ranges = parts.of(snapshot, collector)
            for name, each in local.items():
                of_rank = OfRank(rank, size, each[rank])
                divided[name] = of_rank.encode(name, collector)["divided"]
            seed(rank)
            random_state = collector.encode(random_states(), f"random.{rank}")
            if rank == 0:
                ranges += _shared(snapshot)
            headers = {key: snapshot.entries[key].header for key, *_ in ranges}
            ranges += [Range(key, 0, flat) for key, flat in collector.whole.items()]
            part = {
                "random": random_state,
                "divided": divided,
                "headers": headers | collector.headers,
            }
            writing = Writing(place, rank, size, keep, facts, part, [*in_pieces(ranges)])
            writing.write()
        Writing(place, 0, size, keep, facts, {}, []).commit()
    except BaseException as error:
        if place is not None:
            place.discard()
        if isinstance(error, Exception):
            raise explained(error, path) from error
        raise
    finally:
        if place is not None:
            place.close()
    return place.final


def tensor_names(tree: Any) -> list[str]:
    """Return the names of the tensors in a value that was encoded."""
    names: list[str] = []

    def note(key: str) -> TensorName:
        names.append(key)
        return TensorName(key)

    decode(tree, note)
    return names


def _shared(snapshot: Snapshot) -> Iterator[Range]:
    """Yield what all ranks have."""
    things = snapshot.facts["things"].values()
    for key in dict.fromkeys(name for thing in things for name in tensor_names(thing["tree"])):
        yield from snapshot.ranges(key)


class _Parts:
    """What is divided among the ranks, as a checkpoint has it.

    A snapshot has all that its rank needs. In a checkpoint, state that a parameter has once, such
    as a number of steps, is written once: ranks that update parts of one parameter all have it.
    """

    def __init__(self) -> None:
        self._written: set[tuple[str, str, str]] = set()

    def of(self, snapshot: Snapshot, collector: Collector) -> tuple[dict[str, Any], list[Range]]:
        """Return what is divided of the next rank's things, and the elements of tensors of it."""
        divided: dict[str, dict[str, list[Any]]] = {}
        ranges: dict[str, list[Range]] = {}
        for name, thing in snapshot.facts["things"].items():
            entries = divided[name] = {}
            for index, pairs in thing["divided"].items():
                entries[index] = []
                for key, tree in pairs:
                    names = tensor_names(tree)
                    if snapshot.parts.issuperset(names) and names:
                        ranges |= {each: [*snapshot.ranges(each)] for each in names}
                    elif (name, index, repr(key)) in self._written:
                        continue
                    else:
                        self._written.add((name, index, repr(key)))
                        # Read anew: several parameters of this rank have one such tensor.
                        value = decode(tree, snapshot.read)
                        tree = collector.encode(value, f"{name}.state.{index}.{_text(key)}")
                    entries[index].append([key, tree])
        return divided, [each for found in ranges.values() for each in found]


def _text(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)
