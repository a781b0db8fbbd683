"""What callers give to collectives, checked and brought into one row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors as a list, also where a caller gave a single one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def row(
    tensors: Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """One tensor for each rank, given as a list of them or as a list that holds one such list."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list(tensors[0])
    return list(tensors)  # type: ignore[arg-type]


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one row: the tensor's own memory if they lie in order, else a copy.

    As data: autograd is neither to record what is written nor to count it as a change, as it
    doesn't with the other backends.
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


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Have in ``tensor`` what is in ``flat``, which :func:`flattened` made of it."""
    if flat.data_ptr() != tensor.data_ptr():
        target, values = tensor.data, flat.view(tensor.shape)
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:  # expanded: it has one element there
                target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        target.copy_(values)


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of them share elements, or lie between each other's; a tensor may come twice."""
    if len(set(map(id, tensors))) < len(tensors):
        return True
    dense = [t for t in tensors if t.layout is torch.strided and t.numel()]
    last = [sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in dense]
    extents = sorted(
        (t.data_ptr(), t.data_ptr() + (index + 1) * t.element_size())
        for t, index in zip(dense, last, strict=True)
    )
    return any(start < stop for (_, stop), (start, _) in itertools.pairwise(extents))


def check_dtypes(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise TypeError unless all have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(
            f"{operation} was given tensors of {', '.join(sorted(map(str, dtypes)))}. Give "
            "tensors of one dtype."
        )


def check_sizes(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless all have one number of elements."""
    sizes = {tensor.numel() for tensor in tensors}
    if len(sizes) > 1:
        raise ValueError(
            f"{operation} was given tensors of {sorted(sizes)} elements. Give tensors of one size."
        )


def check_count(size: int, tensors: Sequence[object], what: str) -> None:
    """Raise ValueError unless there is one for each of ``size`` ranks."""
    if len(tensors) != size:
        raise ValueError(
            f"{len(tensors)} {what} were given, but the group has {size} ranks. Give one for each."
        )


def check_multiple(size: int, operation: str, large: torch.Tensor, small: torch.Tensor) -> None:
    """Raise ValueError unless ``large`` is ``size`` times ``small``."""
    if large.numel() != small.numel() * size:
        raise ValueError(
            f"In {operation}, the tensor of all {size} ranks has {large.numel()} "
            f"elements, and that of one has {small.numel()}. Make it {size} times "
            "as large."
        )


def split_numels(size: int, which: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    """How many elements each rank's part of a tensor has, that is split along dimension 0."""
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


def check_rank(size: int, rank: int, what: str) -> None:
    """Raise ValueError unless ``rank`` is one of ``size`` ranks."""
    if not 0 <= rank < size:
        raise ValueError(f"There is no rank {rank} to {what}: the group has ranks 0 to {size - 1}.")
