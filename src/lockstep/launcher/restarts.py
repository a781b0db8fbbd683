"""Whether ranks that have failed are started again: a pure function of all failures so far.

Exit codes tell a scheduler the same of a run. 0 means done; all but those below are those of the
rank that failed first, or 128 and the number of a signal.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from enum import Enum
from typing import NamedTuple

from lockstep.entries import MOST_WORDS, value_in

# Stopped and saved: the same command goes on from there. A rank that ends with it has been asked to
# stop, and has saved. It is EX_TEMPFAIL of <sysexits.h>.
START_AGAIN = 75
# The ranks were started again as often as they may, and failed alike at the same place each time,
# or the program never began.
DONT_START_AGAIN = 76
# Numbers in an error's message, such as addresses, may differ where the cause is the same.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class Reaction(Enum):
    """What is done after a failure."""

    RESTART = "the ranks are started again"
    MORE = "more hosts have come"
    STOPPED = "the ranks have saved, as they were asked to"
    FEWER = "so many ranks failed as often as they may, and one fewer go on"
    NEVER_BEGAN = "the program never began, and wouldn't another time"
    SAME_FAILURE = "it failed alike at the same place, as often as it may"
    NO_PROGRESS = "it failed as often as it may without anything new to go on from"


class Incident(NamedTuple):
    """The end of an attempt by a failure."""

    reason: str
    step: int  # at which it happened
    committed: int | None  # the newest step that all ranks can go on from; None if there is none
    is_of_start: bool  # whether the rank to blame never began


class Decision(NamedTuple):
    """What host 0 tells the others of a failure."""

    reaction: Reaction
    words: str

    def encoded(self) -> str:
        """The text for :meth:`of`."""
        return json.dumps([self.reaction.name, self.words[:MOST_WORDS]])

    @classmethod
    def of(cls, text: str) -> Decision:
        """The decision that was encoded, or anything else that another process has written.

        Raises:
            ValueError: If it is none.
        """
        try:
            name, words = value_in(text)
            return cls(Reaction[name], str(words))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"what it told can't be read: {text!r:.99}") from error


class Record:
    """The incidents of a run.

    Two numbers are counted: failures since something new was committed, so that a run that makes
    progress may be killed for ever, and failures of one reason at one step.

    Args:
        most: How often either may happen, and the ranks are started again.
        num_spare: How often the run may go on with one rank fewer then.

    Attributes:
        num_alike: How often the last failure has come at its step.
        num_spare: How often it still may.
    """

    def __init__(self, most: int, num_spare: int = 0) -> None:
        self._most, self.num_spare = most, num_spare
        self._committed = -1
        self._since_commit = 0
        self._alike: Counter[tuple[str, int]] = Counter()
        self._has_begun = False
        self.num_alike = 0

    @property
    def num_left(self) -> int:
        """How often ranks may fail from now on without progress, and are started again."""
        return self._most - self._since_commit

    def judge(self, incident: Incident) -> Reaction:
        """Note an incident; return what is to be done."""
        if incident.is_of_start and not self._has_begun:
            return Reaction.NEVER_BEGAN
        self._has_begun = True
        if incident.committed is not None and incident.committed > self._committed:
            self._committed, self._since_commit = incident.committed, 0
        self._since_commit += 1
        alike = _NUMBER.sub("#", incident.reason), incident.step
        self._alike[alike] += 1
        self.num_alike = self._alike[alike]
        if max(self.num_alike, self._since_commit) <= self._most:
            return Reaction.RESTART
        if self.num_spare:  # a cause that goes with the last rank, such as its device, is no more
            self.num_spare -= 1
            self._since_commit = self.num_alike = 0
            self._alike.clear()
            return Reaction.FEWER
        return Reaction.SAME_FAILURE if self.num_alike > self._most else Reaction.NO_PROGRESS
