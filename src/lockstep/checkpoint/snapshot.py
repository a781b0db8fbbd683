"""What one rank has of things, as flat tensors that can be copied at once, and put back.

Unlike a checkpoint, a snapshot is of one rank, which alone gets it back: it has all of what ranks
hold alike, and the rank's part of what is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.folder import Entry, Manifest, StoredPiece, padded
from lockstep.checkpoint.things import encode, kind_of, names_of, prepare, unwrapped
from lockstep.errors import CheckpointDamaged
from lockstep.optim import sharding_of
from lockstep.tree import Collector, Header, Range, from_flat

# Before all else the modules: an optimizer may take over their values.
_ORDER = {"module": 0, "value": 2}


class Placed(NamedTuple):
    """Flat elements of a tensor that is in use, and where they go."""

    key: str  # of the tensor
    offset: int  # in bytes
    elements: torch.Tensor


class SnapshotPlan:
    """Where the tensors of things are, and where they go: made once, and used for many snapshots.

    Attributes:
        placed: The tensors' elements, in the order of their places.
        late: Those of them that change in an optimizer's step alone, so that they may be copied
            while the next forward and backward run.
        late_bytes: The size of these.
        num_bytes: The size of all.
        places: What is where, as JSON has it.
    """

    def __init__(self, things: Mapping[str, Any], start: int = 0) -> None:
        shared, local = Collector(), Collector()
        trees = {
            name: encode(name, thing, shared, local, for_this_rank=True)
            for name, thing in sorted(things.items())
        }
        self.placed: list[Placed] = []
        tensors: dict[str, Any] = {}
        headers = shared.headers | local.headers
        ranges = [(key, 0, flat) for key, flat in (shared.whole | local.whole).items()]
        for key, first, flat in [*ranges, *local.ranges]:
            pieces = tensors.setdefault(key, [headers[key], []])[1]
            pieces.append([first, first + flat.numel(), start])
            self.placed.append(Placed(key, start, flat))
            start += padded(flat.nbytes)
        self.num_bytes = start
        parts = [*dict.fromkeys(key for key, *_ in local.ranges)]
        self.places = {"things": trees, "tensors": tensors, "parts": parts}
        late = _changed_by_steps(things)
        self.late = [each for each in self.placed if _storage(each.elements) in late]
        self.late_bytes = sum(each.elements.nbytes for each in self.late)


class LiveThings:
    """The things whose tensors stay where they are, so that one plan of them is used again.

    Args:
        things: All things.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self._things = things
        self.names = [name for name, thing in things.items() if _stays(thing)]
        self.plan: SnapshotPlan | None = None
        self._key: list[Any] = []
        self._modules: list[nn.Module] = []

    def options(self) -> dict[str, Any]:
        """Return the options of optimizers, which schedulers change, as JSON has them."""
        found = {}
        for name in self.names:
            if isinstance(optimizer := unwrapped(self._things[name]), Optimizer):
                groups = [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in optimizer.param_groups
                ]
                # By the names that the plan has for tensors among them.
                found[name] = Collector().encode(groups, f"{name}.param_groups")
        return found

    def update(self) -> SnapshotPlan:
        """Return the plan, a new one if a tensor has another place than before."""
        if self.plan is None or self._key != self._key_now():
            self._modules = [
                part
                for name in self.names
                if isinstance(thing := unwrapped(self._things[name]), nn.Module)
                for part in thing.modules()
            ]
            self.plan = SnapshotPlan({name: self._things[name] for name in self.names})
            # After it, as a sharded optimizer may be divided anew there.
            self._key = self._key_now()
            self._leave_out_copies()
        return self.plan

    def _leave_out_copies(self) -> None:
        """Leave out things of which the plan has copies: a hook has made them, or a conversion."""
        assert self.plan is not None
        tensors = (tensor for name in self.names for tensor in _tensors_of(self._things[name]))
        there = {*map(_storage, tensors)}
        copied = {
            key.split(".")[0]
            for key, _, elements in self.plan.placed
            if elements.numel() and _storage(elements) not in there
        }
        if copied:
            self.names = [name for name in self.names if name not in copied]
            self.plan = None
            self.update()

    def _key_now(self) -> list[Any]:
        key: list[Any] = []
        for part in self._modules:
            key += map(id, part._modules.values())
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                key += (id(tensor), 0 if tensor is None else tensor.data_ptr())
        for name in self.names:
            thing = unwrapped(self._things[name])
            if isinstance(thing, Optimizer):
                key += _key_of_state(thing)
            elif isinstance(thing, torch.Tensor):
                key.append(thing.data_ptr())
        return key


def _key_of_state(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield len(group["params"])
        yield from (v.data_ptr() for v in group.values() if isinstance(v, torch.Tensor))
    for parameter, state in [*optimizer.state.items()]:
        yield id(parameter)
        for name, value in state.items():
            # Anything but a tensor changes by itself, and a number that is equal is the same.
            is_tensor = isinstance(value, torch.Tensor)
            yield (name, value.data_ptr()) if is_tensor else (name, repr(value))


def _stays(thing: Any) -> bool:
    """Whether the thing's tensors may be those of its state dict, time and again."""
    kind, thing = kind_of(thing), unwrapped(thing)
    if kind == "module":
        return all(
            type(part).get_extra_state is nn.Module.get_extra_state for part in thing.modules()
        )
    return kind in ("optimizer", "tensor")


def _tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    thing = unwrapped(thing)
    if isinstance(thing, nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
    elif isinstance(thing, Optimizer):
        for parameter, state in [*thing.state.items()]:
            held = (parameter, *state.values())  # a shard's key may be a copy of its values
            yield from (each for each in held if isinstance(each, torch.Tensor))
        yield from (
            value
            for group in thing.param_groups
            for value in group.values()
            if isinstance(value, torch.Tensor)
        )
    else:
        yield thing


def _changed_by_steps(things: Mapping[str, Any]) -> set[int]:
    """The storages of what optimizers update, but for sharded ones, which may do so in backward."""
    return {
        _storage(tensor)
        for thing in things.values()
        if isinstance(thing, Optimizer) and sharding_of(unwrapped(thing)) is None
        for tensor in (
            *_tensors_of(thing),
            *(p for group in thing.param_groups for p in group["params"]),
        )
    }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class Snapshot(Manifest):
    """A snapshot in memory, read as a checkpoint is.

    Args:
        places: What is where: that of a :class:`SnapshotPlan`, or of several.
        memory: The bytes of the tensors.

    Attributes:
        parts: The names of tensors of which it has this rank's elements, and others have others.
    """

    def __init__(self, places: dict[str, Any], memory: torch.Tensor) -> None:
        self.folder = self._path = Path("the snapshot")
        self._memory = memory
        self.parts = frozenset[str](places["parts"])
        things = places["things"]
        self.facts = {
            "things": things,
            "divided": {name: thing["divided"] for name, thing in things.items()},
        }
        self.entries = {
            key: Entry(
                Header(header[0], tuple(header[1]), tuple(header[2])),
                tuple(StoredPiece(start, stop, 0, offset, 0) for start, stop, offset in pieces),
            )
            for key, (header, pieces) in places["tensors"].items()
        }

    def _damaged(self, what: str, name: str = "") -> CheckpointDamaged:
        return CheckpointDamaged(f"A snapshot in memory {what}.")

    def ranges(self, key: str) -> Iterator[Range]:
        """Yield those elements of a tensor that this rank had, where they are."""
        header, pieces = self.entries[key]
        dtype = header.torch_dtype
        for start, stop, _, offset, _ in pieces:
            num_bytes = (stop - start) * dtype.itemsize
            yield Range(key, start, self._memory[offset : offset + num_bytes].view(dtype))

    def forget(self) -> None:
        """Nothing is kept: each read makes a new tensor."""

    def read(self, key: str, ranges: Any = None) -> torch.Tensor:
        """Return a new tensor with those elements that this rank had; ``ranges`` are of no use.

        Its memory is its own: optimizers take it over.
        """
        header = self.entries[key].header
        flat = torch.empty(header.numel, dtype=header.torch_dtype, device="cpu")
        for _, start, elements in self.ranges(key):
            flat[start : start + elements.numel()] = elements
        return from_flat(flat, header)

    def value(self, name: str) -> Any:
        """Return a plain value that is in it; None if there is none."""
        return (
            prepare(name, None, self, {}, strict=True)() if name in self.facts["things"] else None
        )

    def restore(self, things: Mapping[str, Any]) -> None:
        """Put back what is in it of ``things``. If an optimizer is sharded, every rank calls it.

        Raises:
            CheckpointMismatch: If the things are others.
        """
        names = names_of(things)
        for name in sorted(things, key=lambda name: _ORDER.get(kind_of(things[name]), 1)):
            prepare(name, things[name], self, names, strict=True)()


def merged(
    first: dict[str, Any], second: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the places of two plans, with the options that optimizers had since the first one."""
    things = first["things"] | second["things"]
    for name, groups in options.items():
        saved = things[name]["tree"]["dict"]["param_groups"]
        for group, now in zip(saved, groups, strict=True):
            group["dict"] |= now["dict"]
    return {
        "things": things,
        "tensors": first["tensors"] | second["tensors"],
        "parts": first["parts"] + second["parts"],
    }
