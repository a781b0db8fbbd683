"""Rows of numbers and words in columns: a trace takes little more memory than its file."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_origin, get_type_hints, overload

import torch

Row = TypeVar("Row")
# By the type of an array, what torch calls its elements; and how many bits these have for a number.
_DTYPES = {"b": torch.int8, "h": torch.int16, "i": torch.int32, "q": torch.int64}
_BITS = 7, 15, 31
_NUM_PARTS = 32
_MOST_VALUES = 1 << 13  # of words, each of which takes more memory than in a file


class Rows(Sequence[Row], ABC, Generic[Row]):
    """Rows, each of which is made when it is asked for."""

    @abstractmethod
    def _row(self, index: int) -> Row:
        """Make a row.

        Raises:
            IndexError: If there is none.
        """

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Chosen[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Chosen[Row]:
        if isinstance(index, slice):
            return Chosen(self, range(len(self))[index])
        return self._row(index)


class Columns(Rows[Row]):
    """Rows of the NamedTuple ``kind``.

    A column is an array, as wide as its largest number needs. Anything else has the number of its
    place among all values of its column, and a dictionary of numbers that of its pairs. As a tuple
    of Python's numbers, a row takes several times its line in a file.
    """

    def __init__(self, kind: type[Row], rows: Iterable[Row] = ()) -> None:
        named: Any = kind
        self._make: Callable[[Iterable[Any]], Row] = named._make
        self._names: Sequence[str] = named._fields
        kinds = [get_origin(each) or each for each in get_type_hints(kind).values()]
        self._columns = [array("b") for _ in kinds]
        # By column, what its numbers stand for.
        self._values = [
            None if each is int else _Dicts() if each is dict else _Values(each()) for each in kinds
        ]
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return len(self._columns[0])

    @property
    def num_bytes(self) -> int:
        """How much memory the columns take."""
        pairs = sum(each._pairs.num_bytes for each in self._values if isinstance(each, _Dicts))
        return pairs + sum(len(column) * column.itemsize for column in self._columns)

    def _row(self, index: int) -> Row:
        pairs = zip(self._columns, self._values, strict=True)
        return self._make([c[index] if v is None else v.at(c[index]) for c, v in pairs])

    def __iter__(self) -> Iterator[Row]:
        return self.at(range(len(self)))

    def at(self, places: Sequence[int]) -> Iterator[Row]:
        """Yield the rows at some places."""
        numbers = (map(column.__getitem__, places) for column in self._columns)
        pairs = zip(numbers, self._values, strict=True)
        columns = [each if v is None else map(v.at, each) for each, v in pairs]
        return map(self._make, zip(*columns, strict=True))

    def of(self, name: str) -> Iterator[Any]:
        """Yield one column."""
        index = self._names.index(name)
        values, column = self._values[index], self._columns[index]
        return iter(column) if values is None else map(values.at, column)

    def column(self, name: str) -> array[int]:
        """Return a column of numbers."""
        return self._columns[self._names.index(name)]

    def append(self, row: Row) -> None:
        """Add a row.

        Raises:
            OverflowError: If a number is too large.
            ValueError: If a column has too many values that are no numbers.
        """
        parts: Any = row
        for index, (values, value) in enumerate(zip(self._values, parts, strict=True)):
            number: int = value if values is None else values.place_of(value)
            try:
                self._columns[index].append(number)
            except OverflowError:
                self._widened(index, number).append(number)

    def set(self, index: int, name: str, value: Any) -> None:
        """Change a value of a row."""
        column = self._names.index(name)
        values = self._values[column]
        number: int = value if values is None else values.place_of(value)
        try:
            self._columns[column][index] = number
        except OverflowError:
            self._widened(column, number)[index] = number

    def _widened(self, index: int, number: int) -> array[int]:
        column = self._columns[index] = array(_kind_for(number), self._columns[index])
        return column

    def add(self, names: Sequence[str], number: int) -> None:
        """Add a number to all of some columns."""
        for name in names if number else ():
            _tensor(self._widened(self._names.index(name), 1 << 62)).add_(number)

    def places(self, name: str, value: object) -> array[int]:
        """Return where a column has a value."""
        return array("i", (place for place, each in enumerate(self.of(name)) if each == value))

    def order(self, *names: str, places: array[int] | None = None) -> array[int]:
        """Return the places of all rows, or of some, sorted by columns of numbers.

        The first of ``names`` comes first; by one with a minus before it, the largest rows do.
        Equal rows stay in their order.
        """
        first = _tensor(self.column(names[0]))
        given = None if places is None else _tensor(places)
        first = first if given is None else first[given]
        made, done = array("i", bytes(4 * len(first))), 0
        # A part at a time, as sorting takes several times the memory of what is sorted.
        sample = torch.sort(first[:: max(1, len(first) // _NUM_PARTS**2)]).values
        bounds = sample[::_NUM_PARTS].contiguous()
        part_of = torch.bucketize(first, bounds, out_int32=True, right=True)
        for part in range(len(bounds) + 1):
            found = (part_of == part).nonzero().flatten()
            found = found if given is None else given[found]
            for name in reversed(names):
                key = _tensor(self.column(name.removeprefix("-")))[found]
                found = found[torch.argsort(key, stable=True, descending=name.startswith("-"))]
            _tensor(made)[done : done + len(found)] = found
            done += len(found)
        return made

    def sort(self, *names: str) -> None:
        """Put the rows into this order."""
        self._take(_tensor(self.order(*names)))

    def remove(self, name: str, value: object) -> None:
        """Remove the rows that have this value, if any."""
        if removed := self.places(name, value):
            is_kept = torch.ones(len(self), dtype=torch.bool)
            is_kept[_tensor(removed)] = False
            self._take(is_kept)

    def _take(self, rows: torch.Tensor) -> None:
        for column in self._columns:
            taken = _tensor(column)[rows]
            _tensor(column)[: len(taken)] = taken
            del column[len(taken) :]


class Chosen(Rows[Row]):
    """Some rows of others, by their places there."""

    def __init__(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    def _row(self, index: int) -> Row:
        return self._rows[self._places[index]]

    def __iter__(self) -> Iterator[Row]:
        if isinstance(self._rows, Columns):
            return self._rows.at(self._places)
        return map(self._rows.__getitem__, self._places)

    def where(self, is_taken: Iterable[bool]) -> Chosen[Row]:
        """Return those of which this is true."""
        return Chosen(self._rows, array("i", itertools.compress(self._places, is_taken)))


class _Values:
    """The values of a column, each by its place; the first is what most rows have."""

    def __init__(self, first: object) -> None:
        self._found = [first]
        self._places = {first: 0}
        self.at = self._found.__getitem__

    def place_of(self, value: Any) -> int:
        if (place := self._places.setdefault(value, len(self._found))) == len(self._found):
            if place == _MOST_VALUES:
                raise ValueError(f"there are more than {_MOST_VALUES:,} different names")
            self._found.append(value)
        return place


class _Item(NamedTuple):
    name: str  # or anything else that is hashed
    value: int


class _Dicts:
    """Dictionaries of numbers: the pairs of each follow one that has their number."""

    def __init__(self) -> None:
        self._pairs = Columns(_Item, [_Item("", 0)])  # the empty one

    def at(self, place: int) -> dict[Any, int]:
        (names, numbers), (values, _) = self._pairs._columns, self._pairs._values
        pairs = slice(place + 1, place + 1 + numbers[place])
        assert values is not None
        return dict(zip(map(values.at, names[pairs]), numbers[pairs], strict=True))

    def place_of(self, value: Any) -> int:
        if not value:
            return 0
        place = len(self._pairs)
        for name, number in (("", len(value)), *value.items()):
            self._pairs.append(_Item(name, number))
        return place


def as_columns(kind: type[Row], rows: Iterable[Row]) -> Columns[Row]:
    """Return rows in columns, if they aren't yet."""
    return rows if isinstance(rows, Columns) else Columns(kind, rows)


def in_order(numbers: Iterable[int]) -> array[int]:
    """Return numbers sorted."""
    found = array("q", numbers)
    _tensor(found).copy_(torch.sort(_tensor(found)).values)
    return found


def distinct(numbers: Iterable[int]) -> array[int]:
    """Return numbers sorted, each once."""
    found = in_order(numbers)
    kept = torch.unique_consecutive(_tensor(found))
    _tensor(found)[: len(kept)] = kept
    del found[len(kept) :]
    return found


def is_among(numbers: array[int], number: int) -> bool:
    """Whether a number is one of some that are sorted."""
    place = bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number


def _kind_for(number: int) -> str:
    """Return the type of the narrowest array that takes a number."""
    return "bhiq"[bisect_left(_BITS, number.bit_length())]


def _tensor(column: array[int]) -> torch.Tensor:
    dtype = _DTYPES[column.typecode]
    return torch.frombuffer(column, dtype=dtype) if column else torch.empty(0, dtype=dtype)
