"""``scatter()``: a batch, cut up among devices."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast, overload

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.arguments import Device
from lockstep.nn.replicas import packed
from lockstep.nn.replicas.devices import as_devices, as_dim, move
from lockstep.nn.replicas.nested import Path, children, leaves, like, name_of

_T = TypeVar("_T")


class _Cut(NamedTuple):
    """Where the parts go, and along which dimension they are cut."""

    devices: list[torch.device]
    dim: int


@overload
def scatter(  # type: ignore[overload-overlap]
    inputs: torch.Tensor, target_gpus: Sequence[Device], dim: int = ...
) -> tuple[torch.Tensor, ...]: ...


@overload
def scatter(inputs: _T, target_gpus: Sequence[Device], dim: int = ...) -> list[_T]: ...


def scatter(inputs: object, target_gpus: Sequence[Device], dim: int = 0) -> Sequence[object]:
    """Cut the tensors in ``inputs`` up among devices.

    Parts are those of :func:`torch.chunk`: equally many rows, fewer in the last one. If there are
    fewer rows than devices, there are fewer parts; if there are none, all devices get an empty
    part. Gradients come back from them, of any order. On a tensor's own device parts are views
    of it.

    Args:
        inputs: A tensor, or a nesting of tensors and other objects in lists, tuples, mappings and
            dataclasses, whose types stay. Packed sequences are divided by sequences, whatever
            ``dim`` is. Tensors of no dimension and all other objects go to every device: lists,
            tuples and dicts anew for each, anything else without tensors in it as it is.
        target_gpus: The devices, of whatever kind, which may repeat. An int is the index of an
            accelerator, or -1 for the CPU.
        dim: The dimension that rows are counted along.

    Returns:
        A tuple if ``inputs`` is a tensor, else a list: one part for each of the first devices.

    Raises:
        IndexError: If a tensor has dimensions, but not ``dim``.
        TypeError: If ``dim`` is no whole number, or something isn't a device.
        ValueError: If two tensors come in different numbers of parts, or there are no devices.

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
    """Cut the arguments of a call up among devices.

    Args:
        inputs: Its positional arguments.
        kwargs: Those with names, if there are any.
        target_gpus: The devices, as in :func:`scatter`.
        dim: The dimension that rows are counted along.

    Returns:
        The positional arguments of each device's call, and equally many dicts of those with names.
        Without any arguments there are no calls.

    Raises:
        IndexError: If a tensor has dimensions, but not ``dim``.
        TypeError: If ``dim`` is no whole number, or something isn't a device.
        ValueError: If two tensors come in different numbers of parts, or there are no devices.

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


def check_kwargs(kwargs: object, name: str) -> None:
    """Check that an argument has arguments by name, or is None.

    Raises:
        TypeError: If it isn't so.
    """
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError(f"{name} is {reprlib.repr(kwargs)}; give a dict of arguments by name.")


def _scatter(
    named: dict[str, Any], target_gpus: Sequence[Device], dim: int
) -> list[dict[str, Any]]:
    cut = _Cut(as_devices(target_gpus, "target_gpus"), as_dim(dim))
    if not cut.devices:
        raise ValueError("There are no devices to scatter to. Name one, such as 'cpu', or several.")
    return cast(list[dict[str, Any]], _parts(named, _num_parts(named, cut), cut))


def _num_parts(inputs: object, cut: _Cut) -> int:
    """How many parts all tensors come in; one for each device if there are none to be cut."""
    found = [(path, leaf) for path, leaf in leaves(inputs) if _is_cuttable(leaf)]
    counts = [len(_lengths(leaf, cut, path)) for path, leaf in found]
    if len(set(counts)) <= 1:
        return counts[0] if counts else len(cut.devices)
    given = ", ".join(
        f"{name_of(path)} of {_size_of(leaf)} in {count}"
        for (path, leaf), count in zip(found, counts, strict=True)
    )
    raise ValueError(
        f"For {len(cut.devices)} devices, along dim {cut.dim}, these come in different numbers of "
        f"parts: {given}. Give all equally many rows; expand() one that is the same for all."
    )


def _parts(value: object, count: int, cut: _Cut) -> list[object]:
    if _is_cuttable(value):
        return _pieces(value, cut)
    if isinstance(value, torch.Tensor):
        return [move(value, device) for device in cut.devices[:count]]
    # Replicas run at once, and none may change another's list. But what torch takes for an object
    # is one to its users, who may ask whether it is theirs, unless there is something to cut.
    known = isinstance(value, (tuple, list, dict))
    inside = children(value)
    if inside is None or not (known or _holds_tensors(value)):
        return [value] * count
    columns = [_parts(child, count, cut) for child in inside.values()]
    return [like(value, [column[i] for column in columns]) for i in range(count)]


def _pieces(leaf: torch.Tensor | PackedSequence, cut: _Cut) -> list[object]:
    pieces: list[object] = []
    start = 0
    for length, device in zip(_lengths(leaf, cut), cut.devices, strict=False):
        if isinstance(leaf, PackedSequence):
            pieces.append(packed.take(leaf, start, length, device))
        else:
            # A view each: those of chunk() may not be changed in place. Sparse tensors have none.
            narrow = leaf.narrow_copy if leaf.is_sparse else leaf.narrow
            pieces.append(move(narrow(cut.dim, start, length), device))
        start += length
    return pieces


def _lengths(leaf: torch.Tensor | PackedSequence, cut: _Cut, path: Path = ()) -> list[int]:
    """How many rows each part has, or how many sequences."""
    if isinstance(leaf, PackedSequence):
        total = packed.num_sequences(leaf)
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


def _holds_tensors(value: object) -> bool:
    return any(isinstance(leaf, (torch.Tensor, PackedSequence)) for _, leaf in leaves(value))


def _is_cuttable(value: object) -> TypeGuard[torch.Tensor | PackedSequence]:
    return isinstance(value, PackedSequence) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _size_of(leaf: torch.Tensor | PackedSequence) -> str:
    if isinstance(leaf, PackedSequence):
        return f"{packed.num_sequences(leaf)} packed sequences"
    return f"shape {tuple(leaf.shape)}"
