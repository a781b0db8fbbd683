"""What a checked run writes down, in files of a folder of its own, and what is read of it.

A run is ``"rank-0"`` and so on of the parallel run, or one of the runs in one process. No file is
read that was not written by the same check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.data import bytes_of
from lockstep.errors import LockstepError
from lockstep.torch_private import tree_leaves

ALONE = "alone"  # one process on the global batches
ROUNDED = "rounded"  # the same with a rounding error of its own added in each step


def of_rank(rank: int) -> str:
    """The run of ``rank``."""
    return f"rank-{rank}"


class Backward(NamedTuple):
    """A call of ``backward()``."""

    loss: float
    num_rows: int  # in the first tensor that a module has got since the last one
    rows: int  # the sum of the hashes of its rows, in any order


@dataclass
class Step:
    """A step of an optimizer, after which tensors by name were written down."""

    tensors: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]  # the tensors before the first step; later none
    trained: list[str]  # the tensors that the optimizer changes
    backwards: list[Backward]  # since the last step
    options: dict[str, str]  # learning rate and others of the optimizer
    changed: list[str]  # parameters whose value isn't what the last step left
    batch_norms: list[str]  # modules that normalise by the statistics of this rank's samples
    draws: bool  # whether random numbers were drawn since the last batch or step
    is_parallel: bool  # whether a part of the trained model is reduced in backward
    eps: float  # the relative rounding error of what it computed with


@dataclass
class Batch:
    """A batch that a loader gave."""

    value: Any
    rows: list[int]  # the hash of each sample
    pads: bool  # whether the loader's sampler gives samples twice, to have equally many per rank
    random_state: torch.Tensor  # of torch, right after


@dataclass
class End:
    """How a run ended."""

    num_steps: int = 0
    notes: list[str] = field(default_factory=list)


class Records:
    """The files of one run."""

    def __init__(self, folder: str, run: str) -> None:
        self._folder = Path(folder, run)
        self._folder.mkdir(exist_ok=True)

    def save(self, name: str, value: object) -> None:
        """Write ``value`` under ``name``, by a rename: other ranks may read it meanwhile."""
        unfinished = self._folder / f"unfinished-{name}"
        torch.save(value, unfinished)
        unfinished.rename(self._folder / name)

    def load(self, name: str) -> Any:
        """What was written under ``name``; None if nothing was."""
        path = self._folder / name
        # A batch may be of any class. The folder is open to this user alone.
        return torch.load(path, weights_only=False) if path.exists() else None

    def has(self, name: str) -> bool:
        """Whether anything was written under ``name``."""
        return (self._folder / name).exists()

    def step(self, number: int) -> Step | None:
        """The step ``number``, from 1, if there is one."""
        found: Step | None = self.load(f"step-{number}")
        return found

    def rows(self) -> dict[str, list[tuple[list[int], bool]]]:
        """For each pass over a loader, each batch's hashes of rows, and whether it is padded."""
        found: dict[str, list[tuple[list[int], bool]]] = {}
        paths = self._folder.glob("batch-*-*-*")
        for path in sorted(paths, key=lambda path: [*map(int, path.name.split("-")[1:])]):
            if (batch := self.load(path.name)) is not None:
                found.setdefault(path.name.rpartition("-")[0], []).append((batch.rows, batch.pads))
        return found

    def end(self) -> End | None:
        """How the run ended; None if it has not."""
        found: End | None = self.load("end")
        return found


def hashes_of_rows(value: object) -> list[int]:
    """A hash for each sample of a batch; none if the tensors in it don't have a row for each."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    dense = [t.detach().cpu().contiguous() for t in tensors if t.layout is torch.strided]
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in dense}
    if len(lengths) != 1 or not (length := lengths.pop()):
        return []
    wholes = [(bytes_of(t), t.nbytes // length) for t in dense if t.numel()]
    digests = (
        hashlib.blake2b(
            b"".join(whole[row * size : (row + 1) * size] for whole, size in wholes), digest_size=7
        ).digest()
        for row in range(length)
    )
    return [int.from_bytes(digest) for digest in digests]


def joined(parts: Sequence[Any]) -> Any:
    """The batch of which the ranks had ``parts``.

    Raises:
        LockstepError: If they can't be joined.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim() and len({part.shape[1:] for part in parts}) == 1:
            return torch.cat(list(parts))
    elif isinstance(first, dict):
        values = {key: joined([part[key] for part in parts]) for key in first}
        return values if type(first) is dict else type(first)(values)
    elif isinstance(first, list | tuple):
        if not all(map(_has_fields, parts)):
            every = [element for part in parts for element in part]
            return every if isinstance(first, list) else tuple(every)
        fields = [joined(elements) for elements in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if all(type(part) is type(first) and _are_equal(part, first) for part in parts):
        return first
    shapes = " and ".join(str(tuple(getattr(part, "shape", ()))) for part in parts)
    raise LockstepError(
        f"The ranks' batches can't be joined to a global one: they hold a {type(first).__name__} "
        f"of {shapes}. Pad samples to a fixed length, or collate them into tensors with a row for "
        "each sample."
    )


def _has_fields(value: Sequence[object]) -> bool:
    """Whether a sequence in a batch is a tuple of fields, rather than one of samples."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    lengths = {len(leaf) if leaf.dim() else 0 for leaf in leaves}
    return len({*map(type, value)}) > 1 or (len(lengths) == 1 and 0 not in lengths)


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
