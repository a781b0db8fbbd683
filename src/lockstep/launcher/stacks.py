"""Where ranks are at this moment: the stacks that they write when asked to."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.deadline import Deadline
from lockstep.launcher.failures import is_users_file
from lockstep.memory_files import open_in_memory
from lockstep.printable import printable
from lockstep.run_status import RankState
from lockstep.status import STACKS_NAME, STACKS_SIGNAL

_DUMP_SECONDS, _POLL_SECONDS = 2.0, 0.02
# After so many polls in which it hasn't grown, a dump is whole.
_NUM_SAME = 3
# The main thread's stack, which is the last, has no more frames, and is no longer.
_MOST_FRAMES, _MOST_DUMP_BYTES = 100, 1 << 20
# A number of more digits is none of faulthandler's, and of thousands none of Python's.
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>[0-9]{1,9}) in (?P<function>.*)')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
# The function of the launcher that calls the program.
_STARTERS = ("_run_script", "_run_module", "_call")


class Frame(NamedTuple):
    """A line of a stack, the innermost of which come first."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = self.file
        with suppress(OSError, ValueError):  # the current folder is gone
            path = os.path.relpath(self.file)
        file = self.file if path.startswith("..") else path
        return printable(f"{file}:{self.line}, in {self.function}")


def dump(rank: RankState, seconds: float | None = None) -> str:
    """Have a rank write the stacks of its threads, and return them; "" if it doesn't in time."""
    try:
        mask = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{rank.pid}/status").read_text(), re.M)
        # A process that doesn't catch the signal would be ended by it.
        if mask is None or not int(mask[1], 16) >> (STACKS_SIGNAL - 1) & 1:
            return ""
        path = f"/proc/{rank.pid}/fd/{rank.stacks}"
        # The numbers are what the rank wrote, and its other files are its own.
        with open(open_in_memory(path, STACKS_NAME, os.O_RDWR), "r+b", buffering=0) as file:
            file.truncate(0)
            os.kill(rank.pid, STACKS_SIGNAL)
            deadline = Deadline(_DUMP_SECONDS if seconds is None else seconds)
            sizes = [0]
            # It writes thread after thread, and may be interrupted.
            while deadline.left() and not (sizes[-1] and len({*sizes[-_NUM_SAME:]}) == 1):
                time.sleep(_POLL_SECONDS)
                sizes.append(os.fstat(file.fileno()).st_size)
            size = sizes[-1]
            file.seek(max(0, size - _MOST_DUMP_BYTES))
            return file.read(_MOST_DUMP_BYTES).decode(errors="replace")
    except OSError:  # it has ended
        return ""


def main_stack(dump: str) -> list[Frame]:
    """The stack of the main thread, which a dump has last, without the launcher's frames."""
    start = max((found.start() for found in _THREAD.finditer(dump)), default=0)
    frames = [
        Frame(found["file"], int(found["line"]), found["function"])
        for found in itertools.islice(_FRAME.finditer(dump, start), _MOST_FRAMES)
    ]
    return [*itertools.takewhile(lambda frame: frame.function not in _STARTERS, frames)]


def place_in(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line of the program's own files, or else of all; None if there is none."""
    lines = (frame for frame in stack if is_users_file(frame.file))
    return next(lines, stack[0] if stack else None)
