"""The engines of one group, their numbers, and which of them a backward of any rank reaches."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Collection

import torch.distributed as dist

from lockstep.comm import any_rank, join_state_of
from lockstep.nn.engine import Engine

number_of = operator.attrgetter("number")
# Ranks may be threads.
_lock = threading.RLock()


class Engines:
    """The engines of one group on this rank.

    Ranks know each by its number. Which of them have been in a backward is equal on all ranks: they
    decide by that whether to ask each other which engines a backward reaches.
    """

    def __init__(self) -> None:
        # Weakly, since engines hold the group. Replaced when they change: others may iterate.
        self._all: tuple[weakref.ref[Engine], ...] = ()
        self._num_numbered = 0
        # The numbers of engines that have been in a backward, and in one with others.
        self._trained: set[int] = set()
        self._trained_together: set[int] = set()

    def __len__(self) -> int:
        return self._num_numbered

    def add(self, engine: Engine, *, is_copy: bool) -> None:
        """Add ``engine``; a copied model's gets its number later, by :meth:`give_number`."""
        with _lock:
            self._all = (*(each for each in self._all if each() is not None), weakref.ref(engine))
        if not is_copy:
            self.give_number(engine)

    def remove(self, engine: Engine) -> None:
        """Forget ``engine``, but for its number."""
        with _lock:
            self._all = tuple(each for each in self._all if each() is not engine)
        self._trained.add(engine.number)  # or ranks would always ask for it

    def give_number(self, engine: Engine) -> None:
        """Give ``engine`` the next number, as every rank does."""
        self._num_numbered += 1
        engine.number = self._num_numbered

    def take_number(self, engine: Engine) -> None:
        """Take the last number from ``engine`` again."""
        engine.number = 0
        self._num_numbered -= 1

    def by_number(self, *, copies: bool = False) -> list[Engine]:
        """Return the engines, by number; those of untrained copies only with ``copies``."""
        alive = (engine for each in self._all if (engine := each()) is not None)
        return sorted((one for one in alive if one.number or copies), key=number_of)

    def reached(self) -> list[Engine]:
        """Return those of which the running backward will reduce some gradients."""
        return [engine for engine in self.by_number() if engine.is_any_reached()]

    def have_to_be_told(self, group: dist.ProcessGroup, reached: Collection[Engine]) -> bool:
        """Whether other ranks may reach other engines than ``reached``."""
        if len(self) == 1 or join_state_of(group) is not None:
            # In join(), all ranks that have data reach the same models, and announce them.
            return False
        is_new = len(self._trained) < len(self)
        return is_new or not self._trained_together.isdisjoint(map(number_of, reached))

    def on_any_rank(
        self, group: dist.ProcessGroup, engines: Collection[Engine], fact: bool = False
    ) -> tuple[set[Engine], bool]:
        """Return the engines that any rank passes, and whether ``fact`` is true on any rank."""
        numbers = {engine.number for engine in engines}
        here = [number in numbers for number in range(1, len(self) + 1)]
        *reached, is_fact = any_rank(group, [*here, fact])
        return {engine for engine in self.by_number() if reached[engine.number - 1]}, is_fact

    def note_trained(self, engines: Collection[Engine]) -> None:
        """Note that ``engines`` were in one backward, on all ranks."""
        numbers = {engine.number for engine in engines}
        self._trained |= numbers
        if len(numbers) > 1:
            self._trained_together |= numbers

    def are_trained_together(self, engines: Collection[Engine]) -> bool:
        """Whether each of ``engines`` has been in a backward with others."""
        return self._trained_together.issuperset(map(number_of, engines))
