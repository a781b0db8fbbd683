"""The command line: what it reads, what it leaves to the script, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cli, errors, launcher
from lockstep.errors import LaunchError
from lockstep.launcher import Job
from lockstep.launcher.job import Meeting, Program


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "pkg").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(monkeypatch: pytest.MonkeyPatch, *argv: str) -> Job:
    """What ``lockstep run argv...`` would start."""
    started: list[Job] = []
    monkeypatch.setattr(launcher, "run_job", started.append)
    monkeypatch.setattr(sys, "argv", ["lockstep", "run", *argv])
    cli.main()
    return started[0]


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What ``lockstep argv...`` says when it starts nothing."""
    monkeypatch.setattr(sys, "argv", ["lockstep", *argv])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_run_reads_its_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("-n4", "--threads=2", "--log-dir", "logs", "-m", "pkg.train", "-n", "x")
    job = read(monkeypatch, *argv)
    assert job.program == Program("pkg.train", ("-n", "x"), is_module=True)
    assert (job.num_ranks, job.num_threads, job.log_dir) == (4, 2, str(folder / "logs"))
    assert (job.stdin_rank, job.full_traceback) == (None, False)
    job = read(monkeypatch, "-n", "2", "--stdin", "1", "--full-traceback", "train.py")
    assert (job.stdin_rank, job.full_traceback) == (1, True)
    assert read(monkeypatch, "--stdin", "none", "train.py").stdin_rank is None
    hosts = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "x:29500")
    meeting = read(monkeypatch, *hosts, "-n", "1", "train.py").meeting
    assert meeting == Meeting(2, 1, "x", 29500, "lockstep", 300, 60, 2, 30)


@pytest.mark.parametrize("name", ["-n", "--nprocs", "--nproc-per-node", "--nproc_per_node"])
def test_run_reads_the_number_of_ranks_by_all_its_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert read(monkeypatch, name, "3", "train.py").num_ranks == 3


@pytest.mark.parametrize(
    "words",
    [["--help"], ["-m", "--threads", "2"], ["--", "-m"], ["a b", "-x", "--", ""], ["--version"]],
    ids=" ".join,
)
def test_run_leaves_what_follows_the_script_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    expected = Program("train.py", tuple(words))
    assert read(monkeypatch, "-n", "1", "train.py", *words).program == expected
    assert read(monkeypatch, "-n", "1", "--", "train.py", *words).program == expected


@pytest.mark.parametrize("late", [["-n", "3"], ["--nprocs=3"], ["--nproc-per-node", "3"]])
def test_run_says_that_a_number_of_ranks_after_the_script_is_not_its_own(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    late: list[str],
) -> None:
    job = read(monkeypatch, "train.py", *late)
    assert job.program == Program("train.py", tuple(late))
    said = capsys.readouterr().err
    assert f"running {job.num_ranks} ranks" in said
    assert f"'{late[0].partition('=')[0]}' stands after the script" in said
    read(monkeypatch, "-n", "2", "train.py", *late)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run"], "SCRIPT is missing"),
        (["run", "-n"], "'lockstep run --help'"),
        (["run", "--frob", "train.py"], "--frob"),
        (["frob"], "'frob'"),
        (["bench", "frob"], "'frob'"),
        (["run", "--chek", "3", "train.py"], "option of 'lockstep run'. Did you mean --check?"),
        (["run", "-N", "2", "train.py"], "Did you mean -n?"),
        (["run", "--no_live=", "train.py"], "Did you mean --no-live?"),
        (["explain", "--nproc", "2", "train.py"], "Did you mean --nprocs?"),
        (["report", "--txt", "run1"], "Did you mean --text?"),
        (["status", "--stack"], "Did you mean --stacks?"),
        (["doctor", "--jsn"], "Did you mean --json?"),
        (["demo", "--epoch", "3"], "Did you mean --epochs?"),
        (["export", "--thin", "model", "a", "b"], "Did you mean --thing?"),
        (["bench", "collectives", "--size", "1KiB"], "Did you mean --sizes?"),
        (["bench", "coll"], "Did you mean collectives?"),
        (["--versio"], "Did you mean --version?"),
        (["rnu", "train.py"], "Did you mean run?"),
        (["train.py"], "Did you mean 'lockstep run train.py'?"),
        (["show", "run1", "run2"], "'run2' isn't an argument of 'lockstep show'."),
        (["help", "PeerLst"], "Did you mean PeerLost?"),
        (["help", "LockstepEror"], "Did you mean LockstepError?"),
        (["help", "Foo"], "'lockstep help' lists them."),
        (["demo", "--seed", "x"], "--seed"),
        (["run", "-n", "99999999999999999999", "train.py"], "from 1 to 4,096"),
        (["run", "-n", "9" * 5000, "train.py"], "from 1 to 4,096"),
        (["run", "--threads", "100000", "train.py"], "threads per rank is 100000"),
        (["run", "--threads", "99999999999999999999", "train.py"], "from 1 to 4,096"),
        (["run", "/dev/zero"], "/dev/zero is a device"),
        (["run", "pipe"], "pipe is a device, a pipe"),
        (["run", "huge.py"], "too large"),
        (["run", "-m", "lockstep"], "is this command itself"),
        (["run", "-m", "lockstep.__main__"], "is this command itself"),
        (["run", "-n", "2", "--stdin", "2", "train.py"], "--stdin is 2, but"),
        (["run", "--stdin", "first", "train.py"], "'none' leaves all ranks without"),
        (["run", "--nnodes", "2", "--stdin", "0", "train.py"], "--stdin is for runs on one host"),
        (["bench", "collectives", "--sizes", ""], "--sizes has ''"),
        (["bench", "collectives", "--sizes", "9" * 5000 + "B"], "which is no size"),
        (["bench", "collectives", "--json", "."], "can't be written: Is a directory"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_refusals(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    said: str,
) -> None:
    os.mkfifo(folder / "pipe")
    with open(folder / "huge.py", "wb") as file:
        file.truncate(1 << 40)
    message = refused(monkeypatch, capsys, *argv)
    assert message.startswith("lockstep: ")
    assert said in message


@pytest.mark.parametrize(
    ("argv", "taught"),
    [
        (["--help"], ["run      run a Python script", "lockstep run train.py"]),
        (
            ["run", "-h"],
            ["lockstep run -n 2 train.py", "--nproc-per-node", "--stdin"],
        ),
        (["run", "--help"], ["  SCRIPT [ARGS ...]  "]),
        (["demo", "--help"], ["--data", "1,797 digits"]),
        (["report", "--help"], [" 400gb-ib"]),
        (["bench", "--help"], ["collectives"]),
        (["bench", "collectives", "--help"], ["--json", "A quick look:"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_teaches(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    taught: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", *argv])
    texts = set()
    for columns in ("80", "60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 0
        texts.add(capsys.readouterr().out)
    (shown,) = texts
    for words in taught:
        assert words in shown


@pytest.mark.parametrize("name", errors.__all__)
def test_help_tells_of_every_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    classes = getattr(errors, name).__subclasses__()
    below = [each.__name__ for each in classes if each.__module__ == errors.__name__]
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    told = set()
    for word in (name, name.lower(), snake, f"lockstep.errors.{name}:"):
        monkeypatch.setattr(sys, "argv", ["lockstep", "help", word])
        cli.main()
        told.add(capsys.readouterr().out)
    (shown,) = told
    assert shown.startswith(name)
    assert all(f"\n  {each}: " in shown for each in below)
    assert max(map(len, shown.splitlines())) <= 80


def test_help_lists_all_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "help"])
    cli.main()
    told = capsys.readouterr().out
    assert all(f"{name}: " in told for name in errors.__all__)


def test_a_reader_that_stops_reading_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lockstep", "help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_notes_of_an_error_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Job) -> None:
        error = LaunchError("It can't be started.")
        error.add_note("It was in the midst of something.")
        raise error

    monkeypatch.setattr(launcher, "run_job", fail)
    monkeypatch.setattr(sys, "argv", ["lockstep", "run", __file__])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    told = "lockstep: It can't be started.\nIt was in the midst of something.\n"
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize("path", [[], ["run"], ["demo"], ["bench"], ["bench", "collectives"]])
def test_help_names_every_option(path: list[str]) -> None:
    parser = cli._parser()
    for name in path:
        (subparsers,) = (a for a in parser._actions if isinstance(a.choices, dict))
        parser = subparsers.choices[name]
    for action in parser._actions:
        for option in action.option_strings:
            assert (
                option in ("--nproc_per_node", "--max_restarts")
                or f" {option} " in parser.format_help()
                or (f" {option}, " in parser.format_help())
            )


@pytest.mark.parametrize("argv", [["--version"], ["help"], ["--help"], ["doctor", "--json"]])
def test_a_full_disk_behind_stdout_is_told(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "lockstep", *argv]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "lockstep: stdout can't be written: No space left on device.\n"
    assert done.returncode == 1


def test_a_command_may_have_no_stdout() -> None:
    words = [sys.executable, "-m", "lockstep", "help"]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
