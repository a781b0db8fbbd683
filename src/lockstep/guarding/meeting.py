"""Where the ranks of a guarded step tell each other of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from lockstep.comm import (
    AgreedCalls,
    agreed_calls_of,
    all_gather_json,
    global_rank,
    sum_at,
    survives_mismatches,
)
from lockstep.guarding.entry import check_group, group_of
from lockstep.nn import ParallelState, finish_failed


class RanksOfStep:
    """The ranks of models that are guarded.

    Args:
        states: Those of the models.

    Attributes:
        engines: Of the models.
        group: Their ranks; None if no model is parallel.
        size: How many they are.
    """

    def __init__(self, states: Sequence[ParallelState]) -> None:
        self.engines = [*dict.fromkeys(e for state in states for e in state.engines)]
        self.group = group = group_of(states)
        self.size = 1 if group is None else group.size()
        # What carries what they tell, and has them agree on calls over a group that needs it.
        self._carrier = group
        self._calls: AgreedCalls | None = None
        # What each engine had heard of by then. Of backwards over GPUs ranks hear late.
        self._failed_before: list[tuple[int, int] | None] = []

    @cached_property
    def ranks(self) -> list[int]:
        """The global numbers of the ranks, in rank order."""
        group = self.group
        return [0] if group is None else [global_rank(group, rank) for rank in range(self.size)]

    @cached_property
    def number(self) -> int:
        """The number of this rank among them."""
        return 0 if self.group is None else self.group.rank()

    @property
    def rank(self) -> int:
        """The global number of this rank."""
        return self.ranks[self.number]

    def begin(self) -> None:
        """Have this rank's calls end, until :meth:`end`, when another rank leaves the step.

        All ranks call it; the first time it may block.
        """
        if self.group is None:
            return
        check_group(self.group)
        devices = {device for engine in self.engines for device in engine.devices}
        if not all(survives_mismatches(self.group, device) for device in devices):
            finish_failed(self.group)
            self._calls = agreed_calls_of(self.group)
            self._calls.is_on, self._carrier = True, self._calls.ranks
        heard = [engine.reducer.table.heard for engine in self.engines]
        for each in heard:
            each.settle()
        self._failed_before = [each.failed for each in heard]

    def end(self) -> None:
        """Behind the step."""
        if self._calls is not None:
            self._calls.is_on = False

    def forget_failed(self) -> None:
        """Forget what was heard of backwards of the step, which is left out."""
        for engine, failed in zip(self.engines, self._failed_before, strict=True):
            engine.reducer.table.heard.forget(failed)

    def finish_failed(self) -> None:
        """Finish a backward that failed here."""
        if self.group is not None:
            finish_failed(self.group)

    def tell(self, operation: str, facts: Sequence[int]) -> list[list[int]]:
        """Return the facts of all ranks, in rank order, at an ``operation`` that errors name.

        Raises:
            CollectiveMismatch: On all ranks, if one has called something else.
        """
        if self._carrier is None:
            return [[*facts]]
        rows = [[0] * len(facts)] * self.size
        rows[self.number] = [*facts]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        if self._calls is not None:
            self._calls.agree(operation)
        sum_at(self._carrier, operation, table)
        return table.tolist()

    def gathered(self, value: Any) -> list[Any]:
        """Return each rank's ``value``, which JSON can keep; all ranks are in this call."""
        return [value] if self._carrier is None else all_gather_json(self._carrier, value)
