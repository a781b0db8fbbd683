"""One rank has the standard input of the command; the others say so when they want to read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import termios

import pytest

from tests.launcher.bench import Bench, lines_of, up_to_thrice

pytestmark = pytest.mark.forks


class Terminal:
    """A terminal, and the command that runs in it."""

    def __init__(self, bench: Bench, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        self._position = 0

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.run = bench.start(
            *arguments, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
        )
        os.close(theirs)

    def until(self, words: str) -> None:
        """Read until ``words`` are shown, after those that were waited for before."""
        while (found := self.shown.find(words, self._position)) < 0:
            assert self._read(), self.shown
        self._position = found + len(words)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        while self._read():
            pass
        return self.run.wait(60)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)

    def _read(self) -> bool:
        assert select.select([self._ours], [], [], 60)[0], self.shown
        with contextlib.suppress(OSError):  # what a terminal says when nobody has it open
            data = os.read(self._ours, 4096)
            self.shown += data.decode().replace("\r\n", "\n")
            return bool(data)
        return False


def test_rank_0_has_the_terminal_for_input_and_the_debugger(bench: Bench) -> None:
    script = bench.script(
        """
        import os
        if os.environ["RANK"] == "0":
            print("got", input("name? "))
            seen = 41
            breakpoint()
            print("after", seen)
        """
    )
    with Terminal(bench, "run", "-n", 2, script) as terminal:
        terminal.until("[rank 0] name? ")
        terminal.type("Bob\n")
        terminal.until("got Bob")
        terminal.until("(Pdb) ")
        terminal.type("seen + 1\n")
        terminal.until("42\n")
        terminal.until("(Pdb) ")
        terminal.type("seen = 7\n")
        terminal.until("(Pdb) ")
        terminal.type("c\n")
        assert terminal.end() == 0
        assert "after 7" in terminal.shown


def test_torchs_breakpoint_works_on_the_rank_with_the_terminal(bench: Bench) -> None:
    script = bench.script(
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        seen = 41 + dist.get_rank()
        dist.breakpoint(rank=1)
        dist.barrier()
        print("after")
        """
    )
    with Terminal(bench, "run", "-n", 2, "--stdin", 1, script) as terminal:
        terminal.until("(Pdb) ")
        terminal.type("up\nseen\nc\n")
        assert terminal.end() == 0
        assert "42\n" in terminal.shown
        assert terminal.shown.count("after") == 2


@up_to_thrice
def test_ctrl_c_interrupts_the_rank_with_the_terminal_once(bench: Bench) -> None:
    script = bench.script(
        """
        import os, time
        rank = os.environ["RANK"]
        try:
            print("ready", flush=True)
            time.sleep(1000)
        except KeyboardInterrupt:
            for _ in range(5):
                time.sleep(0.1)
            print("saved by", rank)
            raise
        """
    )
    with Terminal(bench, "run", "-n", 2, script) as terminal:
        for _ in range(2):
            terminal.until("ready")
        terminal.type("\x03")
        assert terminal.end() == 130
        assert "saved by 0" in terminal.shown
        assert "saved by 1" in terminal.shown
        assert "Traceback" not in terminal.shown
        assert terminal.shown.endswith("lockstep: ended by SIGINT; no rank is left running.\n")


def test_a_rank_may_read_what_is_no_terminal(bench: Bench) -> None:
    script = bench.script("import sys; print(repr(sys.stdin.read()))")
    run = bench.start("run", "-n", 2, "--stdin", 1, script, stdin=subprocess.PIPE)
    out, err = run.communicate("some data", timeout=60)
    assert run.returncode == 0, err
    assert (lines_of(out, 0), lines_of(out, 1)) == (["''"], ["'some data'"])


@pytest.mark.parametrize(
    ("wants", "said"), [("input()", "EOFError: EOF when"), ("breakpoint()", "bdb.BdbQuit")]
)
def test_a_rank_without_standard_input_says_how_it_gets_one(
    bench: Bench, wants: str, said: str
) -> None:
    script = bench.script(
        f"""
        import os, time
        if os.environ["RANK"] == "1":
            {wants}
            print("no line after a breakpoint")
        time.sleep(60)
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 1
    assert said in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("Rank 1 has no standard input to read from.")
    assert "--stdin 1" in last
