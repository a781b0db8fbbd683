"""Begins and ends backward passes, for all parallel models of one process group together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import (
    Announced,
    context_of,
    generation_of,
    in_all_groups,
    join_state_of,
    uncompiled,
)
from lockstep.errors import CollectiveFailed, CollectiveMismatch, PeerLost
from lockstep.grad import Phase, without_autograd
from lockstep.nn.after_backward import OTHERS, AfterBackward, Call, ranks_on_gpus
from lockstep.nn.autograd import is_compiled_backward, outermost_running_node
from lockstep.nn.backward_pass import BackwardPass, End, Outcome
from lockstep.nn.engine import Engine
from lockstep.nn.engines import Engines, number_of
from lockstep.nn.options import Options
from lockstep.nn.shard import refuse_in_shard
from lockstep.torch_private import _current_graph_task_id, _execution_engine


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
        # One lock for all groups on GPUs, of which each begins others: see _sharing_gpus().
        self._ranks_on_gpus = ranks_on_gpus(group)
        self._lock = _lock_on_gpus if self._ranks_on_gpus else threading.RLock()
        self._after = AfterBackward(group) if len(self._ranks_on_gpus) > 1 else None
        self._engines = Engines()
        self._backward: BackwardPass | None = None
        self._num_ended = 0
        # What is needed to finish the backward that failed here; no engines, which hold the group.
        self._failed: BackwardPass | None = None
        # Tells the other ranks that a step in shards has failed here, as they wait at its end.
        self.tell_failed_step: Callable[[dist.ProcessGroup], None] | None = None

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._weak_group()
        assert group is not None  # engines and callers hold it
        return group

    @property
    def _generation(self) -> object:
        return generation_of(self._weak_group())

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
        self._engines.add(engine, is_copy=is_copy)
        return engine

    def remove(self, engine: Engine) -> None:
        """Stop reducing the gradients of ``engine``."""
        engine.detach()
        if self._is_reducing(engine):
            self._fail()
            self.finish_failed()
        self._engines.remove(engine)

    def engines(self, *, copies: bool = False) -> list[Engine]:
        """Return the engines, by number; those of untrained copies only with ``copies``."""
        return self._engines.by_number(copies=copies)

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
                self._end_in_order()

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
            self._fail()  # it has failed, although the node still holds its callback
        backward = self._backward or self._begin(engine)
        if engine in backward.engines:
            return True
        # The model is inside of a reentrant checkpoint, or it would have been foreseen.
        engine.sees_nested_tasks = True
        backward.late.add(engine)
        return False

    def _begin(self, engine: Engine) -> BackwardPass:
        refuse_in_shard("A backward reaches another parallel model")
        self.finish_failed()
        backward = BackwardPass(_current_graph_task_id(), self._generation)
        earlier, later = self._sharing_gpus()
        for sync in earlier:
            sync._begin_if_reached()
            backward.comes_later |= sync.is_running()
        if self._backward is not None:
            return self._backward  # an earlier group's has begun it
        if not engine.number:
            self._engines.give_number(engine)
            backward.new_copy = engine
        if is_compiled_backward():
            engines = {engine, *self.engines()}
            backward.awaited = {key for one in engines for key in one.reached()}
        self._call_at_the_end(backward)
        engine.sees_nested_tasks |= backward.enclosing is not None
        reached = {engine}
        if len(self._engines) > 1:
            reached |= {*self._engines.reached()}
        try:
            self._begin_together(backward, reached)
        except CollectiveFailed as error:
            _advise(error, "beginning")
            raise
        for sync in later:
            sync._begin_if_reached()
        return backward

    def begin_before_collective(self) -> None:
        """Prepare for a collective of a layer over the group in the backward that is running.

        Ranks ask each other at their first gradient which models they reach. On some ranks that
        comes before the layer's collective, on others after it; so all of them ask before it.
        """
        if len(self._engines) > 1:
            self._begin_if_reached()

    def _begin_if_reached(self) -> None:
        if not self.is_running():
            with self._lock:
                if reached := self._engines.reached():
                    self._begin(reached[0])

    def _sharing_gpus(self) -> tuple[list[BackwardSync], list[BackwardSync]]:
        """Return those of other groups with two of its ranks: of earlier ones by name, and later.

        Ranks must launch collectives of two groups in one order, or NCCL may deadlock, and each has
        an order of gradients of its own. So groups begin in order, the first of them launches as
        gradients come, and the others do at the end, one after the other. Shown by
        test_two_models_in_two_groups_launch_in_one_order.
        """
        others = [
            sync
            for sync in in_all_groups(BackwardSync)
            if sync is not self and len(sync._ranks_on_gpus & self._ranks_on_gpus) > 1
        ]
        others.sort(key=_group_name)
        later = [sync for sync in others if _group_name(sync) > _group_name(self)]
        return others[: len(others) - len(later)], later

    def _end_in_order(self) -> None:
        """End a compiled backward after those of earlier groups on the same GPUs; then later ones.

        Shown by test_two_models_in_two_groups_launch_in_one_order_in_compiled_backwards.
        """
        earlier, later = self._sharing_gpus()
        if any(sync.is_running() for sync in earlier):
            return  # the last of them ends this one
        self.end()
        for sync in later:
            if sync._backward is not None and sync._backward.awaited == set():
                sync._end_in_order()

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
        backward = BackwardPass(generation=self._generation)
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
        elif not self._engines.reached():
            end()  # no callback is called, and no gradient of a parallel model will come

    def _take_part_once(self, num_ended: int) -> None:
        """Take part if no backward of a model runs, and none has ended since ``num_ended``.

        Not if there are several models that are trained apart, as this rank can't know of which the
        backward is: then it takes part before an optimizer steps.
        """
        engines = [engine for engine in self.engines() if engine.is_syncing]
        if self.is_running() or self._num_ended != num_ended or not engines:
            return
        if len(engines) == 1 or self._engines.are_trained_together(engines):
            self._run_empty(engines[0])

    def follow(self, engines: Sequence[Engine], announced: Announced) -> None:
        """Begin or end a backward of ranks that still have data, as they have announced."""
        if announced is Announced.BEGIN:
            self._begin_all(BackwardPass(generation=self._generation), engines)
        else:
            self._finish()

    def _begin_together(self, backward: BackwardPass, reached: Collection[Engine]) -> None:
        """Begin with the engines that any rank reaches; on this rank they are ``reached``."""
        asks = self._engines.have_to_be_told(self._group, reached)
        engines = set() if asks and backward.task is None else set(reached)
        self._announce(Announced.BEGIN, engines)
        if asks:
            may_be_late = any(engine.sees_nested_tasks for engine in self.engines())
            try:
                named, backward.tells_late = self._engines.on_any_rank(
                    self._group, engines, may_be_late
                )
            except CollectiveMismatch:
                self._end(backward, Outcome.MISMATCHED)
                raise
            engines |= named
        self._begin_all(backward, sorted(engines, key=number_of))

    def _announce(self, announced: Announced, engines: Collection[Engine]) -> None:
        """In join(), announce to ranks without data what comes next."""
        join_state = join_state_of(self._group)
        if join_state is not None and join_state.is_active:
            join_state.call(announced, join_state.mask(engines))

    def _begin_all(self, backward: BackwardPass, engines: Sequence[Engine]) -> None:
        self._backward = backward
        # Nothing is launched before the end of the backward: in join(), which announces the end; if
        # communication hooks of two models could interleave their collectives; if layers have
        # collectives in the backward themselves; and if an earlier group launches.
        waits = (
            backward.comes_later
            or join_state_of(self._group) is not None
            or (len(engines) > 1 and any(engine.reducer.comm_hook for engine in engines))
            or any(engine.sums_in_backward for engine in engines)
        )
        try:
            for engine in engines:
                self.refresh(engine)
            backward.begin(engines, launches_early=not waits)
        except BaseException:
            self._fail()
            raise

    def _call_at_the_end(self, backward: BackwardPass) -> None:
        # At the end of the outermost backward. Autograd calls back at the end of the innermost one,
        # which ends earlier if this gradient comes from a segment of a reentrant checkpoint.
        end = partial(self.end)  # held by autograd alone
        # A backward that raises drops its callbacks without calling them.
        # Shown by test_a_failed_backward_does_not_spoil_the_next.
        backward.end = weakref.ref(end, self._fail)
        enclosing = outermost_running_node()
        if enclosing is None:
            _execution_engine.queue_callback(end)
        else:
            # When that node's backward() has returned, the outermost backward is the innermost.
            backward.enclosing = weakref.ref(enclosing)
            enclosing.register_hook(partial(self._enclosing_has_returned, end))

    def _enclosing_has_returned(self, end: End, *_: object) -> None:
        backward = self._backward
        if backward is not None and backward.end is not None and backward.end() is end:
            backward.enclosing = None
            _execution_engine.queue_callback(end)

    def _fail(self, _: object = None) -> None:
        """Drop the backward that runs, if one does: it has failed, here or by a mismatch."""
        if (backward := self._backward) is not None:
            self._end(backward, self._outcome_of_failure(backward))

    def _outcome_of_failure(self, backward: BackwardPass) -> Outcome:
        is_same = backward.generation is self._generation
        return Outcome.FAILED_HERE if is_same else Outcome.MISMATCHED

    def _end(self, backward: BackwardPass, outcome: Outcome) -> None:
        """Drop ``backward``, which has ended so."""
        self._backward = None
        for engine in self.engines():
            if engine not in backward.engines:
                engine.pass_by()
        if backward.drop(outcome):
            self._failed = BackwardPass(None, backward.generation, tells_late=backward.tells_late)
        if outcome is Outcome.MISMATCHED and backward.new_copy is not None:
            self._engines.take_number(backward.new_copy)
        backward.end = None  # at last: another thread may wait for it

    def finish_failed(self, call: Call = OTHERS) -> None:
        """Finish a backward that failed here with the other ranks, before any other collective.

        Over GPUs, also tell them of ``call``, by which this rank goes on.

        The other ranks wait at its end, or have failed too. Now all launch the same buckets, and
        ranks whose backward succeeded learn of the failure. After a mismatch meanwhile, no rank
        goes on with the backward. See Note [Mismatches] in comm/work.py.
        """
        tell, self.tell_failed_step = self.tell_failed_step, None
        if tell is not None:
            tell(self._group)
        if self._ranks_on_gpus and self._backward is not None:
            self._backward.await_failure()
        if self._failed is not None:
            self._finish_failed(self._failed)
        if self._after is not None:
            self._after.is_next(call)

    def _finish_failed(self, backward: BackwardPass) -> None:
        failed = [
            engine
            for engine in self.engines()
            if engine.reducer.phase is Phase.FAILED and not self._is_reducing(engine)
        ]
        if failed and backward.generation is not self._generation:
            for engine in failed:
                engine.reducer.drop_pass()
            self._failed = None
        elif failed:
            backward.engines, backward.num_continued = failed, len(failed)
            self._backward, self._failed = backward, None
            self._finish()
        elif self._backward is None:
            self._failed = None

    def refresh(self, engine: Engine) -> None:
        """Let ``engine`` continue with the parameters that its module has now.

        Every rank must call it; it blocks if the module may have others than before.
        """
        if engine.has_changed():
            self.finish_failed()
            late_ranks = self._after.late_ranks if self._after is not None else None
            engine.refresh(in_backward=self.is_running(), late_ranks=late_ranks)

    def end(self) -> None:
        """End the backward, and wait until all gradients are reduced.

        Raises:
            CollectiveFailed: If the backward failed on another rank.
        """
        if (backward := self._finish()) is None:
            return
        if backward.failed_elsewhere is not None:
            raise backward.failed_elsewhere
        for engine in backward.engines:
            engine.call_hooks_of_others()

    def _finish(self) -> BackwardPass | None:
        """Reduce all gradients of the backward that runs, if one does, and return it."""
        backward = self._backward
        if backward is None:
            self._announce(Announced.END, ())
            self._num_ended += 1
            return None
        outcome = None
        try:
            with without_autograd():
                for engine in backward.engines:
                    engine.pass_on_queued()
                self._announce(Announced.END, backward.engines)
                for engine in backward.engines:
                    engine.reducer.launch_all_but_last()
                self._begin_late(backward)
                outcome = backward.finish()
        except CollectiveFailed as error:
            _advise(error, "end")
            raise
        finally:
            if backward.generation is self._generation:
                self._engines.note_trained({*backward.engines, *backward.late})
            self._end(backward, outcome or self._outcome_of_failure(backward))
            self._num_ended += 1
            if self._after is not None:
                self._after.backward_ended(has_failed=bool(backward.num_continued))
        return backward

    def _begin_late(self, backward: BackwardPass) -> None:
        """Begin with the engines of which nobody could foresee that they are in ``backward``."""
        if backward.tells_late:
            backward.late |= self._engines.on_any_rank(self._group, backward.late)[0]
        late = sorted(backward.late.difference(backward.engines), key=number_of)
        for engine in late:
            self.refresh(engine)
            backward.engines.append(engine)
            engine.begin_backward([])
        for engine in late:
            engine.reducer.launch_all_but_last()


def _advise(error: CollectiveFailed, place: str) -> None:
    """Note in an error of a collective what to do about a backward that one rank alone runs."""
    if not isinstance(error, PeerLost):
        error.add_note(
            f"It was the {place} of a backward of this rank. A backward reduces gradients "
            "whatever made the loss, model.module(x) too, so every rank runs it; one that "
            "is of this rank alone runs in 'with lockstep.no_sync(model):'."
        )


_lock_on_gpus = threading.RLock()


def backward_sync_of(group: dist.ProcessGroup) -> BackwardSync:
    """Return the BackwardSync of ``group``, the same one every time."""
    return context_of(group).get(BackwardSync, partial(BackwardSync, group))


def _group_name(sync: BackwardSync) -> str:
    return sync._group.group_name


def all_engines() -> list[Engine]:
    """Return the engines of all groups of several ranks, those of a group by number."""
    syncs = [sync for sync in in_all_groups(BackwardSync) if not sync.is_alone]
    return [engine for sync in syncs for engine in sync.engines(copies=True)]


def engines_with(parameters: Collection[torch.Tensor]) -> list[Engine]:
    """Return the engines that reduce gradients of any of ``parameters``."""
    ids = {*map(id, parameters)}
    return [engine for engine in all_engines() if not ids.isdisjoint(engine.reducer.table.ids)]


def finish_failed(group: dist.ProcessGroup, call: Call = OTHERS) -> None:
    """Finish a backward that failed here, before ``call``, or others, over ``group``."""
    backward_sync_of(group).finish_failed(call)
