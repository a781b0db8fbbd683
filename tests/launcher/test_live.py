"""What ``lockstep run`` shows on a terminal while the ranks run."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
import time

import pyte
import pytest
from rich.text import Text

from lockstep.launcher import live
from lockstep.launcher.live import Live, Moment, picture, summary_line
from lockstep.run_status import RankState, RunStatus, in_time
from tests.launcher.bench import Bench
from tests.waiting import until

pytestmark = pytest.mark.forks

SECOND = 1_000_000_000
STATE = RankState(1, 0, "program", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, 0, 0)


class Terminal:
    """A terminal of 24 lines, which ``lockstep run`` writes to."""

    def __init__(self, bench: Bench, *words: object) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self._screen = pyte.HistoryScreen(100, 24, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        environment = {**os.environ, "TERM": "xterm"}
        self.run = bench.start("run", "-n", 2, *words, **streams, env=environment)
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.ours, 4096)
            except OSError:  # nobody has the other end open any more
                return
            with self._lock:
                self._stream.feed(data)

    def lines(self) -> list[str]:
        """All that was written and not erased."""
        with self._lock:
            old = ["".join(row[x].data for x in range(100)) for row in self._screen.history.top]
            found = [line.rstrip() for line in [*old, *self._screen.display]]
        return [line for line in found if line]

    def shows(self, *words: str) -> bool:
        """Whether each of ``words`` is in some line."""
        lines = self.lines()
        return all(any(word in line for line in lines) for word in words)

    def close(self) -> int:
        """Wait for the end of the run, and return its exit code."""
        code = self.run.wait(60)
        self._reader.join()
        os.close(self.ours)
        return code


def test_steps_and_values_and_the_late_rank_are_shown_below_the_output(bench: Bench) -> None:
    script = bench.script(
        """
        import os, sys, time
        import torch, lockstep
        world = lockstep.init()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        for step in range(1000):
            if world.rank == 1:
                time.sleep(0.05)
            lockstep.reduce(1.0)
            optimizer.step()
            lockstep.log(loss=0.25, total=1000)
            if step == 20:
                print("at step 20")
            if os.path.exists("stop"):
                break
        lockstep.log(loss=0.125, step=1000)
        """
    )
    terminal = Terminal(bench, script)
    late = ("% waiting  the others wait for it", "loss 0.25", "/1,000", " left", "steps/s")
    assert until(lambda: terminal.shows("[rank 0] at step 20", "[rank 1] at step 20", *late))
    lines = terminal.lines()
    (row,) = (line for line in lines if "the others wait" in line)
    assert row.startswith("rank 1 ")
    assert lines[-2].startswith("rank 0 ")
    assert lines[-1] == row  # below all output
    (bench.directory / "stop").touch()
    assert terminal.close() == 0
    # Of all that was drawn, the last state of step and values is left, once.
    assert [line.split("  ")[:2] for line in terminal.lines() if "loss" in line] == [
        ["step 1,000/1,000", "loss 0.125"]
    ]
    assert not any(line.startswith("rank") for line in terminal.lines())


def test_progress_bars_have_a_line_each_while_they_move(bench: Bench) -> None:
    script = bench.script(
        """
        import os, sys, time
        name = os.environ["RANK"]
        for percent in range(0, 101, 10):
            print(f"\\rbar {name}: {percent}%", end="", file=sys.stderr, flush=True)
            print(f"line {percent}", flush=True)
            while percent == 50 and not os.path.exists("go"):
                time.sleep(0.02)
        print(file=sys.stderr)
        """
    )
    terminal = Terminal(bench, script)
    assert until(lambda: terminal.shows("bar 0: 50%", "bar 1: 50%", "before the first step"))
    lines = terminal.lines()
    assert [line for line in lines if "bar" in line] == lines[-5:-3]
    assert sorted(lines[-5:-3]) == ["[rank 0] bar 0: 50%", "[rank 1] bar 1: 50%"]
    (bench.directory / "go").touch()
    assert terminal.close() == 0
    for rank in range(2):
        of_rank = [line for line in terminal.lines() if line.startswith(f"[rank {rank}]")]
        assert [line for line in of_rank if "bar" in line] == [f"[rank {rank}] bar {rank}: 100%"]
        assert len(of_rank) == 12


def test_a_bar_that_never_ends_stays_at_the_end(bench: Bench) -> None:
    script = bench.script("print('10%', end='\\r'); print('20%', end='\\r')")
    terminal = Terminal(bench, script)
    assert terminal.close() == 0
    assert sorted(terminal.lines()) == ["[rank 0] 20%", "[rank 1] 20%"]


def test_who_is_asked_for_input_has_the_last_line(bench: Bench) -> None:
    script = bench.script(
        """
        import time
        import torch, lockstep
        if lockstep.init().rank == 0:
            print("you said", input("how many? "))
        lockstep.reduce(1.0)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        for step in range(30):
            optimizer.step()
            time.sleep(0.05)
        """
    )
    terminal = Terminal(bench, script)
    assert until(lambda: terminal.shows("how many?"))
    time.sleep(3 * live._DRAW_NS / 1e9)
    assert terminal.lines()[-1] == "[rank 0] how many?"
    os.write(terminal.ours, b"seven\n")
    assert until(lambda: terminal.shows("you said seven", "rank 1 "))
    assert terminal.close() == 0
    assert terminal.lines()[:2] == ["[rank 0] how many? seven", "you said seven"]


def test_nothing_is_drawn_where_there_is_no_terminal(bench: Bench) -> None:
    script = bench.script("import lockstep; lockstep.log(loss=0.5); lockstep.log(loss=0.25)")
    done = bench.run("run", "-n", 1, script)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[0] == "[rank 0] step 0  loss 0.5"
    assert done.stderr.splitlines()[1].startswith("[rank 0] step 1  loss 0.25")


def moments(*states: list[RankState], seconds: float = 1.0) -> list[Moment]:
    return [Moment(int(i * seconds * SECOND), ranks) for i, ranks in enumerate(states)]


def test_rates_and_the_time_left_are_of_the_last_steps() -> None:
    first = STATE._replace(logged_step=10, last_step=100, values={"loss": 2.0}, num_samples=0)
    then = first._replace(logged_step=30, num_samples=160)
    both = moments([first, first._replace(rank=1)], [then, then._replace(rank=1)], seconds=2.0)
    shown = picture(both, both, world_size=4)
    # 320 samples in two seconds on two of four ranks.
    assert (shown.steps_per_second, shown.samples_per_second) == (10.0, 320.0)
    line = "step 30/100  loss 2  320 samples/s  10 steps/s  0:07 left"
    assert summary_line(shown) == line
    # Without the number of all steps there is the loader's of an epoch.
    batches = {"last_step": 0, "epoch": 1, "num_batches": 40, "all_batches": 60}
    both = moments([first], [then._replace(**batches)], seconds=2.0)
    line = "epoch 1, batch 40/60  loss 2  80 samples/s  10 steps/s  0:02 left of the epoch"
    assert summary_line(picture(both, both, world_size=1)) == f"step 30  {line}"


def test_rates_fall_while_a_step_takes_too_long() -> None:
    paces = moments([STATE], [STATE._replace(num_steps=4)], seconds=2.0)
    for late, rate in ((1, 2.0), (4, 2.0), (6, 0.5)):
        present = Moment(paces[-1].time + late * SECOND, paces[-1].ranks)
        assert picture([*paces, present], paces, world_size=1).steps_per_second == rate


def test_the_rank_that_waits_least_is_late_if_all_others_wait() -> None:
    def rows(*waited: float) -> list[bool]:
        after = [STATE._replace(rank=i, waited=int(w * SECOND)) for i, w in enumerate(waited)]
        window = moments([STATE] * len(waited), after)
        return [row.is_late for row in picture(window, window, len(waited)).rows]

    assert rows(0.5, 0.1, 0.5) == [False, True, False]
    assert rows(0.5, 0.1, 0.1) == [False, False, False]
    assert rows(0.04, 0.0) == [False, False]
    assert rows(0.5) == [False]


def test_a_state_that_lasts_is_told_with_its_time() -> None:
    waits = STATE._replace(state="wait", detail="all_reduce", since=3 * SECOND)
    assert live.state_in_words(waits, 4 * SECOND) == "waits in all_reduce"
    assert live.state_in_words(waits, 45 * SECOND) == "waits in all_reduce for 0:42"
    assert live.state_in_words(STATE, 45 * SECOND) == "computes"
    assert [in_time(s) for s in (3, 65, 3723.4)] == ["0:03", "1:05", "1:02:03"]


@pytest.mark.parametrize("logs", [False, True])
def test_the_first_rate_is_without_the_start(monkeypatch: pytest.MonkeyPatch, logs: bool) -> None:
    """The first step, and all that comes before it, takes 60 seconds, and the others one each."""
    status = RunStatus.create("train.py", 1)
    [rank] = status.ranks
    drawing, seconds = Live(status, 1), 0
    monkeypatch.setattr(live, "now", lambda: seconds * SECOND)
    rank.begin(0)
    rates = []
    for seconds in (0, 30, 60, 61, 62, 64):
        if seconds >= 60:
            rank.count_step()
            if logs:
                rank.log(seconds - 60, 100, {"loss": 1.0})
        drawing.due = 0
        shown = Text.from_ansi(drawing.draw(80, 12).decode()).plain
        rates += re.findall(r"[\d.]+ steps/s", shown)
    assert rates == ["1 steps/s", "1 steps/s", "1 steps/s" if logs else "0.75 steps/s"]


def test_of_many_ranks_those_that_wait_least_are_shown() -> None:
    status = RunStatus.create("train.py", 40)
    for number, rank in enumerate(status.ranks):
        rank.begin(number)
        if number not in (7, 30):
            rank.enter("wait", "all_reduce")
    drawing = Live(status, 40)
    drawing.due = 0
    drawing.draw(80, 12)  # a first moment, from which on they wait
    drawing.due = 0
    shown = Text.from_ansi(drawing.draw(80, 12).decode()).plain
    assert "rank 7 " in shown
    assert "rank 30 " in shown
    assert shown.rstrip().endswith("and 36 ranks more")
    assert len(shown.splitlines()) <= 12 // 2 + 1
