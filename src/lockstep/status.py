"""What a rank does at this moment, in memory that it shares with its supervisor.

A rank writes a few numbers where its state changes, which costs less than a microsecond. See
``lockstep.run_status`` for those who read them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from enum import IntEnum, auto

# The program's own code, its end, and names of spans (lockstep.spans.NAMES) that tell of others.
STATES = ("program", "data", "launch", "wait", "save", "end")
# Makes a rank write the stacks of its threads. Programs use SIGUSR1 and SIGUSR2 for themselves.
STACKS_SIGNAL = signal.SIGRTMAX - 2
STACKS_NAME = "lockstep-stacks"
# Each rank has two pages of 4 KiB: numbers and the detail of its state, and what it logs. Before
# the first rank there is one about the run.
PAGE_BYTES = 4096
RANK_BYTES = 2 * PAGE_BYTES
DETAIL_AT, MOST_DETAIL_BYTES = 1024, 64
MOST_LOGGED_BYTES = PAGE_BYTES


class Number(IntEnum):
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


class RankStatus:
    """The pages of one rank. Only the rank writes, from any of its threads, but for :attr:`asked`.

    Attributes:
        is_shown: Whether the supervisor shows them while the program runs.
    """

    def __init__(self, memory: memoryview) -> None:
        self.is_shown = False
        self._memory = memory
        self._numbers = memory[:DETAIL_AT].cast("q")
        self._logged: dict[str, float] = {}

    def begin(self, rank: int) -> None:
        """The program of this rank begins."""
        self._numbers[Number.SINCE] = now()
        self._numbers[Number.RANK] = rank
        self._numbers[Number.PID] = os.getpid()

    def leave_out(self) -> None:
        """There is no such rank any more."""
        self._numbers[Number.RANK] = -1

    @property
    def asked(self) -> Asked:
        """Whether its launcher has asked it to stop, and whether it does."""
        return Asked(self._numbers[Number.ASKED] % len(Asked))

    @asked.setter
    def asked(self, value: Asked) -> None:
        self._numbers[Number.ASKED] = value

    def enter(self, state: str, detail: str) -> int:
        """Come into a state; return the former one, for :meth:`leave`."""
        numbers = self._numbers
        former = numbers[Number.STATE]
        if state in STATES:
            text = detail.encode()[:MOST_DETAIL_BYTES]
            self._memory[DETAIL_AT : DETAIL_AT + MOST_DETAIL_BYTES] = text.ljust(
                MOST_DETAIL_BYTES, b"\0"
            )
            numbers[Number.SINCE] = now()
            numbers[Number.STATE] = STATES.index(state)
        return former

    def leave(self, former: int) -> None:
        """Go back to the state that :meth:`enter` returned."""
        numbers, time_now = self._numbers, now()
        if STATES[numbers[Number.STATE]] == "wait":
            numbers[Number.WAITED] += time_now - numbers[Number.SINCE]
        numbers[Number.STATE] = former
        numbers[Number.SINCE] = time_now

    def begin_step(self, step: int) -> None:
        """A step of a loop over steps() begins, from 0."""
        self._numbers[Number.NUM_BEGUN] = step + 1

    def count_step(self) -> None:
        """An optimizer has stepped."""
        self._numbers[Number.NUM_STEPS] += 1

    def count_batch(self, epoch: int, num_batches: int, all_batches: int, samples: int) -> None:
        """The loader has made ``num_batches`` of an epoch, the last one of ``samples``."""
        self._numbers[Number.NUM_SAMPLES] += samples
        self._numbers[Number.EPOCH] = epoch
        self._numbers[Number.ALL_BATCHES] = all_batches
        self._numbers[Number.NUM_BATCHES] = num_batches

    def log(self, step: int, last_step: int, values: Mapping[str, float]) -> None:
        """The program logs values; those of before are kept, as far as there is room."""
        self._logged = {**self._logged, **values}
        data = json.dumps(self._logged).encode()
        if len(data) > MOST_LOGGED_BYTES:
            self._logged = dict(values)
            data = json.dumps(self._logged).encode()
        if len(data) > MOST_LOGGED_BYTES:
            self._logged, data = {}, b"{}"
        numbers = self._numbers
        numbers[Number.LOG_VERSION] += 1
        self._memory[PAGE_BYTES : PAGE_BYTES + len(data)] = data
        numbers[Number.LOGGED_BYTES] = len(data)
        numbers[Number.LOGGED_STEP], numbers[Number.LAST_STEP] = step, last_step
        numbers[Number.LOG_VERSION] += 1

    def show_stacks_in(self, descriptor: int) -> None:
        """Tell where a reader finds the stacks that the rank dumps."""
        self._numbers[Number.STACKS] = descriptor
