"""What ranks write comes out whole, labelled, and in order."""

from __future__ import annotations

import functools
import os
import pty
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher import output
from lockstep.launcher.output import Labeller, LineSplitter
from tests.launcher.bench import Bench, lines_of

pytestmark = pytest.mark.forks


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"\n", b"\r", b"\r\n", b"a\rb"])))
def test_splitter_loses_nothing(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert all(line.endswith((b"\n", b"\r")) for line in lines)
    data, rest = b"".join(chunks), splitter.finish()
    assert b"".join(lines + rest) in (data, data + b"\n")
    assert not rest or not data.endswith((b"\n", b"\r"))


def test_splitter_cuts_a_line_that_never_ends() -> None:
    splitter = LineSplitter(max_line_bytes=4)
    assert splitter.feed(b"abc") == []
    assert splitter.feed(b"defghij") == [b"abcd\n", b"efgh\n"]
    assert splitter.finish() == [b"ij\n"]


def test_splitter_looks_at_each_byte_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a line is and however it comes: joined or searched anew, it would take hours."""
    looked_at = 0

    class Pattern:
        def findall(self, data: bytes) -> list[bytes]:
            nonlocal looked_at
            looked_at += len(data)
            # What doesn't end in a line's end is searched again from each of its bytes.
            assert data.endswith((b"\n", b"\r"))
            return [line for line in data.splitlines(keepends=True) if line]

    monkeypatch.setattr(output, "_LINE", Pattern())
    splitter = LineSplitter()
    chunks = [b"x" * 1000] * 1000 + [b"y\nz"]
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert lines == [b"x" * 1_000_000 + b"y\n"]
    assert splitter.finish() == [b"z\n"]
    assert looked_at < 2 * sum(map(len, chunks))


def test_run_with_long_lines_still_sees_a_failure(bench: Bench) -> None:
    script = bench.script(
        """
        import os, time
        if os.environ["RANK"] == "0":
            print("x" * 5_000_000)
            open("written", "w").close()
            time.sleep(1000)
        while not os.path.exists("written"):
            time.sleep(0.01)
        raise SystemExit(3)
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 3
    assert sum(len(line) for line in lines_of(done.stdout, 0)) == 5_000_000


def shown(*writes: tuple[int, bytes]) -> bytes:
    """What is shown when each (rank, data) is written in turn."""
    labeller, splitters = Labeller(), {0: LineSplitter(), 1: LineSplitter()}
    out = b""
    for rank, data in writes:
        out += labeller.label(rank, b"%d:" % rank, splitters[rank].feed(data))
    return out + labeller.finish()


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([(0, b"a\nb\n"), (1, b"c\n")], b"0:a\n0:b\n1:c\n"),
        ([(0, b"a"), (1, b"c\n"), (0, b"b\n")], b"1:c\n0:ab\n"),
        ([(0, b"10%\r"), (0, b"20%\r"), (0, b"\n")], b"0:10%\r0:20%\r\n"),
        ([(0, b"10%\r"), (1, b"c\n"), (0, b"20%\r")], b"0:10%\r\n1:c\n0:20%\r\n"),
        ([(0, b"10%\r"), (1, b"c\n"), (0, b"\n"), (0, b"d\n")], b"0:10%\r\n1:c\n0:d\n"),
        ([(0, b"\r10%"), (0, b"\r20%"), (0, b"\n")], b"0:10%\r0:20%\n"),
        ([(0, b"\n\n")], b"0:\n0:\n"),
    ],
)
def test_labeller_never_lets_one_source_continue_the_line_of_another(
    writes: list[tuple[int, bytes]], expected: bytes
) -> None:
    assert shown(*writes) == expected


def test_labeller_goes_on_after_a_prompt() -> None:
    labeller = Labeller()

    def label(source: int, *lines: bytes) -> bytes:
        return labeller.label(source, b"[%d] " % source, lines)

    assert label(0, b"name? ") == b"[0] name? "
    assert label(0, b"got it\n", b"(Pdb) ") == b"got it\n[0] (Pdb) "
    assert label(1, b"loss\n") == b"\n[1] loss\n"
    assert label(0, b"41\n", b" 10%") == b"[0] 41\n[0]  10%"
    assert label(0, b"\r", b" 20%") == b"\r[0]  20%"
    assert label(0, b"\n") == b"\n"
    assert labeller.finish() == b""


def test_run_keeps_lines_whole(bench: Bench) -> None:
    script = bench.script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for i in range(2000):
            sys.stdout.write(f"{i} " + rank * 3000)
            sys.stdout.write("\\n")
            if i % 10 == 0:
                print("e", i, rank * 3000, file=sys.stderr)
        sys.stdout.write("unfinished")
        """
    )
    done = bench.run("run", "-n", 2, "--log-dir", "logs", script)
    assert done.returncode == 0
    for rank in range(2):
        text = str(rank) * 3000
        out = [f"{i} {text}" for i in range(2000)] + ["unfinished"]
        err = [f"e {i} {text}" for i in range(0, 2000, 10)]
        assert lines_of(done.stdout, rank) == out
        assert lines_of(done.stderr, rank) == err
        log = (bench.directory / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(log) == sorted(out + err)
    assert len(done.stdout.splitlines()) == 2 * 2001


def test_run_shows_a_line_when_it_is_written(bench: Bench) -> None:
    script = bench.script("import time; print('now'); time.sleep(60)")
    run = bench.start("run", "-n", 1, script)
    assert run.stdout is not None
    assert run.stdout.readline() == "[rank 0] now\n"
    run.terminate()
    assert run.wait(60) == 128 + 15


def test_run_ends_when_nobody_reads_its_output(bench: Bench) -> None:
    script = bench.script("while True: print('y' * 100)")
    run = bench.start("run", "-n", 2, script)
    assert run.stdout is not None
    run.stdout.readline()
    run.stdout.close()
    run.stdout = None
    assert run.wait(60) == 128 + 13
    assert run.stderr is not None
    assert "Traceback" not in run.stderr.read()


def test_run_is_ended_though_its_reader_has_stopped_reading(bench: Bench) -> None:
    script = bench.script("while True: print('y' * 100)")
    run = bench.start("run", "-n", 2, script)
    assert run.stdout is not None
    run.stdout.readline()  # and no more: the pipe fills, and the launcher can't write
    run.terminate()
    assert run.wait(60) == 128 + 15


@pytest.mark.long
def test_run_is_ended_though_nobody_reads_what_comes_after_the_signal(bench: Bench) -> None:
    script = bench.script(
        """
        import signal, time

        def flood(*_):
            while True:
                print("y" * 100)

        signal.signal(signal.SIGTERM, flood)
        print("ready")
        while True:
            time.sleep(1)
        """
    )
    run = bench.start("run", "-n", 2, script)
    assert run.stdout is not None
    for _ in range(2):
        run.stdout.readline()  # and no more; there is room in the pipe when the signal comes
    run.terminate()
    assert run.wait(60) == 128 + 15


def test_run_puts_both_streams_of_a_terminal_on_lines_of_their_own(bench: Bench) -> None:
    script = bench.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("10%", end="\\r", flush=True)
            open("bar", "w").close()
        else:
            while not os.path.exists("bar"):
                time.sleep(0.01)
            time.sleep(0.2)
            print("warning", file=sys.stderr)
        """
    )
    ours, theirs = pty.openpty()
    run = bench.start("run", "--no-live", "-n", 2, script, stdout=theirs, stderr=theirs)
    assert run.wait(60) == 0
    os.close(theirs)
    shown = os.read(ours, 4096)
    os.close(ours)
    assert shown == b"[rank 0] 10%\r\r\n[rank 1] warning\r\n"


def test_logs_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    for words in (b"of the first run\n", b"second\n"):
        for log in output.open_log_files(str(tmp_path), range(1)).values():
            os.write(log, words)
            os.close(log)
    assert (tmp_path / "rank-0.log").read_bytes() == b"second\n"


def test_run_log_dir_that_cannot_be_made_is_named(bench: Bench) -> None:
    bench.script("", "file")
    done = bench.run("run", "--log-dir", "file/logs", bench.script(""))
    assert done.returncode == 2
    assert "file/logs" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_goes_on_without_logs_when_the_disk_is_full(bench: Bench) -> None:
    """And with the log of a rank for which there is room."""
    script = bench.script(
        """
        import os, time
        print("hello")
        if os.environ["RANK"] == "0":
            print("x" * 300_000)
            while not os.path.exists("ended"):
                time.sleep(0.01)
            os._exit(7)
        open("ended", "w").close()
        """
    )
    # A full disk needs a disk of one's own; a limit on files' sizes is alike.
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    done = bench.run("run", "-n", 2, "--log-dir", "logs", script, preexec_fn=limit)
    assert done.returncode == 7, done.stderr
    assert [line[:5] for line in lines_of(done.stdout, 0)] == ["hello", "xxxxx"]
    assert "lockstep: the log of rank 0 ends here: File too large." in done.stderr
    assert "failed first: exit code 7" in done.stderr
    assert "Traceback" not in done.stderr
    assert (bench.directory / "logs" / "rank-1.log").read_text() == "hello\n"


@pytest.mark.parametrize(("full", "closed"), [(1, None), (2, None), (None, 1), (None, 2)])
def test_a_run_whose_output_cannot_be_written_goes_on(
    bench: Bench, full: int | None, closed: int | None
) -> None:
    """On a full disk, or without the stream from the start. What is written elsewhere is there."""
    script = bench.script(
        """
        import sys
        print("out\\n" * 5000)
        print("err", file=sys.stderr)
        open("ended", "w").close()
        """
    )
    with open("/dev/full", "wb") as device:
        streams = {
            name: device for number, name in ((1, "stdout"), (2, "stderr")) if number == full
        }
        close = None if closed is None else functools.partial(os.close, closed)
        run = bench.start("run", "-n", 1, script, preexec_fn=close, **streams)
        out, err = run.communicate(timeout=100)
    assert run.returncode == 0
    assert (bench.directory / "ended").exists()
    if full == 1:
        assert "stdout can't be written any more: No space left on device." in err
    assert 1 in (full, closed) or out.count("out") == 5000
    assert 2 in (full, closed) or "[rank 0] err" in err
