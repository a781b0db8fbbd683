"""Arguments of collectives: the overloads of torch's groups, checks, and flat views of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.comm.work import Run, WorkQueue

Tensors = Sequence[Tensor]
TensorLists = Sequence[Sequence[Tensor]]


# The results of an operation, and the functions that carry out its parts, one after the other.
Call = tuple[Tensors, Sequence[Run]]

# The fields of options that overloads take in their place, by the names and in the order of torch's
# parameters.
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def operation(
    options: type, *parameters: str
) -> Callable[[Callable[..., Call]], Callable[..., Work]]:
    """Make a method of a group, which returns a call, one that submits it, for all overloads.

    torch takes options, as in ``group.broadcast([tensor], opts)``, or in their place the fields
    themselves, as in ``group.broadcast(tensor, 0, timeout=timeout)``. The method gets the root and
    the reduction, if there are any. Calls with tensors on other devices go to the group for those.

    Args:
        options: The class of the options.
        parameters: The names of the parameters before them; ``"a|b"`` where overloads differ.
    """
    count = len(parameters)
    fields = {name: field for name, field in _FIELDS.items() if hasattr(options, field)}
    given = [field for field in fields.values() if field != "timeout"]

    def with_options(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        for aliases in parameters[len(args) :]:
            names = aliases.split("|")
            if not (present := [alias for alias in names if alias in kwargs]):
                raise TypeError(f"{name}() lacks the argument {names[0]!r}.")
            args.append(kwargs.pop(present[0]))
        rest = args[count:]
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
        return (*args[:count], opts)

    def decorate(method: Callable[..., Call]) -> Callable[..., Work]:
        @wraps(method)
        def submit(self: Any, *args: Any, **kwargs: Any) -> Work:
            if kwargs or len(args) != count + 1 or not isinstance(args[count], options):
                args = with_options(method.__name__, list(args), kwargs)
            tensor, opts = _first_tensor(args), args[count]
            if tensor is not None and not tensor.is_cpu:
                other = getattr(self._group_for(tensor.device.type), method.__name__)
                return cast(Work, other(*args))
            values = map(opts.__getattribute__, given)
            results, runs = method(self, *args[:count], *values)
            queue: WorkQueue = self._queue
            return queue.submit(runs, results, is_async=opts.asyncOp, timeout=opts.timeout)

        return submit

    return decorate


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    """Return the first tensor in nested lists, if there is one."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_tensor(value)) is not None:
            return found
    return None


def listed(tensors: Tensor | Tensors | TensorLists) -> list[Tensor]:
    """Return the tensors of an argument: one tensor, a list, or a list that holds one list."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in listed(part)]


def flattened(tensor: Tensor) -> Tensor:
    """Return the elements as a flat tensor: a view of contiguous memory, else a copy.

    Autograd neither records nor counts writes to it, as with torch's own backends.
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
        distinct = _distinct_elements(tensor)
        tensor.data[distinct].copy_(flat.view(tensor.shape)[distinct])


def without_repeats(tensor: Tensor) -> Tensor:
    """Return a view of an expanded tensor that has each element of its memory once."""
    if tensor.layout is not torch.strided:
        return tensor
    distinct = _distinct_elements(tensor)
    # The tensor itself, not a view of all of it, which can't be written to in inference mode alone.
    return tensor[distinct] if 0 in distinct else tensor


def _distinct_elements(tensor: Tensor) -> tuple[int | slice, ...]:
    """Return the index of one of the elements wherever several are the same memory."""
    return tuple(
        0 if not stride and numel > 1 else slice(None)
        for numel, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def overlap(tensors: Tensors) -> bool:
    """Whether some of the tensors may share memory; one may be given twice."""
    if len(set(map(id, tensors))) < len(tensors):
        return True
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided and t.numel()]
    extents = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages)
    return any(start < stop for (_, stop), (start, _) in itertools.pairwise(extents))


def check_dtypes(operation: str, tensors: Tensors) -> None:
    """Raise TypeError unless all have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(
            f"{operation} was given tensors of {', '.join(sorted(map(str, dtypes)))}. Give "
            "tensors of one dtype."
        )


def check_sizes(operation: str, tensors: Tensors) -> None:
    """Raise ValueError unless all have one number of elements."""
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
