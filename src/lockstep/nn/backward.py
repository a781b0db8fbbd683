"""Beginning and end of backward passes, for all parallel models of one process group."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction

from lockstep.comm import Announcement, Step, any_rank, join_state_of, mean_divisor, uncompiled
from lockstep.errors import CollectiveFailed, CollectiveMismatch, PeerLost
from lockstep.grad import Phase
from lockstep.nn.autograd import is_compiled_backward, outermost_running_node
from lockstep.nn.engine import Engine, Options
from lockstep.torch_private import _current_graph_task_id, _execution_engine

_End = partial[None]
_number = operator.attrgetter("number")


@dataclass(eq=False)
class _Backward:
    """One backward pass, from its first gradient to the end of its reductions."""

    # Autograd's task; None for a backward of other ranks, to which this one adds nothing.
    task: int | None = None
    # The group's generation when it began; None for groups without any.
    generation: object = None
    # The copy of a model that got its number in it, if one did.
    new_copy: Engine | None = None
    # The engines that have begun to reduce gradients in it, in the order in which they launch.
    engines: list[Engine] = field(default_factory=list)
    # The number of those that began in a backward that failed, and that this one finishes.
    num_continued: int = 0
    # Engines that begin at its end, as they are inside of reentrant checkpoints and so unforeseen.
    late: set[Engine] = field(default_factory=set)
    # Whether ranks tell each other of late engines.
    tells_late: bool = False
    # Under compiled autograd, which calls nothing at the end of a backward: the id() of parameters
    # whose gradients are yet to come. None otherwise.
    awaited: set[int] | None = None
    # The callback at its end, as long as autograd holds it.
    end: weakref.ref[_End] | None = None
    # The node whose own backward this one runs in; until it is through, the end of the backward
    # can't be waited for.
    enclosing: weakref.ref[BackwardCFunction] | None = None


@uncompiled
class BackwardSync:
    """Begins and ends the backwards of all engines of one group, on this rank.

    A backward may run through several models, and through other ones on each rank. Then ranks
    first tell each other the numbers of the models that they reach: while a model is new, and from
    then on if it has been in one backward with another. Those that any rank reaches begin on all,
    launch in the order of their numbers, and end together, when the outermost backward is over.
    Shown by test_ranks_may_reach_different_models_in_one_backward.

    A backward begins with its first gradient, or on a rank that has none, when it takes part in
    one of the others. If it isn't over when autograd drops its callback, it has failed; then it is
    finished with the other ranks before anything else is communicated.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._weak_group = weakref.ref(group)
        # Autograd has a thread for each device, and while one of them waits for a collective
        # another one runs.
        self._lock = threading.RLock()
        # Weakly, as everything here, since engines hold the group.
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._num_engines = 0
        # The numbers of engines that have been in a backward, and in one with others. They are the
        # same on every rank, since ranks decide by them whether to ask each other.
        self._trained: set[int] = set()
        self._trained_together: set[int] = set()
        self._backward: _Backward | None = None
        self._num_ended = 0
        # To finish the backward that failed here with; without its engines, which hold the group.
        self._failed = _Backward()

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._weak_group()
        assert group is not None  # engines and callers hold it
        return group

    @property
    def _generation(self) -> object:
        return getattr(self._weak_group(), "generation", None)

    def new_engine(
        self,
        module: nn.Module,
        options: Options,
        inner: Collection[nn.Module] = (),
        *,
        is_copy: bool = False,
    ) -> Engine:
        """Return an engine for ``module`` whose ``inner`` modules have others.

        Every rank makes its engines in the same order; copies that a rank has made for itself
        alone get a number when they are trained.
        """
        engine = Engine(module, self._group, options, inner, self.gradient_ready)
        with _lock:
            self._engines.add(engine)
        engine.number = 0 if is_copy else self._next_number()
        return engine

    def remove(self, engine: Engine) -> None:
        """Reduce the gradients of ``engine`` no more."""
        engine.detach()
        if self._is_reducing(engine):
            self._drop_backward()
            self.finish_failed()
        with _lock:
            self._engines.discard(engine)
        self._trained.add(engine.number)  # or ranks would always ask for it

    def _next_number(self) -> int:
        self._num_engines += 1
        return self._num_engines

    def engines(self, *, copies: bool = False) -> list[Engine]:
        """Return the engines, by number; copies that have not been trained only with ``copies``."""
        with _lock:
            return sorted((one for one in self._engines if one.number or copies), key=_number)

    def is_running(self) -> bool:
        """Whether a backward of this rank runs."""
        return self._backward is not None and self._backward.task is not None

    def _is_reducing(self, engine: Engine) -> bool:
        return self._backward is not None and engine in self._backward.engines

    def is_in_backward(self, engine: Engine) -> bool:
        """Whether a backward runs that will reduce the gradients of ``engine``, and hasn't."""
        return self._is_reducing(engine) and _current_graph_task_id() != -1

    def gradient_ready(self, engine: Engine, parameter: torch.Tensor) -> None:
        """A gradient of ``engine``, or of a parameter that was unfrozen, has come."""
        if not engine.is_syncing:
            engine.keep_gradient(parameter)
            return
        with self._lock:
            is_begun = self._join(engine)
            # The engine may have refreshed, and have other parameters by now.
            if id(parameter) in engine.reducer.ids:
                if is_begun:
                    engine.mark_ready(parameter)
                else:
                    engine.reducer.mark_unawaited(parameter)
        backward = self._backward
        if backward is not None and backward.awaited:
            backward.awaited.discard(id(parameter))
            if not backward.awaited:
                self.end()

    def _join(self, engine: Engine) -> bool:
        """Return whether ``engine`` is in the backward that runs; if none does, begin it."""
        backward = self._backward
        if engine.reducer.phase is Phase.COLLECTING:
            if backward is not None and backward.task == _current_graph_task_id():
                return True
            # A backward inside of a backward, as reentrant checkpoints have. Its gradients can't
            # be foreseen: see reached().
            engine.sees_nested_tasks = True
            engine.reducer.copies_early = False
        enclosing = backward.enclosing if backward is not None else None
        if backward is not None and backward.task is None:
            self._backward = None  # of other ranks, in a join() that was left with an error
        elif enclosing is not None and enclosing() is not outermost_running_node():
            self._drop_backward()  # it has failed, although the node still holds its end
        backward = self._backward or self._begin(engine)
        if engine in backward.engines:
            return True
        # It is inside of a reentrant checkpoint, or it would have been seen.
        engine.sees_nested_tasks = True
        backward.late.add(engine)
        return False

    def _begin(self, engine: Engine) -> _Backward:
        self.finish_failed()
        backward = _Backward(_current_graph_task_id(), self._generation)
        if not engine.number:
            engine.number, backward.new_copy = self._next_number(), engine
        if is_compiled_backward():
            engines = {engine, *self.engines()}
            backward.awaited = {key for one in engines for key in one.reached()}
        self._call_at_the_end(backward)
        engine.sees_nested_tasks |= backward.enclosing is not None
        reached = {engine}
        if self._num_engines > 1:
            reached |= {one for one in self.engines() if one is not engine and one.is_any_reached()}
        with _advice("beginning"):
            self._begin_together(backward, reached)
        return backward

    def begin_before_collective(self) -> None:
        """Prepare for another collective over the group in the backward that is running.

        Ranks that ask each other which models they reach do so at their first gradient, which some
        may have before that collective and some after it. So they ask before.
        """
        if not self.is_running() and self._num_engines > 1:
            with self._lock:
                reached = [engine for engine in self.engines() if engine.is_any_reached()]
                if reached:
                    self._begin(reached[0])

    def take_part(self, engine: Engine) -> None:
        """Take part in backwards of the other ranks, with no gradients, up to one of ``engine``.

        It returns too if ``engine`` is in no backward of any rank.
        """
        before = engine.num_backwards
        while engine.num_backwards == before and self._run_empty(engine):
            pass

    def _run_empty(self, engine: Engine) -> bool:
        """Take part in a backward in which any rank may reach ``engine``; False if none had one."""
        self.finish_failed()
        backward = _Backward(generation=self._generation)
        self._begin_together(backward, [engine])
        was_any = bool(backward.engines)
        self.end()
        return was_any

    def take_part_at_the_end(self) -> None:
        """Let this rank take part in the reduction of the other ranks' backwards.

        The backward that is running may reach no parameter of them on this rank.
        """
        end = partial(self._take_part_once, self._num_ended)
        if not is_compiled_backward():
            _execution_engine.queue_callback(end)
        elif not any(engine.is_any_reached() for engine in self.engines()):
            end()  # nothing is called back, and no gradient of a model will come

    def _take_part_once(self, num_ended: int) -> None:
        """Take part if no backward of a model runs, and none has ended since ``num_ended``.

        It can't be known of which of several models that are not trained together: then it waits
        until an optimizer steps.
        """
        engines = [engine for engine in self.engines() if engine.is_syncing]
        if self.is_running() or self._num_ended != num_ended or not engines:
            return
        if len(engines) == 1 or self._trained_together.issuperset(map(_number, engines)):
            self._run_empty(engines[0])

    def follow(self, engines: Sequence[Engine], announcement: Announcement) -> None:
        """Take part in a backward of ranks that still have data, when this one has none."""
        _apply(engines, announcement)
        if announcement.step is Step.BEGIN:
            self._begin_all(_Backward(generation=self._generation), engines)
        else:
            self._finish()

    def _begin_together(self, backward: _Backward, reached: Collection[Engine]) -> None:
        """Begin with the engines that any rank reaches; ``backward`` may reach those given."""
        asks = self._has_to_ask(reached)
        engines = set() if asks and backward.task is None else set(reached)
        self._announce(Step.BEGIN, engines)
        if asks:
            may_be_late = any(engine.sees_nested_tasks for engine in self.engines())
            try:
                named, backward.tells_late = self._on_any_rank(engines, may_be_late)
            except CollectiveMismatch:
                self._forget(backward)
                raise
            engines |= named
        self._begin_all(backward, sorted(engines, key=_number))

    def _on_any_rank(
        self, engines: Collection[Engine], fact: bool = False
    ) -> tuple[set[Engine], bool]:
        """Return the engines that any rank passes, and whether ``fact`` is true on any."""
        numbers = {engine.number for engine in engines}
        own = [number in numbers for number in range(1, self._num_engines + 1)]
        *reached, is_fact = any_rank(self._group, [*own, fact])
        return {engine for engine in self.engines() if reached[engine.number - 1]}, is_fact

    def _has_to_ask(self, reached: Collection[Engine]) -> bool:
        """Whether other ranks may reach other models than ``reached``."""
        if self._num_engines == 1 or join_state_of(self._group) is not None:
            # In join(), all ranks that have data reach the same models, and announce them.
            return False
        is_new = len(self._trained) < self._num_engines
        return is_new or not self._trained_together.isdisjoint(map(_number, reached))

    def _announce(self, step: Step, engines: Collection[Engine]) -> None:
        """Announce the next step to ranks that have no data any more, if there may be such."""
        join_state = join_state_of(self._group)
        if join_state is not None and join_state.is_active:
            _apply(engines, join_state.call(step, join_state.mask(engines)))

    def _begin_all(self, backward: _Backward, engines: Sequence[Engine]) -> None:
        self._backward = backward
        # In join() the end is announced, and nothing may be launched before. And communication
        # hooks of two models must not interleave their collectives.
        waits = (
            join_state_of(self._group) is not None
            or (len(engines) > 1 and any(engine.reducer.comm_hook for engine in engines))
            or any(engine.sums_in_backward for engine in engines)
        )
        try:
            for engine in engines:
                self.refresh(engine)
            launch_order = [] if waits else [engine.reducer for engine in engines]
            # Autograd has a thread for each accelerator.
            num_devices = len({device for engine in engines for device in engine.devices})
            task = backward.task if num_devices == 1 and backward.awaited is None else None
            sees_graph = backward.task is not None and backward.enclosing is None
            for engine in engines:
                backward.engines.append(engine)
                engine.begin_backward(launch_order, task, sees_graph=sees_graph)
        except BaseException:
            self._drop_backward()
            raise

    def _call_at_the_end(self, backward: _Backward) -> None:
        # At the end of the outermost backward. Autograd calls back at the end of the innermost, an
        # earlier one if this gradient comes from a segment of a reentrant checkpoint.
        end = partial(self.end)  # autograd alone holds it
        # A backward that raises drops its callbacks without calling them.
        # Shown by test_a_failed_backward_does_not_spoil_the_next.
        backward.end = weakref.ref(end, self._drop_backward)
        enclosing = outermost_running_node()
        if enclosing is None:
            _execution_engine.queue_callback(end)
        else:
            # When that node is through, the outermost backward is the innermost.
            backward.enclosing = weakref.ref(enclosing)
            enclosing.register_hook(partial(self._enclosing_is_through, end))

    def _enclosing_is_through(self, end: _End, *_: object) -> None:
        backward = self._backward
        if backward is not None and backward.end is not None and backward.end() is end:
            backward.enclosing = None
            _execution_engine.queue_callback(end)

    def _drop_backward(self, _: object = None) -> None:
        """The backward is over, or has failed."""
        backward, self._backward = self._backward, None
        if backward is not None:
            for engine in {*backward.engines, *backward.late}:
                engine.end_backward()
            if backward.generation is not self._generation:
                self._forget(backward)
            self._failed = _Backward(None, backward.generation, tells_late=backward.tells_late)

    def _forget(self, backward: _Backward) -> None:
        """No rank goes on with ``backward``, which the other ranks didn't run."""
        for engine in backward.engines[backward.num_continued :]:
            engine.num_backwards -= 1
        if backward.new_copy is not None:
            backward.new_copy.number = 0
            self._num_engines -= 1

    def finish_failed(self) -> None:
        """Finish a backward that failed here with the other ranks, before any other collective.

        The other ranks wait in its end, or have failed too. This makes all launch the same buckets,
        and tells those whose backward succeeded. If there was a mismatch meanwhile, no rank goes on
        with it. See Note [Mismatches] in comm/work.py.
        """
        failed = [
            engine
            for engine in self.engines()
            if engine.reducer.phase is Phase.FAILED and not self._is_reducing(engine)
        ]
        if failed and self._failed.generation is not self._generation:
            for engine in failed:
                engine.reducer.reset()
        elif failed:
            self._failed.engines, self._failed.num_continued = failed, len(failed)
            self._backward = self._failed
            self._finish()

    def refresh(self, engine: Engine) -> None:
        """Let ``engine`` continue with the parameters that its module has now."""
        if engine.has_changed():
            self.finish_failed()
            engine.refresh(in_backward=self.is_running())

    def end(self) -> None:
        """The backward is over: wait until everything has arrived.

        Raises:
            CollectiveFailed: If it failed on another rank.
        """
        engines, failed_elsewhere = self._finish()
        if failed_elsewhere is not None:
            raise failed_elsewhere
        for engine in engines:
            engine.call_hooks_of_others()

    def _finish(self) -> tuple[list[Engine], CollectiveFailed | None]:
        """Reduce all gradients of the backward that is over.

        Returns its engines, and the error to raise if it failed on another rank.
        """
        backward = self._backward or _Backward()
        try:
            with torch.no_grad(), _advice("end"):  # without gradients, as in hooks
                for engine in backward.engines:
                    engine.flush_pending()
                self._announce(Step.END, backward.engines)
                for engine in backward.engines:
                    engine.reducer.launch_all_but_last()
                if backward.tells_late:
                    backward.late |= self._on_any_rank(backward.late)[0]
                late = sorted(backward.late.difference(backward.engines), key=_number)
                for engine in late:
                    self.refresh(engine)
                    backward.engines.append(engine)
                    engine.begin_backward([])
                for engine in late:
                    engine.reducer.launch_all_but_last()
                engines = backward.engines
                for engine in engines:
                    engine.reducer.launch_last()
                # Now rather than before the next forward: buffers travel with the last gradients,
                # and no forward waits for them, whichever method that will be. After the launch of
                # all buckets, of which some ranks may have launched more by now than others.
                exchanges = [engine.buffers.start() for engine in engines]
                errors = []
                for engine, finish_buffers in zip(engines, exchanges, strict=True):
                    errors.append(engine.finish_backward())
                    finish_buffers()
                return engines, next(filter(None, errors), None)
        finally:
            if backward.generation is self._generation:
                numbers = {engine.number for engine in {*backward.engines, *backward.late}}
                self._trained |= numbers
                if len(numbers) > 1:
                    self._trained_together |= numbers
            self._drop_backward()
            self._num_ended += 1


@contextmanager
def _advice(place: str) -> Iterator[None]:
    """Let an error of a collective say what a rank does that runs a backward alone."""
    try:
        yield
    except CollectiveFailed as error:
        if not isinstance(error, PeerLost):
            error.add_note(
                f"It was the {place} of a backward of this rank. A backward reduces gradients "
                "whatever made the loss, model.module(x) too, so every rank runs it; one that "
                "is of this rank alone runs in 'with lockstep.no_sync(model):'."
            )
        raise


def _apply(engines: Collection[Engine], announcement: Announcement) -> None:
    for engine in engines:
        engine.reducer.scale = 1 / mean_divisor(engine.process_group)
        engine.buffers.source = announcement.active[0]


# Ranks may be threads, and what another thread changes can't be iterated over.
_lock = threading.RLock()
# Weakly: a group that is gone takes its BackwardSync with it.
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, BackwardSync] = weakref.WeakKeyDictionary()


def backward_sync_of(group: dist.ProcessGroup) -> BackwardSync:
    """Return the BackwardSync of ``group``, the same one every time."""
    with _lock:
        sync = _by_group.get(group)
        return sync if sync is not None else _by_group.setdefault(group, BackwardSync(group))


def all_engines() -> list[Engine]:
    """Return the engines of all groups of several ranks, those of a group by number."""
    with _lock:
        engines = [engine for sync in _by_group.values() for engine in sync.engines(copies=True)]
    return [engine for engine in engines if engine.process_group.size() > 1]


def engines_with(parameters: Iterable[torch.Tensor]) -> list[Engine]:
    """Return the engines of some of ``parameters``, as :func:`all_engines` does."""
    wanted = {id(parameter) for parameter in parameters}
    return [engine for engine in all_engines() if not engine.reducer.ids.isdisjoint(wanted)]


def finish_failed(group: dist.ProcessGroup) -> None:
    """Finish a backward that failed here, before any other collective over ``group``."""
    backward_sync_of(group).finish_failed()
