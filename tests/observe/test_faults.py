"""A fault of what only observes a run is told of once, and the run goes on."""

from __future__ import annotations

import csv
import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.observe import logger
from lockstep.observe.faults import write_line
from lockstep.observe.trace_files import read, read_folder

ERRORS = ("ENOSPC", "EACCES", "EIO", "EMFILE")
NUM_STEPS = 12


pytestmark = pytest.mark.usefixtures("nothing_logged")


def train_and_log(at: Mapping[int, Callable[[], object]] | None = None) -> None:
    """Take steps, before some of which something happens, and log them."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    for step in range(NUM_STEPS):
        (at or {}).get(step, int)()
        parameter.square().sum().backward()
        optimizer.step()
        lockstep.log({"loss": float(step), **({"late": 1.0} if step > 8 else {})}, step=step)


@contextmanager
def failing(folder: Path, name: str, *calls: str) -> Iterator[None]:
    """Let system calls for what is in ``folder`` fail."""
    number = getattr(errno, name)

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *args: Any, **options: Any) -> Any:
            path = where
            if isinstance(where, int):
                with suppress(OSError):
                    path = os.readlink(f"/proc/self/fd/{where}")
            if str(path).startswith(str(folder)):
                raise OSError(number, os.strerror(number), str(path))
            return original(where, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for each in calls:
            patch.setattr(os, each, wrapped(getattr(os, each)))
        yield


def told(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """One message was logged, and has these words."""
    messages = [record.getMessage() for record in caplog.records if record.name == "lockstep"]
    assert len(messages) == 1, messages
    for word in (*words, "Training goes on."):
        assert word in messages[0]


@pytest.mark.parametrize("call", ["mkdir", "open", "ftruncate", "write", "replace"])
@pytest.mark.parametrize("name", ERRORS)
def test_a_trace_that_fails_is_told_of_once(
    name: str, call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At its start, in its midst (but for what has been opened) and at its end."""
    folder = tmp_path / "deep" / "trace"
    with failing(tmp_path, name, call), lockstep.trace(folder):
        train_and_log()
    told(caplog, "rank 0's trace", str(folder), os.strerror(getattr(errno, name)))
    assert not [*folder.glob("*.tmp")]
    with lockstep.trace(folder):  # and nothing is left that hinders another one
        train_and_log()
    assert len(read_folder(folder)[0].step_ends) == NUM_STEPS


def test_a_trace_keeps_what_it_had_before_a_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr("lockstep.observe.tracing._WRITING_INTERVAL_NS", 0)
    size = 0

    def limit() -> None:
        nonlocal size
        size = (tmp_path / "rank-0.spans").stat().st_size + 10  # a part of a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    try:
        with lockstep.trace(tmp_path):
            train_and_log({6: limit})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told(caplog, "rank 0's trace", os.strerror(errno.EFBIG))
    assert (tmp_path / "rank-0.spans").stat().st_size == size
    assert len(read(tmp_path / "rank-0.spans").step_ends) == 6


def test_a_folder_of_a_trace_may_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lockstep.trace(tmp_path / "trace"):
        train_and_log({5: lambda: shutil.rmtree(tmp_path / "trace")})
    told(caplog, "JSON", os.strerror(errno.ENOENT))


@pytest.mark.parametrize("kind", ["pipe", "link", "hard link", "folder", "device"])
def test_what_stands_in_place_of_a_trace_is_left_alone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe, which nobody reads from, isn't waited for."""
    path, other = tmp_path / "rank-0.spans", tmp_path / "other"
    other.write_text("of somebody else\n")
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("only root may make a device")
    {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(other),
        "hard link": lambda: path.hardlink_to(other),
        "folder": path.mkdir,
        "device": lambda: os.mknod(path, 0o020666, os.makedev(1, 7)),
    }[kind]()
    with lockstep.trace(tmp_path):
        train_and_log()
    told(caplog, "rank 0's trace")
    assert other.read_text() == "of somebody else\n"


def _is_no_csv(path: Path, kind: str) -> None:
    if kind == "device":
        path.symlink_to("/dev/full")  # which gives zeros without end
    elif kind == "huge":
        with open(path, "w") as file:
            file.truncate(1 << 40)
    elif kind == "long":
        path.write_text("x" * (1 << 20))
    else:
        path.write_bytes(b"\xff\0\n" * 1000)


@pytest.mark.parametrize("kind", ["device", "huge", "long", "binary"])
def test_a_log_that_cannot_be_continued_is_told_of_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.csv"
    _is_no_csv(path, kind)
    before = path.stat().st_size
    lockstep.log_to(path, lines=False)
    train_and_log()
    lockstep.log_to(lines=False)
    told(caplog, str(path))
    assert path.stat().st_size == before


def _unreachable(step: int, values: Mapping[str, float]) -> None:
    if step >= 5:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


@pytest.mark.parametrize("place", ["log.csv", "log.jsonl", "board", "function"])
def test_a_log_that_fails_is_told_of_once(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And others are written on."""
    path, whole = tmp_path / place, tmp_path / "whole.csv"
    lockstep.log_to(_unreachable if place == "function" else path, whole, lines=False)
    with suppress(AttributeError):  # those that have no file here
        sink: Any = logger._logger._sinks[0]
        descriptor = sink._file.fileno()
        with open("/dev/full", "w") as full:
            os.dup2(full.fileno(), descriptor)
    train_and_log()
    lockstep.log_to(lines=False)
    told(caplog, "log_to()", "_unreachable" if place == "function" else str(path))
    assert len([*csv.reader(whole.read_text().splitlines())]) == 1 + NUM_STEPS


@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("place", ["log.csv", "log.jsonl", "board"])
def test_a_log_that_cannot_be_opened_is_told_of_once(
    place: str, name: str, call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or whose columns can't be written anew: then what it had is kept."""
    path = tmp_path / "deep" / place
    with failing(tmp_path, name, call):
        lockstep.log_to(path, lines=False)
        train_and_log()
        lockstep.log_to(lines=False)
    if call == "replace" and place != "log.csv":  # which isn't called
        assert not caplog.records
        return
    told(caplog, str(path), os.strerror(getattr(errno, name)))
    assert not [*tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("place", ["log.csv", "log.jsonl"])
def test_a_pipe_is_not_waited_for(
    place: str, is_read: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / place)
    reader = os.open(tmp_path / place, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    try:
        lockstep.log_to(tmp_path / place, lines=False)
        for step in range(200):  # more than fits into a pipe
            lockstep.log({"x" * 1000: 1.0}, step=step)
    finally:
        if reader is not None:
            os.close(reader)
    lockstep.log_to(lines=False)
    told(caplog, str(tmp_path / place))


def test_errors_of_functions_are_the_programs(caplog: pytest.LogCaptureFixture) -> None:
    def judge(step: int, values: Mapping[str, float]) -> None:
        raise ValueError("the loss diverges")

    lockstep.log_to(judge, lines=False)
    with pytest.raises(ValueError, match="diverges"):
        lockstep.log(loss=1.0)
    assert not caplog.records


def test_lines_wait_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        monkeypatch.setattr(sys, "stderr", writer)
        num_written = 0
        while write_line(f"line {num_written}" + "x" * 90_000):
            num_written += 1
            assert num_written < 100
        assert reader.read(4096).startswith(b"line 0xx")
    monkeypatch.setattr(sys, "stderr", writer)  # which is closed now
    assert write_line("nothing")
    monkeypatch.setattr(sys, "stderr", None)
    assert write_line("nothing")


def test_a_full_stderr_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        lockstep.log_to()
        train_and_log()
        logger._logger._unprinted.clear()


SCRIPT = """
import lockstep
from tests.observe.test_faults import train_and_log
lockstep.init()
lockstep.log_to("full/log.csv", "full/log.jsonl", "full/board")
for _ in range(10):
    train_and_log()
print("x" * 50_000)
print("trained")
"""


@pytest.mark.forks
@pytest.mark.long
def test_a_run_on_a_full_disk_ends_well(tmp_path: Path) -> None:
    """Its trace, its logs and the ranks' output are recorded as far as there is room."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "full").mkdir()
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--trace", "full/trace"]
    mount = 'mount -t tmpfs -o size=16k none full && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *command, "--log-dir", "full/logs", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    assert "Traceback" not in done.stderr, done.stderr
    for words in ("No space left on device", "the log of rank 0", "rank 0's trace", "log_to()"):
        assert words in done.stderr
