"""When a backward begins and when it is over, for all parallel models of one process group."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from lockstep.comm import Answer, Step, num_counted, roll_of
from lockstep.grad import Turns

if TYPE_CHECKING:
    from lockstep.nn.engine import Engine


class Conductor:
    """Begins and ends the backwards of all engines of one group, on this rank.

    A backward may run through several models. Their engines begin together, with the first
    gradient that comes to any of them, take turns in the order in which they were made, which is
    the same on every rank, and end together, when the outermost backward is over.

    Attributes:
        lock: Held by a hook while it works. Autograd has a thread for each kind of device, and a
            collective that one of them launches lets another one run.
        task_id: Which of autograd's tasks began the backward that runs; -1 between backwards.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.task_id = -1
        self._num_engines = 0
        self._engines: list[weakref.ref[Engine]] = []
        # Those in the backward that runs: first as foreseen when it began, then the others.
        self._running: list[Engine] = []
        self._late: list[Engine] = []
        self._end: weakref.ref[_EndOfBackward] | None = None

    def add(self, engine: Engine, *, is_copy: bool) -> int:
        """Let ``engine`` take part, and return its number.

        Every rank adds its engines in the same order; copies that a rank has made for itself
        alone get a number when they are trained.
        """
        self._engines.append(weakref.ref(engine))
        return 0 if is_copy else self._next_number()

    def _next_number(self) -> int:
        self._num_engines += 1
        return self._num_engines

    def engines(self) -> list[Engine]:
        """Those that are still there, in the order in which they were made."""
        alive = [(reference, engine) for reference in self._engines if (engine := reference())]
        self._engines = [reference for reference, _ in alive]
        return [engine for _, engine in alive]

    def begin(self, engine: Engine) -> None:
        """A gradient has come to ``engine``, the first one in this backward."""
        if self.task_id != -1:
            # It couldn't be foreseen, as it is inside of a reentrant checkpoint. It comes last.
            self._late.append(engine)
            engine.begin_backward(Turns([]))
            return
        engines = self.engines()
        if len(engines) > 1:
            engines = [one for one in engines if one is engine or one.takes_part()]
        self.task_id = torch._C._current_graph_task_id()
        self._call_at_the_end()
        self._announce(Step.BEGIN, engines)
        self._begin_all(engines)

    def run_empty(self, engines: Sequence[Engine]) -> None:
        """Take part in a backward of the others' to which this rank has no gradients to add."""
        self._announce(Step.BEGIN, engines)
        self._begin_all(engines)
        self.end()

    def take_part_if_idle(self) -> None:
        """Take part in the others' backward if this rank's reached no model, and there is one."""
        engines = [engine for engine in self.engines() if engine.is_syncing]
        if self.task_id == -1 and len(engines) == 1:
            self.run_empty(engines)

    def follow(self, engines: Sequence[Engine], answer: Answer) -> None:
        """Take part in a backward of ranks that still have data, when this one has none."""
        self._heed(engines, answer)
        if answer.step is Step.BEGIN:
            self._begin_all(engines)
        else:
            self.end()

    def _announce(self, step: Step, engines: Sequence[Engine]) -> None:
        """Tell ranks that have no data any more what comes, if there may be such ranks."""
        for engine in engines:
            engine.number = engine.number or self._next_number()
        roll = roll_of(engines[0].reducer.process_group) if engines else None
        if roll is not None and roll.is_active:
            which = sum(1 << engine.number for engine in engines)
            self._heed(engines, roll.call(step, which))

    def _heed(self, engines: Sequence[Engine], answer: Answer) -> None:
        for engine in engines:
            engine.reducer.share = 1 / num_counted(engine.reducer.process_group)
            engine.buffers.source = answer.active[0]

    def _begin_all(self, engines: Sequence[Engine]) -> None:
        self._running = list(engines)
        try:
            for engine in engines:
                engine.adopt_changes()
            # In join() the end is announced, and nothing may be launched before.
            is_joining = bool(engines) and roll_of(engines[0].reducer.process_group) is not None
            turns = Turns([] if is_joining else [engine.reducer for engine in engines])
            for engine in engines:
                engine.begin_backward(turns)
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
            torch.autograd.Variable._execution_engine.queue_callback(end)
        else:
            # When that node is through, the outermost backward is the innermost.
            enclosing.register_hook(lambda *_: _queue(end))

    def _backward_is_gone(self, _: object = None) -> None:
        for engine in [*self._running, *self._late]:
            engine.reducer.give_up()
        self._running, self._late = [], []
        self.task_id = -1

    def end(self) -> None:
        """The backward is over: wait until everything has arrived."""
        # Late ones come in another order on each rank.
        engines = [*self._running, *sorted(self._late, key=lambda engine: engine.number)]
        reducers = [engine.reducer for engine in engines]
        try:
            self._announce(Step.END, engines)
            for reducer in reducers:
                reducer.launch_all_but_last()
            for reducer in reducers:
                reducer.launch_last()
            # Now rather than before the next forward: they travel with the last gradients, and no
            # forward waits for them, whichever method that will be. After the launch of all
            # buckets, of which some ranks may have sent more by now than others.
            on_their_way = [engine.buffers.start() for engine in engines]
            for engine, buffers in zip(engines, on_their_way, strict=True):
                engine.finish_backward()
                buffers.finish()
        finally:
            self._backward_is_gone()


class _EndOfBackward:
    """What autograd calls at the end of a backward; only autograd holds it."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def __call__(self) -> None:
        self._conductor.end()


def _queue(end: _EndOfBackward) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(end)


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
_conductors: weakref.WeakKeyDictionary[dist.ProcessGroup, Conductor] = weakref.WeakKeyDictionary()


def conductor_of(group: dist.ProcessGroup) -> Conductor:
    """The conductor of ``group``, the same one every time."""
    return _conductors.setdefault(group, Conductor())


def take_part_at_the_end(group: dist.ProcessGroup) -> None:
    """See to it that the backward that is running is one of the model over ``group``.

    It may reach no parameter of the model on this rank, while it does on others.
    """
    conductor = _conductors.get(group)
    if conductor is not None:
        torch.autograd.Variable._execution_engine.queue_callback(conductor.take_part_if_idle)
