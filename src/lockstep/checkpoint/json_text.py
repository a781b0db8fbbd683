"""JSON that is read member by member: as objects, ``[],[],[]`` takes twenty times its length.

Of an object or array it keeps where its members are in the text, four to twenty bytes for each, and
makes objects of those that are asked for. Errors are ValueErrors; what isn't asked for may be no
JSON.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SPACE = re.compile(rb"[ \t\n\r]*+")
_NAME = re.compile(_STRING, re.DOTALL)
# A quote alone is one whose string has no end. If it were passed over, each escaped quote behind it
# would be looked at as far as the end. Shown by test_an_open_string_takes_one_look.
_NESTED = re.compile(_STRING + rb'|[\[\]{}"]', re.DOTALL)
_PLAIN = re.compile(rb"[^\s,\[\]{}\":]++")
# Deeper than what is saved, which json itself limits; millions of brackets take no look at each.
_MOST_DEPTH = 10_000


class TextRange(NamedTuple):
    """The place of a value in a text."""

    text: bytearray
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return self.stop - self.start

    def read(self) -> Any:
        """Return it as objects."""
        return json.loads(self.text[self.start : self.stop])


def value_at(text: bytearray, start: int) -> TextRange:
    """Find the end of the value that begins at ``start``, or behind spaces there."""
    start = _after_space(text, start)
    first = text[start : start + 1]
    if first and first in b"[{":
        return TextRange(text, start, _end_of_nested(text, start))
    found = (_NAME if first == b'"' else _PLAIN).match(text, start)
    if found is None:
        raise ValueError(f"there is no value at byte {start}")
    return TextRange(text, start, found.end())


def _end_of_nested(text: bytearray, start: int) -> int:
    depth = 0
    for found in _NESTED.finditer(text, start):
        sign = text[found.start()]
        if sign in b"[{":
            depth += 1
            if depth > _MOST_DEPTH:
                raise ValueError(f"what begins at byte {start} is nested too deeply")
        elif sign in b"]}":
            depth -= 1
            if not depth:
                return found.end()
        elif found.end() - found.start() == 1:
            break
    raise ValueError(f"what begins at byte {start} has no end")


def _members(object_: TextRange) -> Iterator[tuple[int, int]]:
    """Yield where an object's members begin, which is their name, and end."""
    text, at = object_.text, _inside(object_, b"{", b"}")
    while at:
        at = _after_space(text, at)
        stop = value_at(text, _value_of(text, at)).stop
        yield at, stop
        at = _behind_comma(text, stop, object_.stop)


def _name_at(text: bytearray, at: int) -> re.Match[bytes]:
    name = _NAME.match(text, at)
    if name is None:
        raise ValueError(f"there is no name at byte {at}")
    return name


def _value_of(text: bytearray, at: int) -> int:
    """Return where the value begins of the member that begins at ``at``."""
    colon = _after_space(text, _name_at(text, at).end())
    if text[colon : colon + 1] != b":":
        raise ValueError(f"there is no colon at byte {colon}")
    return _after_space(text, colon + 1)


def _inside(value: TextRange, left: bytes, right: bytes) -> int:
    """Return where the first member is, 0 if there is none."""
    text, start, stop = value
    if text[start : start + 1] != left or text[stop - 1 : stop] != right:
        raise ValueError(f"there is no {left.decode()}{right.decode()} at byte {start}")
    at = _after_space(text, start + 1)
    return at if at < stop - 1 else 0


def _behind_comma(text: bytearray, at: int, stop: int) -> int:
    """Return where the next member is, 0 if there is none."""
    at = _after_space(text, at)
    if at == stop - 1:
        return 0
    if text[at : at + 1] != b",":
        raise ValueError(f"there is no comma at byte {at}")
    return at + 1


def _after_space(text: bytearray, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


class Elements(Sequence[Any]):
    """The elements of an array, of which there may be ``most``."""

    def __init__(self, value: TextRange, most: int) -> None:
        self._text = value.text
        self._starts = _places(value.text)
        at = _inside(value, b"[", b"]")
        while at:
            if len(self._starts) == most:
                raise ValueError(f"there are more than {most} elements at byte {value.start}")
            found = value_at(value.text, at)
            self._starts.append(found.start)
            at = _behind_comma(value.text, found.stop, value.stop)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        return value_at(self._text, self._starts[index]).read()


class Members(Mapping[str, Any]):
    """The members of an object, whose names differ."""

    def __init__(self, value: TextRange) -> None:
        self._text = value.text
        self._last = (-1, "")  # the index and the name that was made last
        self._starts, self._stops = _places(value.text), _places(value.text)
        for start, stop in _members(value):
            self._starts.append(start)
            self._stops.append(stop)
        # By the hash of a name one more than its index, or in the next place that was free.
        size = 1 << (3 * len(self._starts) // 2).bit_length()
        self._table = array("I", bytes(4 * size))
        for index, name in enumerate(self):
            place, there = self._find(name)
            if there is not None:
                raise ValueError(f"{name[:100]!r} is there twice")
            self._table[place] = index + 1

    def _find(self, name: str) -> tuple[int, int | None]:
        """Return the place of a member in the table, or one for it, and its index."""
        place = hash(name)
        while index := self._table[place := place % len(self._table)]:
            if self._name(index - 1) == name:
                return place, index - 1
            place += 1
        return place, None

    def _name(self, index: int) -> str:
        if index != self._last[0]:  # a name that was yielded is looked for next, and may be long
            start, stop = _name_at(self._text, self._starts[index]).span()
            if self._text.find(b"\\", start, stop) < 0:  # then it is in memory once
                name = str(memoryview(self._text)[start + 1 : stop - 1], "utf-8")
            else:
                name = str(json.loads(self._text[start:stop]))
            self._last = index, name
        return self._last[1]

    def value(self, name: str) -> TextRange:
        """Return the place of a member's value."""
        index = self._find(name)[1]
        if index is None:
            raise KeyError(name)
        start = _value_of(self._text, self._starts[index])
        return TextRange(self._text, start, self._stops[index])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name)[1] is not None

    def __getitem__(self, name: str) -> Any:
        return self.value(name).read()

    def __iter__(self) -> Iterator[str]:
        return map(self._name, range(len(self)))

    def __len__(self) -> int:
        return len(self._starts)


def _places(text: bytearray) -> array[int]:
    return array("I" if len(text) < 1 << 32 else "Q")
