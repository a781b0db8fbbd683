"""Reads the file of one rank's trace, of which nothing is believed before it is checked.

It may be damaged, or somebody else's: of another kind, without end, with names that a terminal
would obey. What isn't as a rank writes it is refused, with the file, the line and what is wrong.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.comm import check_room
from lockstep.errors import SharedMemoryFull, TraceError
from lockstep.observe.columns import Columns, Rows
from lockstep.observe.records import (
    MOST_BUCKETS,
    MOST_LOADERS,
    BucketTimes,
    GivenBatch,
    RankSpans,
    Span,
    StepEnd,
    tell_apart,
)
from lockstep.printable import printable

# A rank writes less than that: as objects, what a line says may take 30 times as much.
_MOST_LINE_BYTES = 1 << 18
_MOST_TIME, _MOST_NUMBER = 1 << 62, 1 << 53
# The characters that are kept of a word, and of the name of what was logged.
_MOST_WORD, _MOST_NAME = 200, 1000
# What a file takes in memory, as a multiple of its length; and what its columns may, in which few
# large numbers widen all others, beyond some bytes that there are in any case. After how many lines
# that is looked at.
_GROWTH, _MOST_COLUMN_GROWTH, _FREE_BYTES, _CHECKED_LINES = 2, 1.5, 1 << 16, 1 << 14

# Of names of parameters, in text that has a character beyond Latin-1: each takes as much as that.
_MOST_WIDE_BYTES = 3 << 20
_OF_TWO_BYTES, _OF_FOUR_BYTES = re.compile(rb"[\xc4-\xff]"), re.compile(rb"[\xf0-\xff]")
_MARKS = bytes(range(0x80)) + b"?" * 0x80

Check = Callable[[Any], bool]


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, without their ends; a last one that was cut off is left out.

    Raises:
        TraceError: If it is no file, a line is too long, or there isn't memory for all of it.
        OSError: If it can't be read.
    """
    # A pipe would be waited for.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise TraceError(f"{printable(str(path))} isn't of a trace: it is no file.")
        is_room_looked_at = False
        for number in range(1, sys.maxsize):
            line = file.readline(_MOST_LINE_BYTES)
            if len(line) == _MOST_LINE_BYTES:
                raise _damaged(path, number, f"it is longer than {_MOST_LINE_BYTES >> 10} KiB")
            if not line.endswith(b"\n"):
                return
            if not is_room_looked_at:  # not before: the first line may tell that it is no trace
                is_room_looked_at = True
                _check_room(path, found.st_size)
            yield line[:-1]


def _check_room(path: Path, num_bytes: int) -> None:
    try:
        check_room(_GROWTH * num_bytes)
    except SharedMemoryFull as error:
        raise TraceError(
            f"{printable(str(path))} has {num_bytes:,} bytes, for which there isn't memory. Read "
            "it where there is more, or record fewer steps, by --trace-steps."
        ) from error


def _damaged(path: Path, number: int, what: object) -> TraceError:
    return TraceError(f"{printable(str(path))}, line {number}, isn't of a trace: {what}.")


def read(path: Path) -> RankSpans:
    """Read a rank's file.

    Raises:
        TraceError: If it isn't one.
    """
    reader = _Reader()
    try:
        for number, line in enumerate(lines_of(path), 1):
            try:
                reader.take(line)
            except RecursionError as error:
                raise _damaged(path, number, "it is nested too deeply") from error
            except ValueError as error:
                raise _damaged(path, number, printable(str(error))) from error
    except OSError as error:
        why = error.strerror or os.strerror(error.errno or errno.EIO)
        raise TraceError(f"{printable(str(path))} can't be read: {why}.") from error
    try:
        return reader.result(path)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{printable(str(path))} isn't of a trace: {error}.") from error


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_NUMBER


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_time(value: Any) -> bool:
    return type(value) is int and -_MOST_TIME < value < _MOST_TIME


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_whole_or_none(value: Any) -> bool:
    return value is None or _is_whole(value)


def _are_texts(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


def _are_whole(value: Any) -> bool:
    return type(value) is dict and all(map(_is_whole, value.values()))


def _are_operators(value: Any) -> bool:
    """Whether it is phases, names, calls and nanoseconds."""
    checks = (_is_text, _is_text, _is_count, _is_whole)
    return type(value) is list and all(
        type(row) is list
        and len(row) == len(checks)
        and all(check(each) for check, each in zip(checks, row, strict=True))
        for row in value
    )


def _are_numbers(value: Any) -> bool:
    return type(value) is dict and all(
        type(each) is float or (type(each) is int and abs(each) < _MOST_TIME)
        for each in value.values()
    )


# The facts in a line, by the name that tells them apart; those that must be there come first.
_LOG: dict[str, Check] = {"log": _are_numbers, "step": _is_whole, "time": _is_time}
_STEP_END: dict[str, Check] = {"end_of": _is_whole, "time": _is_time, "memory": _are_whole}
_LOADER: dict[str, Check] = {
    "loader": _is_whole,
    "dataset": _is_text,
    "workers": _is_whole,
    "persistent": _is_flag,
    "samples": _is_whole_or_none,
}
_BUCKET: dict[str, Check] = {
    "bucket": _is_whole,
    "bytes": _is_whole,
    "parameters": _are_texts,
    "index": _is_whole,
    "hooked": _is_flag,
    "deferred": _is_flag,
}
_OPERATORS: dict[str, Check] = {
    "operators": _are_operators,
    "first": _is_whole,
    "profiled": _is_count,
}
_RANK: dict[str, Check] = {
    "rank": _is_whole,
    "host": _is_text,
    "pid": _is_whole,
    "boot": _is_text,
    "world_size": _is_count,
    "local_world_size": _is_count,
    "device": _is_text,
    "cores": _is_count,
    "threads": _is_count,
    "offset": _is_time,
    "bound": _is_time,
}


class _Reader:
    """Takes the lines of a file, and has what they say."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {"offset": 0, "bound": 0}
        self._spans, self._buckets = Columns(Span), Columns(BucketTimes)
        self._logged = _Logged()
        self._bucket_facts: dict[int, dict[str, Any]] = {}
        self._step_ends, self._batches = Columns(StepEnd), Columns(GivenBatch)
        self._loaders: dict[int, dict[str, Any]] = {}
        self._words: dict[str, str] = {}  # each that comes often, once
        self._num_lines = self._num_bytes = 0

    def take(self, line: bytes) -> None:
        """Take a line.

        Raises:
            ValueError: If it isn't as a rank writes it.
            RecursionError: If it is nested too deeply.
        """
        self._num_lines, self._num_bytes = self._num_lines + 1, self._num_bytes + len(line) + 1
        if not self._num_lines % _CHECKED_LINES:
            self._check_growth()
        if line.startswith(b"{"):
            self._take_facts(json.loads(line), line)
            return
        name, *words = line.decode().split(" ")
        if name == "bucket":
            ready, launched, done, step, number = _numbers(words, 5)
            which = _whole(step), _below(number, MOST_BUCKETS)
            self._buckets.append(BucketTimes(ready, launched, done, *which))
        elif name == "batch":
            time, step, thread, loader, samples, flag = _numbers(words, 6)
            where = _whole(step), _whole(thread), _below(loader, MOST_LOADERS)
            self._batches.append(GivenBatch(time, *where, _whole(samples + 1) - 1, bool(flag)))
        else:
            if len(words) != 6:
                raise ValueError(f"it has {len(words) + 1} words, and a span has 7")
            *numbers, detail, size = words
            start, stop, step, thread = _numbers(numbers, 4)
            if stop < start:
                raise ValueError("the span ends before it begins")
            of_step = _whole(step), _whole(thread), self._word(detail)
            self._spans.append(
                Span(self._word(name), start, stop, *of_step, _whole(*_numbers([size], 1)))
            )

    def _word(self, word: str) -> str:
        word = word[:_MOST_WORD]
        if (found := self._words.get(word)) is None:
            found = self._words[word] = printable(word)
        return found

    def _check_growth(self) -> None:
        columns = self._spans, self._buckets, self._step_ends, self._batches
        num_bytes = sum(each.num_bytes for each in columns)
        if num_bytes > _MOST_COLUMN_GROWTH * self._num_bytes + _FREE_BYTES:
            raise ValueError(
                f"up to there it has {self._num_bytes:,} bytes, and its numbers take "
                f"{num_bytes:,}, as few are far larger than the others"
            )

    def _take_facts(self, found: dict[str, Any], line: bytes) -> None:
        if "log" in found:
            _checked(found, _LOG, 3)
            self._logged.add(line)
        elif "end_of" in found:
            facts = _checked(found, _STEP_END, 2)
            end = StepEnd(facts["end_of"], facts["time"], 0, facts.get("memory", {}))
            self._step_ends.append(end)
        elif "loader" in found:
            facts = _checked(found, _LOADER, 4)
            facts["dataset"] = facts["dataset"][:_MOST_WORD]
            self._loaders[_below(facts.pop("loader"), MOST_LOADERS)] = facts
        elif "operators" in found:
            self._facts |= _checked(found, _OPERATORS, 3)
        elif "bucket" in found:
            self._take_bucket(_checked(found, _BUCKET, 3))
        else:
            self._facts |= _checked(found, _RANK, 0)

    def _take_bucket(self, facts: dict[str, Any]) -> None:
        """Take the facts of a bucket, with the names of some of its parameters as a text."""
        number, names = _below(facts.pop("bucket"), MOST_BUCKETS), facts.pop("parameters")
        # Appended to, as a text of very many lines would be copied for each of them.
        known = self._bucket_facts.get(number, {}).get("parameters", bytearray())
        for name in names:
            known += (b", " if known else b"") + name.encode(errors="surrogatepass")
        self._bucket_facts[number] = facts | {"parameters": known}

    def result(self, path: Path) -> RankSpans:
        """Return what was read, by the clock of rank 0.

        Raises:
            ValueError: If something is missing.
        """
        self._check_growth()
        facts = self._facts
        if not facts.keys() >= {"rank", "host"}:
            raise ValueError("it doesn't say of which rank it is")
        named = path.stem.removeprefix("rank-")
        if named.isdecimal() and int(named) != facts["rank"]:
            raise ValueError(f"by what it says it is of rank {facts['rank']}")
        num_left = _MOST_WIDE_BYTES
        for of_bucket in self._bucket_facts.values():
            names = of_bucket["parameters"]
            num_left -= _width(names) * len(names)
            of_bucket["parameters"] = _text_of(names, may_be_wide=num_left >= 0)
        for number in {*self._buckets.of("number")} - self._bucket_facts.keys():
            self._bucket_facts[number] = {"bytes": 0, "index": number, "parameters": ""}
        spans, buckets, batches, ends = self._spans, self._buckets, self._batches, self._step_ends
        spans.add(("start", "stop"), facts["offset"])
        buckets.add(("ready", "launched", "done"), facts["offset"])
        for rows in batches, ends:
            rows.add(("time",), facts["offset"])
        lists = spans, buckets, self._logged, self._bucket_facts, ends, batches, self._loaders
        found = RankSpans(facts["rank"], facts, *lists)
        tell_apart(found, spans, ends)
        return found


class _Logged(Rows[dict[str, Any]]):
    """What was logged, as the lines that were checked: dictionaries take ten times as much."""

    def __init__(self) -> None:
        self._lines, self._ends = bytearray(), array("q", [0])

    def add(self, line: bytes) -> None:
        self._lines += line
        self._ends.append(len(self._lines))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def _row(self, index: int) -> dict[str, Any]:
        line = self._lines[self._ends[index] : self._ends[index + 1]]
        facts = _checked(json.loads(line), _LOG, 3)
        return facts | {
            "log": {printable(name[:_MOST_NAME]): each for name, each in facts["log"].items()}
        }


def _width(names: bytearray) -> int:
    """How many bytes each character takes of text in UTF-8, where one of them needs more than 1."""
    if _OF_TWO_BYTES.search(names) is None:
        return 0
    return 2 if _OF_FOUR_BYTES.search(names) is None else 4


def _text_of(names: bytearray, *, may_be_wide: bool) -> str:
    """Return the text, or where there is too much of it, with question marks beyond ASCII."""
    if not may_be_wide and not names.isascii():
        names = names.translate(_MARKS, bytes(range(0x80, 0xC0)))
    return names.decode(errors="surrogatepass")


def _numbers(words: list[str], number: int) -> list[int]:
    if len(words) != number:
        raise ValueError(f"it has {len(words)} numbers, and {number} belong there")
    found = [*map(int, words)]
    for each in found:
        if not -_MOST_TIME < each < _MOST_TIME:
            raise ValueError(f"{each} is too large")
    return found


def _whole(number: int) -> int:
    if not 0 <= number < _MOST_NUMBER:
        raise ValueError(f"{number} is where a count belongs")
    return number


def _below(number: int, most: int) -> int:
    if _whole(number) >= most:
        raise ValueError(f"it has number {number}, and a rank tells {most:,} apart")
    return number


def _checked(found: Any, checks: Mapping[str, Check], num_needed: int) -> dict[str, Any]:
    """Return the known facts among ``found``, texts made printable."""
    for name in [*checks][:num_needed]:
        if name not in found:
            raise ValueError(f"{name!r} is missing")
    known = {}
    for name, value in found.items():
        if name in checks:
            if not checks[name](value):
                raise ValueError(f"{name!r} is {repr(value)[:60]}")
            known[name] = _printable(value)
    return known


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    return [*map(_printable, value)] if isinstance(value, list) else value
