"""Loops of different lengths on each rank: ``lockstep.join()`` and torch's Join context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep.comm import Announced, JoinState, broadcast_tensors, join_state_of, set_join_state
from lockstep.errors import ModelError
from lockstep.nn.backward import backward_sync_of, finish_failed
from lockstep.nn.engine import Engine
from lockstep.torch_private import _JoinConfig


class UnevenLoop(JoinState):
    """A context around a loop that ends at different times on the ranks of ``group``.

    A rank has finished when it has left the loop. With ``divide_by_active`` gradients are means
    over the ranks that still have data; with ``throws`` the first rank that has finished ends the
    loop on all ranks, with an error.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        group: dist.ProcessGroup,
        *,
        divide_by_active: bool,
        throws: bool = False,
    ) -> None:
        devices = (t.device for engine in engines for t in engine.tensors_in_step())
        device = next(devices, torch.device("cpu"))
        super().__init__(group, device, divide_by_active=divide_by_active, throws=throws)
        # Functions that restore this rank's gradients of before its first backward without data.
        self._restore: list[Callable[[], None]] = []
        # In torch's context: each engine's number of backwards at the beginning of the iteration,
        # and the engines that are done with the iteration.
        self._num_backwards: dict[Engine, int] = {}
        self._done: set[Engine] = set()
        # The models that have joined: the engines of each.
        self.models: list[Sequence[Engine]] = []
        self.add_model(engines)

    def __enter__(self) -> None:
        """Announce every step of the group from now on."""
        finish_failed(self._group)
        set_join_state(self._group, self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Take part in the other ranks' steps, until all have finished."""
        try:
            if error is None:
                finish_failed(self._group)
            while error is None and self.follow_announced() is not Announced.FINISHED:
                pass
        finally:
            self.close()
        if error is None:
            self.take_last_model()

    def add_model(self, engines: Sequence[Engine]) -> None:
        """Add the engines of one more model."""
        if any(engine.process_group is not self._group for engine in engines):
            raise ModelError(
                "The models of this loop, or parts of one, are parallel over different ranks, and "
                "in a loop that ends at different times nobody could take part in the reductions "
                "of some. Give the ranks loops of one length."
            )
        for engine in engines:  # on all ranks, of which only those with data may read them later
            engine.reducer.sum_unsummed()
        self._members += engines
        self.models.append(engines)

    def follow_announced(self) -> Announced:
        """Take part in the next collective of the ranks that still have data, and return it."""
        announcement = self.call(Announced.FINISHED)
        kind = announcement.kind
        if kind in (Announced.GATHER, Announced.SUM):
            self.follow(announcement)
            return kind
        if kind is Announced.UPDATE:
            self.follow_update(announcement)
            return kind
        bits = enumerate(self._members)
        engines: list[Engine] = [one for bit, one in bits if announcement.detail >> bit & 1]
        if kind is Announced.BEGIN and engines:
            self._restore = self._restore or [*map(_save_gradients, self._members)]
            for engine in self._members:
                if not engine.reducer.table.has_unreduced:
                    for parameter in engine.parameters:
                        parameter.grad = None
        if kind in (Announced.BEGIN, Announced.END) and engines:
            backward_sync_of(self._group).follow(engines, kind)
        if kind in (Announced.END, Announced.NOTHING):
            self._done.update(engines)
        return kind

    def close(self) -> None:
        """End the announcements, and restore the gradients of this rank's last step with data."""
        for restore in self._restore:
            restore()
        self._restore = []
        set_join_state(self._group, None)

    def take_last_model(self) -> None:
        """Broadcast parameters and buffers from one of the last ranks with data."""
        for engine in self._members:
            tensors = [tensor.detach() for tensor in engine.tensors_in_step()]
            broadcast_tensors(self._group, tensors, source=self.last_active[0])


def _save_gradients(engine: Engine) -> Callable[[], None]:
    """Save the gradients of a rank that has finished, and return a function that restores them.

    The rank takes part in reductions of the others, and the next step after the loop would add to
    the results. Shown by test_gradients_of_a_rank_that_is_through_are_its_own. Gradients that it
    had accumulated, and not reduced, are reduced with the others', and not restored. Shown by
    test_gradients_accumulated_by_a_rank_that_is_through_are_reduced_with_the_others.
    """
    num_backwards, is_unreduced = engine.num_backwards, engine.reducer.table.has_unreduced
    gradients = [
        (p, None if p.grad is None or is_unreduced else p.grad.clone()) for p in engine.parameters
    ]

    def restore() -> None:
        if not is_unreduced or engine.num_backwards > num_backwards:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    return restore


class _JoinedModels(UnevenLoop):
    """The models of one group in torch's Join context, which may have other Joinables too.

    There an iteration begins with the first model's forward. A model is done with it when its
    gradients have been reduced, or else when the next iteration begins.
    """

    follows_updates = False  # optimizers step after the models are done with the iteration

    def begin_iteration(self) -> None:
        """Begin an iteration, with the forward of the first model."""
        before, now = self._num_backwards, {one: one.num_backwards for one in self._members}
        if over := [engine for engine in self._members if before.get(engine) == now[engine]]:
            self.call(Announced.NOTHING, self.mask(over))
        self._num_backwards = now

    def follow_iteration(self, engines: Sequence[Engine]) -> None:
        """Take part until the model of ``engines`` is done with the iteration on other ranks."""
        while not self._done.issuperset(engines):
            if self.follow_announced() is Announced.FINISHED:
                break
        self._done.difference_update(engines)


def _joined(group: dist.ProcessGroup) -> _JoinedModels | None:
    """Return the models of ``group`` that are in a Join context."""
    state = join_state_of(group)
    return state if isinstance(state, _JoinedModels) else None


def _of_several_ranks(engines: Sequence[Engine]) -> list[Engine]:
    return [engine for engine in engines if engine.process_group.size() > 1]


class DDPJoinHook(JoinHook):
    """The methods that torch's Join context calls on a rank that has finished.

    The wrapper ``model`` joins along with models of the same group that have joined before. The
    context calls other Joinables between them, such as a sharded optimizer that steps.
    """

    def __init__(
        self, model: Joinable, engines: Sequence[Engine], *, divide_by_active: bool
    ) -> None:
        super().__init__()
        self._model, self._engines = model, _of_several_ranks(engines)
        self._models: _JoinedModels | None = None
        self._is_first = False
        if self._engines:
            group = model.join_process_group
            models = _joined(group)
            # The model has joined before if an error has ended an earlier context.
            self._is_first = models is None or self._engines in models.models
            if models is None or self._is_first:
                set_join_state(group, None)
                models = _JoinedModels(self._engines, group, divide_by_active=divide_by_active)
                models.__enter__()
            else:
                models.add_model(self._engines)
            self._models = models

    def main_hook(self) -> None:
        """Take part in an iteration of the ranks that still have data."""
        if self._models is not None:
            self._models.follow_iteration(self._engines)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters of the last rank with data, when all have finished."""
        if self._models is not None and self._is_first:
            self._models.close()
            self._models.take_last_model()
        _leave_join(self._model)


def begin_joined_iteration(model: Joinable, engines: Sequence[Engine]) -> None:
    """Notify the Join context of ``model`` that a forward begins."""
    for engine in engines:
        finish_failed(engine.process_group)
    engines = _of_several_ranks(engines)
    if engines:
        models = _joined(model.join_process_group)
        if models is None or engines not in models.models:
            _leave_join(model)  # an error has ended the context
            return
        if model._join_config.is_first_joinable:
            models.begin_iteration()
    Join.notify_join_context(model)


def _leave_join(model: Joinable) -> None:
    model._join_config = _JoinConfig.construct_disabled_join_config()
