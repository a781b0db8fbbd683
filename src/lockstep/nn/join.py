"""Loops of different lengths on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep.comm import Answer, Roll, Step, broadcast_tensors, set_roll

if TYPE_CHECKING:
    from lockstep.nn.engine import Engine


class UnevenLoop:
    """A context around a loop that ends at different times on the ranks.

    A rank that leaves it early goes on with the others' reductions, and contributes nothing. When
    all are through, all have the model of the last. In between, every rank that is not through
    runs the same methods and backwards; SyncBatchNorm and ``lockstep.mean`` may be among them.

    Args:
        engines: Those of the model, all of one group.
        group: Their group; None if this rank is alone.
        device: Of a kind whose tensors the group can carry.
        divide_by_active: Whether gradients are means over the ranks that still have data.
        throws: Whether the first rank that is through ends the loop on all, with an error.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        divide_by_active: bool,
        throws: bool,
    ) -> None:
        self._engines = list(engines)
        self._group = group
        self._roll = None
        if group is not None and group.size() > 1:
            self._roll = Roll(group, device, divide_by_active=divide_by_active, throws=throws)
        self._num_backwards: int | None = None

    def __enter__(self) -> None:
        """From here on call the roll."""
        if self._group is not None:
            set_roll(self._group, self._roll)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """This rank is through: take part until all are."""
        try:
            if error is None and self._roll is not None:
                while (answer := self._roll.call(Step.THROUGH)).active:
                    self._follow(answer)
        finally:
            self.close()
        if error is None:
            self.take_the_last_model()

    def follow_one_iteration(self) -> None:
        """Take part until the others have reduced gradients, or have begun anew without."""
        while self._roll is not None:
            answer = self._roll.call(Step.THROUGH)
            self._follow(answer)
            if answer.step in (Step.BACKWARD, Step.NOTHING, Step.THROUGH):
                return

    def begin_iteration(self, num_backwards: int) -> None:
        """A forward begins, after so many backwards: if the one before had none, say so."""
        if num_backwards == self._num_backwards and self._roll is not None:
            self._roll.call(Step.NOTHING)
        self._num_backwards = num_backwards

    def close(self) -> None:
        """Call the roll no more."""
        if self._group is not None:
            set_roll(self._group, None)
        for engine in self._engines:
            engine.reducer.share = 1 / engine.reducer.process_group.size()
            engine.buffers.source = 0

    def take_the_last_model(self) -> None:
        """Give all ranks the parameters and buffers of one that was through last."""
        if self._group is None or self._roll is None:
            return
        for engine in self._engines:
            module = engine.module
            if module is not None:
                tensors = [t.detach() for t in [*module.parameters(), *engine.buffers.named()]]
                broadcast_tensors(self._group, tensors, source=self._roll.last_active[0])

    def _follow(self, answer: Answer) -> None:
        assert self._roll is not None
        if answer.step is Step.BACKWARD:
            engines = [e for e in self._engines if answer.details[0] >> e.number & 1]
            for engine in engines:
                engine.drop_reduced_gradients()
            if engines:
                engines[0].conductor.follow(engines, answer)
        else:
            self._roll.follow(answer)


class DDPJoinHook(JoinHook):
    """What torch's generic Join context calls, so that others can join along with a model."""

    def __init__(self, loop: UnevenLoop) -> None:
        super().__init__()
        self._loop = loop
        loop.__enter__()

    def main_hook(self) -> None:
        """Take part in an iteration of the ranks that are not through."""
        self._loop.follow_one_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are through: take the model of the last."""
        self._loop.close()
        self._loop.take_the_last_model()
