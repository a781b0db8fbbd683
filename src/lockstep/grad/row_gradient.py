"""Gradients of tables of which only some rows were computed: all others are zero.

A lookup's backward returns one in place of a tensor as large as the table. To everybody else it is
that tensor: whatever is computed with it, by autograd too, first makes it dense. So where a table
has a gradient from elsewhere as well, the sum has the bits that it always had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.torch_private import disabled_torch_function, tree_map_only

_aten: Any = torch.ops.aten
# The indices of rows, in ascending order, each once; and their values.
Rows = tuple[torch.Tensor, torch.Tensor]


class _State:
    """What a gradient and its aliases share.

    Attributes:
        indices: The computed rows, in ascending order, each once.
        rows: Their values, of shape (number of indices, width).
        dense: The whole gradient, once somebody has asked for it; from then on it counts.
    """

    def __init__(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        self.indices, self.rows = indices, rows
        self.dense: torch.Tensor | None = None


class RowGradient(torch.Tensor):
    """A gradient of shape ``shape``, of which the rows that aren't at ``indices`` are zero.

    Args:
        indices: The other rows, in ascending order, each once; int64.
        rows: Their values.
        shape: That of the table.
    """

    __torch_function__ = disabled_torch_function
    _state: _State

    @staticmethod
    def __new__(
        cls, indices: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]
    ) -> RowGradient:
        """Make one, which has no memory of its own."""
        gradient: RowGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=rows.dtype, device=rows.device
        )
        gradient._state = _State(indices, rows)
        return gradient

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:  # as autograd makes it the gradient of the parameter
            return args[0]._alias()
        if func is _aten.add.Tensor and not kwargs and (both := _both_rows(args)):
            return _sum(*both, args[0].shape)
        dense = {id(each): each.as_dense() for each in _among(args, kwargs)}
        get: Callable[[RowGradient], torch.Tensor] = lambda each: dense[id(each)]  # noqa: E731
        result = func(*tree_map_only(cls, get, args), **tree_map_only(cls, get, kwargs))
        if not func._schema.returns:
            return None  # torch._foreach_mul_() and the like, which torch takes nothing else from
        is_in_place = bool(args) and dense.get(id(args[0])) is result
        return args[0] if is_in_place else result

    def _alias(self) -> RowGradient:
        alias = RowGradient(self._state.indices, self._state.rows, self.shape)
        alias._state = self._state
        return alias

    def computed_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the indices and values of its rows; None if it has been made dense."""
        state = self._state
        return (state.indices, state.rows) if state.dense is None else None

    def as_dense(self) -> torch.Tensor:
        """Return the whole gradient, a plain tensor, the same one each time."""
        state = self._state
        if state.dense is None:
            state.dense = dense_of(state.indices, state.rows, self.shape)
        return state.dense

    # What reads memory, and calls no operator.

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """As that of the dense tensor."""
        return repr(self.as_dense())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy of the dense tensor."""
        return copy.deepcopy(self.as_dense(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the dense tensor."""
        return self.as_dense().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        """Return the values of the dense tensor."""
        return self.as_dense().tolist()

    def numpy(self, **options: Any) -> Any:
        """Return the dense tensor's memory."""
        return self.as_dense().numpy(**options)


def dense_of(indices: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of zeros, but for the ``rows`` at ``indices``."""
    return rows.new_zeros(shape).index_copy_(0, indices, rows)


def _among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[RowGradient]:
    found: list[RowGradient] = []
    tree_map_only(RowGradient, found.append, (args, kwargs))
    return found


def _both_rows(args: Sequence[Any]) -> tuple[Rows, Rows] | None:
    rows = [each.computed_rows() for each in args if isinstance(each, RowGradient)]
    if len(rows) == len(args) == 2 and rows[0] is not None and rows[1] is not None:
        return rows[0], rows[1]
    return None


def _sum(first: Rows, second: Rows, shape: Sequence[int]) -> RowGradient:
    indices, total = sum_of_rows([first, second], first[1].dtype)
    return RowGradient(indices, total, shape)


def sum_of_rows(parts: Sequence[Rows], dtype: torch.dtype) -> Rows:
    """Return the rows of any of ``parts``, ascending, and their sums in ``dtype``.

    They are added in the order of the parts, in each of which a row that it lacks is zero: the sums
    have the bits of those of dense tensors, signs of zeros included.
    """
    indices, places = torch.cat([indices for indices, _ in parts]).unique(return_inverse=True)
    shape = len(indices), *parts[0][1].shape[1:]
    total, *others = (
        dense_of(at, rows.to(dtype), shape)
        for at, (_, rows) in zip(places.split([len(i) for i, _ in parts]), parts, strict=True)
    )
    for other in others:
        total.add_(other)
    return indices, total
