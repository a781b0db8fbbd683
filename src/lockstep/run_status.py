"""What the ranks of a run on one host do, for whoever looks: their supervisor, and other processes.

``lockstep run`` shows it while it runs, and ``lockstep status`` finds it by the name of the memory
among the open files of all supervisors. The name is of no file: nothing is left behind.
"""

from __future__ import annotations

import json
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.memory_files import files_in_memory, memory_file, open_in_memory
from lockstep.printable import printable
from lockstep.status import (
    DETAIL_AT,
    MOST_DETAIL_BYTES,
    MOST_LOGGED_BYTES,
    PAGE_BYTES,
    RANK_BYTES,
    STATES,
    Number,
    RankStatus,
    now,
)

MEMORY_NAME = "lockstep-status"
VERSION = 1


def in_time(seconds: float) -> str:
    """Return a length of time, as in 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_a_second(number: float, what: str) -> str:
    """Return a rate, as in "1,234 steps/s"."""
    return f"{number:,.0f} {what}/s" if number >= 100 else f"{number:.3g} {what}/s"


class RankState(NamedTuple):
    """What a rank does at one moment."""

    pid: int  # 0 before it has begun
    rank: int
    state: str  # one of STATES
    detail: str  # of a wait, the operation
    since: int  # when it came into this state, by now()
    waited: int  # nanoseconds that it has waited for others, this wait included
    num_steps: int
    num_samples: int
    epoch: int
    num_batches: int
    all_batches: int
    logged_step: int
    last_step: int
    values: dict[str, float]  # what it logged last
    stacks: int
    num_begun: int


# The numbers that a RankState has under their names in lower case.
_SHOWN = {each.name.lower(): each for each in Number if each.name.lower() in RankState._fields}


class ShownRank(RankStatus):
    """The pages of one rank, as others read them."""

    def read(self, *, with_values: bool = True) -> RankState:
        """Return what the rank does; ``with_values`` that it logged."""
        found: dict[str, Any] = {name: self._numbers[place] for name, place in _SHOWN.items()}
        # Whatever a rank that runs wild has left there is shown.
        found["state"] = STATES[found["state"] % len(STATES)]
        if found["state"] == "wait":
            found["waited"] += max(0, now() - found["since"])
        detail = bytes(self._memory[DETAIL_AT : DETAIL_AT + MOST_DETAIL_BYTES]).rstrip(b"\0")
        found["detail"] = printable(detail.decode(errors="replace"))
        found["values"] = {}
        if with_values:
            found["logged_step"], found["last_step"], data = self._read_log()
            found["values"] = _numbers_in(_object_in(data))
        return RankState(**found)

    def _read_log(self) -> tuple[int, int, bytes]:
        numbers = self._numbers
        for _ in range(100):  # a rank that was killed may leave an odd version for ever
            version = numbers[Number.LOG_VERSION]
            size = max(0, min(numbers[Number.LOGGED_BYTES], MOST_LOGGED_BYTES))
            data = bytes(self._memory[PAGE_BYTES : PAGE_BYTES + size])
            step, last = numbers[Number.LOGGED_STEP], numbers[Number.LAST_STEP]
            if version % 2 == 0 and version == numbers[Number.LOG_VERSION]:
                return step, last, data
        return 0, 0, b""


def _object_in(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a page; an empty one if there is none."""
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers_in(found: dict[str, Any]) -> dict[str, float]:
    """Return what are numbers, by names that a terminal can show."""
    numbers = {}
    for name, value in found.items():
        if isinstance(value, int | float):
            with suppress(OverflowError):  # a whole number without a float
                numbers[printable(name)] = float(value)
    return numbers


class RunStatus:
    """The pages of a run on one host: facts about it, and what each of its ranks does."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memoryview(memory)
        num_ranks = len(memory) // RANK_BYTES
        first = len(memory) - num_ranks * RANK_BYTES
        self.ranks = [
            ShownRank(self._memory[start : start + RANK_BYTES])
            for start in range(first, len(memory), RANK_BYTES)
        ]

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """How large the pages are of a run with so many ranks on this host."""
        return PAGE_BYTES + num_ranks * RANK_BYTES

    @classmethod
    def create(cls, program: str, num_ranks: int) -> RunStatus:
        """Make the pages, in memory that is shared with the processes that this one forks.

        Raises:
            OSError: If there is no room for them, or no descriptor.
        """
        size = cls.num_bytes(num_ranks)
        descriptor = memory_file(MEMORY_NAME)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a rank that lacked a page would be ended
            memory = mmap.mmap(descriptor, size)  # has a descriptor of its own, which stays open
        finally:
            os.close(descriptor)
        facts = {"version": VERSION, "pid": os.getpid(), "program": program[:500], "at": now()}
        data = json.dumps(facts).encode()[: PAGE_BYTES - 1] + b"\0"
        memory[: len(data)] = data
        return cls(memory)

    @classmethod
    def of(cls, pid: int) -> RunStatus:
        """Open the pages that another process of this user has made.

        Raises:
            OSError: If it has none.
        """
        for owner, path in files_in_memory(MEMORY_NAME):
            if owner == pid:
                descriptor = open_in_memory(path, MEMORY_NAME, os.O_RDWR)
                try:
                    return cls(mmap.mmap(descriptor, 0))
                finally:
                    os.close(descriptor)
        raise OSError(f"Process {pid} has no pages of a run.")

    def clear(self, num_ranks: int) -> None:
        """Forget what ranks did that have ended: so many others are started in their places."""
        first = len(self._memory) - len(self.ranks) * RANK_BYTES
        self._memory[first:] = bytes(len(self.ranks) * RANK_BYTES)
        for rank in self.ranks[num_ranks:]:
            rank.leave_out()

    def read(self) -> list[RankState]:
        """Return what each rank does of those that there are."""
        states = [rank.read() for rank in self.ranks]
        return [state for state in states if state.rank >= 0]

    @property
    def facts(self) -> dict[str, Any]:
        """The supervisor's process id, its program, and when it began, by now(); or nothing."""
        found = _object_in(bytes(self._memory[:PAGE_BYTES]).split(b"\0", 1)[0])
        kinds = {"version": int, "pid": int, "program": str, "at": int}
        if not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
            return {}
        if abs(found["at"]) >= 1 << 63:  # a time, as a rank that runs wild may leave it
            return {}
        return found | {"program": printable(found["program"])}


def stat_fields(pid: int) -> list[str]:
    """Return fields 3 and up of /proc/PID/stat: state, parent, ...; 2 may hold any characters."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
