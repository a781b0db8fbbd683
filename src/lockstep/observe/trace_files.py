"""The files of a trace: spans as ranks write them, and JSON in the format of Chrome's tracer.

A rank's file has lines of two kinds: a JSON object with facts, or the name of a span, times in
nanoseconds and numbers: ``NAME START STOP STEP THREAD DETAIL BYTES``; for a bucket ``bucket READY
LAUNCHED DONE STEP NUMBER``, and for what a loader returned ``batch TIME STEP THREAD LOADER SAMPLES
WITH_GRADIENTS``. The last line may be cut off, if the rank was killed.

Source: "Trace Event Format", which Perfetto opens.
"""

from __future__ import annotations

import json
import math
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import TraceError
from lockstep.folders import new_text
from lockstep.observe.columns import distinct
from lockstep.observe.records import RankSpans
from lockstep.observe.trace_reader import lines_of, read
from lockstep.printable import printable

T = TypeVar("T")

# Of names in a line, in which each may take twelve bytes.
_LINE_CHARACTERS = 1 << 13
# The program's track has the number of its process, the rank: Perfetto takes track 0 for that one.
_FIRST_BUCKET_TRACK, _FIRST_OTHER_TRACK = 1_000_000, 2_000_000


def spool_of(folder: Path, rank: int) -> Path:
    """The file to which a rank writes."""
    return folder / f"rank-{rank}.spans"


def in_lines(named: Mapping[str, T]) -> Iterator[dict[str, T]]:
    """Yield what has names, if only that there is nothing, in parts that readers take as lines."""
    some, size = dict[str, T](), 0
    for name, value in named.items():
        if size > _LINE_CHARACTERS:
            yield some
            some, size = {}, 0
        name = name[:_LINE_CHARACTERS]
        some[name] = value
        size += len(name) + 16  # as a number may need
    yield some


def read_folder(folder: Path) -> list[RankSpans]:
    """Read the files of all ranks, in the order of ranks.

    Raises:
        TraceError: If there is none, or one can't be read.
    """
    paths = [*folder.glob("rank-*.spans")]
    if not paths:
        name = printable(str(folder))
        raise TraceError(
            f"There is no trace in {name}. Record one: lockstep run --trace {name} SCRIPT."
        )
    ranks = sorted(map(read, paths), key=lambda found: found.rank)
    numbers = [found.rank for found in ranks]
    if len({*numbers}) < len(numbers):
        raise TraceError(f"{printable(str(folder))} has several files of the same rank.")
    return ranks


def events(found: RankSpans) -> Iterator[dict[str, Any]]:
    """Yield a rank's events, in the format of Chrome's tracer."""
    pid, host = found.rank, found.facts["host"]
    yield _named("process_name", pid, 0, f"rank {pid} on {host}")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    yield _named("thread_name", pid, pid, "program")
    threads = distinct(span.thread for span in found.spans if span.thread)

    def track_of(thread: int) -> int:
        return _FIRST_OTHER_TRACK + bisect_left(threads, thread) if thread else pid

    for thread in threads:
        yield _named("thread_name", pid, track_of(thread), "another thread")
    for number in found.bucket_facts:
        yield _named("thread_name", pid, _FIRST_BUCKET_TRACK + number, f"bucket {number}")
    for span in found.spans:
        args: dict[str, int | str] = {"step": span.step}
        if span.name == "data":
            args |= {"loader": span.detail} if span.detail else {}
        elif span.detail:
            args |= {"operation": span.detail, "bytes": span.num_bytes}
        yield _complete(span.name, pid, track_of(span.thread), span.start, span.stop, args)
    for bucket in found.buckets:
        track = _FIRST_BUCKET_TRACK + bucket.number
        args = {"step": bucket.step, "bytes": found.bucket_facts[bucket.number]["bytes"]}
        yield _complete("bucket", pid, track, bucket.ready, bucket.done, args)
        yield _complete("all-reduce", pid, track, bucket.launched, bucket.done, args)
    for end in found.step_ends:
        if end.memory:
            time = end.time / 1000
            yield {"ph": "C", "name": "memory", "pid": pid, "ts": time, "args": end.memory}
    for entry in found.logged:
        time = (entry["time"] + found.facts["offset"]) / 1000
        for name, value in entry["log"].items():
            if math.isfinite(value):  # JSON has no other numbers
                yield {"ph": "C", "name": "log", "pid": pid, "ts": time, "args": {name: value}}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    name: str, pid: int, tid: int, start: int, stop: int, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": start / 1000, "dur": (stop - start) / 1000}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": args}


def remove_json(folder: Path, rank: int) -> None:
    """Remove what an earlier trace of this rank has left beside its spans, if that can be done."""
    for path in (folder / "trace.json", folder / f"rank-{rank}.json"):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def drop_later_ranks(folder: Path, num_ranks: int) -> None:
    """Remove what an earlier trace of more ranks has left, if that can be done."""
    for path in folder.glob("rank-*.*"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and int(number) >= num_ranks:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def write_json(folder: Path, rank: int) -> None:
    """Make ``rank-R.json`` of a rank's spans, one event in a line."""
    _write_json(folder, read(spool_of(folder, rank)))


def _write_json(folder: Path, found: RankSpans) -> None:
    _replace(folder / f"rank-{found.rank}.json", _array(map(json.dumps, events(found))))


def merge(folder: Path) -> Path | None:
    """Put the ranks' JSON into ``trace.json``, if all ranks have written theirs."""
    paths = sorted(folder.glob("rank-*.json"))
    spools = [*folder.glob("rank-*.spans")]
    if not paths or len(paths) < len(spools):
        return None
    found = (line.rstrip(b",") for path in paths for line in lines_of(path))
    lines = (line for line in found if line not in (b"[", b"]"))
    _replace(folder / "trace.json", _array(line.decode(errors="replace") for line in lines))
    return folder / "trace.json"


def complete(folder: Path, ranks: Sequence[RankSpans]) -> None:
    """Make ``trace.json`` of ``ranks`` if some were killed, and left the folder without."""
    if not (folder / "trace.json").exists():
        for found in ranks:
            _write_json(folder, found)
        merge(folder)


def _array(lines: Iterator[str]) -> Iterator[str]:
    yield "[\n"
    yield next(lines, "{}")
    for line in lines:
        yield ",\n" + line
    yield "\n]\n"


def _replace(path: Path, parts: Iterator[str]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with new_text(temporary) as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:  # a full disk, mostly: leave the room to others
        with suppress(OSError):
            temporary.unlink()
        raise
