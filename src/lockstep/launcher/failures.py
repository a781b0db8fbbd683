"""Which rank failed first, and the message about it: pure functions.

A rank that dies takes its peers along: within some 10 ms their collectives raise "connection
closed by peer", often before the kernel has told the launcher of the death. So the earliest
time stamp alone would blame the wrong rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import signal as signals
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from traceback import FrameSummary, TracebackException
from types import MappingProxyType, TracebackType
from typing import NamedTuple, TypeVar

from lockstep import errors
from lockstep.errors import (
    CheckpointError,
    CollectiveTimeout,
    LaunchError,
    PeerLost,
    RankFailed,
    RendezvousFailed,
)
from lockstep.launcher.lookups import note_lookup
from lockstep.printable import signal_name

# Messages of process groups when a peer is gone or doesn't come. A rank whose traceback has one of
# them is blamed only if no rank failed in another way.
_LOST_A_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset) by (?:remote )?peer|connection refused|broken pipe"
    r"|gloo[/\\]transport|remote process exited|ncclremoteerror|nccl communicator was aborted"
    r"|socket(?: has)? (?:closed|timed ?out)|DistNetworkError|failed to recv, got 0 bytes"
    r"|\b(?:PeerLost|CollectiveTimeout|RendezvousFailed)\b|timed out waiting \d+ms for",
    re.IGNORECASE,
)
_EARLY_STOP = (
    "by fewer steps of a loop, or by a break, return or sys.exit() that not all ranks came to. Let "
    "them decide together when to stop: if lockstep.reduce(stop, 'max'): break."
)
_MOST_RANKS_SHOWN = 16
# Lines to leave out of faulthandler's report: frames that started the program, and libraries.
_NOISE = re.compile(r'  File "(<string>|.*/lockstep/launcher/\w+\.py)"|Extension modules: ')
_PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(errors.__file__) + os.sep
_START = ("<frozen importlib", "<frozen runpy>", os.path.dirname(__file__) + os.sep)


class Silent(Enum):
    """How a rank failed that tells of no failure, in words."""

    BY_ITSELF = "it ended with exit code 0 before its program was at the end, as os._exit(0) does"
    STOPPED = "it was stopped, as by SIGSTOP, Ctrl-Z or a debugger, while others waited for it"


class ErrorText(NamedTuple):
    """An exception in words."""

    full: str  # the traceback as Python would print it, without the launcher's frames
    # The same without frames of lockstep, torch and Python, and without exceptions that only
    # these raised and handled: the last one has the words for a user.
    folded: str
    error: str  # the first line of the exception's own message


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: its own report or, of a rank that sent none, its exit."""

    rank: int
    at_seconds: float  # by time.monotonic(), which all processes of a host share
    exit_code: int  # as a shell gives it
    told: ErrorText | None = None  # the exception that ended the program
    signal: int | None = None  # the number of the signal that ended the rank
    refusal: str | None = None  # the whole message, if the program couldn't be started
    silent: Silent | None = None
    # Whether the program hadn't come to init(), and would fail alike: an import, a usage.
    is_of_start: bool = False
    missed: tuple[int, ...] = ()  # the ranks, of any host, for which it waited until its timeout
    told_of: tuple[int, ...] = ()  # ranks that failed before it, as its error tells
    last_words: str = ""  # the end of its stderr, which is all there is of a crash

    @property
    def traceback(self) -> str | None:
        """The traceback of its exception or, of a crash, faulthandler's."""
        if self.told is not None:
            return self.told.full
        start = self.last_words.find("Fatal Python error:")
        if start < 0:
            return None
        lines = self.last_words[start:].splitlines()
        return "\n".join(line for line in lines if not _NOISE.match(line))

    @property
    def lost_a_peer(self) -> bool:
        """Whether it failed because another rank was gone, or didn't come."""
        if self.told_of:
            return True
        return self.told is not None and bool(_LOST_A_PEER.search(self.told.full))


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of a job; from ``rank`` on, the rank to blame and its failure."""

    exit_status: int  # the exit code of what is to blame, and of the whole run
    results: tuple[bytes, ...] = ()  # each rank's, pickled, if all went well
    message: str | None = None  # to the user, if it didn't
    rank: int | None = None
    signal: str | None = None
    traceback: str | None = None
    at_seconds: float = 0.0  # of the failure, by this host's time.monotonic()
    lost_a_peer: bool = False
    run_status: int | None = None  # the exit code of the whole run, if that is another one
    reason: str = ""  # of the failure, in a few words: the same if the same happens again
    is_of_start: bool = False  # whether the program never began
    lost_host: int | None = None  # the host that is lost, and its ranks
    # What to blame if all failures are of ranks that have lost a peer, maybe on other hosts.
    suspect: JobOutcome | None = None

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
            exit_code=None if self.signal else self.exit_status,
            signal=self.signal,
            traceback=self.traceback,
        )


class Ended(Exception):
    """The run was ended before all hosts had met, as by a signal to the launcher of another one."""

    def __init__(self, outcome: JobOutcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class RankEnded(Ended):
    """The rank of this ``local_rank`` ended while its host waited for others."""

    def __init__(self, outcome: JobOutcome, local_rank: int) -> None:
        super().__init__(outcome)
        self.local_rank = local_rank


def failure_outcome(
    failures: Sequence[Failure],
    world_size: int,
    *,
    ended_well: Sequence[int] = (),
    full_traceback: bool = False,
    places: Mapping[int, str] = MappingProxyType({}),
) -> JobOutcome:
    """The outcome of a job in which these ranks failed, at least one.

    ``ended_well`` are ranks whose programs had come to their ends, and not because of the failure;
    ``places`` tell where ranks were for which others had waited in vain.
    """
    culprit = _told_last(first_failure(failures), failures)
    absent = _absent(culprit, failures, world_size)
    earlier = None if absent else _earlier(culprit, failures, ended_well)
    where = [f"Rank {rank} was at {places[rank]}." for rank in absent if rank in places]
    message = _message(culprit, absent, where, failures, ended_well, world_size, full_traceback)
    if earlier is not None:
        message = f"rank {earlier} failed before all others, as they tell. Of them, {message}"
    rank = absent[0] if len(absent) == 1 else culprit.rank
    if earlier is not None:  # of which there is no more than what the culprit tells
        return JobOutcome(
            culprit.exit_code,
            message=message,
            rank=earlier,
            at_seconds=culprit.at_seconds,
            lost_a_peer=True,
            reason=f"rank {culprit.rank} tells of it: {_reason(culprit)}",
        )
    return JobOutcome(
        culprit.exit_code,
        message=message,
        rank=rank,
        signal=None if culprit.signal is None else signal_name(culprit.signal),
        traceback=culprit.traceback,
        at_seconds=culprit.at_seconds,
        lost_a_peer=culprit.lost_a_peer,
        reason=_reason(culprit),
        is_of_start=culprit.is_of_start or culprit.refusal is not None,
    )


_Failed = TypeVar("_Failed", Failure, JobOutcome)


def first_failure(failures: Sequence[_Failed]) -> _Failed:
    """The failure to blame, of a rank or a host: the first that no other one has caused."""
    return min(failures, key=lambda failure: (failure.lost_a_peer, failure.at_seconds))


def _told_last(first: Failure, failures: Sequence[Failure]) -> Failure:
    """The failure that the ``first`` one tells of, if its rank has told of it too, and so on.

    A rank whose time is up leaves the others before it tells why: theirs may be known first.
    """
    by_rank = {failure.rank: failure for failure in failures}
    found, seen = first, {first.rank}
    while found.lost_a_peer and (rank := next(iter(found.told_of), None)) in by_rank:
        assert rank is not None
        if rank in seen:  # they tell of each other
            return first
        found = by_rank[rank]
        seen.add(rank)
    return found


def _absent(culprit: Failure, failures: Sequence[Failure], world_size: int) -> list[int]:
    """The ranks that are to blame, as the culprit only waited for them; none if it is itself.

    So it may be where most others aren't, or where those are that waited for it elsewhere.
    """
    # One that came too late raises what the others raise: that it didn't come.
    waited = {each.rank for each in failures if each.missed and each.rank not in each.missed}
    absent = sorted({*culprit.missed} - waited)
    return absent if 2 * len(absent) <= world_size else []


def _earlier(
    culprit: Failure, failures: Sequence[Failure], ended_well: Sequence[int]
) -> int | None:
    """The rank that failed before the ``culprit``, but was ended before it could tell of that."""
    known = {*ended_well, *(failure.rank for failure in failures)}
    in_time = sorted(failures, key=lambda failure: failure.at_seconds)
    ranks = [rank for failure in in_time for rank in failure.told_of if rank not in known]
    return ranks[0] if culprit.lost_a_peer and ranks else None


def _message(
    culprit: Failure,
    absent: Sequence[int],
    where: Sequence[str],
    failures: Sequence[Failure],
    ended_well: Sequence[int],
    world_size: int,
    full_traceback: bool,
) -> str:
    if culprit.refusal is not None:
        return culprit.refusal
    others = sorted((f for f in failures if f is not culprit), key=lambda failure: failure.rank)
    headline = f"rank {culprit.rank} of {world_size} failed first: {how(culprit)}."
    if absent:
        headline = (
            f"{_ranks_in_words(absent)} of {world_size} did not come to where others waited, of "
            f"which rank {culprit.rank} failed first: {how(culprit)}."
        )
    if others:
        ranks = _ranks_in_words([failure.rank for failure in others])
        headline += f" After it, and likely because of it, failed {ranks}."
    if culprit.lost_a_peer and ended_well:
        who = _ranks_in_words(sorted(ended_well))
        headline += f" But {who} had ended with exit code 0 while others went on: {_EARLY_STOP}"
    first_error = None if culprit.told is None else culprit.told.error
    told = [
        f"Rank {failure.rank}: {failure.told.error}"
        for failure in others
        if failure.told and not failure.lost_a_peer and failure.told.error != first_error
    ]
    waiting = first_failure(others) if others and culprit.silent is Silent.STOPPED else None
    if waiting is not None and waiting.told is not None:
        waited_for = waiting.told.full if full_traceback else waiting.told.folded
        evidence = ["", f"Rank {waiting.rank}, which waited for it:", waited_for.rstrip("\n")]
    elif culprit.told is not None and not full_traceback:
        evidence = ["", culprit.told.folded.rstrip("\n")]
    elif culprit.traceback is not None:
        evidence = ["", culprit.traceback.rstrip("\n")]
    elif culprit.last_words:
        evidence = ["", "It left no traceback. The last it wrote to stderr:", culprit.last_words]
    else:
        evidence = ["It left no traceback and wrote nothing to stderr."]
    shown = [*where[:_MOST_RANKS_SHOWN], *told[:_MOST_RANKS_SHOWN]]
    return "\n".join([headline, *shown, *evidence])


def how(failure: Failure) -> str:
    """How a rank failed, in words that follow a colon."""
    if failure.signal == signals.SIGKILL:
        return (
            "it was ended by SIGKILL. Where nobody sent that, it is how Linux ends a process when "
            "memory runs out; 'dmesg' tells"
        )
    if failure.signal is not None:
        return f"it was ended by {signal_name(failure.signal)}"
    if failure.silent is not None:
        return failure.silent.value
    return f"exit code {failure.exit_code}"


def _reason(failure: Failure) -> str:
    if failure.signal is not None:
        return signal_name(failure.signal)
    if failure.told is not None and failure.told.error:
        return failure.told.error
    if failure.silent is not None:
        return "it stood still" if failure.silent is Silent.STOPPED else "it left early"
    return f"exit code {failure.exit_code}"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_RANKS_SHOWN])
    more = len(ranks) - _MOST_RANKS_SHOWN
    return f"ranks {shown}" + (f" and {more} more" if more > 0 else "")


def failure_by(
    error: BaseException, rank: int, *, of_function: bool, has_met: bool = True
) -> Failure:
    """The failure of ``rank``, whose program or function was ended by ``error``.

    ``has_met`` is whether it had met the others, as by init().
    """
    code, now = 1, time.monotonic()
    if isinstance(error, SystemExit):
        code = exit_code_of(error, of_function=of_function)
    elif isinstance(error, KeyboardInterrupt):
        code = 128 + signals.SIGINT
    option, attribute = "--full-traceback shows", "the error's attribute traceback has"
    lookup = ""
    with contextlib.suppress(Exception):  # of a note on the error, which is what is to be told
        lookup = note_lookup(error)
    told = _tell(error, f"{attribute if of_function else option} them")
    told = told._replace(error=f"{told.error} {lookup}".rstrip())
    never_began = isinstance(error, (ImportError, SyntaxError, SystemExit)) and not has_met
    chain = [*_chain(error)]
    missed, told_of = _missed(chain), _told_of(chain)
    return Failure(rank, now, code, told, is_of_start=never_began, missed=missed, told_of=told_of)


def _missed(chain: Sequence[BaseException]) -> tuple[int, ...]:
    """The ranks that didn't come in time, if that is an error of the chain."""
    late = (each.ranks for each in chain if isinstance(each, (CollectiveTimeout, RendezvousFailed)))
    return next(late, ())


def _told_of(chain: Sequence[BaseException]) -> tuple[int, ...]:
    """The ranks whose failure is an error of the chain."""
    for each in chain:
        if isinstance(each, PeerLost):
            return each.ranks
        if isinstance(each, CheckpointError) and each.rank is not None:
            return (each.rank,)
    return ()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def exit_code_of(error: SystemExit, *, of_function: bool) -> int:
    """The exit code that Python makes of ``sys.exit(...)``, which has 8 bits."""
    if error.code is not None and not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
        return 1
    # A function that exits hasn't returned.
    return (error.code or 0) & 0xFF or int(of_function)


def _tell(error: BaseException, hint: str) -> ErrorText:
    """``error`` in words; ``hint`` says where the folded frames can be seen."""
    error.__traceback__ = program_frames(error.__traceback__)
    told = TracebackException.from_exception(error)
    full = "".join(told.format())
    said = next(told.format_exception_only()).splitlines()[0]
    if any(map(_is_users, told.stack)):
        _fold(told, hint)
    return ErrorText(full, "".join(told.format()), said)


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
        name = f"{count} frame{'s' if count > 1 else ''} of lockstep, torch and Python; {hint}"
        stack.append(FrameSummary("", None, name, line=""))
    told.stack = stack


def _next_with_users_frame(told: TracebackException | None) -> TracebackException | None:
    # One without any frame comes from another process, whose traceback is in its message.
    while told is not None and told.stack and not any(map(_is_users, told.stack)):
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    return told


def _is_users(frame: FrameSummary) -> bool:
    return is_users_file(frame.filename)


def is_users_file(name: str) -> bool:
    """Whether a file is neither of lockstep, torch nor Python."""
    if name.startswith((_PACKAGE, _torch_folder(), "<frozen ")):
        return False
    # Other people's packages may lie in a folder of Python's own, and are shown.
    return not name.startswith(_PYTHON) or "site-packages" in name


@functools.cache
def _torch_folder() -> str:
    spec = importlib.util.find_spec("torch")  # no import, which takes a second
    assert spec is not None
    return os.path.dirname(str(spec.origin)) + os.sep
