"""``lockstep status`` where processes, of other users for root, have what isn't of a run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.launcher import dump, main_stack
from lockstep.observe import attach
from lockstep.run_status import RunStatus
from lockstep.status import STACKS_SIGNAL, Number
from tests.memory import FIXED_BYTES, peak_of

NAME = "lockstep-aaaaaaaa.lockstep-{} (deleted)"  # as /proc shows a file that is removed


PROGRAM = "test_status_of_others.py"  # of whose runs this process may have others


def facts(program: str = PROGRAM) -> bytes:
    return json.dumps({"version": 1, "pid": os.getpid(), "program": program, "at": 0}).encode()


@contextmanager
def shown(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = attach.files_in_memory  # of all processes: tests beside this one have large ones

    def of_this_process(name: str) -> list[tuple[int, str]]:
        return [found for found in files(name) if found[0] == os.getpid()]

    monkeypatch.setattr(attach, "files_in_memory", of_this_process)
    monkeypatch.setattr(attach, "_OBSERVED_SECONDS", 0.0)
    monkeypatch.setattr("lockstep.launcher.stacks._DUMP_SECONDS", 0.0)


def local_runs() -> list[attach.ShownRun]:
    is_of_this = {"pid": os.getpid(), "program": PROGRAM}.items()
    return [run for run in attach.running() if run.facts.items() >= is_of_this]


def observe() -> int:
    """See what the ranks of this process's runs do; return how many runs there are."""
    runs = local_runs()
    for run in runs:
        attach._observe(run)
    return len(runs)


@pytest.mark.parametrize("size", [100, 1 << 20, 1 << 42])
def test_pages_of_no_runs_size_are_not_shown(size: int) -> None:
    """However much a file seems to have, of which nothing is on a disk or in memory."""
    descriptor = os.memfd_create("lockstep-status")
    with shown(descriptor):
        os.write(descriptor, facts())
        os.ftruncate(descriptor, size)
        assert observe() == (size == 1 << 20)
        assert peak_of(observe) < FIXED_BYTES + 2 * size


def test_pages_take_at_most_twice_their_size() -> None:
    """Whatever each rank seems to have logged."""
    num_ranks = 200
    run = RunStatus.create(PROGRAM, num_ranks)
    logged = b"{" + b",".join(b'"%x":1' % n for n in range(500)) + b"}"
    for page, rank in enumerate(run.ranks):
        rank.begin(page)
        rank._memory[4096 : 4096 + len(logged)] = logged
        rank._numbers[Number.LOGGED_BYTES] = len(logged)
    assert len(run.ranks[5].read().values) == 500
    peak = min(peak_of(observe) for _ in range(3))  # other threads' memory is counted as well
    assert peak < 2 * len(run._memory) + FIXED_BYTES, peak / len(run._memory)


@pytest.mark.long
def test_the_largest_pages_take_less_than_their_size_and_few_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 4,096 ranks that all seem to run, and to have stacks that nobody writes."""
    run = RunStatus.create(PROGRAM, 4096)
    for number, rank in enumerate(run.ranks):
        rank.begin(number)
        rank.enter("wait", "x" * 64)
    assert peak_of(lambda: attach.status(str(os.getpid()))) < len(run._memory)
    out = capsys.readouterr().out
    assert "and 3,840 more ranks" in out
    assert len(out) < 64 * 1024
    with shown(os.memfd_create("lockstep-status")) as larger:
        os.write(larger, facts())
        os.ftruncate(larger, len(run._memory) + 8192)
        assert len(local_runs()) == 1


def test_a_process_is_shown_with_one_run() -> None:
    """However many files it has."""
    first, second = RunStatus.create(PROGRAM, 1), RunStatus.create(PROGRAM, 1)
    assert len(local_runs()) == 1
    del first, second


def test_pages_that_are_cut_off_are_no_end() -> None:
    """A map of the file would be: the kernel ends who reads behind its end."""
    descriptor = os.memfd_create("lockstep-status")
    with shown(descriptor):
        os.write(descriptor, facts())
        os.ftruncate(descriptor, RunStatus.num_bytes(2))
        (run,) = local_runs()
        os.ftruncate(descriptor, 0)
        assert [state.pid for state in run.read()] == [0, 0]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / NAME.format("status")
    os.mkfifo(path)
    with shown(os.open(path, os.O_RDWR)):
        assert not local_runs()


@pytest.mark.parametrize("kind", ["stacks", "other"])
def test_a_file_with_a_name_is_not_emptied(kind: str, tmp_path: Path) -> None:
    """Stacks are written to a file without one: another may be a link to somebody's file."""
    victim = tmp_path / "victim"
    victim.write_text("of somebody else\n")
    path = tmp_path / NAME.format(kind)
    os.link(victim, path)
    descriptor = os.open(path, os.O_RDONLY)
    former = signal.signal(STACKS_SIGNAL, lambda *_: None)
    try:
        run = RunStatus.create("train.py", 1)
        run.ranks[0].begin(0)
        run.ranks[0].show_stacks_in(descriptor)
        assert dump(run.ranks[0].read()) == ""
    finally:
        signal.signal(STACKS_SIGNAL, former)
        os.close(descriptor)
    assert victim.read_text() == "of somebody else\n"


def test_a_long_dump_takes_no_more_memory_than_a_stack() -> None:
    frame = '  File "x", line 1 in y\n'
    text = "Current thread 0x1 (most recent call first):\n" + frame * 40_000
    assert len(main_stack(text)) == 100
    assert peak_of(lambda: main_stack(text)) < FIXED_BYTES
