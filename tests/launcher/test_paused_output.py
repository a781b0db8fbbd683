"""A launcher whose terminal or pager is paused still looks after its ranks, and loses no output."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.launcher.writer import MOST_WAITING_BYTES, StreamWriter
from tests.launcher.bench import Bench, free_port
from tests.waiting import until

pytestmark = pytest.mark.forks

_PAUSE, _GO_ON = b"\x13", b"\x11"  # Ctrl-S, Ctrl-Q

# Rank 0 writes more than any terminal or pipe keeps; rank 1 fails once that rests there.
FLOOD = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        open("pid", "w").write(str(os.getpid()))
        for i in range({lines}):
            print(i, "x" * 90)
            if i % 100 == 0:
                open("written", "w").write(str(i))
        open("flooded", "w").close()
        time.sleep(1000)
    while not os.path.exists("fail"):
        time.sleep(0.01)
    {then}
    """
FAIL = "raise ValueError('here it failed')"


def read_all(source: int) -> Iterator[bytes]:
    """What can be read until the end, or until the other side of a terminal is closed."""
    with contextlib.suppress(OSError):
        while data := os.read(source, 1 << 16):
            yield data


def numbers_in(shown: bytes) -> list[int]:
    lines = [line for line in shown.splitlines() if line.startswith(b"[rank 0] ")]
    assert all(line.rstrip().endswith(b" " + b"x" * 90) for line in lines)
    return [int(line.split()[2]) for line in lines]


def is_gone(bench: Bench) -> bool:
    return not Path("/proc", (bench.directory / "pid").read_text()).exists()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_failure_ends_the_ranks_while_the_output_is_paused(bench: Bench, is_terminal: bool) -> None:
    """Then the launcher waits for its reader, who finds all lines and why the run failed."""
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    script = bench.script(FLOOD.format(lines=10_000, then=FAIL))
    run = bench.start("run", "--no-live", "-n", 2, script, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert until((bench.directory / "flooded").exists)
    (bench.directory / "fail").touch()
    assert until(lambda: is_gone(bench), 10)
    assert run.poll() is None
    shown = b"".join(read_all(ours))
    os.close(ours)
    assert run.wait(10) == 1
    assert numbers_in(shown) == [*range(10_000)]
    assert b"lockstep: rank 1 of 2 failed first: exit code 1" in shown
    assert b"ValueError: here it failed" in shown


def test_failure_ends_the_ranks_after_ctrl_s(bench: Bench) -> None:
    """A terminal that was paused by its user, with little in it and with the live display."""
    ours, theirs = pty.openpty()
    script = bench.script(FLOOD.format(lines=10, then=FAIL))
    run = bench.start("run", "-n", 2, script, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, _PAUSE)
    assert until((bench.directory / "flooded").exists)
    (bench.directory / "fail").touch()
    assert until(lambda: is_gone(bench), 10)
    assert run.poll() is None
    os.write(ours, _GO_ON)
    shown = b"".join(read_all(ours))
    os.close(ours)
    assert run.wait(10) == 1
    assert numbers_in(shown) == [*range(10)]
    assert b"lockstep: rank 1 of 2 failed first: exit code 1" in shown


@pytest.mark.parametrize("failing", [1, 2])
def test_other_host_hears_of_a_failure_though_the_output_of_one_is_paused(
    bench: Bench, failing: int
) -> None:
    """That of host 0, which keeps the store; a rank of it fails, or one of host 1."""
    then = f"assert os.environ['RANK'] != '{failing}'; time.sleep(1000)"
    script = bench.script(FLOOD.format(lines=10_000, then=then))
    common = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", script]
    paused = bench.start("run", "--node-rank", 0, "-n", 2, *common)
    other = bench.start("run", "--node-rank", 1, "-n", 1, *common)
    assert until((bench.directory / "flooded").exists)
    (bench.directory / "fail").touch()
    assert until(lambda: is_gone(bench), 10)
    _, err = other.communicate(timeout=20)
    assert f"lockstep: rank {failing} of 3 failed first: exit code 1" in err
    assert paused.poll() is None
    out, err = paused.communicate(timeout=20)
    assert f"lockstep: rank {failing} of 3 failed first: exit code 1" in err
    assert numbers_in(out.encode()) == [*range(10_000)]
    assert paused.returncode == other.returncode == 1


def test_ranks_block_when_enough_waits_for_a_paused_reader(bench: Bench) -> None:
    script = bench.script(FLOOD.format(lines=1_000_000, then=FAIL))
    run = bench.start("run", "-n", 2, script)
    written = bench.directory / "written"

    def rests() -> bool:
        before = written.read_text() if written.exists() else ""
        time.sleep(0.3)
        return bool(before) and written.read_text() == before

    assert until(rests)
    assert int(written.read_text()) * 93 < MOST_WAITING_BYTES + (1 << 19)
    (bench.directory / "fail").touch()
    assert until(lambda: is_gone(bench), 10)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 1
    numbers = numbers_in(out.encode().rpartition(b"\n")[0])
    assert numbers == [*range(len(numbers))]
    assert len(numbers) >= int(written.read_text())
    assert "rank 1 of 2 failed first: exit code 1" in err


def close_reader(run: subprocess.Popen[str]) -> None:
    assert run.stdout is not None
    run.stdout.close()
    run.stdout = None


@pytest.mark.parametrize(
    "end", [lambda run: run.send_signal(signal.SIGINT), lambda run: run.terminate(), close_reader]
)
def test_wait_for_a_paused_reader_can_be_ended(
    bench: Bench, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    """By Ctrl-C, by a scheduler and by a pager that is quit, when the ranks have ended."""
    run = bench.start("run", "-n", 2, bench.script(FLOOD.format(lines=10_000, then=FAIL)))
    assert until((bench.directory / "flooded").exists)
    (bench.directory / "fail").touch()
    assert until(lambda: is_gone(bench), 10)
    time.sleep(1)  # now it waits
    assert run.poll() is None
    end(run)
    assert run.wait(10) == 1
    assert run.stderr is not None
    assert "rank 1 of 2 failed first: exit code 1" in run.stderr.read()


def test_writer_does_not_wait_where_a_poll_says_that_there_is_room() -> None:
    """A terminal that has room for a few bytes polls as writable, and blocks in the rest."""
    ours, theirs = pty.openpty()
    woken: list[int] = []
    writer = StreamWriter(theirs, lambda: woken.append(1))
    lines = [b"y" * 4095 + b"\n"] * 100
    putting = threading.Thread(target=lambda: [writer.put(line) for line in lines], daemon=True)
    putting.start()
    putting.join(10)
    assert not putting.is_alive()
    assert until(lambda: writer.stuck_seconds > 0.2)
    shown = 0
    is_idle = False
    while (has_more := bool(select.select([ours], [], [], 0.1)[0])) or not is_idle:
        is_idle = writer.is_idle  # before what may be read for the last time
        shown += len(os.read(ours, 1 << 16)) if has_more else 0
    assert shown == 100 * 4097  # a terminal writes \r\n
    assert until(lambda: woken)
    writer.drop()
    for descriptor in (ours, theirs):
        os.close(descriptor)
