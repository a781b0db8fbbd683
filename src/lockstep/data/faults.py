"""What is told of a loader's failure: of which samples it was, and what ended a worker."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lockstep.deadline import Deadline
from lockstep.printable import signal_name

_MOST_NAMED = 8  # samples
_OF_A_DATASET = " in DataLoader worker process "  # so torch begins what a worker has raised
_ENDING_SECONDS = 1.0  # between the end of a worker's connections and that of its process
_MIB = 1 << 20


def add_note(error: BaseException, words: str) -> None:
    """Add ``words`` to what is shown of ``error``, once."""
    with suppress(Exception):  # a class may refuse attributes
        if words not in getattr(error, "__notes__", ()):
            error.add_note(words)


def in_place_of(error: Exception, words: str) -> RuntimeError | None:
    """Return what to raise instead of ``error``, with ``words`` added to what is shown; or None.

    StopIteration would end the epoch, on this rank alone and without a word. Of a class that has a
    ``message``, as groups of exceptions, torch makes another one of a worker's, which may fail.
    """
    told = None
    if isinstance(error, StopIteration):
        told = RuntimeError(f"StopIteration({error.value!r}) was raised in the midst of an epoch.")
    elif get_worker_info() is not None and getattr(type(error), "message", None):
        told = RuntimeError(f"{type(error).__name__}: {error}")
    if told is not None:
        add_note(told, words)
    return told


def samples_in_words(indices: Sequence[Any], first: int) -> str:
    """Name samples, the first of which is at the position ``first`` of the epoch."""
    named = ", ".join(repr(index) for index in indices[:_MOST_NAMED])
    if len(indices) == 1:
        return f"sample {named}, at position {first:,} of the epoch"
    more = f" and {len(indices) - _MOST_NAMED:,} more" if len(indices) > _MOST_NAMED else ""
    last = first + len(indices) - 1
    return f"samples {named}{more}, at positions {first:,} to {last:,} of the epoch"


class _Kills(NamedTuple):
    """How many processes the kernel has killed because memory was out."""

    of_group: int | None  # the control group's; None if it isn't known
    of_host: int | None


def _count_kills() -> _Kills:
    return _Kills(_in_group(), _number_in(Path("/proc/vmstat")))


def _in_group() -> int | None:
    """The number of this process's control group, of version 2 or 1."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            version = "memory" if kinds else ""
            name = "memory.oom_control" if kinds else "memory.events"
            if kinds and "memory" not in kinds.split(","):
                continue
            for folder in (f"/sys/fs/cgroup/{version}{path}", f"/sys/fs/cgroup/{version}"):
                number = _number_in(Path(folder) / name)
                if number is not None:
                    return number
    return None


def _number_in(path: Path) -> int | None:
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return None if found is None else int(found[1])
    return None


def telling_how_workers_end(batches: Any) -> Iterator[Any]:
    """Yield from an iterator of torch's, and name what ended a worker if one doesn't come back.

    Torch then raises an error of its own or, if the worker's tensors can't be fetched any more,
    that of a connection. If the program is at something else when a worker ends, torch raises its
    error there, which names the signal alone.
    """
    before = None
    try:
        before = _count_kills()
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:
        if _OF_A_DATASET not in str(error):
            for words in _how_ended(getattr(batches, "_workers", ()), before):
                add_note(error, words)
        raise


def _how_ended(workers: Sequence[Any], before: _Kills | None) -> Iterator[str]:
    """Yield sentences about workers that have ended, or are ending."""

    def has_any_ended() -> bool:
        return any(worker.exitcode is not None for worker in workers)

    if workers and not Deadline(_ENDING_SECONDS).until(has_any_ended, _ENDING_SECONDS / 100):
        return
    numbers = set()
    for index, worker in enumerate(workers):
        code = worker.exitcode or 0
        if code > 0:
            yield f"Worker {index} ended with the exit code {code}: the dataset called exit(), say."
        elif code < 0:
            numbers.add(-code)
            yield f"Worker {index} was ended by {signal_name(-code)}."
    codes = [worker.exitcode for worker in workers]
    if not any(codes) and 0 in codes:  # beside another reason, its iterator may have come to an end
        yield f"Worker {codes.index(0)} ended with the exit code 0: it called os._exit(0), say."
    if signal.SIGKILL in numbers:
        yield _who_kills(before)
    if signal.SIGBUS in numbers:
        yield _room_for_batches()


def _who_kills(before: _Kills | None) -> str:
    now = _count_kills()
    before = before or now
    advice = (
        "Use fewer workers, a smaller prefetch_factor or smaller batches, or allow more memory."
    )
    for place, then, later in zip(
        ("of this control group", "of this host"), before, now, strict=True
    ):
        if then is not None and later is not None and later > then:
            return (
                f"Since the epoch began, the kernel has killed {later - then} of the processes "
                f"{place} because memory was out. {advice}"
            )
    known = ", though it has counted none since the epoch began" if now.of_host is not None else ""
    return (
        "SIGKILL comes from 'kill -9' or, most often, from the kernel when memory is out"
        f"{known}: 'dmesg' may tell. If so: {advice[:1].lower()}{advice[1:]}"
    )


def _room_for_batches() -> str:
    words = "SIGBUS mostly means that /dev/shm is full, in which workers hand over their batches"
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        free, size = (found.f_frsize * number / _MIB for number in (found.f_bavail, found.f_blocks))
        words += f"; it has {size:,.0f} MiB, of which {free:,.0f} are free now"
    return (
        words + ". Make it larger (in a container by --shm-size or --ipc=host), or use fewer "
        "workers, a smaller prefetch_factor or smaller batches."
    )
