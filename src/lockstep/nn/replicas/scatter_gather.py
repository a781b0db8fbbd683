"""``scatter()`` splits a batch among devices; ``gather()`` concatenates replicas' outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast, overload

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import PackedSequence

from lockstep.arguments import Device
from lockstep.nn.replicas.devices import as_device, as_devices, as_dim, check_kwargs, move
from lockstep.nn.replicas.group import is_one, mark_as_one, this_replica
from lockstep.nn.replicas.nested import (
    Path,
    children,
    equal,
    follows_its_class,
    key_of,
    leaves,
    like,
    name_of,
    num_elements,
)

_T = TypeVar("_T")


class _Cut(NamedTuple):
    """The devices of the parts, and the dimension along which they are cut."""

    devices: list[torch.device]
    dim: int


@overload
def scatter(  # type: ignore[overload-overlap]
    inputs: torch.Tensor, target_gpus: Sequence[Device], dim: int = ...
) -> tuple[torch.Tensor, ...]: ...


@overload
def scatter(inputs: _T, target_gpus: Sequence[Device], dim: int = ...) -> list[_T]: ...


def scatter(inputs: object, target_gpus: Sequence[Device], dim: int = 0) -> Sequence[object]:
    """Split the tensors in ``inputs`` among devices. ::

        parts = lockstep.scatter({"image": x, "label": y}, ["cpu", "cpu"])
        parts[0]["image"]  # the first half of the rows

    Parts are those of :func:`torch.chunk`: all have equally many rows, except the last, which may
    have fewer. With fewer rows than devices there are fewer parts; without rows each device gets
    an empty part. Parts are differentiable any number of times. On a tensor's own device they are
    views of it.

    Args:
        inputs: A tensor, or a nesting of tensors and other objects in lists, tuples, mappings and
            dataclasses (those of attrs, too), whose types stay. Packed sequences are divided by
            sequences, whatever ``dim`` is. Tensors of no dimension and all other objects go to
            every device: lists, tuples and dicts anew for each, anything else as it is, with the
            tensors that it may have. Tensors in attributes of containers are divided as those in
            their items, and a tensor that is met twice is divided once. Attributes that a class
            computes from its items, such as their number, are computed from the parts'.
        target_gpus: The devices, of any type, which may repeat. An int is the index of an
            accelerator, or -1 for the CPU.
        dim: The dimension to split, whose elements are the rows.

    Returns:
        A tuple if ``inputs`` is a tensor, else a list: one part for each of the first devices.

    Raises:
        IndexError: If a tensor has dimensions, but not ``dim``.
        TypeError: If ``dim`` isn't a whole number, an element of ``target_gpus`` isn't a device, or
            the class of a container doesn't let it be made again with other tensors.
        ValueError: If two tensors have different numbers of parts, or there are no devices.

    Source: ``torch.nn.parallel.scatter_gather.scatter``, which drops parts where tensors come in
    different numbers of them.
    """
    parts = [part["inputs"] for part in _scatter({"inputs": inputs}, target_gpus, dim)]
    return tuple(parts) if isinstance(inputs, torch.Tensor) else parts


def scatter_kwargs(
    inputs: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    target_gpus: Sequence[Device],
    dim: int = 0,
) -> tuple[tuple[tuple[object, ...], ...], tuple[dict[str, object], ...]]:
    """Split the arguments of a call among devices. ::

        inputs, kwargs = lockstep.scatter_kwargs((x,), {"scale": 2.0}, ["cpu", "cpu"])
        outputs = lockstep.parallel_apply(replicas, inputs, kwargs)

    Args:
        inputs: Its positional arguments.
        kwargs: Its keyword arguments, if any.
        target_gpus: The devices, as in :func:`scatter`.
        dim: The dimension to split, whose elements are the rows.

    Returns:
        For each device's call a tuple of positional arguments and a dict of keyword arguments.
        Without any arguments there are no calls.

    Raises:
        IndexError, TypeError, ValueError: As :func:`scatter`.

    Source: ``torch.nn.parallel.scatter_gather.scatter_kwargs``, which calls with ``()`` or ``{}``
    where the tensors of one of the two come in fewer parts.
    """
    if not isinstance(inputs, tuple | list):
        raise TypeError(f"inputs is a {type(inputs).__name__}; give a tuple of arguments.")
    check_kwargs(kwargs, "kwargs")
    # Both at once, so that both have equally many parts, with () or {} where there is nothing.
    parts = _scatter({"inputs": inputs, "kwargs": dict(kwargs or {})}, target_gpus, dim)
    if not inputs and not kwargs:
        return (), ()
    return tuple(part["inputs"] for part in parts), tuple(part["kwargs"] for part in parts)


def _scatter(
    named: dict[str, Any], target_gpus: Sequence[Device], dim: int
) -> list[dict[str, Any]]:
    cut = _Cut(as_devices(target_gpus, "target_gpus"), as_dim(dim))
    if not cut.devices:
        raise ValueError("There are no devices to scatter to. Name one, such as 'cpu', or several.")
    found = [(path, leaf) for path, leaf in leaves(named) if _is_cuttable(leaf)]
    counts = [len(_lengths(leaf, cut, path)) for path, leaf in found]
    if len(set(counts)) > 1:
        given = ", ".join(
            f"{name_of(path)} of {_size_of(leaf)} in {count}"
            for (path, leaf), count in zip(found, counts, strict=True)
        )
        raise ValueError(
            f"For {len(cut.devices)} devices, along dim {cut.dim}, these come in different numbers "
            f"of parts: {given}. Give all equally many rows; expand() one that is the same for all."
        )
    count = counts[0] if counts else len(cut.devices)
    met: _Met = {}
    columns = [_parts(value, count, cut, met, (name,)) for name, value in named.items()]
    return [dict(zip(named, row, strict=True)) for row in zip(*columns, strict=True)]


# By id, values that have been met with what was made of them, or None while it is being made. An
# attribute of a container may be one of its items once more, and has to stay that.
_Met = dict[Any, tuple[object, Any]]


def _parts(value: object, count: int, cut: _Cut, met: _Met, path: Path) -> list[object]:
    """What each of the first ``count`` devices gets of the value at ``path``."""
    if id(value) not in met:
        met[id(value)] = value, None
        met[id(value)] = value, _new_parts(value, count, cut, met, path)
    if (parts := met[id(value)][1]) is None:
        raise _around(value, path)
    return cast(list[object], parts)


def _around(value: object, path: Path) -> TypeError:
    return TypeError(
        f"{name_of(path)} is the {type(value).__name__} around it, so it can't be made again with "
        "other tensors. Leave out what refers to its own container."
    )


def _new_parts(value: object, count: int, cut: _Cut, met: _Met, path: Path) -> list[object]:
    if _is_cuttable(value):
        return _pieces(value, cut)
    if isinstance(value, torch.Tensor):
        return [move(value, device) for device in cut.devices[:count]]
    # Replicas run in parallel, so each needs lists of its own. Other containers without tensors
    # are passed on as they are, like by torch: callers may compare them by identity.
    inside = children(value)
    if inside is None or not (
        isinstance(value, (tuple, list, dict))
        or any(isinstance(leaf, (torch.Tensor, PackedSequence)) for _, leaf in leaves(value))
    ):
        return [value] * count
    columns = [_parts(child, count, cut, met, (*path, key)) for key, child in inside.items()]
    by_class = follows_its_class(value)
    return [like(value, [column[i] for column in columns], by_class=by_class) for i in range(count)]


def _pieces(leaf: torch.Tensor | PackedSequence, cut: _Cut) -> list[object]:
    pieces: list[object] = []
    start = 0
    for length, device in zip(_lengths(leaf, cut), cut.devices, strict=False):
        if isinstance(leaf, PackedSequence):
            pieces.append(_take(leaf, start, length, device))
        else:
            # Not by chunk(), whose views can't be modified in place. Sparse tensors have no views.
            narrow = leaf.narrow_copy if leaf.is_sparse else leaf.narrow
            pieces.append(move(narrow(cut.dim, start, length), device))
        start += length
    return pieces


def _lengths(leaf: torch.Tensor | PackedSequence, cut: _Cut, path: Path = ()) -> list[int]:
    """Return the number of rows or sequences of each part."""
    if isinstance(leaf, PackedSequence):
        total = _num_sequences(leaf)
    elif -leaf.ndim <= cut.dim < leaf.ndim:
        total = leaf.size(cut.dim)
    else:
        raise IndexError(
            f"{name_of(path)} of shape {tuple(leaf.shape)} has no dim {cut.dim} to be cut along. "
            "Give it one, or choose a dim that all tensors have."
        )
    if total == 0:
        return [0] * len(cut.devices)
    size = -(-total // len(cut.devices))
    return [min(size, total - start) for start in range(0, total, size)]


def _is_cuttable(value: object) -> TypeGuard[torch.Tensor | PackedSequence]:
    return isinstance(value, PackedSequence) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _size_of(leaf: torch.Tensor | PackedSequence) -> str:
    if isinstance(leaf, PackedSequence):
        return f"{_num_sequences(leaf)} packed sequences"
    return f"shape {tuple(leaf.shape)}"


def gather(outputs: Sequence[_T], target_device: Device, dim: int = 0) -> _T:
    """Concatenate the outputs of replicas on one device. ::

        output = lockstep.gather([replica(part) for replica, part in zip(replicas, parts)], "cpu")

    The result is differentiable any number of times. A single replica's output is only moved.

    Args:
        outputs: One output for each replica: tensors, or nestings of tensors and other objects in
            lists, tuples, mappings and dataclasses, alike on all. They may be on any devices.
        target_device: Where the tensors are to be. An int is the index of an accelerator, or -1
            for the CPU.
        dim: The dimension along which tensors are concatenated.

    Returns:
        A nesting like that of the first replica. Tensors are concatenated, and those of no
        dimension become a vector, whatever ``dim`` is, but a :func:`lockstep.mean` over all
        replicas stays one; packed sequences follow one another in the replicas' order. Other
        objects are given once where all are equal, else as a list.

    Raises:
        IndexError: If tensors have dimensions, but not ``dim``.
        TypeError: If ``outputs`` isn't a list, ``dim`` isn't a whole number, or the class of a
            container doesn't let it be made again with other tensors.
        ValueError: If there are no outputs, or their structures differ, or the shapes of tensors
            differ in another dimension than ``dim``.

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
    device = as_device(target_device, "target_device")
    return cast(_T, _gather(replicas, device, as_dim(dim), ("output",), {}))


def _gather(values: list[object], device: torch.device, dim: int, path: Path, met: _Met) -> object:
    """Join the replicas' values at one position."""
    key = tuple(map(id, values))
    if key not in met:
        met[key] = values, None
        met[key] = values, (_joined(values, device, dim, path, met),)
    if met[key][1] is None:
        raise _around(values[0], path)
    return met[key][1][0]


def _joined(values: list[object], device: torch.device, dim: int, path: Path, met: _Met) -> object:
    name = name_of(path)
    inside = [held for value in values if (held := children(value)) is not None]
    tensors = [leaf for leaf in values if isinstance(leaf, torch.Tensor)]
    sequences = [leaf for leaf in values if isinstance(leaf, PackedSequence)]
    if 0 < max(len(inside), len(tensors), len(sequences)) < len(values):
        kinds = ", ".join(type(value).__name__ for value in values)
        raise ValueError(f"Replicas give {name} of the types {kinds}. Return one type from each.")
    if tensors:
        return _join(tensors, device, dim, name)
    if sequences:
        _check_shapes([sequence.data for sequence in sequences], 0, f"{name}.data")
        return _join_packed(sequences, device)
    if not inside:
        return values[0] if all(equal(values[0], value) for value in values[1:]) else values
    keys = [set(held) for held in inside]
    if differing := set.union(*keys) - set.intersection(*keys):
        sizes = ", ".join(str(num_elements(held)) for held in inside)
        raise ValueError(
            f"Replicas give {name} of {sizes} elements, and not all have "
            f"{', '.join(sorted(map(key_of, differing)))}. Return the same ones from each."
        )
    joined = [
        _gather([held[key] for held in inside], device, dim, (*path, key), met) for key in inside[0]
    ]
    return like(values[0], joined, by_class=all(map(follows_its_class, values)))


def _join(tensors: list[torch.Tensor], device: torch.device, dim: int, name: str) -> torch.Tensor:
    one, *others = moved = [move(tensor, device) for tensor in tensors]
    if all(map(is_one, tensors)):
        if others:
            # Each replica gets its part of the gradient. A mean() would round the value again.
            one = _OneOfAll.apply(*moved)  # type: ignore[no-untyped-call]
        if not others or this_replica() is not None:
            mark_as_one(one)  # it is equal on all replicas around these, too
        return one
    if not others:
        return one
    if all(tensor.ndim == 0 for tensor in tensors):
        return torch.stack(moved)
    _check_shapes(tensors, dim, name)
    return torch.cat(moved, dim)


class _OneOfAll(torch.autograd.Function):
    """A scalar that is equal on all replicas; its gradient is divided among them."""

    @staticmethod
    def forward(ctx: Any, *same: torch.Tensor) -> torch.Tensor:
        ctx.count = len(same)
        return same[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = gradient / ctx.count
        return tuple(part for _ in range(ctx.count))


def _check_shapes(tensors: list[torch.Tensor], dim: int, name: str) -> None:
    shapes = [list(tensor.shape) for tensor in tensors]
    given = f"Replicas give {name} of the shapes {', '.join(str(tuple(s)) for s in shapes)}"
    if len(set(map(len, shapes))) == 1:
        if not -len(shapes[0]) <= dim < len(shapes[0]):
            raise IndexError(f"{given}, which have no dim {dim} to be joined along.")
        for shape in shapes:
            shape[dim] = 0
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{given}, but to be joined they may differ in dim {dim} alone.")


# Packed sequences, which are split and concatenated by sequence


def _num_sequences(packed: PackedSequence) -> int:
    """The number of sequences: of those that have a first element."""
    return int(packed.batch_sizes[0])


def _take(packed: PackedSequence, start: int, length: int, device: torch.device) -> PackedSequence:
    """``length`` sequences from ``start`` on, in the batch's own order, on ``device``."""
    return _pack(packed.data, _rows(packed)[:, start : start + length], device)


def _join_packed(parts: Sequence[PackedSequence], device: torch.device) -> PackedSequence:
    """All sequences of all parts, in the parts' order, on ``device``."""
    if len(parts) == 1:
        return parts[0].to(device)  # type: ignore[arg-type]  # torch gives one of the overloads
    rows, num_rows = [], 0
    for part in parts:
        indices = _rows(part)
        rows.append(torch.where(indices < 0, indices, indices + num_rows))
        num_rows += len(part.data)
    longest = max(map(len, rows))
    below = [pad(indices, (0, 0, 0, longest - len(indices)), value=-1) for indices in rows]
    data = torch.cat([move(part.data, device) for part in parts])
    return _pack(data, torch.cat(below, dim=1), device)


def _rows(packed: PackedSequence) -> torch.Tensor:
    """The rows of ``packed.data``: a column for each sequence, -1 below its end."""
    sizes = packed.batch_sizes
    order = packed.unsorted_indices
    places = torch.arange(_num_sequences(packed)) if order is None else order.cpu()
    starts = sizes.cumsum(0) - sizes
    # The longest come first: the sequences that have an element t are the sizes[t] first ones.
    return torch.where(places < sizes[:, None], starts[:, None] + places, -1)


def _pack(data: torch.Tensor, rows: torch.Tensor, device: torch.device) -> PackedSequence:
    there = rows >= 0
    order = there.sum(0).argsort(descending=True, stable=True)
    rows, there = rows[:, order], there[:, order]
    sizes = there.sum(1)
    chosen = data.index_select(0, rows[there].to(data.device))
    return PackedSequence(move(chosen, device), sizes[sizes > 0], order.to(device))
