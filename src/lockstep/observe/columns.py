"""Rows of numbers and words in columns: a trace takes little more memory than its file."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, get_origin, get_type_hints, overload

import torch

Row = TypeVar("Row", bound=tuple[Any, ...])


class Columns(Sequence[Row], Generic[Row]):
    """Rows of the NamedTuple ``kind``, each of which is made when it is asked for.

    A number takes 8 bytes, and anything else the 4 of its place among all values of its column. As
    a tuple of Python's numbers, a row takes several times its line in a file.
    """

    def __init__(self, kind: type[Row]) -> None:
        named: Any = kind
        self._make: Callable[[Sequence[Any]], Row] = named._make
        self._names: Sequence[str] = named._fields
        kinds = [get_origin(each) or each for each in get_type_hints(kind).values()]
        self._columns = [array("q" if each is int else "i") for each in kinds]
        # By column, what its numbers stand for.
        self._values = [None if each is int else _Values(each()) for each in kinds]

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        pairs = zip(self._columns, self._values, strict=True)
        return self._make([c[index] if v is None else v.found[c[index]] for c, v in pairs])

    def __iter__(self) -> Iterator[Row]:
        return map(self._make, zip(*map(self.of, self._names), strict=True))

    def of(self, name: str) -> Iterator[Any]:
        """Yield one column."""
        index = self._names.index(name)
        values, column = self._values[index], self._columns[index]
        return iter(column) if values is None else map(values.found.__getitem__, column)

    def append(self, row: Row) -> None:
        """Add a row."""
        for column, values, value in zip(self._columns, self._values, row, strict=True):
            number: Any = value if values is None else values.place_of(value)
            column.append(number)

    def set(self, index: int, name: str, value: object) -> None:
        """Change a value of a row."""
        column = self._names.index(name)
        values = self._values[column]
        number: Any = value if values is None else values.place_of(value)
        self._columns[column][index] = number

    def add(self, names: Sequence[str], number: int) -> None:
        """Add a number to all of some columns."""
        for name in names:
            _tensor(self._columns[self._names.index(name)]).add_(number)

    def sort(self, name: str) -> None:
        """Sort the rows by a column; equal ones stay in their order."""
        key = _tensor(self._columns[self._names.index(name)])
        self._take(torch.argsort(key, stable=True))

    def remove(self, name: str, value: object) -> None:
        """Remove the rows that have this value, if any."""
        kept = array("q", (index for index, each in enumerate(self.of(name)) if each != value))
        if len(kept) < len(self):
            self._take(_tensor(kept))

    def _take(self, rows: torch.Tensor) -> None:
        for column in self._columns:
            _tensor(column)[: len(rows)] = _tensor(column)[rows]
            del column[len(rows) :]


class _Values:
    """The values of a column, each by its place; the first is what most rows have."""

    def __init__(self, first: object) -> None:
        self.found = [first]
        self._places: dict[object, int] = {}

    def place_of(self, value: Any) -> int:
        if not value:
            return 0
        if isinstance(value, dict):  # few rows have one
            self.found.append(value)
            return len(self.found) - 1
        if (place := self._places.setdefault(value, len(self.found))) == len(self.found):
            self.found.append(value)
        return place


def _tensor(column: array[int]) -> torch.Tensor:
    dtype = torch.int64 if column.typecode == "q" else torch.int32
    return torch.frombuffer(column, dtype=dtype) if column else torch.empty(0, dtype=dtype)
