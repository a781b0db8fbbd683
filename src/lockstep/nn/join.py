"""Loops of different lengths on each rank: ``lockstep.join()`` and torch's Join context."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep.comm import JoinState, Step, broadcast_tensors, set_join_state
from lockstep.errors import ModelError
from lockstep.nn.backward import finish_failed
from lockstep.nn.engine import Engine
from lockstep.torch_private import _JoinConfig


class UnevenLoop:
    """A context around a loop that ends at different times on the ranks.

    A rank that leaves it early goes on with the others' reductions, and contributes nothing. When
    all are through, all take the models of a rank that was through last. Until then, every rank
    that is not through runs the same methods and backwards; SyncBatchNorm and ``lockstep.mean``
    may be among them.

    Args:
        engines: The engines of the models, all of one group.
        group: Their group; None if this rank is alone.
        device: A device whose tensors the group can carry.
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
        # Restore this rank's gradients, from the first backward of others that it takes part in.
        self._restore: list[Callable[[], None]] = []
        self._group = group
        self._join_state = None
        if group is not None and group.size() > 1:
            self._join_state = JoinState(
                group, device, divide_by_active=divide_by_active, throws=throws
            )
        self.add(engines)

    def __enter__(self) -> None:
        """Announce every step of the group from now on."""
        if self._group is not None:
            finish_failed(self._group)
            set_join_state(self._group, self._join_state)

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
            self.take_last_model(self._engines)

    def add(self, engines: Sequence[Engine]) -> None:
        """Add one more model.

        Raises:
            ModelError: If a part of it is parallel over other ranks: nothing is announced to them.
        """
        self._engines += engines
        if self._join_state is None:
            return
        if any(engine.process_group is not self._group for engine in engines):
            raise ModelError(
                "The models of this loop, or parts of one, are parallel over different ranks, and "
                "in a loop that ends at different times nobody could take part in the reductions "
                "of some. Give the ranks loops of one length."
            )
        self._join_state.add(engine.number for engine in engines)

    def follow(self, done: set[Engine] | None = None) -> Step:
        """Take part in the next step of the ranks that still have data, and return it.

        Engines whose part of an iteration is over are added to ``done``.
        """
        if self._join_state is None:
            return Step.THROUGH
        announcement = self._join_state.call(Step.THROUGH)
        step = announcement.step
        if step in (Step.GATHER, Step.SUM):
            self._join_state.follow(announcement)
            return step
        numbers = self._join_state.unmask(announcement.detail)
        engines = [engine for engine in self._engines if engine.number in numbers]
        if step is Step.BEGIN and engines:
            self._restore = self._restore or [*map(_own_gradients, self._engines)]
            for engine in self._engines:
                engine.drop_reduced_gradients()
        if step in (Step.BEGIN, Step.END) and engines:
            engines[0].backward_sync.follow(engines, announcement)
        if step in (Step.END, Step.NOTHING) and done is not None:
            done.update(engines)
        return step

    def close(self) -> None:
        """End announcements; this rank's gradients are those of its last step again."""
        for restore in self._restore:
            restore()
        self._restore = []
        if self._group is not None:
            set_join_state(self._group, None)
        for engine in self._engines:
            engine.reducer.scale = 1 / engine.process_group.size()
            engine.buffers.source = 0

    def take_last_model(self, engines: Sequence[Engine]) -> None:
        """Broadcast parameters and buffers from a rank that was through last."""
        if self._group is None or self._join_state is None:
            return
        for engine in engines:
            tensors = [tensor.detach() for tensor in engine.everything_that_follows()]
            broadcast_tensors(self._group, tensors, source=self._join_state.last_active[0])


def _own_gradients(engine: Engine) -> Callable[[], None]:
    """Save the gradients of a rank that is through, and return a function that restores them.

    It takes part in others' reductions with zeros, and an optimizer of this rank has stepped with
    its own gradients already, or zero_grad() has reset them: the other ranks' last gradients would
    be added to its next step. Gradients that were yet to be reduced have been reduced along with
    the others' and are gone. Shown by test_gradients_of_a_rank_that_is_through_are_its_own.
    """
    num_backwards, is_unreduced = engine.num_backwards, engine.reducer.has_unreduced
    gradients = [
        (p, None if p.grad is None or is_unreduced else p.grad.clone()) for p in engine.parameters
    ]

    def restore() -> None:
        if not is_unreduced or engine.num_backwards > num_backwards:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    return restore


class _JoinedModels(UnevenLoop):
    """The models of one group in torch's Join context, which may join other things too.

    There an iteration begins with the first model's forward, and is over for a model when its
    gradients have been reduced, or else when the next iteration begins.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, divide_by_active: bool
    ) -> None:
        super().__init__([], group, device, divide_by_active=divide_by_active, throws=False)
        # Each model's engines, with their number of backwards when the iteration began.
        self._models: list[tuple[list[Engine], int]] = []
        self._done: set[Engine] = set()
        self._has_begun = False

    def has(self, engines: Sequence[Engine]) -> bool:
        return any(known == list(engines) for known, _ in self._models)

    def add(self, engines: Sequence[Engine]) -> None:
        if engines:
            self._models.append((list(engines), 0))
        super().add(engines)

    def begin_iteration(self) -> None:
        """The first model's forward begins."""
        counted = [(engines, sum(e.num_backwards for e in engines)) for engines, _ in self._models]
        if self._has_begun and self._join_state is not None:
            for (engines, now), (_, before) in zip(counted, self._models, strict=True):
                if now == before:
                    mask = self._join_state.mask([engine.number for engine in engines])
                    self._join_state.call(Step.NOTHING, mask)
        self._models, self._has_begun = counted, True

    def follow_iteration(self, engines: Sequence[Engine]) -> None:
        """Take part until the others are through with that model's part of the iteration."""
        while not self._done.issuperset(engines):
            if self.follow(self._done) is Step.THROUGH:
                break
        self._done.difference_update(engines)


# Weakly: the join hooks hold them, and torch's Join context those.
_joined: weakref.WeakValueDictionary[dist.ProcessGroup, _JoinedModels] = (
    weakref.WeakValueDictionary()
)


class DDPJoinHook(JoinHook):
    """The methods that torch's Join context calls on a rank that is through.

    Args:
        model: The wrapper. It joins along with those of the same group that have joined before.
        engines: Its engines.
        divide_by_active: Whether gradients are means over the ranks that still have data.
    """

    def __init__(
        self, model: Joinable, engines: Sequence[Engine], *, divide_by_active: bool
    ) -> None:
        super().__init__()
        self._model = model
        self._engines = engines
        self._models: _JoinedModels | None = None
        self._group = group = model.join_process_group
        if not engines or group is None:
            return
        models = _joined.get(group)
        if models is None or models.has(engines):  # an earlier context was left with an error
            set_join_state(group, None)
            models = _joined[group] = _JoinedModels(
                group, model.join_device, divide_by_active=divide_by_active
            )
            models.__enter__()
        models.add(engines)
        self._models = models

    def main_hook(self) -> None:
        """Take part in an iteration of the ranks that are not through."""
        if self._models is not None:
            self._models.follow_iteration(self._engines)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are through: take the last model."""
        if self._models is not None:
            _joined.pop(self._group, None)
            self._models.close()
            self._models.take_last_model(self._engines)
        _leave_join(self._model)


def begin_joined_iteration(model: Joinable, engines: Sequence[Engine]) -> None:
    """Notify torch's Join context, in which ``model`` is, that a forward of it begins."""
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
