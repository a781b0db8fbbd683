"""Loops of different lengths on each rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep.comm import Announcement, JoinState, Step, broadcast_tensors, set_join_state
from lockstep.errors import ModelError
from lockstep.nn.backward import finish_failed
from lockstep.torch_private import _JoinConfig

if TYPE_CHECKING:
    from lockstep.nn.engine import Engine


class UnevenLoop:
    """A context around a loop that ends at different times on the ranks.

    A rank that leaves it early goes on with the others' reductions, and contributes nothing. When
    all are through, all have the model of the last. In between, every rank that is not through
    runs the same methods and backwards; SyncBatchNorm and ``lockstep.mean`` may be among them.

    Args:
        engines: Those of the models, all of one group.
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
        self._engines: list[Engine] = []
        # What this rank's gradients were when it was through, while it takes part with others.
        self._own_gradients: list[OwnGradients] = []
        self._group = group
        self._roll = None
        if group is not None and group.size() > 1:
            self._roll = JoinState(group, device, divide_by_active=divide_by_active, throws=throws)
        self.add(engines)

    def __enter__(self) -> None:
        """From here on call the roll."""
        if self._group is not None:
            finish_failed(self._group)
            set_join_state(self._group, self._roll)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """This rank is through: take part until all are."""
        try:
            if error is None and self._group is not None:
                finish_failed(self._group)
            while error is None and self.follow() is not Step.THROUGH:
                pass
        finally:
            self.close()
        if error is None:
            self.take_the_last_model(self._engines)

    def add(self, engines: Sequence[Engine]) -> None:
        """Look after one more model.

        Raises:
            ModelError: If a part of it is parallel over other ranks, which wouldn't be told.
        """
        self._engines += engines
        if self._roll is None:
            return
        if any(engine.reducer.process_group is not self._group for engine in engines):
            raise ModelError(
                "The models of this loop, or parts of one, are parallel over different ranks, and "
                "in a loop that ends at different times nobody could take part in the reductions "
                "of some. Give the ranks loops of one length."
            )
        self._roll.add(engine.number for engine in engines)

    def call(self, step: Step, engines: Sequence[Engine]) -> None:
        """Say what this rank is about to do with ``engines``."""
        if self._roll is not None:
            self._roll.call(step, self._roll.mask([engine.number for engine in engines]))

    def follow(self, done: set[Engine] | None = None) -> Step:
        """Take part in the next thing that the others do, and return it.

        Engines that are through with their part of an iteration are added to ``done``.
        """
        if self._roll is None:
            return Step.THROUGH
        answer = self._roll.call(Step.THROUGH)
        if answer.step in (Step.GATHER, Step.SUM):
            self._roll.follow(answer)
            return answer.step
        numbers = self._roll.unmask(answer.detail)
        engines = [engine for engine in self._engines if engine.number in numbers]
        if answer.step in (Step.BEGIN, Step.END) and engines:
            self._reduce(engines, answer)
        if answer.step in (Step.END, Step.NOTHING) and done is not None:
            done.update(engines)
        return answer.step

    def _reduce(self, engines: Sequence[Engine], answer: Announcement) -> None:
        if answer.step is Step.BEGIN:
            if not self._own_gradients:
                self._own_gradients = [OwnGradients(engine) for engine in self._engines]
            for own in self._own_gradients:
                own.engine.drop_reduced_gradients()
        engines[0].backward_sync.follow(engines, answer)

    def close(self) -> None:
        """Call the roll no more; gradients are those of this rank's last step again."""
        for own in self._own_gradients:
            own.put_back()
        self._own_gradients = []
        if self._group is not None:
            set_join_state(self._group, None)
        for engine in self._engines:
            engine.reducer.scale = 1 / engine.reducer.process_group.size()
            engine.buffers.source = 0

    def take_the_last_model(self, engines: Sequence[Engine]) -> None:
        """Give all ranks the parameters and buffers of one that was through last."""
        if self._group is None or self._roll is None:
            return
        for engine in engines:
            tensors = [tensor.detach() for tensor in engine.everything_that_follows()]
            broadcast_tensors(self._group, tensors, source=self._roll.last_active[0])


class OwnGradients:
    """The gradients of a rank that is through, which takes part in others' reductions with zeros.

    In the end they are what they were: an optimizer of this rank has stepped with them already, or
    zero_grad() has emptied them, and the other ranks' last ones would be added to its next step.
    Gradients that were still to be reduced have been reduced along with the others' and are gone.
    Shown by test_gradients_of_a_rank_that_is_through_are_its_own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_backwards = engine.num_backwards
        self._is_unreduced = engine.reducer.has_unreduced
        self._gradients = [
            (p, None if p.grad is None or self._is_unreduced else p.grad.clone())
            for p in engine.parameters
        ]

    def put_back(self) -> None:
        """Have them again."""
        if not self._is_unreduced or self.engine.num_backwards > self._num_backwards:
            for parameter, gradient in self._gradients:
                parameter.grad = gradient


class JoinedModels:
    """The models of one group in torch's Join context, which has other things join as well.

    There an iteration begins with the first model's forward, and is over for a model when its
    gradients have been reduced, or else when the next iteration begins.
    """

    def __init__(self, group: dist.ProcessGroup, loop: UnevenLoop) -> None:
        self.loop = loop
        self._group = group
        self._models: list[tuple[list[Engine], int]] = []  # with how many backwards each had
        self._done: set[Engine] = set()
        self._has_begun = False
        loop.__enter__()

    def has(self, engines: Sequence[Engine]) -> bool:
        """Whether that model is one of them."""
        return any(known == list(engines) for known, _ in self._models)

    def add(self, engines: Sequence[Engine]) -> None:
        """One more model joins."""
        self._models.append((list(engines), 0))
        self.loop.add(engines)

    def begin_iteration(self) -> None:
        """The first model's forward begins."""
        counted = [(engines, _num_backwards(engines)) for engines, _ in self._models]
        if self._has_begun:
            for (engines, now), (_, before) in zip(counted, self._models, strict=True):
                if now == before:
                    self.loop.call(Step.NOTHING, engines)
        self._models, self._has_begun = counted, True

    def follow(self, engines: Sequence[Engine]) -> None:
        """Take part until the others are through with that model's part of the iteration."""
        while not self._done.issuperset(engines):
            if self.loop.follow(self._done) is Step.THROUGH:
                break
        self._done.difference_update(engines)

    def end(self, engines: Sequence[Engine]) -> None:
        """All are through: take the last model."""
        _joined.pop(self._group, None)
        self.loop.close()
        self.loop.take_the_last_model(engines)


def _num_backwards(engines: Sequence[Engine]) -> int:
    return sum(engine.num_backwards for engine in engines)


# torch's Join context has them, through its hooks.
_joined: weakref.WeakValueDictionary[dist.ProcessGroup, JoinedModels] = (
    weakref.WeakValueDictionary()
)


def join_models(
    engines: Sequence[Engine],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    divide_by_active: bool,
) -> JoinedModels:
    """Let a model join along with those of the same group that have joined just now."""
    models = _joined.get(group)
    if models is None or models.has(engines):  # what has it already was left with an error
        set_join_state(group, None)
        loop = UnevenLoop([], group, device, divide_by_active=divide_by_active, throws=False)
        models = _joined[group] = JoinedModels(group, loop)
    models.add(engines)
    return models


class DDPJoinHook(JoinHook):
    """What torch's Join context calls on a rank that is through."""

    def __init__(
        self, model: Joinable, engines: Sequence[Engine], *, divide_by_active: bool
    ) -> None:
        super().__init__()
        self._model = model
        self._engines = engines
        self._models: JoinedModels | None = None
        group = model.join_process_group
        if engines and group is not None:
            self._models = join_models(
                engines, group, model.join_device, divide_by_active=divide_by_active
            )

    def main_hook(self) -> None:
        """Take part in an iteration of the ranks that are not through."""
        if self._models is not None:
            self._models.follow(self._engines)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are through: take the model of the last."""
        if self._models is not None:
            self._models.end(self._engines)
        _leave_join(self._model)


def begin_joined_iteration(model: Joinable, engines: Sequence[Engine]) -> None:
    """Tell torch's Join context, in which ``model`` is, that a forward of it begins."""
    for engine in engines:
        engine.backward_sync.finish_failed()
    if engines:
        models = _joined.get(model.join_process_group)
        if models is None or not models.has(engines):
            _leave_join(model)  # the context was left with an error
            return
        if model._join_config.is_first_joinable:
            models.begin_iteration()
    Join.notify_join_context(model)


def _leave_join(model: Joinable) -> None:
    model._join_config = _JoinConfig.construct_disabled_join_config()
