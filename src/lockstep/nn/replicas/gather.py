"""``gather()``: the outputs of replicas, joined to those of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.arguments import Device
from lockstep.nn.replicas import packed
from lockstep.nn.replicas.devices import as_device, as_dim, move
from lockstep.nn.replicas.meeting import is_one, mark_as_one, this_seat
from lockstep.nn.replicas.nested import Path, children, like, name_of

_T = TypeVar("_T")


def gather(outputs: Sequence[_T], target_device: Device, dim: int = 0) -> _T:
    """Join the outputs of replicas on one device.

    Gradients go back to all of them, of any order. The output of a single replica is only moved.

    Args:
        outputs: One output for each replica: tensors, or nestings of tensors and other objects in
            lists, tuples, mappings and dataclasses, alike on all. They may be on any devices.
        target_device: Where the tensors are to be. An int is the index of an accelerator, or -1
            for the CPU.
        dim: The dimension that tensors are joined along.

    Returns:
        A nesting like that of the first replica. Tensors are concatenated, and those of no
        dimension become a vector, whatever ``dim`` is, but a :func:`lockstep.mean` over all
        replicas stays one; packed sequences follow one another in the replicas' order. Other
        objects are given once where all are equal, else as a list.

    Raises:
        IndexError: If tensors have dimensions, but not ``dim``.
        TypeError: If ``outputs`` are no list, or ``dim`` no whole number.
        ValueError: If there are no outputs, or they differ in what they hold, or tensors in any
            size but that of ``dim``.

    Source: ``torch.nn.parallel.scatter_gather.gather``.
    """
    is_scalar = isinstance(outputs, torch.Tensor) and outputs.ndim == 0
    if is_scalar or isinstance(outputs, Mapping | str) or not isinstance(outputs, Iterable):
        raise TypeError(
            f"outputs is a {type(outputs).__name__}; give a list of what each replica has returned."
        )
    replicas: list[object] = list(outputs)
    if not replicas:
        raise ValueError("There are no outputs to gather. Give that of one replica at least.")
    return cast(
        _T, _gather(replicas, as_device(target_device, "target_device"), as_dim(dim), ("output",))
    )


def gather_leaves(leaves: list[object], device: torch.device, dim: int, place: str) -> object:
    """Join what replicas have at one place, of which nothing is a container."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sequences = [leaf for leaf in leaves if isinstance(leaf, PackedSequence)]
    if len(tensors) == len(leaves):
        return _join(tensors, device, dim, place)
    if len(sequences) == len(leaves):
        _check_shapes([sequence.data for sequence in sequences], 0, f"{place}.data")
        return packed.join(sequences, device)
    if tensors or sequences:
        raise _different_kinds(leaves, place)
    return leaves[0] if all(_equal(leaves[0], leaf) for leaf in leaves[1:]) else leaves


def _gather(values: list[object], device: torch.device, dim: int, path: Path) -> object:
    inside = [held for value in values if (held := children(value)) is not None]
    if not inside:
        return gather_leaves(values, device, dim, name_of(path))
    if len(inside) < len(values):
        raise _different_kinds(values, name_of(path))
    keys = [set(held) for held in inside]
    if differing := set.union(*keys) - set.intersection(*keys):
        sizes = ", ".join(str(len(held)) for held in inside)
        raise ValueError(
            f"Replicas give {name_of(path)} of {sizes} elements, and not all have "
            f"{', '.join(sorted(map(repr, differing)))}. Return the same ones from each."
        )
    joined = [
        _gather([held[key] for held in inside], device, dim, (*path, key)) for key in inside[0]
    ]
    return like(values[0], joined)


def _join(tensors: list[torch.Tensor], device: torch.device, dim: int, place: str) -> torch.Tensor:
    if len(tensors) == 1:
        moved_one = move(tensors[0], device)
        if is_one(tensors[0]):
            mark_as_one(moved_one)
        return moved_one
    moved = [move(tensor, device) for tensor in tensors]
    if all(map(is_one, tensors)):
        # Each of them gets its share of the gradient, and the value is not rounded once more.
        one: torch.Tensor = _OneOfAll.apply(*moved)  # type: ignore[no-untyped-call]
        if this_seat() is not None:
            mark_as_one(one)  # all replicas around these have it, too
        return one
    if all(tensor.ndim == 0 for tensor in tensors):
        return torch.stack(moved)
    _check_shapes(tensors, dim, place)
    return torch.cat(moved, dim)


class _OneOfAll(torch.autograd.Function):
    """A scalar that all replicas have."""

    @staticmethod
    def forward(ctx: Any, *same: torch.Tensor) -> torch.Tensor:
        ctx.count = len(same)
        return same[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        share = gradient / ctx.count
        return tuple(share for _ in range(ctx.count))


def _check_shapes(tensors: list[torch.Tensor], dim: int, place: str) -> None:
    shapes = [list(tensor.shape) for tensor in tensors]
    given = f"Replicas give {place} of the shapes {', '.join(str(tuple(s)) for s in shapes)}"
    if len(set(map(len, shapes))) == 1:
        if not -len(shapes[0]) <= dim < len(shapes[0]):
            raise IndexError(f"{given}, which have no dim {dim} to be joined along.")
        for shape in shapes:
            shape[dim] = 0
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{given}, but to be joined they may differ in dim {dim} alone.")


def _different_kinds(values: list[object], place: str) -> ValueError:
    kinds = ", ".join(type(value).__name__ for value in values)
    return ValueError(f"Replicas give {place} of the types {kinds}. Return one type from each.")


def _equal(one: object, other: object) -> bool:
    if one is other:
        return True
    try:
        answer = one == other
    except Exception:
        return False
    # NumPy has a bool of its own, which has changed its name. Arrays, and objects that make an
    # expression of ==, don't say.
    return type(answer).__name__ in ("bool", "bool_") and bool(answer)
