"""Who is to blame, given what is known of each rank's end."""

from __future__ import annotations

import signal

import pytest

from lockstep.launcher.failures import (
    Ending,
    Report,
    Told,
    describe,
    first_failure,
    signal_name,
)
from lockstep.launcher.processes import Escalation, after_failure, after_signal

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"


def raised(rank: int, at: float, text: str = "ValueError: bad", *, asked: bool = False) -> Ending:
    report = Report(at, exit_code=1, told=Told(text, text, text.splitlines()[-1]))
    return Ending(rank, at + 0.05, exit_code=1, report=report, asked=asked)


def killed(rank: int, at: float, number: int = signal.SIGKILL, *, asked: bool = False) -> Ending:
    return Ending(rank, at, signal=number, asked=asked)


WELL = Ending(9, 0.5, exit_code=0)


@pytest.mark.parametrize(
    ("endings", "rank"),
    [
        ([WELL], None),
        ([raised(0, 2.0), raised(1, 1.0)], 1),
        # The peers' exceptions come before the news of the death that caused them.
        ([raised(0, 1.0, LOST), killed(1, 1.1)], 1),
        ([raised(0, 1.0, LOST), Ending(1, 1.1, exit_code=7)], 1),
        # Raised while handling the lost connection: still a consequence.
        ([raised(0, 1.0, f"{LOST}\n...\nMyError: training failed"), killed(1, 1.1)], 1),
        # An exception of its own comes before a death that follows it.
        ([raised(0, 1.0), killed(1, 1.1, signal.SIGABRT)], 0),
        # All lost a peer, so it was elsewhere: the first is as good as any.
        ([raised(0, 2.0, LOST), raised(1, 1.0, LOST)], 1),
        # Who is asked to end hasn't failed, however it takes it.
        ([raised(0, 1.0), killed(1, 0.9, signal.SIGTERM, asked=True)], 0),
        ([raised(0, 1.0, asked=True), WELL], None),
        ([Ending(0, 1.0, exit_code=0, without_result=True)], 0),
        ([], None),
    ],
)
def test_first_failure(endings: list[Ending], rank: int | None) -> None:
    for order in (endings, endings[::-1]):
        culprit = first_failure(order)
        assert (None if culprit is None else culprit.rank) == rank


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (Ending(0, 1.0, exit_code=3), 3),
        (killed(0, 1.0), 137),
        (Ending(0, 1.0, exit_code=0, without_result=True), 1),
        # It reported an exception, and was ended because it wouldn't end by itself.
        (Ending(0, 1.0, signal=signal.SIGTERM, report=Report(0.5, exit_code=1)), 1),
        # It had returned, and crashed at its exit.
        (Ending(0, 1.0, signal=signal.SIGSEGV, report=Report(0.5, 0, result=b"")), 139),
    ],
)
def test_exit_status(ending: Ending, status: int) -> None:
    assert ending.exit_status == status
    assert str(status) in describe(ending, [ending], 1) or ending.signal is not None or status == 1


def test_describe_names_those_that_failed_after() -> None:
    endings = [raised(0, 1.0, LOST), raised(1, 0.5), raised(2, 1.0, LOST), killed(3, 2, asked=True)]
    message = describe(endings[1], endings, 4)
    first, *rest = message.splitlines()
    assert first == (
        "rank 1 of 4 failed first: exit code 1. After it, and likely because of it, failed "
        "ranks 0, 2."
    )
    assert rest == ["", "ValueError: bad"]


def test_describe_shows_what_a_crash_left() -> None:
    words = (
        'Fatal Python error: Aborted\n\n  File "train.py", line 1 in <module>\n'
        '  File "/x/lockstep/launcher/program.py", line 89 in _execute\n'
        '  File "<string>", line 4 in <module>\n\nExtension modules: numpy (total: 1)'
    )
    ending = Ending(0, 1.0, signal=signal.SIGABRT, last_words=f"before\n{words}")
    message = describe(ending, [ending], 1)
    assert "ended by SIGABRT" in message
    assert message.rstrip().endswith('File "train.py", line 1 in <module>')


def test_signal_name_of_one_without_a_name() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"


def test_escalation_waits_to_judge_then_asks_then_kills() -> None:
    escalation = Escalation(after_failure(grace_seconds=3.0))
    assert escalation.take(10.0) == []
    assert escalation.take(10.1) == []
    assert escalation.take(10.2) == [signal.SIGTERM]
    assert escalation.take(13.1) == []
    assert escalation.take(13.2) == [signal.SIGKILL]
    assert not escalation.exhausted(13.3)
    assert escalation.exhausted(20.0)


def test_escalation_after_ctrl_c_lets_ranks_see_it_first() -> None:
    actions = after_signal(signal.SIGINT, grace_seconds=3.0)
    assert [action.signal for action in actions] == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    assert sum(action.seconds for action in actions[:-1]) == 3.0
