"""Which rank failed first, and how that is told. Pure functions from endings to words.

A rank that dies takes its peers along: within some 10 ms their collectives raise "connection
closed by peer", often before the kernel has told the launcher of the death. So the earliest
time stamp alone would blame the wrong rank.
"""

from __future__ import annotations

import itertools
import os
import re
import signal as signals
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import FrameSummary, TracebackException
from types import TracebackType
from typing import NamedTuple

from lockstep import errors
from lockstep.errors import LaunchError, RankFailed

# Messages of torch's process groups when a peer is gone. A rank whose traceback has one of
# them is blamed only if no rank failed in another way.
_LOST_A_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset) by (?:remote )?peer|connection refused|broken pipe"
    r"|gloo[/\\]transport|remote process exited|ncclremoteerror|nccl communicator was aborted"
    r"|socket(?: has)? (?:closed|timed ?out)|DistNetworkError|failed to recv, got 0 bytes"
    r"|\bPeerLost\b",
    re.IGNORECASE,
)
_MOST_RANKS_SHOWN = 16
# Left out of faulthandler's words: frames that started the program, and a list of libraries.
_NOISE = re.compile(r'  File "(<string>|.*/lockstep/launcher/\w+\.py)"|Extension modules: ')
_PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(errors.__file__) + os.sep
_START = ("<frozen importlib", "<frozen runpy>", os.path.dirname(__file__) + os.sep)


class Told(NamedTuple):
    """An exception in words."""

    full: str  # the traceback as Python would print it, without the launcher's frames
    # The same without frames of lockstep, torch and Python, and without exceptions that only
    # these raised and handled: the last one has the words for a user.
    folded: str
    error: str  # the first line of the exception's own message


@dataclass(frozen=True)
class Report:
    """A rank's message to the launcher at the end of its program."""

    at_seconds: float  # by time.monotonic(), which all processes of a host share
    exit_code: int  # of the rank
    told: Told | None = None  # the exception that ended the program
    advice: str | None = None  # instead of a traceback, if the program couldn't be started
    result: bytes | None = None  # of a function, pickled


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job; from ``rank`` on, the rank to blame and its failure."""

    exit_status: int  # the exit code for the whole run
    results: tuple[bytes, ...] = ()  # each rank's, pickled, if all went well
    message: str | None = None  # to the user, if it didn't
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    traceback: str | None = None
    at_seconds: float = 0.0  # of the failure by the wall clock, which hosts have in common
    lost_a_peer: bool = False  # whether it failed because another rank was gone

    @property
    def blame(self) -> tuple[bool, bool, float]:
        """Sort key of the outcomes of several hosts: the least is the first failure."""
        return self.rank is None, self.lost_a_peer, self.at_seconds

    def check(self) -> None:
        """Raise RankFailed, or LaunchError if no rank is to blame, unless all went well."""
        if self.exit_status == 0:
            return
        message = self.message or f"The ranks ended with exit code {self.exit_status}."
        if self.rank is None:
            raise LaunchError(message)
        raise RankFailed(
            message,
            rank=self.rank,
            exit_code=self.exit_code,
            signal=self.signal,
            traceback=self.traceback,
        )


@dataclass
class Ending:
    """How a rank ended, by its own report and by the kernel's."""

    rank: int
    at_seconds: float = 0.0  # when the launcher learned of it, by time.monotonic()
    exit_code: int | None = None  # None if a signal ended it or it is still running
    signal: int | None = None  # the number of the signal that ended it
    report: Report | None = None  # its own, if it sent one
    asked: bool = False  # whether the launcher had asked it to end before it went wrong
    without_result: bool = False  # whether its function's result is missing
    last_words: str = ""  # the end of its stderr, which is all there is of a crash

    @property
    def reported_failure(self) -> Report | None:
        """Its report, if that is of a failure: its exit is then a mere consequence."""
        return self.report if self.report is not None and self.report.exit_code else None

    @property
    def failed(self) -> bool:
        """Whether it went wrong, other than because the launcher asked it to end."""
        ended_badly = self.signal is not None or bool(self.exit_code) or self.without_result
        return not self.asked and (self.reported_failure is not None or ended_badly)

    @property
    def failed_at_seconds(self) -> float:
        """The time of the failure, by time.monotonic(), as exactly as is known."""
        return (self.reported_failure or self).at_seconds

    @property
    def exit_status(self) -> int:
        """Its exit code as a shell would give it, if it is the rank to blame."""
        if self.reported_failure is not None:
            return self.reported_failure.exit_code
        return self.exit_code or 1 if self.signal is None else 128 + self.signal

    @property
    def told(self) -> Told | None:
        """The exception that it reported."""
        return None if self.reported_failure is None else self.reported_failure.told

    @property
    def traceback(self) -> str | None:
        """The traceback of its exception or, of a crash, faulthandler's."""
        if self.reported_failure is not None:
            return None if self.told is None else self.told.full
        start = self.last_words.find("Fatal Python error:")
        if start < 0:
            return None
        lines = self.last_words[start:].splitlines()
        return "\n".join(line for line in lines if not _NOISE.match(line))

    @property
    def lost_a_peer(self) -> bool:
        """Whether it failed because another rank was gone."""
        return self.told is not None and bool(_LOST_A_PEER.search(self.told.full))


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank to blame, or None if none failed."""
    failures = [ending for ending in endings if ending.failed]
    culprits = [ending for ending in failures if not ending.lost_a_peer]
    return min(culprits or failures, key=lambda ending: ending.failed_at_seconds, default=None)


def failure_outcome(
    culprit: Ending, endings: Sequence[Ending], world_size: int, *, full_traceback: bool = False
) -> Outcome:
    """The outcome of a job in which ``culprit`` is to blame."""
    by_signal = culprit.signal is not None and culprit.reported_failure is None
    return Outcome(
        culprit.exit_status,
        message=describe(culprit, endings, world_size, full_traceback=full_traceback),
        rank=culprit.rank,
        exit_code=None if by_signal else culprit.exit_status,
        signal=signal_name(culprit.signal) if by_signal and culprit.signal else None,
        traceback=culprit.traceback,
        at_seconds=culprit.failed_at_seconds + time.time() - time.monotonic(),
        lost_a_peer=culprit.lost_a_peer,
    )


def describe(
    culprit: Ending, endings: Sequence[Ending], world_size: int, *, full_traceback: bool = False
) -> str:
    """The message for ``culprit``: its exit and traceback, and the ranks that failed later."""
    if culprit.report is not None and culprit.report.advice is not None:
        return culprit.report.advice
    others = [ending for ending in endings if ending.failed and ending.rank != culprit.rank]
    others.sort(key=lambda ending: ending.rank)
    headline = f"rank {culprit.rank} of {world_size} failed first: {_how(culprit)}."
    if others:
        ranks = _ranks([ending.rank for ending in others])
        headline += f" After it, and likely because of it, failed {ranks}."
    own_error = None if culprit.told is None else culprit.told.error
    told = [
        f"Rank {ending.rank}: {ending.told.error}"
        for ending in others
        if ending.told is not None and not ending.lost_a_peer and ending.told.error != own_error
    ]
    return "\n".join([headline, *told[:_MOST_RANKS_SHOWN], *_evidence(culprit, full_traceback)])


def _evidence(culprit: Ending, full_traceback: bool) -> list[str]:
    if culprit.told is not None and not full_traceback:
        return ["", culprit.told.folded.rstrip("\n")]
    if culprit.traceback is not None:
        return ["", culprit.traceback.rstrip("\n")]
    if culprit.last_words:
        return ["", "It left no traceback. The last it wrote to stderr:", culprit.last_words]
    return ["It left no traceback and wrote nothing to stderr."]


def signal_name(number: int) -> str:
    """``9`` -> ``"SIGKILL"``; a signal without a name is called by its number."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _how(ending: Ending) -> str:
    if ending.reported_failure is not None:
        return f"exit code {ending.reported_failure.exit_code}"
    if ending.signal == signals.SIGKILL:
        return (
            "it was ended by SIGKILL. Where nobody sent that, it is how Linux ends a process "
            "when memory runs out; 'dmesg' tells"
        )
    if ending.signal is not None:
        return f"it was ended by {signal_name(ending.signal)}"
    if ending.without_result and not ending.exit_code:
        return "it ended with exit code 0 before the function had returned"
    return f"exit code {ending.exit_code}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_RANKS_SHOWN])
    more = len(ranks) - _MOST_RANKS_SHOWN
    return f"ranks {shown}" + (f" and {more} more" if more > 0 else "")


def exit_code_of(error: SystemExit, *, of_function: bool) -> int:
    """The exit code that Python makes of ``sys.exit(...)``, which has 8 bits."""
    if error.code is not None and not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
        return 1
    # A function that exits hasn't returned.
    return (error.code or 0) & 0xFF or int(of_function)


def tell(error: BaseException, hint: str) -> Told:
    """Put ``error`` into words; ``hint`` says where the folded frames can be seen."""
    error.__traceback__ = program_frames(error.__traceback__)
    told = TracebackException.from_exception(error)
    full = "".join(told.format())
    said = next(told.format_exception_only()).splitlines()[0]
    if not _has_users_frame(told):
        return Told(full, full, said)
    _fold(told, hint)
    return Told(full, "".join(told.format()), said)


def program_frames(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without the frames on top of it that started the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_START):
        trace = trace.tb_next
    return trace


class _FoldedStack(traceback.StackSummary):
    """A stack in which a frame without a file stands for several, which its name counts."""

    def format_frame_summary(self, frame_summary: FrameSummary, **options: bool) -> str:
        if not frame_summary.filename:
            return f"  [{frame_summary.name}]\n"
        return super().format_frame_summary(frame_summary, **options)


def _fold(told: TracebackException, hint: str) -> None:
    told.__cause__ = _next_with_users_frame(told.__cause__)
    told.__context__ = _next_with_users_frame(told.__context__)
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _fold(other, hint)
    stack = _FoldedStack()
    for is_users, frames in itertools.groupby(told.stack, _is_users):
        if is_users:
            stack.extend(frames)
            continue
        count = len(list(frames))
        name = f"{count} frame{'s' if count > 1 else ''} of lockstep, torch and Python{hint}"
        stack.append(FrameSummary("", None, name, line=""))
    told.stack = stack


def _next_with_users_frame(told: TracebackException | None) -> TracebackException | None:
    # One without any frame comes from another process, whose traceback is in its message.
    while told is not None and told.stack and not _has_users_frame(told):
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    return told


def _has_users_frame(told: TracebackException) -> bool:
    return any(_is_users(frame) for frame in told.stack)


def _is_users(frame: FrameSummary) -> bool:
    import torch

    name = frame.filename
    if name.startswith((_PACKAGE, os.path.dirname(torch.__file__) + os.sep, "<frozen ")):
        return False
    # Other people's packages may lie in a folder of Python's own, and are shown.
    return not name.startswith(_PYTHON) or "site-packages" in name
