"""What the ranks do, on a few lines below their output, while they run.

The lines stand at the bottom of the terminal. Before ranks' output is written they are erased, and
they are drawn again below it. A progress bar of a rank (a line that ends in a carriage return) is
one of them as long as it moves.
"""

from __future__ import annotations

import io
import os
import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.run_status import RankState, RunStatus, in_a_second, in_time
from lockstep.status import now
from lockstep.world import is_dumb_terminal

Source = tuple[int, int]  # a rank, and 1 or 2 for its stdout or stderr

_DRAW_NS = 250_000_000
# A rank is late by what it did in this time; rates are those of the last steps that were seen.
_WINDOW_NS = 15_000_000_000
_NUM_PACES = 40
_LATE_PART, _STUCK_SECONDS = 0.05, 5.0
_NARROWEST = 40
_STATES = {
    "program": "computes",
    "data": "loads data",
    "launch": "starts a collective",
    "wait": "waits",
    "save": "saves",
    "end": "has ended",
}
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def terminal() -> int | None:
    """The standard stream, 2 or 1, that is a terminal on which lines can be drawn again."""
    if is_dumb_terminal(os.environ):
        return None
    return next((number for number in (2, 1) if os.isatty(number)), None)


class Moment(NamedTuple):
    """What all ranks of this host did at one time, in nanoseconds."""

    time: int
    ranks: Sequence[RankState]


class Row(NamedTuple):
    """What is shown of a rank."""

    rank: int
    num_steps: int
    state: str
    waiting: float  # the part of the time in which it waits for others
    is_late: bool  # the others wait for it


class Picture(NamedTuple):
    """What is shown."""

    step: int
    last_step: int  # 0: unknown
    progress: str  # of the epoch, where the loader tells of it
    values: dict[str, float]
    samples_per_second: float  # 0: unknown
    steps_per_second: float
    left: str  # the time that is left, of the run or of the epoch; "" if that isn't known
    rows: list[Row]


def picture(window: Sequence[Moment], paces: Sequence[Moment], world_size: int) -> Picture:
    """What is to be shown at the last moment of ``window``.

    Args:
        window: Moments of the last seconds, the present included: who waits, and for whom.
        paces: The moments at which the last steps were through, from which rates are told.
        world_size: The number of ranks on all hosts.
    """
    first, last = window[0], window[-1]
    seconds = max(1e-9, (last.time - first.time) / 1e9)
    ranks = [(a, b) for a, b in zip(first.ranks, last.ranks, strict=True) if b.pid]
    parts = [min(1.0, (b.waited - a.waited) / 1e9 / seconds) if a.pid else 0.0 for a, b in ranks]
    rows = [
        Row(state.rank, state.num_steps, state_in_words(state, last.time), part, False)
        for (_, state), part in zip(ranks, parts, strict=True)
    ]
    if len(rows) > 1:
        least, second = sorted(parts)[:2]
        if second - least > _LATE_PART:
            late = parts.index(least)
            rows[late] = rows[late]._replace(is_late=True)
    leader = leader_of(last)
    if leader is None:
        return Picture(0, 0, "", {}, 0.0, 0.0, "", rows)
    rate, samples = _rates(paces, last.time)
    step, progress, left = step_of(leader), "", ""
    if leader.all_batches:
        progress = f"epoch {leader.epoch}, batch {leader.num_batches:,}/{leader.all_batches:,}"
        if rate:
            of_epoch = max(0, leader.all_batches - leader.num_batches) / rate
            left = f"{in_time(of_epoch)} left of the epoch"
    if leader.last_step and rate:
        left = f"{in_time(max(0, leader.last_step - step) / rate)} left"
    samples *= world_size / max(1, len(rows))
    return Picture(step, leader.last_step, progress, leader.values, samples, rate, left, rows)


def leader_of(moment: Moment) -> RankState | None:
    """The rank whose steps and values are shown: the first that logs some, or the first."""
    begun = [rank for rank in moment.ranks if rank.pid]
    return next((rank for rank in begun if rank.values), begun[0] if begun else None)


def step_of(rank: RankState) -> int:
    """The step that the rank has logged last or, if it logs nothing, its number of steps."""
    return rank.logged_step if rank.values else rank.num_steps


def _rates(paces: Sequence[Moment], time: int) -> tuple[float, float]:
    """Steps in a second up to ``time``, and samples of all ranks of this host."""
    if len(paces) < 2:
        return 0.0, 0.0
    first, last = paces[0], paces[-1]
    before, after = leader_of(first), leader_of(last)
    assert before is not None
    assert after is not None
    pairs = zip(first.ranks, last.ranks, strict=True)
    samples = sum(after.num_samples - before.num_samples for before, after in pairs)
    length = last.time - first.time
    if time - last.time > 2 * length / (len(paces) - 1):  # a step takes longer than those before
        length = time - first.time
    seconds = max(1e-9, length / 1e9)
    return max(0, step_of(after) - step_of(before)) / seconds, samples / seconds


def state_in_words(state: RankState, time: int) -> str:
    """What the rank does at a time and, if it seems stuck, for how long."""
    words = _STATES[state.state]
    if state.state == "wait" and state.detail:
        words = f"waits in {state.detail}"
    seconds = (time - state.since) / 1e9
    if state.state not in ("program", "end") and seconds > _STUCK_SECONDS:
        words += f" for {in_time(seconds)}"
    return words


def summary_line(shown: Picture) -> str:
    """Step, values, rates and the time that is left, in one line."""
    if not (shown.step or shown.values or shown.progress):
        return "before the first step"
    words = [f"step {shown.step:,}" + (f"/{shown.last_step:,}" if shown.last_step else "")]
    words += [shown.progress] if shown.progress else []
    words += [f"{name} {value:.4g}" for name, value in shown.values.items()]
    if shown.samples_per_second:
        words.append(in_a_second(shown.samples_per_second, "samples"))
    if shown.steps_per_second:
        words.append(in_a_second(shown.steps_per_second, "steps"))
    words += [shown.left] if shown.left else []
    return "  ".join(words)


class Live:
    """Draws the lines on a terminal.

    Args:
        status: What the ranks of this host do.
        world_size: The number of ranks on all hosts.
    """

    def __init__(self, status: RunStatus, world_size: int) -> None:
        self._status, self._world_size = status, world_size
        self._window: deque[Moment] = deque()
        self._paces: deque[Moment] = deque(maxlen=_NUM_PACES)
        self._bars: dict[Source, bytes] = {}
        self._lines = b""  # as they were drawn last
        self._height = 0  # how many of them stand on the terminal
        self.due = now() + _DRAW_NS  # when the lines are to be drawn
        # Streams whose last line ended in a carriage return: what follows is a bar.
        self._in_bar: set[Source] = set()
        # The ranks' numbers of steps when one of them asked for input. Until one goes on, the
        # terminal's last line belongs to whoever types.
        self._prompted_at: list[int] | None = None

    def take_bars(self, source: Source, label: bytes, lines: list[bytes]) -> list[bytes]:
        """Keep the progress bars among ``lines`` of a stream; return what is to be written."""
        written = []
        for line in lines:
            text = _ESCAPES.sub(b"", line).strip()
            if line.endswith(b"\r"):
                self._in_bar.add(source)
                if text:
                    self._bars[source] = label + text
                continue
            if line.endswith(b"\n"):
                self._in_bar.discard(source)
            # A bar that is complete is followed by an empty line.
            bar = self._bars.pop(source, None)
            written.append(line if bar is None or text else bar[len(label) :] + b"\n")
        return written

    def take_rest(self, source: Source, label: bytes, rest: bytes) -> bool:
        """Keep the unfinished line of a stream if it is a bar or empty; tell whether it is."""
        text = _ESCAPES.sub(b"", rest).strip()
        if text and source in self._in_bar:
            self._bars[source] = label + text
        return not rest or source in self._in_bar

    def prompt(self) -> None:
        """A rank waits for what is typed."""
        self._prompted_at = [rank.read().num_steps for rank in self._status.ranks]

    def goes_on(self) -> bool:
        """Whether a rank has made steps since the prompt; then the lines are shown again."""
        if self._prompted_at in (None, [rank.read().num_steps for rank in self._status.ranks]):
            return False
        self._prompted_at = None
        return True

    def around(self, output: bytes) -> bytes:
        """What to write so that ``output`` stands above the lines."""
        return self._erase() + output + (self._show() if self._prompted_at is None else b"")

    def draw(self, columns: int, height: int) -> bytes:
        """What to write now on a terminal of this size, so that the lines are up to date."""
        if now() < self.due:
            return b""
        moment = self._note()
        self.due = moment.time + _DRAW_NS
        if self._prompted_at is not None or leader_of(moment) is None:
            return b""
        shown = picture(self._window, self._paces, self._world_size)
        self._lines = _drawn(shown, [*self._bars.values()], columns, height)
        return self._erase() + self._show()

    def close(self) -> bytes:
        """What to write at the end: bars, and the line that sums up, stay."""
        written = self._erase() + b"".join(bar + b"\n" for bar in self._bars.values())
        self._lines = b""
        self._note()
        shown = picture(self._window, self._paces, self._world_size)._replace(left="")
        return written + (summary_line(shown).encode() + b"\n" if shown.step else b"")

    def _note(self) -> Moment:
        moment = Moment(now(), [rank.read() for rank in self._status.ranks])
        self._window.append(moment)
        while moment.time - self._window[0].time > _WINDOW_NS:
            self._window.popleft()
        before, leader = leader_of(self._paces[-1]) if self._paces else None, leader_of(moment)
        # Not before the end of the first step: it takes as long as the start of the program.
        if leader is None or not (leader.num_steps or step_of(leader)):
            return moment
        if before is None or step_of(before) != step_of(leader):
            self._paces.append(moment)
        return moment

    def _show(self) -> bytes:
        self._height = self._lines.count(b"\n")
        return self._lines

    def _erase(self) -> bytes:
        height, self._height = self._height, 0
        return b"\x1b[%dA\r\x1b[J" % height if height else b""


def _drawn(shown: Picture, bars: Sequence[bytes], columns: int, height: int) -> bytes:
    """The lines for a terminal of this size, of whose height they take half at most."""
    # Imported late: no rank, all of which are forked before, has it in its memory.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    bars = bars[: max(1, height // 4)]
    most = max(1, height // 2 - 2 - len(bars))
    # The late ones, and those that wait least, are the ones to look at.
    rows = sorted(sorted(shown.rows, key=lambda row: row.waiting)[:most], key=lambda row: row.rank)
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for row in rows:
        cells = (
            f"rank {row.rank}",
            f"{row.num_steps:,} steps",
            row.state,
            f"{row.waiting:.0%} waiting",
            "the others wait for it" if row.is_late else "",
        )
        # No markup: an operation's name may have brackets.
        table.add_row(*map(Text, cells), style="yellow" if row.is_late else None)
    text = io.StringIO()
    console = Console(
        file=text, width=max(_NARROWEST, columns - 1), force_terminal=True, highlight=False
    )
    for bar in bars:
        console.print(Text(bar.decode(errors="replace")), no_wrap=True, overflow="crop")
    console.print(Text(summary_line(shown), style="bold"), no_wrap=True, overflow="ellipsis")
    console.print(table)
    if left := len(shown.rows) - len(rows):
        console.print(f"and {left:,} ranks more", style="dim")
    # Without automatic wrapping: a line too many on a terminal that got narrower would be left.
    return b"\x1b[?7l" + text.getvalue().encode() + b"\x1b[?7h"
