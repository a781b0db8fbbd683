"""What is told of a loader's failure: of which samples it was, and what ended a worker."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from traceback import TracebackException, print_exception
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lockstep.deadline import Deadline
from lockstep.printable import signal_name

_MOST_NAMED = 8  # samples
_OF_A_DATASET = " in DataLoader worker process "  # so torch begins what a worker has raised
_ENDING_SECONDS = 1.0  # between the end of a worker's connections and that of its process
_UNSENT = 117  # the exit code of a worker whose batch can't be sent
_MIB = 1 << 20
_TEXT = "what it is given"
_log = logging.getLogger("lockstep")


class _Place(Exception):
    """Stands before an error that can be given no note, as its cause."""


def add_note(error: BaseException, words: str) -> None:
    """Have ``words`` shown with ``error``, once: as a note or, if it refuses, before it."""
    if _is_noted(error, words):
        return
    ways: tuple[Callable[[], object], ...] = (
        lambda: error.add_note(words),
        lambda: BaseException.add_note(error, words),  # whatever the class makes of it
        lambda: object.__setattr__(error, "__notes__", [words]),
    )
    for add in ways:
        with suppress(Exception):
            add()
        if _is_noted(error, words):
            return
    before = _Place(words)
    before.__cause__, before.__context__ = error.__cause__, error.__context__
    before.__suppress_context__ = error.__suppress_context__
    object.__setattr__(error, "__cause__", before)


def _is_noted(error: BaseException, words: str) -> bool:
    with suppress(Exception):
        if words in getattr(error, "__notes__", ()):
            return True
    return isinstance(error.__cause__, _Place) and error.__cause__.args == (words,)


def telling(error: BaseException, words: str) -> BaseException:
    """Return what to raise after ``error``, such that ``words`` are shown: mostly itself.

    StopIteration would end the epoch, on this rank alone and without a word. What isn't an
    Exception ends a worker's process, and torch makes another one of a worker's Exception, which
    may fail, or show nothing. In the program's own process SystemExit and KeyboardInterrupt stay
    what they are: whether they came by a signal can't be told.
    """
    in_worker = get_worker_info() is not None
    told = error
    if isinstance(error, StopIteration) or (in_worker and not isinstance(error, Exception)):
        by = (
            ", as SIGINT does unless it is handled," if isinstance(error, KeyboardInterrupt) else ""
        )
        told = RuntimeError(f"{_repr(error)} was raised{by} in the midst of an epoch.")
    elif not _can_be_shown(error) or (in_worker and not _is_sent_whole(type(error))):
        told = RuntimeError(_repr(error)).with_traceback(error.__traceback__)
    if told is not error and _can_be_shown(error):
        told.__cause__ = error
    if isinstance(told, SystemExit):  # which is shown to nobody
        _log.warning("%s was raised in the midst of an epoch. %s", _repr(told), words)
    add_note(told, words)
    return told


def ends_worker(error: BaseException, told: BaseException) -> bool:
    """Whether a worker is to read no more: torch ends it, and would wait for what it reads then."""
    return told is not error and not isinstance(error, Exception)


def _repr(error: BaseException) -> str:
    with suppress(Exception):
        return repr(error)
    return type(error).__name__


def _can_be_shown(error: BaseException) -> bool:
    """Whether its traceback can be made, for which Python before 3.13 reads any notes."""
    with suppress(Exception):
        TracebackException.from_exception(error, limit=0)
        return True
    return False


def _is_sent_whole(kind: type[BaseException]) -> bool:
    """Whether what torch makes of a worker's exception shows the text that it is given.

    One whose class can't be pickled is sent to nobody, and waited for without an end.
    """
    if getattr(kind, "message", None):
        return False
    try:
        ForkingPickler.dumps(kind)
    except Exception:
        return False
    try:
        made = kind(_TEXT)
    except Exception:
        return True  # torch makes a RuntimeError then
    except BaseException:
        return False
    with suppress(Exception):
        return isinstance(made, kind) and _TEXT in str(made)
    return False


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


def end_worker(
    otherwise: Callable[[BaseException, object], None], error: BaseException, unsent: object
) -> None:
    """End this process of a worker that can't send a batch: it would be waited for without an end.

    Comes in the place of ``multiprocessing.queues.Queue._on_queue_feeder_error()``, which is called
    for what isn't torch's.
    """
    if not (isinstance(unsent, tuple) and len(unsent) == 2 and isinstance(unsent[0], int)):
        return otherwise(error, unsent)  # a number and its batch are torch's
    with suppress(Exception):
        print_exception(error)
    os._exit(_UNSENT)


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
        if code == _UNSENT:
            yield f"Worker {index} couldn't hand over a batch: its error is on stderr."
        elif code > 0:
            yield f"Worker {index} ended with the exit code {code}: the dataset called exit(), say."
        elif code < 0:
            numbers.add(-code)
            yield f"Worker {index} was ended by {signal_name(-code)}."
    codes = [worker.exitcode for worker in workers]
    if not any(codes) and 0 in codes:  # beside another reason, its iterator may have come to an end
        yield (
            f"Worker {codes.index(0)} ended with the exit code 0: it called os._exit(0), say, or "
            "was interrupted by SIGINT between two batches."
        )
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
