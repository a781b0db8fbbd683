"""What the ranks of one host do at this moment, in memory that they share with their supervisor.

A rank writes a few numbers where its state changes, which costs less than a microsecond.
``lockstep run`` shows them while it runs, and ``lockstep status`` finds them by the name of the
memory among the open files of all supervisors. The name is of no file: nothing is left behind.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum, auto
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.memory_files import files_in_memory, memory_file, open_in_memory
from lockstep.printable import printable

# The program's own code, its end, and names of spans (lockstep.spans.NAMES) that tell of others.
STATES = ("program", "data", "launch", "wait", "save", "end")
# Makes a rank write the stacks of its threads. Programs use SIGUSR1 and SIGUSR2 for themselves.
STACKS_SIGNAL = signal.SIGRTMAX - 2
STACKS_NAME, MEMORY_NAME = "lockstep-stacks", "lockstep-status"
VERSION = 1
# Each rank has two pages of 4 KiB: numbers and the detail of its state, and what it logs. Before
# the first rank there is one about the run.
PAGE_BYTES = 4096
_RANK_BYTES = 2 * PAGE_BYTES
_DETAIL_AT, _MOST_DETAIL_BYTES = 1024, 64
_MOST_LOGGED_BYTES = PAGE_BYTES


class _Number(IntEnum):
    """The place of a number of a rank, in units of 8 bytes."""

    PID = 0
    RANK = auto()
    STATE = auto()  # an index of STATES
    SINCE = auto()  # when it came into its state, by now()
    WAITED = auto()  # nanoseconds in the state "wait" that are over
    NUM_STEPS = auto()
    NUM_SAMPLES = auto()  # of global batches, from the loader
    EPOCH = auto()
    NUM_BATCHES = auto()  # of this epoch that were loaded
    ALL_BATCHES = auto()  # of an epoch; 0: unknown
    LOGGED_STEP = auto()
    LAST_STEP = auto()  # the number of steps in all; 0: unknown
    LOGGED_BYTES = auto()
    LOG_VERSION = auto()  # odd while the log is being written
    STACKS = auto()  # the rank's descriptor of a file that takes its stacks; 0: none
    ASKED = auto()  # whether the rank is to stop for more hosts, and whether it does: an Asked
    NUM_BEGUN = auto()  # steps of a loop over steps(), from the run's beginning on; 0: unknown


class Asked(IntEnum):
    """Whether a rank is to stop at a step's end, as more hosts have come."""

    NO = 0
    TO_STOP = auto()
    STOPS = auto()


now = time.perf_counter_ns  # CLOCK_MONOTONIC, the same for all processes of a host


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
_SHOWN = {each.name.lower(): each for each in _Number if each.name.lower() in RankState._fields}


class RankStatus:
    """The pages of one rank. Only the rank writes, from any of its threads, but for :attr:`asked`.

    Attributes:
        is_shown: Whether the supervisor shows them while the program runs.
    """

    def __init__(self, memory: memoryview) -> None:
        self.is_shown = False
        self._memory = memory
        self._numbers = memory[:_DETAIL_AT].cast("q")
        self._logged: dict[str, float] = {}

    def begin(self, rank: int) -> None:
        """The program of this rank begins."""
        self._numbers[_Number.SINCE] = now()
        self._numbers[_Number.RANK] = rank
        self._numbers[_Number.PID] = os.getpid()

    def leave_out(self) -> None:
        """There is no such rank any more."""
        self._numbers[_Number.RANK] = -1

    @property
    def asked(self) -> Asked:
        """Whether its launcher has asked it to stop, and whether it does."""
        return Asked(self._numbers[_Number.ASKED] % len(Asked))

    @asked.setter
    def asked(self, value: Asked) -> None:
        self._numbers[_Number.ASKED] = value

    def enter(self, state: str, detail: str) -> int:
        """Come into a state; return the former one, for :meth:`leave`."""
        numbers = self._numbers
        former = numbers[_Number.STATE]
        if state in STATES:
            text = detail.encode()[:_MOST_DETAIL_BYTES]
            self._memory[_DETAIL_AT : _DETAIL_AT + _MOST_DETAIL_BYTES] = text.ljust(
                _MOST_DETAIL_BYTES, b"\0"
            )
            numbers[_Number.SINCE] = now()
            numbers[_Number.STATE] = STATES.index(state)
        return former

    def leave(self, former: int) -> None:
        """Go back to the state that :meth:`enter` returned."""
        numbers, time_now = self._numbers, now()
        if STATES[numbers[_Number.STATE]] == "wait":
            numbers[_Number.WAITED] += time_now - numbers[_Number.SINCE]
        numbers[_Number.STATE] = former
        numbers[_Number.SINCE] = time_now

    def begin_step(self, step: int) -> None:
        """A step of a loop over steps() begins, from 0."""
        self._numbers[_Number.NUM_BEGUN] = step + 1

    def count_step(self) -> None:
        """An optimizer has stepped."""
        self._numbers[_Number.NUM_STEPS] += 1

    def count_batch(self, epoch: int, num_batches: int, all_batches: int, samples: int) -> None:
        """The loader has made ``num_batches`` of an epoch, the last one of ``samples``."""
        self._numbers[_Number.NUM_SAMPLES] += samples
        self._numbers[_Number.EPOCH] = epoch
        self._numbers[_Number.ALL_BATCHES] = all_batches
        self._numbers[_Number.NUM_BATCHES] = num_batches

    def log(self, step: int, last_step: int, values: Mapping[str, float]) -> None:
        """The program logs values; those of before are kept, as far as there is room."""
        self._logged = {**self._logged, **values}
        data = json.dumps(self._logged).encode()
        if len(data) > _MOST_LOGGED_BYTES:
            self._logged = dict(values)
            data = json.dumps(self._logged).encode()
        if len(data) > _MOST_LOGGED_BYTES:
            self._logged, data = {}, b"{}"
        numbers = self._numbers
        numbers[_Number.LOG_VERSION] += 1
        self._memory[PAGE_BYTES : PAGE_BYTES + len(data)] = data
        numbers[_Number.LOGGED_BYTES] = len(data)
        numbers[_Number.LOGGED_STEP], numbers[_Number.LAST_STEP] = step, last_step
        numbers[_Number.LOG_VERSION] += 1

    def show_stacks_in(self, descriptor: int) -> None:
        """Tell where a reader finds the stacks that the rank dumps."""
        self._numbers[_Number.STACKS] = descriptor

    def read(self, *, with_values: bool = True) -> RankState:
        """Return what the rank does; ``with_values`` that it logged."""
        found: dict[str, Any] = {name: self._numbers[place] for name, place in _SHOWN.items()}
        # Whatever a rank that runs wild has left there is shown.
        found["state"] = STATES[found["state"] % len(STATES)]
        if found["state"] == "wait":
            found["waited"] += max(0, now() - found["since"])
        detail = bytes(self._memory[_DETAIL_AT : _DETAIL_AT + _MOST_DETAIL_BYTES]).rstrip(b"\0")
        found["detail"] = printable(detail.decode(errors="replace"))
        found["logged_step"], found["last_step"], data = self._read_log()
        found["values"] = _numbers_in(_object_in(data)) if with_values else {}
        return RankState(**found)

    def _read_log(self) -> tuple[int, int, bytes]:
        numbers = self._numbers
        for _ in range(100):  # a rank that was killed may leave an odd version for ever
            version = numbers[_Number.LOG_VERSION]
            size = max(0, min(numbers[_Number.LOGGED_BYTES], _MOST_LOGGED_BYTES))
            data = bytes(self._memory[PAGE_BYTES : PAGE_BYTES + size])
            step, last = numbers[_Number.LOGGED_STEP], numbers[_Number.LAST_STEP]
            if version % 2 == 0 and version == numbers[_Number.LOG_VERSION]:
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
        num_ranks = len(memory) // _RANK_BYTES
        first = len(memory) - num_ranks * _RANK_BYTES
        self.ranks = [
            RankStatus(self._memory[start : start + _RANK_BYTES])
            for start in range(first, len(memory), _RANK_BYTES)
        ]

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """How large the pages are of a run with so many ranks on this host."""
        return PAGE_BYTES + num_ranks * _RANK_BYTES

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
        first = len(self._memory) - len(self.ranks) * _RANK_BYTES
        self._memory[first:] = bytes(len(self.ranks) * _RANK_BYTES)
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
