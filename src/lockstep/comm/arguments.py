"""Arguments of collectives: the overloads of torch's groups, checks, and flat views of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Tensors = Sequence[Tensor]
TensorLists = Sequence[Sequence[Tensor]]


def operation(
    options: type, *parameters: str, values: Mapping[str, str] | None = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Let a method of a group be called by every overload of torch's groups.

    torch takes options, as in ``group.broadcast([tensor], opts)``, or in their place the fields
    themselves, as in ``group.broadcast(tensor, 0, timeout=timeout)``. The method always gets
    options. Calls with tensors on other devices go to the group for that device.

    Args:
        options: The class of the options.
        parameters: The names of the parameters before them; ``"a|b"`` where overloads differ.
        values: The fields of the options that may be given in their place, by the names and in
            the order of torch's parameters; after them, the time-out.
    """
    count = len(parameters)
    fields = {**(values or {}), "timeout": "timeout"}

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        name = method.__name__

        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> T:
            if kwargs or len(args) != count + 1 or not isinstance(args[count], options):
                args = _with_options(name, options, parameters, fields, args, kwargs)
            tensor = _first_tensor(args[:count])
            if tensor is None or tensor.is_cpu:
                return method(self, *args)
            result: T = getattr(self._group_for(tensor.device.type), name)(*args)
            return result

        return call

    return decorate


def of_any_device(method: Callable[..., T]) -> Callable[..., T]:
    """As :func:`operation`, for methods without options: tensors choose the group by device."""

    @wraps(method)
    def call(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> T:
        tensor = _first_tensor(tensors)
        if tensor is None or tensor.is_cpu:
            return method(self, tensors, *args, **kwargs)
        other = self._group_for(tensor.device.type)
        result: T = getattr(other, method.__name__)(tensors, *args, **kwargs)
        return result

    return call


def _with_options(
    name: str,
    options: type,
    parameters: Sequence[str],
    fields: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    """Return the arguments of an overload as those before the options, and the options."""
    given, count = list(args), len(parameters)
    for aliases in parameters[len(given) :]:
        alias = next((alias for alias in aliases.split("|") if alias in kwargs), None)
        if alias is None:
            raise TypeError(f"{name}() lacks the argument {aliases.split('|')[0]!r}.")
        given.append(kwargs.pop(alias))
    rest = given[count:]
    opts, values = kwargs.pop("opts", None), kwargs
    if opts is None:
        opts = rest.pop(0) if rest and isinstance(rest[0], options) else options()
        values = dict(zip(fields, rest, strict=False)) | kwargs
    if len(rest) > len(fields) or not set(values) <= set(fields):
        raise TypeError(
            f"{name}() was given {[*map(repr, rest), *kwargs]} beside the tensors. It takes "
            f"{options.__name__}, or {', '.join(fields)}."
        )
    for parameter, value in values.items():
        if value is not None:
            setattr(opts, fields[parameter], value)
    return (*given[:count], opts)


def _first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, (list, tuple)):
        for value in values:
            tensor = _first_tensor(value)
            if tensor is not None:
                return tensor
    return None


def listed(tensors: Tensor | Tensors) -> list[Tensor]:
    """Return the tensors as a list; some overloads take a single one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def row(tensors: Tensors | TensorLists) -> list[Tensor]:
    """Return one tensor for each rank, given as a list, or as a list that holds one such list."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        return list(tensors[0])
    return list(tensors)  # type: ignore[arg-type]


def flattened(tensor: Tensor) -> Tensor:
    """Return the elements as a flat tensor: a view of contiguous memory, else a copy.

    As data: autograd neither records what is written nor counts it as a change, as with torch's
    own backends.
    """
    data = tensor.data
    if data.is_complex() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    data = data.contiguous()
    if data.numel() < 2:
        # Any stride counts as contiguous then, but not for a view of the bytes.
        # Shown by test_tensors_of_any_layout_are_sent.
        return data.as_strided((data.numel(),), (1,))
    return data if data.dim() == 1 else data.view(-1)


def put_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy to ``tensor`` the result in ``flat``, which :func:`flattened` made of it."""
    if flat.data_ptr() != tensor.data_ptr():
        target, values = tensor.data, flat.view(tensor.shape)
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:  # expanded: it has one element there
                target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        target.copy_(values)


def overlap(tensors: Tensors) -> bool:
    """Whether some of the tensors share memory, or interleave; one may be given twice."""
    if len(set(map(id, tensors))) < len(tensors):
        return True
    dense = [t for t in tensors if t.layout is torch.strided and t.numel()]
    last = [sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in dense]
    extents = sorted(
        (t.data_ptr(), t.data_ptr() + (index + 1) * t.element_size())
        for t, index in zip(dense, last, strict=True)
    )
    return any(start < stop for (_, stop), (start, _) in itertools.pairwise(extents))


def check_dtypes(operation: str, tensors: Tensors) -> None:
    """Raise TypeError unless all have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(
            f"{operation} was given tensors of {', '.join(sorted(map(str, dtypes)))}. Give "
            "tensors of one dtype."
        )


def check_alike(operation: str, tensors: Tensors) -> None:
    """Raise TypeError or ValueError unless all have one dtype and one number of elements."""
    check_dtypes(operation, tensors)
    sizes = {tensor.numel() for tensor in tensors}
    if len(sizes) > 1:
        raise ValueError(
            f"{operation} was given tensors of {sorted(sizes)} elements. Give tensors of one size."
        )


def check_count(size: int, tensors: Sequence[object], what: str) -> None:
    """Raise ValueError unless there is one tensor for each of ``size`` ranks."""
    if len(tensors) != size:
        raise ValueError(
            f"{len(tensors)} {what} were given, but the group has {size} ranks. Give one for each."
        )


def check_multiple(size: int, operation: str, large: Tensor, small: Tensor) -> None:
    """Raise ValueError unless ``large`` has ``size`` times the elements of ``small``."""
    if large.numel() != small.numel() * size:
        raise ValueError(
            f"In {operation}, the tensor of all {size} ranks has {large.numel()} "
            f"elements, and that of one has {small.numel()}. Make it {size} times "
            "as large."
        )


def check_rank(size: int, rank: int, what: str) -> None:
    """Raise ValueError unless ``rank`` is one of ``size`` ranks."""
    if not 0 <= rank < size:
        raise ValueError(f"There is no rank {rank} to {what}: the group has ranks 0 to {size - 1}.")


def split_numels(size: int, which: str, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the number of elements in each rank's part of a tensor, split along dimension 0."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % size:
            raise ValueError(
                f"all_to_all_single's {which} has {rows} rows, which can't be divided into "
                f"{size} equal parts. Give split sizes."
            )
        sizes = [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all_single's {which} has {rows} rows, and its split sizes are {sizes}. "
            f"Give {size} sizes that add up to that."
        )
    row = tensor.numel() // rows if rows else 0
    return [part * row for part in sizes]
