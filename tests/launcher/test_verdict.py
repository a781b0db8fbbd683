"""Who is to blame, given what is known of each rank's end."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest

from lockstep.errors import CollectiveTimeout, PeerLost, RendezvousFailed, SaveFailed
from lockstep.launcher.failures import (
    ErrorText,
    Failure,
    failure_by,
    failure_outcome,
    first_failure,
    signal_name,
)
from lockstep.launcher.processes import (
    Escalation,
    after_failure,
    after_signal,
    ending_signal,
    fork,
)
from lockstep.launcher.rank import LENGTH_BYTES
from lockstep.launcher.rank_process import RankProcess

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"


def rank_process(rank: int, *, asked: bool = False, wants_result: bool = False) -> RankProcess:
    connection: Any = None  # nothing is sent
    return RankProcess(rank, -1, connection, (), False, wants_result, asked=asked)


def ended(rank: int, at: float, code: int, **options: bool) -> RankProcess:
    process = rank_process(rank, **options)
    process.end(code, at)
    return process


def raised(
    rank: int, at: float, text: str = "ValueError: bad", *, code: int = 1, asked: bool = False
) -> RankProcess:
    process = rank_process(rank, asked=asked)
    process.failure = Failure(rank, at, 1, ErrorText(text, text, text.splitlines()[-1]))
    process.end(code, at + 0.05)
    return process


def killed(
    rank: int, at: float, number: int = signal.SIGKILL, *, asked: bool = False
) -> RankProcess:
    return ended(rank, at, -number, asked=asked)


def failures_of(processes: list[RankProcess]) -> list[Failure]:
    return [failure for process in processes if (failure := process.failure_unless_asked())]


WELL = ended(9, 0.5, 0)


@pytest.mark.parametrize(
    ("processes", "rank"),
    [
        ([WELL], None),
        ([raised(0, 2.0), raised(1, 1.0)], 1),
        # The peers' exceptions come before the news of the death that caused them.
        ([raised(0, 1.0, LOST), killed(1, 1.1)], 1),
        ([raised(0, 1.0, LOST), ended(1, 1.1, 7)], 1),
        # Raised while handling the lost connection: still a consequence.
        ([raised(0, 1.0, f"{LOST}\n...\nMyError: training failed"), killed(1, 1.1)], 1),
        # An exception of its own comes before a death that follows it.
        ([raised(0, 1.0), killed(1, 1.1, signal.SIGABRT)], 0),
        # All lost a peer, so it was elsewhere: the first is as good as any.
        ([raised(0, 2.0, LOST), raised(1, 1.0, LOST)], 1),
        # Who is asked to end hasn't failed, however it takes it.
        ([raised(0, 1.0), killed(1, 0.9, signal.SIGTERM, asked=True)], 0),
        ([raised(0, 1.0, asked=True), WELL], None),
        ([ended(0, 1.0, 0, wants_result=True)], 0),
        ([], None),
    ],
)
def test_first_failure(processes: list[RankProcess], rank: int | None) -> None:
    for order in (processes, processes[::-1]):
        failures = failures_of(order)
        assert (first_failure(failures).rank if failures else None) == rank


def has_returned(process: RankProcess) -> RankProcess:
    process.result = b""
    process.end(-signal.SIGSEGV, 1.0)
    return process


@pytest.mark.parametrize(
    ("process", "status"),
    [
        (ended(0, 1.0, 3), 3),
        (killed(0, 1.0), 137),
        (ended(0, 1.0, 0, wants_result=True), 1),
        # It reported an exception, and was ended because it wouldn't end by itself.
        (raised(0, 0.5, code=-signal.SIGTERM), 1),
        # It had returned, and crashed at its exit.
        (has_returned(rank_process(0, wants_result=True)), 139),
    ],
)
def test_exit_status(process: RankProcess, status: int) -> None:
    outcome = failure_outcome(failures_of([process]), 1)
    assert outcome.exit_status == status
    assert outcome.message is not None
    assert str(status) in outcome.message or outcome.signal is not None or status == 1


def test_message_names_those_that_failed_after() -> None:
    processes = [
        raised(0, 1.0, LOST), raised(1, 0.5), raised(2, 1.0, LOST), killed(3, 2, asked=True)
    ]  # fmt: skip
    message = failure_outcome(failures_of(processes), 4).message
    assert message is not None
    first, *rest = message.splitlines()
    assert first == (
        "rank 1 of 4 failed first: exit code 1. After it, and likely because of it, failed "
        "ranks 0, 2."
    )
    assert rest == ["", "ValueError: bad"]


@pytest.mark.parametrize(("text", "is_told"), [(LOST, True), ("ValueError: bad", False)])
def test_message_names_those_that_stopped_before_the_others_were_through(
    text: str, is_told: bool
) -> None:
    """But not where the failure is another one."""
    message = failure_outcome([raised(0, 1.0, text).failure], 3, ended_well=[2, 1]).message
    assert message is not None
    said = "But ranks 1, 2 had ended with exit code 0 while others went on: by fewer steps"
    assert (said in message) == is_told


def missed(rank: int, at: float, *absent: int) -> RankProcess:
    process = raised(rank, at, f"CollectiveTimeout: Rank {absent} did not come")
    assert process.failure is not None
    process.failure = replace(process.failure, missed=absent)
    return process


@pytest.mark.parametrize(
    ("processes", "size", "rank", "headline"),
    [
        ([missed(0, 1.0, 1)], 2, 1, "rank 1 of 2 did not come"),
        ([missed(0, 2.0, 3), missed(2, 1.0, 3)], 4, 3, "rank 3 of 4 did not come"),
        ([missed(0, 1.0, 2, 3)], 4, 0, "ranks 2, 3 of 4 did not come"),
        # It came too late, to find nobody.
        ([missed(0, 1.0, 1), raised(1, 1.1, LOST)], 2, 1, "rank 1 of 2 did not come"),
        # It came too late, and was told so.
        ([missed(0, 1.0, 1), missed(1, 1.1, 1)], 2, 1, "rank 1 of 2 did not come"),
        # The one that waits may be where it shouldn't be.
        ([missed(0, 1.0, 1, 2, 3)], 4, 0, "rank 0 of 4 failed first"),
        # They waited for each other, in different groups.
        ([missed(0, 1.0, 1), missed(1, 1.1, 0)], 2, 0, "rank 0 of 2 failed first"),
        # There is why it didn't come.
        ([missed(0, 1.0, 1), killed(1, 1.1)], 2, 1, "rank 1 of 2 failed first: it was ended by"),
    ],
)
def test_headline_names_who_was_waited_for(
    processes: list[RankProcess], size: int, rank: int, headline: str
) -> None:
    outcome = failure_outcome(failures_of(processes), size)
    assert outcome.rank == rank
    assert outcome.message is not None
    assert outcome.message.startswith(headline)


def test_ranks_that_were_waited_for_are_those_of_an_error_or_its_cause() -> None:
    late = CollectiveTimeout("Rank 1 did not come", [1], "all_reduce")
    again = ValueError("the step failed")
    again.__cause__ = late
    for error in (late, again, RendezvousFailed("rank 1 did not come", [1])):
        assert failure_by(error, 0, of_function=False).missed == (1,)
    assert failure_by(ValueError("bad"), 0, of_function=False).missed == ()


def tells(rank: int, at: float, *earlier: int) -> RankProcess:
    process = raised(rank, at, "SaveFailed: there was no room")
    assert process.failure is not None
    process.failure = replace(process.failure, told_of=earlier)
    return process


@pytest.mark.parametrize(
    ("processes", "rank", "headline"),
    [
        ([tells(0, 1.0, 2), raised(2, 1.1, "OSError: no room")], 2, "rank 2 of 3 failed first"),
        ([tells(0, 1.0, 2), tells(1, 1.1, 2)], 2, "rank 2 failed before all others, as they tell."),
        # Rank 0 was lost, as it had lost rank 2.
        ([tells(1, 1.0, 0), tells(0, 1.1, 2)], 2, "rank 2 failed before all others"),
        ([tells(1, 1.0, 0), tells(0, 1.1, 1)], 1, "rank 1 of 3 failed first"),
        # Rank 0 left rank 1, as it had waited for rank 2 for long enough.
        ([tells(1, 1.0, 0), missed(0, 1.1, 2)], 2, "rank 2 of 3 did not come"),
    ],
)
def test_a_rank_that_others_tell_of_is_blamed(
    processes: list[RankProcess], rank: int, headline: str
) -> None:
    outcome = failure_outcome(failures_of(processes), 3)
    assert outcome.rank == rank
    assert outcome.message is not None
    assert outcome.message.startswith(headline)


def test_the_rank_that_failed_before_is_that_of_an_error_or_its_cause() -> None:
    saved = SaveFailed("Rank 2: no room")
    saved.rank = 2
    again = ValueError("the step failed")
    again.__cause__ = PeerLost("Rank 2 has left", [2], "all_gather")
    for error in (saved, again):
        assert failure_by(error, 0, of_function=False).told_of == (2,)
    assert failure_by(SaveFailed("no room"), 0, of_function=False).told_of == ()


def test_a_rank_that_is_ended_in_its_exit_handlers_had_ended_well() -> None:
    through = killed(0, 1.0, signal.SIGTERM, asked=True)
    assert not through.has_ended_well()
    through.is_through = True
    assert through.has_ended_well()
    assert WELL.has_ended_well()
    crashed_at_exit = killed(0, 1.0, signal.SIGSEGV)
    crashed_at_exit.is_through = True
    assert not crashed_at_exit.has_ended_well()


def test_message_shows_what_a_crash_left() -> None:
    words = (
        'Fatal Python error: Aborted\n\n  File "train.py", line 1 in <module>\n'
        '  File "/x/lockstep/launcher/program.py", line 89 in _execute\n'
        '  File "<string>", line 4 in <module>\n\nExtension modules: numpy (total: 1)'
    )
    process = killed(0, 1.0, signal.SIGABRT)
    process.keep_last_words(f"before\n{words}".encode())
    message = failure_outcome(failures_of([process]), 1).message
    assert message is not None
    assert "ended by SIGABRT" in message
    assert message.rstrip().endswith('File "train.py", line 1 in <module>')


def test_message_shows_the_end_of_what_a_rank_wrote() -> None:
    process = ended(0, 1.0, 7)
    for number in range(5000):
        process.keep_last_words(f"line {number}\n".encode())
    message = failure_outcome(failures_of([process]), 1).message
    assert message is not None
    assert message.endswith("\nline 4998\nline 4999")
    assert "line 0\n" not in message


def test_a_report_that_comes_with_another_is_read() -> None:
    connection, of_rank = socket.socketpair()
    with connection, of_rank:
        connection.setblocking(False)
        process = RankProcess(0, -1, connection, (), False)
        for failure in (None, Failure(0, 1.0, 3)):
            report = pickle.dumps((failure, None))
            of_rank.sendall(len(report).to_bytes(LENGTH_BYTES, "little") + report)
        process.read_report()
    assert process.failure == Failure(0, 1.0, 3)


def test_signal_name_of_one_without_a_name() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"


def test_escalation_waits_to_judge_then_asks_then_kills() -> None:
    escalation = Escalation(after_failure(grace_seconds=3.0))
    assert escalation.take(10.0) == []
    assert escalation.take(10.1) == []
    assert escalation.take(10.15) == []
    assert escalation.take(10.21) == [signal.SIGTERM]
    assert escalation.take(13.2) == []
    assert escalation.take(13.22) == [signal.SIGKILL]
    assert escalation.seconds_left(13.3) is not None
    assert escalation.seconds_left(20.0) is None


def test_escalation_of_a_launcher_that_stood_still_waits_again_to_judge() -> None:
    escalation = Escalation(after_failure(grace_seconds=3.0))
    assert escalation.take(10.0) == []
    assert escalation.take(30.0) == []
    assert escalation.take(30.11) == [signal.SIGTERM]


def test_escalation_after_ctrl_c_lets_ranks_see_it_first() -> None:
    actions = after_signal(signal.SIGINT, grace_seconds=3.0)
    assert [number for number, _ in actions] == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    assert sum(seconds for _, seconds in actions[:-1]) == 3.0


def test_a_rank_that_still_writes_its_core_is_not_asked_to_end() -> None:
    """A zombie stands for it, of which the kernel tells the same."""
    pid = fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        process = replace(rank_process(1), pid=pid, connection=ours)
        process.note_ending()
        (failure,) = failures_of([process])
        assert failure.signal == signal.SIGSEGV
        assert ending_signal(os.getpid()) == 0
    finally:
        ours.close()
        os.waitpid(pid, 0)
    assert ending_signal(pid) == 0


def test_rank_that_could_not_tell_of_its_failure_has_no_traceback_of_another_one() -> None:
    text = "lockstep.errors.PeerLost: Rank 0 is gone; rank 1 waited for it"
    told = Failure(1, 2.0, 1, ErrorText(text, text, text), told_of=(0,))
    outcome = failure_outcome([told, replace(told, rank=2, at_seconds=3.0)], 3)
    assert outcome.rank == 0
    assert outcome.traceback is None
    assert outcome.reason == f"rank 1 tells of it: {text}"
    assert (outcome.message or "").startswith("rank 0 failed before all others, as they tell.")
    assert text in (outcome.message or "")
