"""What keeps a module's replicas alike: hooks on its parameters.

The engine never touches the module's class, methods or attributes. It hangs a hook on each
parameter, and these fire whichever method made the loss. That is why any method will do, why
``copy.deepcopy(model)`` gives a plain model, and why nothing has to wrap ``forward``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import all_gather_bytes, any_rank, broadcast_tensors
from lockstep.comm.uncompiled import uncompiled
from lockstep.errors import CollectiveFailed, ModelMismatch, ParameterChanged
from lockstep.grad import MIB, LaunchOrder, Phase, Reducer, gradient_dtype
from lockstep.nn.backward import conductor_of
from lockstep.nn.buffers import BroadcastBuffers, Buffers, policy_of
from lockstep.nn.gradient_hooks import GradientHooks, Hook, hooks_of, take_over_optimizers
from lockstep.nn.reached import is_any_reached, is_reached
from lockstep.nn.sync_batch_norm import sums_in_backward
from lockstep.nn.verify import check_same_model
from lockstep.torch_private import _current_graph_task_id

# Autograd gives out other numbers.
_NO_TASK = -2


class Options(NamedTuple):
    """How a module is to be kept in step; the same on every rank.

    Attributes:
        bucket_cap_mb: How much makes a bucket full, in MiB.
        broadcast_buffers: Whether buffers follow rank 0's, or a policy for each pattern of names.
        init_sync: Whether to check the model and start from rank 0's values.
        ignored: Names of parameters and buffers to leave alone.
        skip_unused: Whether buckets of which no rank uses anything are not sent.
        init_buffers: Whether buffers that are left alone later start from rank 0's values.
    """

    bucket_cap_mb: float
    broadcast_buffers: BroadcastBuffers
    init_sync: bool = True
    ignored: Collection[str] = ()
    skip_unused: bool = False
    init_buffers: bool = False

    def left_alone(self, module: nn.Module) -> set[str]:
        """Names of those parameters and buffers of ``module`` that may differ from the start."""
        local = {
            name
            for name, _ in module.named_buffers()
            if policy_of(name, self.broadcast_buffers) == "local"
        }
        return {*self.ignored, *(() if self.init_buffers else local)}


class Engine:
    """Keeps the replicas of one module in step, once they are alike.

    Invariants: an engine holds parameters, never the module, which may hold the engine; and
    hooks hold the engine weakly, since Python's garbage collector doesn't see through a
    parameter's hooks.

    Attributes:
        is_syncing: Whether backwards reduce gradients; without, they add up.
        is_stale: Whether the module may have other parameters by now. Then :meth:`refresh` is
            called before the next forward or backward.
        num_backwards: In how many backwards it has reduced gradients.
        num_backwards_stepped: How many it had when an optimizer of its parameters last stepped.
        number: Which one of its group's engines it is, the same on every rank; 0 if it is a copy
            that has not been trained yet.
        conductor: Begins and ends backwards, for all engines of its group.
        sees_nested_tasks: Whether there have been backwards inside of backwards.
        sums_in_backward: Whether its backwards have other collectives of the same group.
        devices: Where its parameters are.
        reducer: Has the gradients.
        buffers: Has the buffers.

    Args:
        module: The module, the same on every rank.
        group: The process group to keep it in step with, of several ranks.
        options: How.
        inner: Modules in it that are parallel by themselves, and are left to their own engines.
        is_copy: Whether other ranks may not have made one.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        options: Options,
        inner: Collection[nn.Module] = (),
        *,
        is_copy: bool = False,
    ) -> None:
        self.is_syncing = True
        self.is_stale = False
        self.num_backwards = 0
        self.num_backwards_stepped = 0
        self.conductor = conductor_of(group)
        self.buffers = Buffers(
            module, group, options.broadcast_buffers, leave_out=inner, ignored=options.ignored
        )
        self._module = weakref.ref(module)
        self._inner = weakref.WeakSet(inner)
        self._group = group
        self._options = options
        self._notes = _Notes()
        self._hooks: list[tuple[GradientHooks, Hook]] = []
        # The id() of parameters on which others have hooks too.
        self._with_others: set[int] = set()
        self._left_out: Sequence[nn.Parameter] = ()
        self.sees_nested_tasks = False
        self._take(module)
        self.number = self.conductor.add(self, is_copy=is_copy)

    @property
    def module(self) -> nn.Module | None:
        """The module, if it is still there."""
        return self._module()

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients it reduces."""
        return self._parameters

    def looks_after(self, ids: Collection[int]) -> bool:
        """Whether one of its parameters is among those of these ``id()``."""
        return not self._trained.keys().isdisjoint(ids)

    def _take(self, module: nn.Module, previous: Reducer | None = None) -> None:
        """Look after the parameters that ``module`` has now, instead of those of ``previous``."""
        own, sparse = self._own_parameters(module), with_sparse_gradients(module)
        named = [(name, p) for name, p in own if p.requires_grad]
        self._names = {id(parameter): name for name, parameter in own}
        self._parameters = [parameter for _, parameter in named]
        self._trained = {id(parameter): parameter for parameter in self._parameters}
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._description = self._describe(module)
        self._frozen = [p for _, p in own if not p.requires_grad and _can_be_trained(p)]
        reducer = Reducer(
            named,
            self._group,
            cap_bytes=int(self._options.bucket_cap_mb * MIB),
            skip_unused=self._options.skip_unused,
            sparse=[i for i, p in enumerate(self._parameters) if id(p) in sparse],
        )
        if previous is not None:
            reducer.take_over(previous)
        self.reducer: Reducer = reducer
        self.sums_in_backward = sums_in_backward(module, self._group)
        self.devices = {parameter.device for parameter in self._parameters}
        self._left_out = ()
        self._hang_hooks()

    def _describe(self, module: nn.Module) -> tuple[object, ...]:
        """What of the module makes a difference here."""
        own = [(id(p), p.requires_grad, gradient_dtype(p)) for _, p in self._own_parameters(module)]
        return own, [name for name, _ in module.named_buffers()]

    def _own_parameters(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        others = {id(p) for part in self._inner for p in part.parameters()}
        ignored = self._options.ignored
        return [
            (name, p)
            for name, p in module.named_parameters()
            if id(p) not in others and name not in ignored
        ]

    def _hang_hooks(self) -> None:
        self.detach()
        me = weakref.ref(self)
        # The same for all, and so at hand when the next gradient comes.
        hook, thaw_hook = _gradient_hook(me, self._notes), _thaw_hook(me)
        self._hooks = [(hooks_of(parameter), hook) for parameter in self._parameters]
        self._hooks += [(hooks_of(parameter), thaw_hook) for parameter in self._frozen]
        for hooks, own in self._hooks:
            hooks.hold_back(own, self._with_others)

    def detach(self) -> None:
        """Take all hooks off the parameters: gradients stay this rank's own."""
        for hooks, own in self._hooks:
            hooks.release(own)
        self._hooks = []

    def run_hooks_of_others(self) -> None:
        """Call the hooks that others have on parameters whose gradients have been reduced."""
        if self._with_others:
            with torch.no_grad():  # as in hooks
                for parameter in self.reducer.reduced:
                    if id(parameter) in self._with_others:
                        hooks_of(parameter).call_others(parameter)

    def is_in_backward(self) -> bool:
        """Whether a backward runs that will reduce its gradients, and hasn't."""
        return self.conductor.runs(self) and _current_graph_task_id() != -1

    def gradient_has_come(self, parameter: torch.Tensor) -> None:
        """The backward that runs has added to the gradient of ``parameter``."""
        if not self.is_syncing:
            self.reducer.mark_accumulated(parameter)
            hooks_of(parameter).call_others(parameter)
            return
        with self.conductor.lock:
            self._take_gradient(parameter)
        self.conductor.has_come(parameter)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        conductor = self.conductor
        if self.reducer.phase is Phase.IDLE:
            has_begun = conductor.has_begun(self)
            # It may have taken up changes, and look after this one no more.
            if id(parameter) not in self._trained:
                return
            if not has_begun:
                self.reducer.mark_late(parameter)
                return
        elif _current_graph_task_id() != conductor.task_id:
            # A backward inside of a backward, as reentrant checkpoints have. What will come
            # of it can't be foreseen: see is_reached.
            self.sees_nested_tasks = True
            self.reducer.takes_early = False
            if not conductor.has_begun(self):
                return
        self.take_notes()
        self._notes.room = self.reducer.mark_ready([parameter])

    def take_notes(self) -> None:
        """Tell the reducer which gradients have come, of those that it need not know at once."""
        noted = self._notes.parameters
        if noted:
            self._notes.room = self.reducer.mark_ready(noted)
            noted.clear()

    def gradient_has_thawed(self, parameter: torch.Tensor) -> None:
        """A parameter has got a gradient that was frozen when hooks were hung."""
        if not self.is_syncing:
            hooks_of(parameter).call_others(parameter)
            return  # when gradients are reduced, this one is found where it is
        with self.conductor.lock:
            if self.reducer.phase is Phase.IDLE:
                self.conductor.has_begun(self)
        if id(parameter) in self._trained:
            self.gradient_has_come(parameter)
        else:
            self.conductor.has_come(parameter)

    def takes_part(self) -> bool:
        """Whether the backward that is running will reduce some of its gradients."""
        return self.is_syncing and is_any_reached(self._parameters)

    def reached(self) -> list[int]:
        """The ``id()`` of each parameter whose gradient comes in the backward that is running."""
        hooked = [*self._parameters, *self._frozen] if self.is_syncing else []
        return [id(parameter) for parameter in hooked if is_reached(parameter)]

    def adopt_changes(self) -> None:
        """See whether the module's parameters are other ones by now. All ranks must call it."""
        if (
            self.is_stale
            or any(parameter.requires_grad for parameter in self._frozen)
            or [parameter.dtype for parameter in self._parameters] != self._dtypes
        ):
            self.refresh()

    def refresh(self) -> None:
        """Go on with the parameters that the module has now, and with rank 0's values of new ones.

        Every rank must call it, except for a copy that hasn't been trained: that is this rank's
        own.

        Raises:
            ModelMismatch: If the ranks' modules have changed in different ways.
        """
        self.is_stale = False
        self.conductor.finish_failed()
        module = self.module
        if module is None:
            return
        known = self._names
        own = self._own_parameters(module)
        trained = [id(p) for _, p in own if p.requires_grad]
        if self._describe(module) == self._description:
            return
        if not self.number:
            self.buffers.look(module, self._inner)
            self._take(module, self.reducer)
            return
        try:
            check_same_model(module, self._group, left_out=self._options.left_alone(module))
        except ModelMismatch as error:
            error.add_note("They were the same when they were made parallel, but changed since.")
            raise
        except CollectiveFailed as error:
            new = [name for name, p in own if id(p) not in self._trained and p.requires_grad]
            gone = [self._names[key] for key in self._trained if key not in trained]
            error.add_note(
                "This rank wanted to compare its model with the others', as it has changed since "
                f"it was made parallel: to be trained by now are {new}, and no longer {gone}. "
                "Change the model in the same way, at the same time, on every rank."
            )
            raise
        old_buffers = set(self.buffers.named())
        self.buffers.look(module, self._inner)
        more = [b for name, b in self.buffers.named().items() if name not in old_buffers]
        added = {name: p.detach() for name, p in own if id(p) not in known}
        before = [p.clone() for p in added.values()] if self.conductor.task_id != -1 else []
        broadcast_tensors(self._group, [*more, *added.values()])
        self._reduce_what_goes(set(trained))
        self._take(module, self.reducer)
        if before:
            self._check_same_before(added, before)

    def _check_same_before(
        self, added: dict[str, torch.Tensor], before: Sequence[torch.Tensor]
    ) -> None:
        """Raise, on every rank, if the forward that is over had other values than rank 0's.

        Compiled code calls no hook before it, where it would have got them.
        """
        is_other = [not torch.equal(*both) for both in zip(added.values(), before, strict=True)]
        for name, differs in zip(added, any_rank(self._group, is_other), strict=True):
            if differs:
                raise ParameterChanged(
                    f"{name!r} was put in its place since compiled code was made of the forward, "
                    "which therefore didn't wait for rank 0's values, and had other ones on some "
                    "rank. Repeat the step: all ranks have the same ones now."
                )

    def _reduce_what_goes(self, trained: Collection[int]) -> None:
        """Reduce gradients added up so far for parameters that are not trained any more."""
        going = [(self._names[key], key) for key in self._trained if key not in trained]
        mine = bytes(self.reducer.is_unreduced(self._trained[key]) for _, key in going)
        if not going:
            return
        everyones = all_gather_bytes(self._group, mine, self._parameters[0].device)
        named = [
            (name, self._trained[key])
            for (name, key), *flags in zip(going, *everyones, strict=True)
            if any(flags)
        ]
        if named:
            last = Reducer(named, self._group, cap_bytes=int(self._options.bucket_cap_mb * MIB))
            last.take_over(self.reducer)
            last.begin()
            last.finish()

    def begin_backward(self, turns: LaunchOrder, *, in_one_thread: bool) -> None:
        """A backward begins whose gradients are to be reduced.

        Args:
            turns: In which order the engines in it launch.
            in_one_thread: Whether all their gradients come from one thread. Several need the lock.
        """
        self.num_backwards += 1
        take_over_optimizers(self._parameters)
        takes_early = not (self.sees_nested_tasks or torch.is_grad_enabled())
        self.reducer.begin(turns, takes_early=takes_early)
        if in_one_thread:
            self._notes.task, self._notes.room = self.conductor.task_id, 1
        sees_all = not (self.sees_nested_tasks or self.conductor.is_nested)
        if self.conductor.task_id != -1 and sees_all:
            self.reducer.excuse(
                parameter for parameter in self._left_out if not is_reached(parameter)
            )

    def forget_backward(self) -> None:
        """The backward is over, or has failed."""
        self._notes.task = _NO_TASK
        for parameter in self._notes.parameters:
            self.reducer.mark_accumulated(parameter)
        self._notes.parameters.clear()
        self.reducer.give_up()

    def finish_backward(self) -> None:
        """The backward is over: wait until everything has arrived."""
        self.reducer.finish()
        before, self._left_out = self._left_out, self.reducer.left_out
        if [*map(id, before)] != [*map(id, self._left_out)]:
            self._check_still_the_same()

    def num_gradients(self) -> int:
        """How many of its parameters have a gradient."""
        return sum(parameter.grad is not None for parameter in self._parameters)

    def take_part_without_gradients(self) -> None:
        """Do what the other ranks do in backwards to which this one has nothing to add.

        Those of models that are reached along with this one may be before it. If there is none of
        this one, all ranks say so: it is on all that it has none.
        """
        before = self.num_backwards
        while self.conductor.run_empty(self) and self.num_backwards == before:
            pass

    def drop_reduced_gradients(self) -> None:
        """Forget the gradients of an earlier step, unless some are still to be reduced."""
        if not self.reducer.has_unreduced:
            for parameter in self._parameters:
                parameter.grad = None

    def everything_that_follows(self) -> list[torch.Tensor]:
        """Its parameters and those buffers that are kept alike."""
        module = self.module
        own = self._own_parameters(module) if module is not None else []
        return [*(parameter for _, parameter in own), *self.buffers.named().values()]

    def _check_still_the_same(self) -> None:
        """Raise if parameters were left out because the module has others now."""
        module = self.module
        for name, parameter in self._own_parameters(module) if module is not None else ():
            if parameter.requires_grad and id(parameter) not in self._trained:
                self.is_stale = True
                raise ParameterChanged(
                    f"{name!r} was put in its place without telling torch (say, in "
                    "module._parameters, as moving a model to another device does), so its "
                    "gradient was not reduced. Repeat the step: it is known from now on."
                )


def with_sparse_gradients(module: nn.Module) -> set[int]:
    """The id() of those parameters that torch gives gradients of some rows only."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return {id(table.weight) for table in tables if table.sparse}


def _can_be_trained(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


class _Notes:
    """Gradients that have come, and that the engine need not know of at once.

    To look into each when it comes takes longer than all of them together: what for is no longer in
    the cores' caches. The first one of a backward, which begins it, is never among them.

    Attributes:
        task: Autograd's task of the backward whose gradients are noted.
        parameters: Those that have got one. No longer than a backward, as their hooks hold this.
        room: With how many of them the engine is to look.
    """

    def __init__(self) -> None:
        self.task = _NO_TASK
        self.parameters: list[torch.Tensor] = []
        self.room = 1


def _gradient_hook(engine: weakref.ref[Engine], notes: _Notes) -> Callable[[torch.Tensor], None]:
    # What every gradient of every step passes through has its names at hand.
    current_task, parameters = _current_graph_task_id, notes.parameters

    @uncompiled
    def gradient_has_come(parameter: torch.Tensor) -> None:
        if notes.task == current_task():
            parameters.append(parameter)
            if len(parameters) < notes.room:
                return
            alive = engine()
            if alive is not None:
                alive.take_notes()
        else:
            alive = engine()
            if alive is not None:
                alive.gradient_has_come(parameter)
            else:
                _engine_is_gone(parameter)

    return gradient_has_come


def _thaw_hook(engine: weakref.ref[Engine]) -> Callable[[torch.Tensor], None]:
    @uncompiled
    def gradient_has_thawed(parameter: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.gradient_has_thawed(parameter)
        else:
            _engine_is_gone(parameter)

    return gradient_has_thawed


def _engine_is_gone(parameter: torch.Tensor) -> None:
    hooks = hooks_of(parameter)
    hooks.release_all()
    hooks.call_others(parameter)
