"""Which rank failed first, and how to say it. Pure functions from endings to words.

A rank that dies takes its peers along: within some 10 ms their collectives raise "connection
closed by peer", often before the kernel has told the launcher of the death. So the earliest
stamp alone would blame the wrong rank.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.launcher.tracebacks import Told

# What torch's process groups say when a peer is gone. A rank whose traceback has one of these
# is to blame only if no rank failed in another way.
_LOST_A_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset) by (?:remote )?peer|connection refused|broken pipe"
    r"|gloo[/\\]transport|remote process exited|ncclremoteerror|nccl communicator was aborted"
    r"|socket(?: has)? (?:closed|timed ?out)|DistNetworkError|failed to recv, got 0 bytes"
    r"|\bPeerLost\b",
    re.IGNORECASE,
)
# Of what faulthandler writes: the frames that started the program, and a list of libraries.
_NUM_SHOWN = 16
_NOISE = re.compile(r'  File "(<string>|.*/lockstep/launcher/\w+\.py)"|Extension modules: ')


@dataclass(frozen=True)
class Report:
    """What a rank has to say of itself before it ends.

    Attributes:
        at_seconds: When, by ``time.monotonic()``, which all processes of a host share.
        exit_code: The exit code that it is about to end with.
        told: Its exception, if one ends it.
        advice: What to say instead of a traceback, if the program couldn't be started at all.
        result: What the function returned, pickled; None if there is no function or no result.
    """

    at_seconds: float
    exit_code: int
    told: Told | None = None
    advice: str | None = None
    result: bytes | None = None


@dataclass(frozen=True)
class Ending:
    """How a rank ended: what it reported, and what the kernel says.

    Attributes:
        rank: Which rank.
        at_seconds: When the launcher learned of it, by ``time.monotonic()``.
        exit_code: Its exit code, or None if a signal ended it or it hasn't ended yet.
        signal: The number of that signal, or None.
        report: What it reported, if it did.
        asked: Whether the launcher had asked it to end before it went wrong.
        without_result: Whether a function's result is missing, though it ended as if well.
        last_words: The end of what it wrote to stderr, which is all there is of a crash.
    """

    rank: int
    at_seconds: float
    exit_code: int | None = None
    signal: int | None = None
    report: Report | None = None
    asked: bool = False
    without_result: bool = False
    last_words: str = ""

    @property
    def reported_failure(self) -> Report | None:
        """Its report, if that tells of a failure. What follows one is a mere consequence."""
        return self.report if self.report is not None and self.report.exit_code else None

    @property
    def killed_by(self) -> str | None:
        """The name of the signal that ended it, if nothing had gone wrong before."""
        if self.signal is None or self.reported_failure is not None:
            return None
        return signal_name(self.signal)

    @property
    def failed(self) -> bool:
        """Whether it went wrong, other than because the launcher asked it to end."""
        if self.asked:
            return False
        ended_badly = self.signal is not None or bool(self.exit_code) or self.without_result
        return self.reported_failure is not None or ended_badly

    @property
    def failed_at_seconds(self) -> float:
        """When it went wrong, as exactly as is known."""
        report = self.reported_failure
        return self.at_seconds if report is None else report.at_seconds

    @property
    def traceback(self) -> str | None:
        """The traceback of its exception or, of a crash, what faulthandler wrote."""
        if self.reported_failure is not None:
            return None if self.told is None else self.told.full
        start = self.last_words.find("Fatal Python error:")
        if start < 0:
            return None
        lines = self.last_words[start:].splitlines()
        return "\n".join(line for line in lines if not _NOISE.match(line))

    @property
    def told(self) -> Told | None:
        """The exception that it reported."""
        return None if self.reported_failure is None else self.reported_failure.told

    @property
    def lost_a_peer(self) -> bool:
        """Whether it failed because another rank was gone."""
        return self.told is not None and bool(_LOST_A_PEER.search(self.told.full))


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank to blame, or None if none failed."""
    failures = [ending for ending in endings if ending.failed]
    culprits = [ending for ending in failures if not ending.lost_a_peer]
    return min(culprits or failures, key=lambda ending: ending.failed_at_seconds, default=None)


def exit_status(ending: Ending) -> int:
    """The exit code for the whole run: that of the rank to blame, as a shell would give it."""
    if ending.reported_failure is not None:
        return ending.reported_failure.exit_code
    if ending.signal is not None:
        return 128 + ending.signal
    return ending.exit_code or 1


def describe(
    culprit: Ending, endings: Sequence[Ending], world_size: int, *, full_traceback: bool = False
) -> str:
    """The message for ``culprit``: who, how, with which traceback, and whom it took along."""
    if culprit.report is not None and culprit.report.advice is not None:
        return culprit.report.advice
    others = sorted(
        (e for e in endings if e.failed and e.rank != culprit.rank), key=lambda e: e.rank
    )
    headline = f"rank {culprit.rank} of {world_size} failed first: {_how(culprit)}."
    if others:
        ranks = [ending.rank for ending in others]
        headline += f" After it, and likely because of it, failed {_ranks(ranks)}."
    told = [
        f"Rank {ending.rank}: {ending.told.error}"
        for ending in others
        if ending.told is not None and not ending.lost_a_peer and not _alike(ending, culprit)
    ]
    return "\n".join([headline, *told[:_NUM_SHOWN], *_evidence(culprit, full_traceback)])


def _alike(ending: Ending, culprit: Ending) -> bool:
    return (
        culprit.told is not None
        and ending.told is not None
        and (culprit.told.error == ending.told.error)
    )


def _evidence(culprit: Ending, full_traceback: bool) -> list[str]:
    if culprit.told is not None and not full_traceback:
        return ["", culprit.told.folded.rstrip("\n")]
    if culprit.traceback is not None:
        return ["", culprit.traceback.rstrip("\n")]
    if culprit.last_words:
        return ["", "It left no traceback. The last it wrote to stderr:", culprit.last_words]
    return ["It left no traceback and wrote nothing to stderr."]


def signal_name(number: int) -> str:
    """``9`` -> ``"SIGKILL"``; a number that has no name is called by its number."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ended_by(number: int) -> str:
    """What to say when the launcher itself was sent a signal."""
    return f"ended by {signal_name(number)}; no rank is left running."


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
    shown = ", ".join(str(rank) for rank in ranks[:_NUM_SHOWN])
    more = len(ranks) - _NUM_SHOWN
    return f"ranks {shown}" + (f" and {more} more" if more > 0 else "")
