"""Write what ranks wrote: to the launcher's own streams, labelled, and to log files."""

from __future__ import annotations

import os
import select
from pathlib import Path

from lockstep.errors import BadLaunch
from lockstep.launcher.forking import RankProcess, Stream
from lockstep.launcher.output import Labeller
from lockstep.launcher.signals import SignalPipe

# A pipe that polls as writable takes this much without blocking (PIPE_BUF).
_CHUNK_BYTES = 4096


class Console:
    """The launcher's stdout and stderr, and a log file for each rank.

    Whoever reads the launcher's output may stop doing so: a pager, a terminal after Ctrl-S.
    A write must then not keep the launcher from being ended, so it waits for room and for a
    signal at once, and nothing more is written when one came and there was no room.

    Args:
        log_files: The descriptor of each rank's log file; empty if none are kept.
        signals: Where a signal to end arrives.
    """

    def __init__(self, log_files: dict[int, int], signals: SignalPipe) -> None:
        self._log_files = log_files
        self._signals = signals
        self._mute = False
        self.broken = False  # whether nobody can read the output any more
        out = Labeller()
        # On a terminal both streams share the cursor.
        self._labellers = {1: out, 2: out if os.path.sameopenfile(1, 2) else Labeller()}

    def show(self, process: RankProcess, stream: Stream, pieces: list[bytes]) -> None:
        """Write ``pieces`` of a rank's stream, each a whole line or, the last one, a prompt."""
        if not pieces:
            return
        label = b"[rank %d] " % process.rank
        source = (process.rank, stream.destination)
        labeller = self._labellers[stream.destination]
        self.write(stream.destination, labeller.label(source, label, pieces))
        self._log(process.rank, b"".join(pieces))

    def log(self, process: RankProcess, text: str) -> None:
        """Write ``text`` to the log file of a rank only."""
        self._log(process.rank, text.encode(errors="backslashreplace"))

    def finish(self) -> None:
        """End the last line of each stream and close the log files."""
        for destination, labeller in self._labellers.items():
            self.write(destination, labeller.finish())
        for log_file in self._log_files.values():
            os.close(log_file)

    def _log(self, rank: int, data: bytes) -> None:
        """Write ``data`` to the log file of ``rank`` or, if that fails, nothing there any more."""
        view = memoryview(data)
        try:
            while view and rank in self._log_files:
                view = view[os.write(self._log_files[rank], view) :]
        except OSError as error:  # a full disk, mostly: no reason to end the run
            os.close(self._log_files.pop(rank))
            words = f"lockstep: the log of rank {rank} ends here: {error.strerror}.\n"
            self.write(2, self._labellers[2].finish() + words.encode())

    def write(self, destination: int, data: bytes) -> None:
        """Write ``data`` to stdout (1) or stderr (2), waiting for room there."""
        poll = select.poll()
        poll.register(destination, select.POLLOUT)
        poll.register(self._signals, select.POLLIN)
        view = memoryview(data)
        while view and not self._mute and not self.broken:
            ready = dict(poll.poll())
            if destination in ready:
                view = view[self._write_chunk(destination, view[:_CHUNK_BYTES]) :]
                continue
            self._mute = self._signals.is_pending()

    def _write_chunk(self, destination: int, chunk: memoryview) -> int:
        try:
            return os.write(destination, chunk)
        except BlockingIOError:  # someone made it non-blocking, and it had no room after all
            return 0
        except OSError:  # a closed pipe or terminal
            self.broken = True
            return 0


def open_log_files(directory: str | None, ranks: range) -> dict[int, int]:
    """Create ``directory`` and a ``rank-R.log`` in it for each rank.

    Returns:
        Descriptors, not files: a rank closes them after the fork, and a file object that is
        collected later would close whatever has got the number by then.

    Raises:
        BadLaunch: If it can't be.
    """
    if directory is None:
        return {}
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        paths = {rank: Path(directory) / f"rank-{rank}.log" for rank in ranks}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return {rank: os.open(path, flags, 0o666) for rank, path in paths.items()}
    except OSError as error:
        raise BadLaunch(
            f"The logs can't be kept in {directory}: {error.strerror}. Give --log-dir a directory "
            "that exists, or can be created, and can be written to."
        ) from error
