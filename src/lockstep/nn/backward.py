"""Begins and ends backward passes, for all parallel models of one process group together."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction

from lockstep.comm import Step, any_rank, join_state_of, uncompiled
from lockstep.errors import CollectiveFailed, CollectiveMismatch, PeerLost
from lockstep.grad import Phase, without_autograd
from lockstep.nn.autograd import is_compiled_backward, outermost_running_node
from lockstep.nn.engine import Engine, Options
from lockstep.torch_private import _current_graph_task_id, _execution_engine

_End = partial[None]
_number = operator.attrgetter("number")


@dataclass(eq=False)
class _Backward:
    """One backward pass, from its first gradient to the end of its reductions."""

    # Autograd's task; None for a backward of other ranks, to which this rank adds nothing.
    task: int | None = None
    # The group's generation when it began; None if the group has no generations.
    generation: object = None
    # The engine of a copied model that got its number in this backward, if there is one.
    new_copy: Engine | None = None
    # The engines that have begun to reduce gradients in it, in the order in which they launch.
    engines: list[Engine] = field(default_factory=list)
    # The number of those engines that began in a failed backward, which this one finishes.
    num_continued: int = 0
    # Engines that begin at the end of the backward: their models are inside of reentrant
    # checkpoints, so that autograd can't foresee their gradients.
    late: set[Engine] = field(default_factory=set)
    # Whether ranks tell each other their late engines.
    tells_late: bool = False
    # The id() of parameters whose gradients are yet to come, under compiled autograd, which calls
    # no callback at the end of a backward. None otherwise.
    awaited: set[int] | None = None
    # The callback at the end of the backward, as long as autograd holds it.
    end: weakref.ref[_End] | None = None
    # The autograd node whose backward() runs this backward. Until it returns, no callback can be
    # queued for the end of the outermost backward.
    enclosing: weakref.ref[BackwardCFunction] | None = None


@uncompiled
class BackwardSync:
    """Begins and ends the backwards of all engines of one group, on this rank.

    A backward may run through several models, and through different ones on each rank. If it may,
    ranks first tell each other the numbers of the models that they reach: while a model is new, and
    later if it has shared a backward with another model. The models that any rank reaches begin on
    all ranks, launch in the order of their numbers, and end together, when the outermost backward
    is over. Shown by test_ranks_may_reach_different_models_in_one_backward.

    A backward begins with its first gradient or, on a rank without gradients, when that rank takes
    part in a backward of the others. It has failed if autograd drops its callback before the end;
    then it is finished with the other ranks before any other communication.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._weak_group, self.is_alone = weakref.ref(group), group.size() == 1
        # Autograd has a thread for each device: one may run while another waits for a collective.
        self._lock = threading.RLock()
        # Weakly, since engines hold the group. Replaced when they change: others may iterate.
        self._engines: tuple[weakref.ref[Engine], ...] = ()
        self._num_engines = 0
        # The numbers of engines that have been in a backward, and of those that have been in one
        # with others. Equal on all ranks, which decide by them whether to ask each other.
        self._trained: set[int] = set()
        self._trained_together: set[int] = set()
        self._backward: _Backward | None = None
        self._num_ended = 0
        # What is needed to finish the backward that failed here; no engines, which hold the group.
        self._failed: _Backward | None = None

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
        """Return an engine for ``module``, whose ``inner`` modules have engines of their own.

        Every rank makes its engines in the same order. A copied model, which one rank may make for
        itself alone, gets its number in its first backward.
        """
        engine = Engine(module, self._group, options, inner, self.gradient_ready)
        with _lock:
            alive = [each for each in self._engines if each() is not None]
            self._engines = (*alive, weakref.ref(engine))
        engine.number = 0 if is_copy else self._next_number()
        return engine

    def remove(self, engine: Engine) -> None:
        """Stop reducing the gradients of ``engine``."""
        engine.detach()
        if self._is_reducing(engine):
            self._drop_backward()
            self.finish_failed()
        with _lock:
            self._engines = tuple(each for each in self._engines if each() is not engine)
        self._trained.add(engine.number)  # or ranks would always ask for it

    def _next_number(self) -> int:
        self._num_engines += 1
        return self._num_engines

    def engines(self, *, copies: bool = False) -> list[Engine]:
        """Return the engines, by number; those of untrained copies only with ``copies``."""
        alive = (engine for each in self._engines if (engine := each()) is not None)
        return sorted((one for one in alive if one.number or copies), key=_number)

    def is_running(self) -> bool:
        """Whether this rank runs a backward, and not only takes part in one of other ranks."""
        return self._backward is not None and self._backward.task is not None

    def _is_reducing(self, engine: Engine) -> bool:
        return self._backward is not None and engine in self._backward.engines

    def is_in_backward(self, engine: Engine) -> bool:
        """Whether a backward runs that has yet to reduce the gradients of ``engine``."""
        return self._is_reducing(engine) and _current_graph_task_id() != -1

    def gradient_ready(self, engine: Engine, parameter: torch.Tensor) -> None:
        """Handle a gradient that is ready, of ``engine`` or of a parameter that was unfrozen."""
        if not engine.is_syncing:
            engine.keep_gradient(parameter)
            return
        with self._lock:
            is_begun = self._join(engine)
            # The engine may have been refreshed, and have other parameters by now.
            if id(parameter) in engine.reducer.table.ids:
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
            # A nested backward, as of a reentrant checkpoint, whose gradients can't be foreseen:
            # see autograd.reached().
            engine.sees_nested_tasks = True
            engine.reducer.stop_early_copies()
        enclosing = backward.enclosing if backward is not None else None
        if backward is not None and backward.task is None:
            self._backward = None  # of other ranks, in a join() that an error has ended
        elif enclosing is not None and enclosing() is not outermost_running_node():
            self._drop_backward()  # it has failed, although the node still holds its callback
        backward = self._backward or self._begin(engine)
        if engine in backward.engines:
            return True
        # The model is inside of a reentrant checkpoint, or it would have been foreseen.
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
        try:
            self._begin_together(backward, reached)
        except CollectiveFailed as error:
            _advise(error, "beginning")
            raise
        return backward

    def begin_before_collective(self) -> None:
        """Prepare for a collective of a layer over the group in the backward that is running.

        Ranks ask each other at their first gradient which models they reach. On some ranks that
        comes before the layer's collective, on others after it; so all of them ask before it.
        """
        if not self.is_running() and self._num_engines > 1:
            with self._lock:
                reached = [engine for engine in self.engines() if engine.is_any_reached()]
                if reached:
                    self._begin(reached[0])

    def take_part(self, engine: Engine) -> None:
        """Take part in backwards of the other ranks, without gradients, up to one of ``engine``.

        It also returns if no rank has a backward with ``engine``.
        """
        before = engine.num_backwards
        while engine.num_backwards == before and self._run_empty(engine):
            pass

    def _run_empty(self, engine: Engine) -> bool:
        """Take part in a backward that may reach ``engine``; return whether any rank had one."""
        self.finish_failed()
        backward = _Backward(generation=self._generation)
        self._begin_together(backward, [engine])
        was_any = bool(backward.engines)
        self.end()
        return was_any

    def take_part_at_the_end(self) -> None:
        """At the end of the running backward, take part in the other ranks' if it wasn't one.

        It may reach no parameter of a parallel model on this rank, which has no samples.
        """
        end = partial(self._take_part_once, self._num_ended)
        if not is_compiled_backward():
            _execution_engine.queue_callback(end)
        elif not any(engine.is_any_reached() for engine in self.engines()):
            end()  # no callback is called, and no gradient of a parallel model will come

    def _take_part_once(self, num_ended: int) -> None:
        """Take part if no backward of a model runs, and none has ended since ``num_ended``.

        Not if there are several models that are trained apart, as this rank can't know of which the
        backward is: then it takes part before an optimizer steps.
        """
        engines = [engine for engine in self.engines() if engine.is_syncing]
        if self.is_running() or self._num_ended != num_ended or not engines:
            return
        if len(engines) == 1 or self._trained_together.issuperset(map(_number, engines)):
            self._run_empty(engines[0])

    def follow(self, engines: Sequence[Engine], step: Step) -> None:
        """Take a step of a backward of ranks that still have data, which they have announced."""
        if step is Step.BEGIN:
            self._begin_all(_Backward(generation=self._generation), engines)
        else:
            self._finish()

    def _begin_together(self, backward: _Backward, reached: Collection[Engine]) -> None:
        """Begin with the engines that any rank reaches; on this rank they are ``reached``."""
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
        """Return the engines that any rank passes, and whether ``fact`` is true on any rank."""
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
        """In join(), announce the next step to ranks without data."""
        join_state = join_state_of(self._group)
        if join_state is not None and join_state.is_active:
            join_state.call(step, join_state.mask(engines))

    def _begin_all(self, backward: _Backward, engines: Sequence[Engine]) -> None:
        self._backward = backward
        # Nothing is launched before the end of the backward: in join(), which announces the end; if
        # communication hooks of two models could interleave their collectives; and if layers have
        # collectives in the backward themselves.
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
        # At the end of the outermost backward. Autograd calls back at the end of the innermost one,
        # which ends earlier if this gradient comes from a segment of a reentrant checkpoint.
        end = partial(self.end)  # held by autograd alone
        # A backward that raises drops its callbacks without calling them.
        # Shown by test_a_failed_backward_does_not_spoil_the_next.
        backward.end = weakref.ref(end, self._drop_backward)
        enclosing = outermost_running_node()
        if enclosing is None:
            _execution_engine.queue_callback(end)
        else:
            # When that node's backward() has returned, the outermost backward is the innermost.
            backward.enclosing = weakref.ref(enclosing)
            enclosing.register_hook(partial(self._enclosing_is_through, end))

    def _enclosing_is_through(self, end: _End, *_: object) -> None:
        backward = self._backward
        if backward is not None and backward.end is not None and backward.end() is end:
            backward.enclosing = None
            _execution_engine.queue_callback(end)

    def _drop_backward(self, _: object = None) -> None:
        """Drop the backward, which is over or has failed."""
        backward, self._backward = self._backward, None
        if backward is not None:
            for engine in dict.fromkeys([*backward.engines, *backward.late]):
                engine.end_backward()
            if backward.generation is not self._generation:
                self._forget(backward)
            if any(engine.reducer.phase is Phase.FAILED for engine in backward.engines):
                self._failed = _Backward(None, backward.generation, tells_late=backward.tells_late)

    def _forget(self, backward: _Backward) -> None:
        """Undo the counting of ``backward``: it was a mismatch, and no rank goes on with it."""
        for engine in backward.engines[backward.num_continued :]:
            engine.num_backwards -= 1
        if backward.new_copy is not None:
            backward.new_copy.number = 0
            self._num_engines -= 1

    def finish_failed(self) -> None:
        """Finish a backward that failed here with the other ranks, before any other collective.

        The other ranks wait at its end, or have failed too. Now all launch the same buckets, and
        ranks whose backward succeeded learn of the failure. After a mismatch meanwhile, no rank
        goes on with the backward. See Note [Mismatches] in comm/work.py.
        """
        if self._failed is None:
            return
        failed = [
            engine
            for engine in self.engines()
            if engine.reducer.phase is Phase.FAILED and not self._is_reducing(engine)
        ]
        if failed and self._failed.generation is not self._generation:
            for engine in failed:
                engine.reducer.drop_pass()
            self._failed = None
        elif failed:
            self._failed.engines, self._failed.num_continued = failed, len(failed)
            self._backward, self._failed = self._failed, None
            self._finish()
        elif self._backward is None:
            self._failed = None

    def refresh(self, engine: Engine) -> None:
        """Let ``engine`` continue with the parameters that its module has now."""
        if engine.has_changed():
            self.finish_failed()
            engine.refresh(in_backward=self.is_running())

    def end(self) -> None:
        """End the backward, and wait until all gradients are reduced.

        Raises:
            CollectiveFailed: If the backward failed on another rank.
        """
        engines, failed_elsewhere = self._finish()
        if failed_elsewhere is not None:
            raise failed_elsewhere
        for engine in engines:
            engine.call_hooks_of_others()

    def _finish(self) -> tuple[list[Engine], CollectiveFailed | None]:
        """Reduce all gradients of the backward; return its engines, and a failure elsewhere."""
        backward = self._backward or _Backward()
        try:
            with without_autograd():
                for engine in backward.engines:
                    engine.pass_on_queued()
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
                    engine.reducer.launch_last(tells=engine.buffers.has_changed())
                # Buffers are exchanged along with the last gradients, and not before the next
                # forward, which could be any method, and would wait. After the launch of all
                # buckets, since ranks have launched different numbers of buckets until here.
                exchanges = [engine.buffers.start() for engine in engines]
                errors = []
                for engine, finish_buffers in zip(engines, exchanges, strict=True):
                    errors.append(engine.finish_backward())
                    finish_buffers()
                for engine in [one for one in engines if one.reducer.last.was_told]:
                    engine.buffers.agree()
                return engines, next(filter(None, errors), None)
        except CollectiveFailed as error:
            _advise(error, "end")
            raise
        finally:
            if backward.generation is self._generation:
                numbers = {engine.number for engine in {*backward.engines, *backward.late}}
                self._trained |= numbers
                if len(numbers) > 1:
                    self._trained_together |= numbers
            self._drop_backward()
            self._num_ended += 1


def _advise(error: CollectiveFailed, place: str) -> None:
    """Note in an error of a collective what to do about a backward that one rank alone runs."""
    if not isinstance(error, PeerLost):
        error.add_note(
            f"It was the {place} of a backward of this rank. A backward reduces gradients "
            "whatever made the loss, model.module(x) too, so every rank runs it; one that "
            "is of this rank alone runs in 'with lockstep.no_sync(model):'."
        )


# Ranks may be threads.
_lock = threading.RLock()
# Weakly: a BackwardSync lives as long as its group.
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, BackwardSync] = weakref.WeakKeyDictionary()


def backward_sync_of(group: dist.ProcessGroup) -> BackwardSync:
    """Return the BackwardSync of ``group``, the same one every time."""
    with _lock:
        sync = _by_group.get(group)
        return sync if sync is not None else _by_group.setdefault(group, BackwardSync(group))


def all_engines() -> list[Engine]:
    """Return the engines of all groups of several ranks, those of a group by number."""
    with _lock:
        syncs = [sync for sync in _by_group.values() if not sync.is_alone]
    return [engine for sync in syncs for engine in sync.engines(copies=True)]


def engines_with(parameters: Collection[torch.Tensor]) -> list[Engine]:
    """Return the engines that reduce gradients of any of ``parameters``."""
    own = {*map(id, parameters)}
    return [engine for engine in all_engines() if not own.isdisjoint(engine.reducer.table.ids)]


def finish_failed(group: dist.ProcessGroup) -> None:
    """Finish a backward that failed here, before any other collective over ``group``."""
    backward_sync_of(group).finish_failed()
