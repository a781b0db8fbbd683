"""``log()``: numbers of a step, such as the loss, to where they are seen and kept."""

from __future__ import annotations

import atexit
import csv
import errno
import itertools
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, SupportsFloat

import torch

from lockstep import spans
from lockstep.arguments import as_number, as_whole_number, refusal
from lockstep.comm import uncompiled
from lockstep.folders import new_text, open_named, path_given
from lockstep.observe.event_files import EventFile
from lockstep.observe.faults import give_up, make_folder, only_observing, write_line
from lockstep.printable import printable
from lockstep.run_status import in_a_second, in_time
from lockstep.world import this_rank

Values = Mapping[str, float]
Sink = Callable[[int, Values], object]
_SECONDS_BETWEEN_LINES = 10.0
# Of a row that is continued, characters and columns: as a list it takes more than in the file.
_MOST_IN_A_ROW, _MOST_COLUMNS = 1 << 20, 1 << 14
_LOST = "What is logged from now on isn't written there."


@uncompiled
def log(
    values: Mapping[str, SupportsFloat] | None = None,
    /,
    *,
    step: int | None = None,
    total: int | None = None,
    **named: SupportsFloat,
) -> None:
    """Show and record numbers of a step, such as the loss. ::

        for step, (x, y) in enumerate(loader):
            ...
            lockstep.log(loss=loss, total=num_steps)
        lockstep.log({"val/accuracy": accuracy(model)}, step=step)

    Rank 0's are recorded: by the trace, if one is being recorded, and wherever
    :func:`lockstep.log_to` says. On a terminal ``lockstep run`` shows them while the program runs;
    elsewhere rank 0 prints a line every ten seconds. Any rank may call it, or only one; it waits
    for no other. For a mean over the ranks, give it one: see :func:`lockstep.mean` and
    :func:`lockstep.reduce`.

    Args:
        values: Numbers or tensors of one element, by name. A tensor on a GPU is waited for.
        step: The number of the step; by default one more than at the last call, from 0.
        total: The number of steps in all, from which the time that is left is told.
        **named: More values, for names that are words of Python.

    Raises:
        TypeError: If a value isn't a number.
        ValueError: If a step is negative.
    """
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(refusal("log()'s first argument", values, "a dict of numbers by name"))
    numbers = {
        str(name): _as_number(str(name), value)
        for name, value in {**(values or {}), **named}.items()
    }
    whole = "a whole number, at least 0"
    if step is not None:
        step = as_whole_number("step", step, whole, at_least=0)
    if total is not None:
        total = as_whole_number("total", total, whole, at_least=0)
    rank = this_rank()
    if rank == 0:
        _logger.log(numbers, step, total)
    elif spans.status is not None:
        spans.status.log(step or 0, total or 0, numbers)


def _as_number(name: str, value: object) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return as_number(f"{name!r} in log()", value, "a number or a tensor of one element")


def log_to(*sinks: str | os.PathLike[str] | Sink, lines: bool = True) -> None:
    """Say where :func:`lockstep.log` records, from now on. ::

        lockstep.log_to("run1/log.csv", "run1/log.jsonl")
        lockstep.log_to(lambda step, values: wandb.log(dict(values), step=step))

    Every rank may call it: only rank 0 writes, and a second call replaces the first. Files that
    exist are continued, as a program that goes on from a checkpoint needs it.

    What can't be written, to a full disk or a folder that is gone say, doesn't end the program:
    that is told of once, and nothing more is written there. So are functions left out from then on
    that raise an OSError, as most do that reach no server; other errors are the program's.

    Args:
        *sinks: The name of a file that ends in ``.csv`` (a column for the step and one for each
            name) or ``.jsonl`` (an object in each line; NaN and infinity are ``null``); any other
            name is a folder for TensorBoard. Or a function of a step and the values by name, for
            all else. None: nowhere.
        lines: Whether rank 0 prints a line from time to time where ``lockstep run`` shows nothing.

    Raises:
        TypeError: If a sink is neither a path nor callable.
        FileExistsError: If what is to be a folder is a file.
    """
    made = [_sink_of(sink) for sink in sinks] if this_rank() == 0 else []
    _logger.send_to([sink for sink in made if sink is not None], lines=lines)


def _sink_of(sink: object) -> Sink | None:
    """Return what writes to ``sink``; None if it can't be written to."""
    if callable(sink):
        return sink
    if not isinstance(sink, str | os.PathLike):
        raise TypeError(refusal("A sink of log_to()", sink, "a path or a function"))
    path = Path(path_given("A sink of log_to()", sink, "run1/log.csv"))
    kinds: dict[str, Callable[[Path], Sink]] = {".csv": _Csv, ".jsonl": _JsonLines}
    with only_observing(f"log_to() can't write to {path}", _LOST):
        return kinds.get(path.suffix.lower(), EventFile)(path)
    return None


def _opened(path: Path, mode: str) -> IO[str]:
    """Open a file whose writes are at once, and don't wait: it may be a pipe."""
    make_folder(path.parent)
    opener = partial(_open_without_waiting, 0o666)
    return open(path, mode, buffering=1, newline="", opener=opener)


def _open_without_waiting(mode: int, path: str, flags: int) -> int:
    return open_named(path, flags | os.O_NONBLOCK, mode)


class _JsonLines:
    """Writes an object in each line of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _opened(path, "a")
        self.close = self._file.close

    def __call__(self, step: int, values: Values) -> None:
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")


class _Csv:
    """Writes rows to a file, which is written anew when there is a column more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _opened(path, "a+")
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise OSError(errno.ENOTSUP, "it is no file")
            self._columns = next(self._rows(), [])
        except OSError:
            self._file.close()
            raise
        self._file.seek(0, os.SEEK_END)

    def __call__(self, step: int, values: Values) -> None:
        missing = [name for name in ("step", *values) if name not in self._columns]
        if missing:
            self._add(missing)
        row = {"step": step, **values}
        csv.writer(self._file).writerow([row.get(name, "") for name in self._columns])

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> Iterator[list[str]]:
        """Yield the rows of the file, the heading first."""
        self._file.seek(0)
        lines = _LinesOfRows(self._file)
        try:
            for row in csv.reader(lines):
                lines.begin_row()
                yield row
        except (csv.Error, UnicodeError, ValueError) as error:
            raise OSError(errno.EINVAL, f"what it has can't be continued ({error})") from error

    def _add(self, columns: list[str]) -> None:
        before = len(self._columns)
        self._columns += columns
        temporary = self.path.with_suffix(".csv.tmp")
        try:
            with new_text(temporary) as file:
                writer = csv.writer(file)
                writer.writerow(self._columns)
                rows = itertools.islice(self._rows(), 1, None)
                # A row that had lacked columns lacks them still, or a wide heading fills the disk.
                writer.writerows(
                    [*row, *[""] * len(columns)] if len(row) == before else row for row in rows
                )
            os.replace(temporary, self.path)
        except OSError:  # what there was is kept
            with suppress(OSError):
                temporary.unlink()
            raise
        self._file.close()
        self._file = _opened(self.path, "a+")


class _LinesOfRows:
    """The lines of a file; a row may have several, and takes a bounded memory."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.begin_row()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(self._num_left + 1)
        self._num_left -= len(line)
        self._num_columns += line.count(",")
        if self._num_left < 0 or self._num_columns >= _MOST_COLUMNS:
            raise ValueError("a row is longer than those of logs")
        if not line:
            raise StopIteration
        return line

    def begin_row(self) -> None:
        """Let the next line be the first of a row."""
        self._num_left, self._num_columns = _MOST_IN_A_ROW, 0


class _Logger:
    """Where rank 0's values go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: list[Sink] = []
        self._lines = True
        self._next_step = self._total = 0
        # When a line was printed last, and of which step; and what has come since.
        self._printed: tuple[float, int] | None = None
        self._unprinted: dict[str, float] = {}

    def send_to(self, sinks: list[Sink], *, lines: bool) -> None:
        with self._lock:
            former, self._sinks, self._lines = self._sinks, sinks, lines
            for sink in former:
                if isinstance(sink, _Csv | _JsonLines | EventFile):
                    with only_observing(f"log_to() can't write to {sink.path}", _LOST):
                        sink.close()

    def log(self, values: dict[str, float], step: int | None, total: int | None) -> None:
        with self._lock:
            step = self._next_step if step is None else step
            self._next_step = step + 1
            self._total = self._total if total is None else total
            if spans.recorder is not None:
                spans.recorder.log(values)
            if spans.status is not None:
                spans.status.log(step, self._total, values)
            for sink in [*self._sinks]:
                try:
                    sink(step, values)
                except OSError as error:
                    self._leave_out(sink, error)
            if self._lines and (spans.status is None or not spans.status.is_shown):
                self._unprinted |= values
                self._print_at_times(step)

    def _leave_out(self, sink: Sink, error: OSError) -> None:
        self._sinks.remove(sink)
        name = getattr(sink, "path", None) or getattr(sink, "__qualname__", type(sink).__name__)
        give_up(f"log_to() can't write to {name}", error, _LOST)
        if isinstance(sink, _Csv | _JsonLines | EventFile):
            with suppress(OSError):  # what could not be written can't be now
                sink.close()

    def _print_at_times(self, step: int) -> None:
        now = spans.now() / 1e9
        if self._printed is None:
            atexit.register(self._print_rest)
        elif now - self._printed[0] < _SECONDS_BETWEEN_LINES:
            return
        self._print(step, now)

    def _print_rest(self) -> None:
        with self._lock:
            if self._unprinted:
                self._print(self._next_step - 1, spans.now() / 1e9)

    def _print(self, step: int, now: float) -> None:
        words = [f"step {step:,}" + (f"/{self._total:,}" if self._total else "")]
        words += [f"{printable(name)} {value:.4g}" for name, value in self._unprinted.items()]
        if self._printed is not None and step > self._printed[1]:
            then, former = self._printed
            rate = (step - former) / (now - then)
            words.append(in_a_second(rate, "steps"))
            if self._total > step:
                words.append(f"{in_time((self._total - step) / rate)} left")
        if write_line("  ".join(words)):
            self._printed, self._unprinted = (now, step), {}


_logger = _Logger()
atexit.register(lambda: _logger.send_to([], lines=False))
