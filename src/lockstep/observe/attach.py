"""``lockstep status``: attach to runs of this host, and tell what each rank does."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from lockstep.deadline import Deadline
from lockstep.errors import BadLaunch
from lockstep.launcher import Frame, dump, main_stack, place_in, state_in_words
from lockstep.memory_files import files_in_memory, open_in_memory
from lockstep.run_status import (
    MEMORY_NAME,
    VERSION,
    RankState,
    RunStatus,
    ShownRank,
    in_time,
    stat_fields,
)
from lockstep.status import PAGE_BYTES, RANK_BYTES, now
from lockstep.tables import FittedTable

# A rank that has waited for this time counts as stuck, unless others have made steps meanwhile.
_STUCK_NS = 5_000_000_000
_OBSERVED_SECONDS = 0.5
_MOST_RANKS = 4096  # of a host, as many as a launcher starts
_MOST_SHOWN, _MOST_LISTED = 256, 16  # ranks
_ALL_DUMPS_SECONDS = 10.0  # for the stacks of all ranks of a run
_COLUMNS = ("rank", "process", "steps", "state", "at")


class ShownRun(RunStatus):
    """The pages of another process's run, which may be another user's where root looks.

    They are read one by one, into copies: who cuts a file off ends the processes that read it in a
    map. What ranks have logged isn't read.

    Args:
        path: Of the open file that has them.

    Raises:
        OSError: If it isn't of a run, or the process has ended.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._descriptor = open_in_memory(path, MEMORY_NAME)
        size = os.fstat(self._descriptor).st_size
        if not PAGE_BYTES <= size <= self.num_bytes(_MOST_RANKS):
            raise OSError(errno.EFBIG, "It is no run's", path)
        self._starts = range(size % RANK_BYTES, size, RANK_BYTES)
        super().__init__(self._read(0))

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _read(self, start: int) -> bytearray:
        page = bytearray(PAGE_BYTES)
        os.preadv(self._descriptor, [page], start)
        return page

    def read(self) -> list[RankState]:
        """Return what each rank does now, those that there are no more too."""
        return [
            ShownRank(memoryview(self._read(start))).read(with_values=False)
            for start in self._starts
        ]


def running() -> Iterator[ShownRun]:
    """Yield the runs of this user on this host, of all users for root; of each process, one."""
    seen = set[int]()
    for pid, path in [*files_in_memory(MEMORY_NAME)]:  # which are opened after that
        with suppress(OSError):  # the process has just ended
            found = ShownRun(path)
            # Ranks have the same memory open.
            is_its = found.facts.get("version") == VERSION and found.facts["pid"] == pid
            if is_its and pid not in seen:
                seen.add(pid)
                yield found


class Observed(NamedTuple):
    """A rank at a moment."""

    state: RankState
    num_new_steps: int  # while it was observed
    process: str  # "running", "stopped" or "gone"
    stack: list[Frame]  # of its main thread; empty if it couldn't be had

    @property
    def place(self) -> Frame | None:
        """The innermost line of the program's own files."""
        return place_in(self.stack)


def status(pid: str | None = None, stacks: bool = False) -> None:
    """Print what the ranks of this user's runs on this host do, and which one others wait for.

    Args:
        pid: The process id of one ``lockstep run``; by default all.
        stacks: Whether to print the whole stack of each rank's main thread.

    Raises:
        BadLaunch: If there is no such run.
    """
    console, has_found = Console(highlight=False), False
    for run in running():
        if pid is None or str(run.facts["pid"]) == pid:
            has_found = True
            _print(console, run, stacks=stacks)
    if not has_found:
        raise BadLaunch(
            f"No run with the process id {pid} was found on this host."
            if pid is not None
            else "Nothing that was started by 'lockstep run' is running on this host. On several "
            "hosts, give this command on the host to look at; another user's runs aren't shown."
        )


def _print(console: Console, run: ShownRun, *, stacks: bool) -> None:
    facts = run.facts
    ranks, time_now = _observe(run), now()
    console.print(
        Text(
            f"{facts['program']}: process {facts['pid']}, for "
            f"{in_time((time_now - facts['at']) / 1e9)}",
            style="bold",
        ),
        soft_wrap=not console.is_terminal,
    )
    rows = [_row(rank, time_now) for rank in ranks[:_MOST_SHOWN]]
    console.print(FittedTable(_COLUMNS, rows, texts=(0, 3, 4), has_rule=False))
    if len(ranks) > _MOST_SHOWN:
        console.print(f"and {len(ranks) - _MOST_SHOWN:,} more ranks")
    console.print(Text("\n" + verdict(ranks, time_now) + "\n"), soft_wrap=not console.is_terminal)
    for rank in ranks[:_MOST_SHOWN] if stacks else []:
        console.print(f"rank {rank.state.rank}, innermost line first:")
        for frame in rank.stack:
            console.print(Text(f"  {frame}"), soft_wrap=True)


def _row(rank: Observed, time_now: int) -> list[str]:
    state = rank.state
    if not state.pid:
        return ["?", "", "", "hasn't begun", ""]
    is_known = rank.process == "running" or state.state == "end"
    words = state_in_words(state, time_now) if is_known else rank.process
    place = "" if rank.place is None else str(rank.place)
    return [str(state.rank), str(state.pid), f"{state.num_steps:,}", words, place]


def _observe(run: ShownRun) -> list[Observed]:
    before = [state.num_steps for state in run.read()]
    time.sleep(_OBSERVED_SECONDS)
    found, deadline = [], Deadline(_ALL_DUMPS_SECONDS)
    for num_steps, new in zip(before, run.read(), strict=True):
        if new.rank < 0:  # fewer go on
            continue
        process = _process_state(new.pid) if new.pid else "gone"
        is_asked = process == "running" and deadline.left()
        stack = main_stack(dump(new)) if is_asked else []
        found.append(Observed(new, new.num_steps - num_steps, process, stack))
    return found


def _process_state(pid: int) -> str:
    try:
        letter = stat_fields(pid)[0]
    except OSError:
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")


def verdict(ranks: Sequence[Observed], time_now: int) -> str:
    """Who waits for whom, in a sentence or two."""
    begun = [rank for rank in ranks if rank.state.pid]
    if len(begun) < len(ranks):
        return f"{len(ranks) - len(begun)} of {len(ranks)} ranks haven't begun."
    ended = [rank for rank in begun if rank.state.state == "end"]
    if len(ended) == len(begun):
        return _of_the_end(ended)
    bad = [rank for rank in begun if rank.process != "running" and rank not in ended]
    if bad:
        words = ", ".join(
            f"Rank {rank.state.rank} is {rank.process}" for rank in bad[:_MOST_LISTED]
        )
        if len(bad) > _MOST_LISTED:
            words += f", and {len(bad) - _MOST_LISTED:,} more are stopped or gone"
        stopped = any(rank.process == "stopped" for rank in bad)
        return words + (": 'kill -CONT' and its process id let it go on." if stopped else ".")
    first = f"{_listed(ended)} {_has(ended)} ended. " if ended else ""
    return first + _of_running([rank for rank in begun if rank not in ended], ended, time_now)


def _of_the_end(ranks: Sequence[Observed]) -> str:
    left = [rank for rank in ranks if rank.process != "gone"]
    words = "The run is over: the program has ended on all ranks of this host."
    if left:
        process = "process" if len(left) == 1 else "processes"
        words += f" The {process} of {_listed(left).lower()} {_has(left)} yet to end."
    return words


def _of_running(ranks: Sequence[Observed], ended: Sequence[Observed], time_now: int) -> str:
    """Tell of ranks whose program runs, beside those where it has ended."""
    steps = max(rank.num_new_steps for rank in ranks)
    waiting = [r for r in ranks if r.state.state == "wait" and time_now - r.state.since > _STUCK_NS]
    others = [rank for rank in ranks if rank not in waiting]
    if steps:
        return f"It goes on: {steps:,} steps in {_OBSERVED_SECONDS} s."
    if not waiting:
        return f"No rank has waited for others for more than {_STUCK_NS // 10**9} s."
    longest = in_time(max(time_now - rank.state.since for rank in waiting) / 1e9)
    operations = sorted({rank.state.detail for rank in waiting})
    if others:
        places = [f"rank {rank.state.rank} is at {rank.place}" for rank in others[:8] if rank.place]
        at = "; ".join(places) or "their stacks couldn't be read"
        return (
            f"{_listed(waiting)} {_has(waiting)} waited in {operations[0]} for {longest}, for "
            f"{_listed(others).lower()}. {at[:1].upper()}{at[1:]}."
        )
    if ended:
        return (
            f"{_listed(waiting)} {_has(waiting)} waited in {' and '.join(operations)} for "
            f"{longest}, to which {_listed(ended).lower()} will not come."
        )
    if len(operations) > 1:
        return (
            f"All ranks wait, up to {longest}, in different operations: "
            f"{', '.join(operations)}. They have taken different ways through the program."
        )
    return (
        f"All ranks of this host have waited in {operations[0]} for {longest}: for a rank of "
        "another host, or for the network."
    )


def _has(ranks: Sequence[Observed]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _listed(ranks: Sequence[Observed]) -> str:
    numbers = [str(rank.state.rank) for rank in ranks[:_MOST_LISTED]]
    if len(ranks) > _MOST_LISTED:
        return f"Ranks {', '.join(numbers)} and {len(ranks) - _MOST_LISTED:,} more"
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return f"Ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
