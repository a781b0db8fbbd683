"""The command line is read the same in both ways there are to read it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lockstep.cli import running
from lockstep.cli.app import app
from lockstep.cli.plain import RunOptions, plain_run

WORDS = ["-n", "2", "--nprocs", "--threads", "--log-dir", "logs", "-m", "train.py", "--", "-x", ""]


def whole_parser(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> RunOptions | None:
    read: list[RunOptions] = []
    with monkeypatch.context() as patch:
        patch.setattr(running, "run", read.append)
        CliRunner().invoke(app, argv)
    return read[0] if read else None


@given(words=st.lists(st.sampled_from(WORDS), max_size=8))
@example(words=["-n", "2", "--threads", "2", "-m", "train.py", "-n", "2", "--", "--help"])
@example(words=["train.py", "--", "-m"])
@example(words=["--log-dir", "logs", "train.py"])
def test_plain_run_agrees_with_the_whole_parser(words: list[str]) -> None:
    plain = plain_run(["run", *words])
    if plain is not None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            assert plain == whole_parser(["run", *words], monkeypatch)


def test_plain_run_reads_what_is_plain() -> None:
    argv = ["run", "-n", "4", "--threads", "2", "--log-dir", "logs", "-m", "pkg.train", "-n", "x"]
    assert plain_run(argv) == RunOptions(
        "pkg.train", ("-n", "x"), module=True, num_ranks="4", num_threads="2", log_dir="logs"
    )


@pytest.mark.parametrize(
    "argv",
    [[], ["run"], ["demo"], ["run", "--help"], ["run", "-n", "-1", "x.py"], ["run", "-n2", "x.py"]],
)
def test_plain_run_leaves_the_rest(argv: list[str]) -> None:
    assert plain_run(argv) is None


def test_whole_parser_reads_what_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["run", "-n4", "--threads=2", "--nnodes", "2", "--node-rank", "1", "train.py", "--help"]
    assert whole_parser(argv, monkeypatch) == RunOptions(
        "train.py", ("--help",), num_ranks="4", num_threads="2", num_hosts="2", host="1"
    )
