"""When a backward begins and when it is over, for all parallel models of one process group."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from lockstep.comm import Announcement, Step, any_rank, join_state_of, mean_divisor
from lockstep.comm.uncompiled import uncompiled
from lockstep.errors import CollectiveFailed, PeerLost
from lockstep.grad import LaunchOrder
from lockstep.nn.reached import is_compiled_backward
from lockstep.torch_private import _current_graph_task_id, _execution_engine

if TYPE_CHECKING:
    from lockstep.nn.engine import Engine


@uncompiled
class BackwardSync:
    """Begins and ends the backwards of all engines of one group, on this rank.

    A backward may run through several models, and through other ones on each rank. Then ranks
    first tell each other which ones they reach, a number for each: while a model is new, and from
    then on if it has been in a backward along with another one. Those that any rank reaches begin
    on all, take turns in the order of their numbers, and end together, when the outermost
    backward is over. Shown by test_ranks_may_reach_different_models_in_one_backward.

    Attributes:
        lock: Held by a hook while it works, unless all gradients come from one thread. Autograd has
            one for each device, and a collective that one of them launches lets another one run.
        task_id: Which of autograd's tasks began the backward that runs; -1 between backwards.
        num_ended: How many backwards are over.
        awaited: Under compiled autograd, which never calls back at the end of a backward: those
            parameters, by their ``id()``, whose gradients are still to come. With the last of
            them the backward is over. None otherwise.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.lock = threading.RLock()
        self.task_id = -1
        self.num_ended = 0
        self.awaited: set[int] | None = None
        self._group = weakref.ref(group)
        self._num_engines = 0
        # The numbers of those that have been in a backward, and in one with others. The same on
        # every rank, as what ranks do by it has to be.
        self._seen: set[int] = set()
        self._kin: set[int] = set()
        self._engines: list[weakref.ref[Engine]] = []
        # Those in the backward that runs, by number, and those of which nobody could know when
        # it began, as they are inside of reentrant checkpoints.
        self._running: list[Engine] = []
        self._late: list[Engine] = []
        self._tells_late = False
        # Those in a backward that failed here, whose end the others may wait for. Weakly, as
        # engines hold the group, which takes this with it when it is gone.
        self._failed: list[weakref.ref[Engine]] = []
        self._end: weakref.ref[_EndOfBackward] | None = None
        # What must be through before the end of the backward can be waited for.
        self._enclosing: weakref.ref[BackwardCFunction] | None = None

    def add(self, engine: Engine, *, is_copy: bool) -> int:
        """Let ``engine`` take part, and return its number.

        Every rank adds its engines in the same order; copies that a rank has made for itself
        alone get a number when they are trained.
        """
        self._engines.append(weakref.ref(engine))
        return 0 if is_copy else self._next_number()

    def remove(self, engine: Engine) -> None:
        """Let ``engine`` take part no more."""
        if engine in self._running:
            self._backward_is_gone()
        self._engines = [one for one in self._engines if one() is not engine]
        self._seen.add(engine.number)  # or ranks would ask for it for ever

    def _next_number(self) -> int:
        self._num_engines += 1
        return self._num_engines

    def engines(self) -> list[Engine]:
        """Those that are still there and are no mere copies, by number."""
        alive = [(reference, engine) for reference in self._engines if (engine := reference())]
        self._engines = [reference for reference, _ in alive]
        trained = [engine for _, engine in alive if engine.number]
        return sorted(trained, key=lambda engine: engine.number)

    def has_begun(self, engine: Engine) -> bool:
        """Whether ``engine``, to which a gradient came, is in the backward that runs.

        If none runs, it begins. If ``engine`` isn't in it, its gradients are reduced at the end.
        """
        if self.task_id != -1 and self._is_forsaken():
            self._backward_is_gone()
        if self.task_id == -1:
            self._begin(engine)
        if engine in self._running:
            return True
        if engine not in self._late:
            self._late.append(engine)
            # It is inside of a reentrant checkpoint, or it would have been seen.
            engine.sees_nested_tasks = True
        return False

    def runs(self, engine: Engine) -> bool:
        """Whether ``engine`` is in the backward that runs."""
        return engine in self._running

    def begin_if_others_must_know(self) -> None:
        """Begin the backward of what it reaches, before any gradient comes, if ranks ask then."""
        if self.task_id == -1 and self._num_engines > 1:
            with self.lock:
                reached = [engine for engine in self.engines() if engine.takes_part()]
                if reached:
                    self._begin(reached[0])

    def _begin(self, engine: Engine) -> None:
        self.finish_failed()  # which forgets what is known of a backward, so before any of it is
        engine.number = engine.number or self._next_number()
        self.task_id = _current_graph_task_id()
        if is_compiled_backward():
            engines = {engine, *self.engines()}
            self.awaited = {key for one in engines for key in one.reached()}
        self._call_at_the_end()
        engine.sees_nested_tasks |= self.is_nested
        reached = {engine}
        if self._num_engines > 1:
            reached.update(one for one in self.engines() if one is not engine and one.takes_part())
        self._begin_together(reached, asks=self._has_to_ask(reached))

    def has_come(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` has come, in a backward that doesn't tell when it ends."""
        if self.awaited:
            self.awaited.discard(id(parameter))
            if not self.awaited:
                self.end()

    @property
    def is_nested(self) -> bool:
        """Whether the backward began where it can't be seen what it will reach."""
        return self._enclosing is not None

    def run_empty(self, engine: Engine) -> bool:
        """Take part in a backward of ``engine`` to which this rank has no gradients to add.

        If it is one of several, other ranks say what they reach, which may be others, or nothing.

        Returns:
            Whether there was any.
        """
        self.finish_failed()
        asks = self._has_to_ask([engine])
        self._begin_together([] if asks else [engine], asks=asks)
        was_any = bool(self._running)
        self.end()
        return was_any

    def take_part_once(self, num_ended: int) -> None:
        """Take part if no backward of a model runs, and none has ended since ``num_ended``.

        With several models that don't belong together it can't be known of which: then it waits
        until an optimizer steps.
        """
        engines = [engine for engine in self.engines() if engine.is_syncing]
        if self.task_id != -1 or self.num_ended != num_ended or not engines:
            return
        if len(engines) == 1 or all(engine.number in self._kin for engine in engines):
            self.run_empty(engines[0])

    def follow(self, engines: Sequence[Engine], answer: Announcement) -> None:
        """Take part in a backward of ranks that still have data, when this one has none."""
        self._heed(engines, answer)
        if answer.step is Step.BEGIN:
            self._begin_all(engines)
        else:
            self._finish()

    def _begin_together(self, reached: Collection[Engine], *, asks: bool) -> None:
        """Begin all that any rank reaches, of which this rank reaches some."""
        self._announce(Step.BEGIN, reached)
        engines, self._tells_late = set(reached), False
        group = self._group()
        if asks and group is not None:
            numbers = {engine.number for engine in reached}
            facts = [number in numbers for number in range(1, self._num_engines + 1)]
            may_be_late = any(engine.sees_nested_tasks for engine in self.engines())
            *named, self._tells_late = any_rank(group, [*facts, may_be_late])
            engines.update(one for one in self.engines() if named[one.number - 1])
        self._remember(engines)
        self._begin_all(sorted(engines, key=lambda engine: engine.number))

    def _remember(self, engines: Collection[Engine]) -> None:
        """These have been in one backward, on all ranks."""
        numbers = {engine.number for engine in engines}
        self._seen |= numbers
        if len(numbers) > 1:
            self._kin |= numbers

    def _has_to_ask(self, reached: Iterable[Engine]) -> bool:
        """Whether other ranks may reach other models than ``reached``."""
        group = self._group()
        if self._num_engines == 1 or group is None or join_state_of(group) is not None:
            # In join(), all that have data reach the same ones, and the others have been told.
            return False
        return len(self._seen) < self._num_engines or any(
            engine.number in self._kin for engine in reached
        )

    def _late_on_any_rank(self) -> list[Engine]:
        late, group = set(self._late), self._group()
        if self._tells_late and group is not None:
            numbers = {engine.number for engine in late}
            facts = [number in numbers for number in range(1, self._num_engines + 1)]
            named = any_rank(group, facts)
            late.update(one for one in self.engines() if named[one.number - 1])
        late.difference_update(self._running)
        return sorted(late, key=lambda engine: engine.number)

    def _announce(self, step: Step, engines: Iterable[Engine]) -> None:
        """Tell ranks that have no data any more what comes, if there may be such ranks."""
        group = self._group()
        roll = join_state_of(group) if group is not None else None
        if roll is not None and roll.is_active:
            engines = list(engines)
            self._heed(engines, roll.call(step, roll.mask([engine.number for engine in engines])))

    def _heed(self, engines: Sequence[Engine], answer: Announcement) -> None:
        for engine in engines:
            engine.reducer.share = 1 / mean_divisor(engine.reducer.process_group)
            engine.buffers.source = answer.active[0]

    def _begin_all(self, engines: Sequence[Engine]) -> None:
        self._running = list(engines)
        group = self._group()
        # In join() the end is announced, and nothing may be launched before. And no hook of one
        # model may find its collectives between those of another one's.
        waits = (group is not None and join_state_of(group) is not None) or (
            len(engines) > 1 and any(engine.reducer.comm_hook for engine in engines)
        )
        waits = waits or any(engine.sums_in_backward for engine in engines)
        try:
            for engine in engines:
                engine.adopt_changes()
            turns = LaunchOrder([] if waits else [engine.reducer for engine in engines])
            # Autograd has a thread for each accelerator.
            num_devices = len({device for engine in engines for device in engine.devices})
            in_one_thread = self.task_id != -1 and num_devices == 1 and self.awaited is None
            for engine in engines:
                engine.begin_backward(turns, in_one_thread=in_one_thread)
        except BaseException:
            self._backward_is_gone()
            raise

    def _call_at_the_end(self) -> None:
        """Have :meth:`end` called at the end of the outermost backward.

        Autograd calls back at the end of the innermost, which is an earlier one if this gradient
        comes from a segment of a reentrant checkpoint.
        """
        end = _EndOfBackward(self)
        # A backward that raises drops its callbacks without calling them.
        # Shown by test_a_failed_backward_does_not_spoil_the_next.
        self._end = weakref.ref(end, self._backward_is_gone)
        enclosing = _outermost_running_node(sys._getframe())
        if enclosing is None:
            _queue(end)
        else:
            # When that node is through, the outermost backward is the innermost.
            self._enclosing = weakref.ref(enclosing)
            enclosing.register_hook(partial(self._node_is_through, end))

    def _node_is_through(self, end: _EndOfBackward, *_: object) -> None:
        if self._end is not None and self._end() is end:
            self._enclosing = None
            _queue(end)

    def _is_forsaken(self) -> bool:
        """Whether the backward that is believed to run has failed.

        A node that it was inside of may live on, and so the end that it is to call.
        """
        if self._enclosing is None:
            return False
        return self._enclosing() is not _outermost_running_node(sys._getframe())

    def _backward_is_gone(self, _: object = None) -> None:
        for engine in [*self._running, *self._late]:
            engine.forget_backward()
        self._failed += [weakref.ref(one) for one in self._running if one.reducer.has_failed]
        self._running, self._late = [], []
        self.task_id, self._end, self._enclosing, self.awaited = -1, None, None, None

    def finish_failed(self) -> None:
        """Finish, with the other ranks, a backward that failed here, before anything else is said.

        The other ranks wait in its end, or have failed too. Then all have sent the same once more,
        and those whose backward went well have been told.
        """
        failed = [engine for reference in self._failed if (engine := reference())]
        self._failed = []
        if failed:
            self._running = failed
            self._finish()

    def end(self) -> None:
        """The backward is over: wait until everything has arrived.

        Raises:
            CollectiveFailed: If it failed on another rank.
        """
        engines = self._finish()
        for engine in engines:
            engine.reducer.check_all_have_succeeded()
        for engine in engines:
            engine.run_hooks_of_others()

    def _finish(self) -> list[Engine]:
        """Reduce all gradients of the backward that is over; return whose they were."""
        try:
            with torch.no_grad():  # as in hooks
                for engine in self._running:
                    engine.take_notes()
            self._announce(Step.END, self._running)
            self._launch_all_but_last(self._running)
            late = self._late_on_any_rank()
            for engine in late:
                engine.adopt_changes()
                engine.begin_backward(LaunchOrder([]), in_one_thread=False)
            self._launch_all_but_last(late)
            engines = [*self._running, *late]
            self._remember(engines)
            for engine in engines:
                engine.reducer.launch_last()
            # Now rather than before the next forward: they travel with the last gradients, and no
            # forward waits for them, whichever method that will be. After the launch of all
            # buckets, of which some ranks may have sent more by now than others.
            exchanges = [engine.buffers.start() for engine in engines]
            for engine, finish_buffers in zip(engines, exchanges, strict=True):
                engine.finish_backward()
                finish_buffers()
            return engines
        except CollectiveFailed as error:
            if not isinstance(error, PeerLost):
                error.add_note(
                    "It was the end of a backward of this rank. A backward reduces gradients "
                    "whatever made the loss, model.module(x) too, so every rank runs it; one that "
                    "is of this rank alone runs in 'with lockstep.no_sync(model):'."
                )
            raise
        finally:
            self._backward_is_gone()
            self.num_ended += 1

    def _launch_all_but_last(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.reducer.launch_all_but_last()
            engine.reducer.finish_hooks()


@uncompiled
class _EndOfBackward:
    """What autograd calls at the end of a backward; only autograd holds it."""

    def __init__(self, conductor: BackwardSync) -> None:
        self._conductor = conductor

    def __call__(self) -> None:
        self._conductor.end()


def _queue(callback: Callable[[], None]) -> None:
    _execution_engine.queue_callback(callback)


def _outermost_running_node(frame: FrameType | None) -> BackwardCFunction | None:
    """The node whose own backward runs the one that we are in; None if there is no such node.

    A reentrant checkpoint is one, and so is every other autograd.Function that calls backward()
    in its backward(). Autograd doesn't tell, but they are on the stack of this thread: their
    first argument is the node.
    """
    node = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                node = first
        frame = frame.f_back
    return node


# Weakly: a group that is gone takes its conductor with it.
_conductors: weakref.WeakKeyDictionary[dist.ProcessGroup, BackwardSync] = (
    weakref.WeakKeyDictionary()
)


def conductor_of(group: dist.ProcessGroup) -> BackwardSync:
    """The conductor of ``group``, the same one every time."""
    return _conductors.setdefault(group, BackwardSync(group))


def begin_if_others_must_know(group: dist.ProcessGroup) -> None:
    """Prepare for a collective over ``group`` in the backward that is running.

    Ranks that ask each other which models they reach do so at their first gradient, which some may
    have before that collective and some after it. So they ask before.
    """
    conductor = _conductors.get(group)
    if conductor is not None:
        conductor.begin_if_others_must_know()


def take_part_at_the_end(group: dist.ProcessGroup) -> None:
    """See to it that the backward that is running is one of the models over ``group``.

    It may reach no parameter of them on this rank, while it does on others.
    """
    conductor = _conductors.get(group)
    if conductor is not None:
        end = partial(conductor.take_part_once, conductor.num_ended)
        if not is_compiled_backward():
            _queue(end)
        elif not any(engine.takes_part() for engine in conductor.engines()):
            end()  # nobody calls back, and no gradient of a model is to come


def finish_failed(group: dist.ProcessGroup) -> None:
    """Finish, with the other ranks, a backward of models over ``group`` that failed here.

    Whatever else is said over the group would meet what the others still have to say of that.
    """
    conductor = _conductors.get(group)
    if conductor is not None:
        conductor.finish_failed()


def refresh_stale(group: dist.ProcessGroup) -> None:
    """Let models over ``group`` that have changed take up their parameters, as a forward would."""
    finish_failed(group)
    conductor = _conductors.get(group)
    for engine in conductor.engines() if conductor is not None else ():
        if engine.is_stale:
            engine.refresh()
