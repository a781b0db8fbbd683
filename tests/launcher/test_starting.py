"""What is said while many more ranks start than there are cores."""

from __future__ import annotations

import pytest

from lockstep.launcher import Job, starting
from lockstep.launcher.job import Program
from lockstep.launcher.starting import StartOfMany
from lockstep.run_status import RunStatus

SECOND = 1_000_000_000


class Start:
    """The start of 20 ranks on two cores, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 20) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(starting, "now", lambda: int(self.seconds * SECOND))
        monkeypatch.setattr(starting, "num_cores", lambda: 2)
        self.status = RunStatus.create("train.py", num_ranks)
        self.start = StartOfMany(Job(Program("train.py"), num_ranks, 1), self.status)

    def told_at(self, seconds: float) -> list[str]:
        """What is said at this time."""
        told: list[str] = []
        self.seconds = seconds
        self.start.tell(told.append)
        return told


def test_many_ranks_are_announced_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start = Start(monkeypatch)
    said = capfd.readouterr().err
    assert said.startswith("lockstep: starting 20 ranks on 2 cores, each a process")
    assert "With -n 2 there is one for each core." in said
    start.start.note_process(3)
    assert capfd.readouterr().err == ""
    start.seconds = 5.0
    start.start.note_process(7)
    assert capfd.readouterr().err == "lockstep: 7 of 20 processes are there after 0:05.\n"


def test_a_few_ranks_start_silently(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    few = Start(monkeypatch, 16)
    few.seconds = 100
    few.start.note_process(3)
    assert few.told_at(200) == []
    assert few.start.seconds_left() is None
    assert capfd.readouterr().err == ""


def test_it_is_told_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    assert start.told_at(4) == []
    for number, rank in enumerate(start.status.ranks[:5]):
        rank.begin(number)
    former = start.status.ranks[0].enter("wait", "init")
    assert start.told_at(6) == [
        "5 of 20 ranks have begun the program after 0:06, and 1 wait in init() for the others."
    ]
    assert start.told_at(7) == []
    assert start.start.seconds_left() == 4
    start.status.ranks[0].leave(former)
    assert start.told_at(11) == []  # it is through, and so all have come
    assert start.start.seconds_left() is None


def test_it_ends_if_the_program_does_not_call_init(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    for number, rank in enumerate(start.status.ranks):
        rank.begin(number)
    told = [start.told_at(seconds) for seconds in (5, 10, 15, 20)]
    assert [len(each) for each in told] == [1, 1, 0, 0]
    assert start.start.is_over
