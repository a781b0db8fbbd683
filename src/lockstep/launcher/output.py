"""From the bytes that ranks write to labelled lines on the launcher's streams, and log files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path

from lockstep.deadline import Deadline
from lockstep.errors import BadLaunch
from lockstep.folders import FULL_DISK, open_to_write
from lockstep.launcher.live import Live, terminal
from lockstep.launcher.processes import SignalPipe
from lockstep.launcher.writer import StreamWriter
from lockstep.printable import shown
from lockstep.status import now

# Longer lines are cut, since a line that never ends must not fill the memory.
MAX_LINE_BYTES = 1 << 20
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)")
# A line that stays unfinished for this time is a prompt; others are just being written.
_PROMPT_NS = 100_000_000
# How long a stream may take nothing once a signal has come, before all output is dropped.
_STUCK_SECONDS = 0.5
# The same, before no more pictures of what the ranks do are put behind those that wait.
_PICTURE_SECONDS = 0.2


class LineSplitter:
    r"""Cuts a stream into whole lines.

    One ends in ``\n``, or in ``\r`` where the writer means to write over it: a progress bar
    has to be seen before its line is over.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._rest = bytearray()  # the unfinished line; to append to it doesn't copy it
        self._max_line_bytes = max_line_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data`` to the stream; return the lines that it completes."""
        lines: list[bytes] = []
        if end := max(data.rfind(b"\n"), data.rfind(b"\r")) + 1:
            # Not beyond the last line's end: there the pattern would retry from each byte.
            lines = _LINE.findall(bytes(self._rest) + data[:end])
            self._rest.clear()
        self._rest += data[end:]
        while len(self._rest) >= self._max_line_bytes:
            lines.append(bytes(self._rest[: self._max_line_bytes]) + b"\n")
            del self._rest[: self._max_line_bytes]
        return lines

    @property
    def rest(self) -> bytes:
        """The unfinished line."""
        return bytes(self._rest)

    def finish(self) -> list[bytes]:
        """End the stream; return its unfinished line, with an end."""
        rest = bytes(self._rest)
        self._rest.clear()
        return [rest + b"\n"] if rest else []


class Labeller:
    r"""Labels the lines of several sources that go to one destination.

    Invariant: the output of one source never continues a line of another. One that ends in ``\r``
    stays open, so another source's line is preceded by a newline. So does one without an end, such
    as a prompt; what its source writes next continues it without a label.
    """

    def __init__(self) -> None:
        self._open: Hashable = None  # source of the line that the cursor stands on
        # The end of each source's last line: a newline, \r, or nothing.
        self._ends: dict[Hashable, bytes] = {}

    def label(self, source: Hashable, label: bytes, lines: Iterable[bytes]) -> bytes:
        """The bytes to write for ``lines`` of ``source``."""
        return b"".join(self._label_one(source, label, line) for line in lines)

    def finish(self) -> bytes:
        """The bytes to write at the end, so that other output begins on a line of its own."""
        was_open, self._open = self._open, None
        return b"\n" if was_open is not None else b""

    def _label_one(self, source: Hashable, label: bytes, line: bytes) -> bytes:
        is_open, last_end = self._open == source, self._ends.get(source, b"\n")
        continues = is_open and not last_end
        if line == b"\r" and not continues:  # tqdm writes it before a bar: nothing to show yet
            return b""
        end = line[-1:] if line.endswith((b"\n", b"\r")) else b""
        ends_bar = line in (b"\n", b"\r\n") and last_end == b"\r"
        newline = b"\n" if not is_open and self._open is not None else b""
        self._ends[source] = end
        if ends_bar and not is_open:  # another source's newline has ended it already
            return b""
        self._open = None if end == b"\n" else source
        if ends_bar:
            return b"\n"
        return newline + (b"" if continues else label) + line


class Console:
    """The launcher's stdout and stderr, and a log file for each rank.

    The reader of the launcher's output may stop reading: a pager, or a terminal after Ctrl-S. No
    call but :meth:`wait` and :meth:`finish` waits for it: see :class:`StreamWriter`. Nothing is
    lost by that, unless a signal ends the launcher: then all output is dropped once a stream has
    taken nothing for half a second.
    """

    def __init__(self, signals: SignalPipe, live: Live | None = None) -> None:
        self._log_files: dict[int, int] = {}
        self._signals = signals
        self._live = live  # draws lines below the output
        # When an unfinished line of a rank that reads the terminal is to be shown, as a prompt.
        self._prompts: dict[tuple[int, int], int] = {}
        self._splitters: defaultdict[tuple[int, int], LineSplitter] = defaultdict(LineSplitter)
        self._patience: Deadline | None = None  # since a signal that ends the launcher
        self.broken = False  # whether nobody can read the output any more
        out, to_out = Labeller(), StreamWriter(1, signals.wake)
        self._labellers, self._writers = {1: out, 2: out}, {1: to_out, 2: to_out}
        # On a terminal both streams share the cursor.
        if not os.path.sameopenfile(1, 2):
            self._labellers[2], self._writers[2] = Labeller(), StreamWriter(2, signals.wake)

    def feed(self, rank: int, destination: int, data: bytes, *, show_prompt: bool) -> None:
        """Write the lines that ``data``, of a rank's stdout (1) or stderr (2), completes.

        No data is the stream's end. A prompt is a line without an end.
        """
        source = rank, destination
        splitter = self._splitters[source]
        lines = splitter.feed(data) if data else splitter.finish()
        if self._live is not None:
            self._show(rank, destination, lines)
            if self._live.take_rest(source, _label(rank), splitter.rest) or not show_prompt:
                self._prompts.pop(source, None)
            else:
                self._prompts[source] = now() + _PROMPT_NS
            return
        if data and show_prompt:
            lines += [rest[:-1] for rest in splitter.finish()]
        self._show(rank, destination, lines)

    def _show(self, rank: int, destination: int, lines: list[bytes]) -> None:
        if lines:
            source, label = (rank, destination), _label(rank)
            self._log(rank, b"".join(lines))
            if self._live is not None:
                lines = self._live.take_bars(source, label, lines)
            labelled = self._labellers[destination].label(source, label, lines)
            if self._live is not None and os.isatty(destination):
                labelled = self._live.around(labelled)
            self._writers[destination].put(labelled)

    def draw(self) -> float | None:
        """Bring the lines below the output up to date; return the seconds until the next time."""
        if self._live is None or (number := terminal()) is None:
            return None
        writer = self._writers[number]
        if writer.stuck_seconds > _PICTURE_SECONDS:
            return None  # it tells when all is written
        for rank, destination in [source for source, due in self._prompts.items() if now() >= due]:
            del self._prompts[rank, destination]
            self._live.prompt()
            rests = self._splitters[rank, destination].finish()
            self._show(rank, destination, [rest[:-1] for rest in rests])
        if self._live.goes_on():
            writer.put(self._labellers[number].finish())
        with contextlib.suppress(OSError):  # the terminal is gone since
            size = os.get_terminal_size(number)
            writer.put(self._live.draw(size.columns, size.lines))
        next_times = [self._live.due, *self._prompts.values()]
        return max(0.0, (min(next_times) - now()) / 1e9)

    def say(self, words: str) -> None:
        """Write a line of the launcher's own."""
        line = self._labellers[2].finish() + f"lockstep: {words}\n".encode()
        self._writers[2].put(self._live.around(line) if self._live and os.isatty(2) else line)

    def _log(self, rank: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and rank in self._log_files:
                view = view[os.write(self._log_files[rank], view) :]
        except OSError as error:  # a full disk, mostly: no reason to end the run
            os.close(self._log_files.pop(rank))
            self.say(f"the log of rank {rank} ends here: {error.strerror}.")

    def close(self, tracebacks: Mapping[int, str]) -> None:
        """End all lines, add ``tracebacks`` of ranks to their log files, and close those."""
        for (rank, destination), splitter in self._splitters.items():
            self._show(rank, destination, splitter.finish())
        if self._live is not None and (number := terminal()) is not None:
            self._writers[number].put(self._live.close())
            self._live = None
        for rank, traceback in tracebacks.items():
            self._log(rank, traceback.encode(errors="backslashreplace"))
        for destination, labeller in self._labellers.items():
            self._writers[destination].put(labeller.finish())
        for log_file in self._log_files.values():
            os.close(log_file)
        self._log_files, self._prompts = {}, {}
        self._splitters.clear()

    def begin_anew(self, live: Live | None) -> None:
        """Take the output of ranks that are started again, after :meth:`close`."""
        self._live = live

    def keep_logs(self, directory: str | None, ranks: range, restarts: int = 0) -> None:
        """Write what ranks write to files too: see :func:`open_log_files`.

        A full disk is no reason not to train; nor is anything that happens to a run that has begun.

        Raises:
            BadLaunch: If the directory or a file can't be created.
        """
        try:
            self._log_files = open_log_files(directory, ranks, restarts)
        except OSError as error:
            where = f"{shown(error.filename)}: " if error.filename not in (None, directory) else ""
            told = f"the logs can't be kept in {shown(str(directory))}: {where}{error.strerror}."
            if restarts or error.errno in FULL_DISK:
                self.say(f"{told} The run goes on without.")
                return
            raise BadLaunch(
                f"T{told[1:]} Give --log-dir a directory that exists, or can be created, and can "
                "be written to."
            ) from error

    def is_full(self, destination: int) -> bool:
        """Whether ranks' output that goes there is to be left in their pipes for now."""
        return self._writers[destination].is_full

    @property
    def is_idle(self) -> bool:
        """Whether all is written, or won't be."""
        return all(writer.is_idle for writer in self._writers.values())

    def hasten(self) -> None:
        """A signal has come that ends the launcher: have no more patience with who doesn't read."""
        if self._patience is None:
            self._patience = Deadline(_STUCK_SECONDS)

    def check(self) -> float | None:
        """See whether the streams take what is written; return the seconds until the next time."""
        was_broken = self.broken
        for destination, writer in self._writers.items():
            if (error := writer.take_error()) is None:
                continue
            if error.errno in (errno.EPIPE, errno.EBADF):  # as `head` leaves it
                self.broken = True
                continue
            # A full disk, or a terminal that is gone: no reason to end the run.
            self.say(
                f"{'stdout' if destination == 1 else 'stderr'} can't be written any more: "
                f"{error.strerror}. The run goes on; what ranks write there is lost."
            )
        patience_seconds = self._patience_seconds()
        if self.broken or patience_seconds == 0:
            for writer in self._writers.values():
                writer.drop()
        return patience_seconds if self.broken == was_broken else 0.0

    def _patience_seconds(self) -> float | None:
        """How long the streams have to take something; None as long as they like."""
        if self._patience is None or self.is_idle:
            return None
        stuck_seconds = max(writer.stuck_seconds for writer in self._writers.values())
        return max(self._patience.left(), _STUCK_SECONDS - stuck_seconds)

    def wait(self) -> None:
        """Wait a moment for all to be written, if no signal comes."""
        deadline = Deadline(_STUCK_SECONDS)
        while not self.is_idle and not self._signals.is_pending():
            if not (seconds := deadline.left()):
                return
            self._signals.wait(seconds)
            self.check()

    def finish(self, words: str | None) -> None:
        """Say the last words, and wait until all is written, as every program in a pipe does.

        There is nothing left to look after. A signal ends the wait, if nobody reads.
        """
        if words is not None:
            self.say(words)
        seconds_left = self.check()
        while not self.is_idle:
            self._signals.wait(seconds_left)
            if self._signals.take_ending():
                if self._patience is not None:
                    return
                self.hasten()
            seconds_left = self.check()


def _label(rank: int) -> bytes:
    return b"[rank %d] " % rank


def open_log_files(directory: str | None, ranks: range, restarts: int = 0) -> dict[int, int]:
    """Create ``directory`` and a ``rank-R.log`` in it for each rank; return their descriptors.

    Of ranks that were started again, they have names of their own: ``rank-R.restart-K.log``.

    Raises:
        OSError: If the directory or a file can't be created.
    """
    files: dict[int, int] = {}
    if directory is None:
        return files
    end = f".restart-{restarts}.log" if restarts else ".log"
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            files[rank] = open_to_write(Path(directory) / f"rank-{rank}{end}")
        for file in files.values():
            os.ftruncate(file, 0)
    except OSError:
        for file in files.values():
            os.close(file)
        raise
    return files
