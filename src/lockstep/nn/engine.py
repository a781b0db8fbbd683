"""The engine: hooks on a module's parameters that keep its replicas in step.

The engine never touches the module's class, methods or attributes. It registers a hook on each
parameter, which autograd calls whichever method computed the loss. So ``forward`` need not be
wrapped, and ``copy.deepcopy(model)`` returns a plain model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import chain, compress

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import any_rank, broadcast_tensors, can_exchange_buffers
from lockstep.errors import CollectiveFailed, CollectiveTimeout, ModelMismatch, ParameterChanged
from lockstep.grad import (
    DeferredBucket,
    DeferredParameter,
    Reducer,
    UnsummedBucket,
    WhoTold,
    failed_before,
)
from lockstep.nn import autograd
from lockstep.nn.buffers import BroadcastBuffers, Buffers
from lockstep.nn.options import Options
from lockstep.nn.ready_hooks import ReadyHooks
from lockstep.nn.renormed import RenormedRows
from lockstep.nn.tracked import TrackedParameters, parameters_outside, sparse_indices
from lockstep.nn.verify import check_same_model
from lockstep.nn.watch import Forwards, ForwardWatch, Stepped


class Engine:
    """Reduces the gradients of one module, and exchanges its buffers between the ranks.

    Invariants: an engine holds parameters, but never the module, which may hold the engine; and
    hooks hold the engine weakly, since Python's garbage collector doesn't see through a
    parameter's hooks.

    ``inner`` modules have engines of their own. ``gradient_ready`` is called with the engine and a
    parameter for the first gradient of a backward, and for each gradient that can't be queued.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        options: Options,
        inner: Collection[nn.Module],
        gradient_ready: Callable[[Engine, torch.Tensor], None],
    ) -> None:
        self.process_group = group
        self.gradient_ready = gradient_ready
        # Its number among its group's engines, the same on every rank; 0 for a copied model that
        # has not been trained yet.
        self.number = 0
        # The number of backwards in which it has reduced gradients, and of them those with which
        # optimizers have stepped.
        self.num_backwards, self.stepped = 0, Stepped()
        # Whether backwards reduce gradients, or else only accumulate them; and what is told then of
        # each that is ready.
        self.is_syncing = True
        self.when_kept: Callable[[torch.Tensor], None] | None = None
        # Whether the module may have got other parameters. Then the engine is refreshed before the
        # next forward or backward.
        self.is_stale = False
        self.watch = ForwardWatch()
        # Whether nested backwards, as of reentrant checkpoints, have computed its gradients.
        self.sees_nested_tasks = False
        self.buffers = Buffers(group)
        self.renormed = RenormedRows()
        # The module and all modules in it.
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet(module.modules())
        self._module = weakref.ref(module)
        self._inner = weakref.WeakSet(inner)
        self._options = options
        self._hooks = ReadyHooks(self)
        # Runs of parameters with unsummed gradients, in the order of sharded optimizers' memories.
        self._deferred: list[tuple[list[nn.Parameter], type[UnsummedBucket]]] = []
        self._find_buffers(module)
        self.buffers.accept()
        self._take(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, if it still exists."""
        return self._module()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients it reduces."""
        return self._tracked.parameters

    @property
    def devices(self) -> set[torch.device]:
        """Where they are."""
        return self._tracked.devices

    @property
    def sums_in_backward(self) -> bool:
        """Whether backwards of the module have other collectives of the same group."""
        return self._tracked.sums_in_backward

    def _named_in(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return parameters_outside(module, self._inner, self._options.ignored)

    def _take(self, module: nn.Module, previous: Reducer | None = None) -> None:
        """Reduce the parameters that ``module`` has now, instead of those of ``previous``."""
        named, group = self._named_in(module), self.process_group
        self._tracked = tracked = TrackedParameters(module, named, self._inner, group)
        self.renormed.find(module, named)
        self.reducer: Reducer = Reducer(
            tracked.trained,
            group,
            cap_bytes=self._options.cap_bytes,
            skip_unused=self._options.skip_unused,
            sparse=sparse_indices(module, tracked.parameters),
        )
        if previous is not None:
            previous.sum_unsummed()
            self.reducer.take_over(previous)
        self._defer()
        self._hooks.attach(tracked.parameters, tracked.frozen)
        if autograd.may_be_distributed():
            self.refuse_distributed_autograd()

    def defer(self, run: Sequence[nn.Parameter], kind: type[UnsummedBucket]) -> None:
        """Let gradients stay unsummed of those parameters of ``run`` that this engine has.

        A run is in the order of a sharded optimizer's memory. Every rank must call it.
        """
        ids = {*map(id, run)}
        before = (([p for p in other if id(p) not in ids], its) for other, its in self._deferred)
        self._deferred = [*(pair for pair in before if pair[0]), ([*run], kind)]
        self._defer()

    def _defer(self) -> None:
        can_defer = all(can_exchange_buffers(self.process_group, device) for device in self.devices)
        # Not parameters of the program's own classes, which would lose their methods.
        trained = {
            id(p)
            for p in self.parameters
            if type(p) is nn.Parameter or isinstance(p, DeferredParameter)
        }
        trained -= {*map(id, self.reducer.table.sparse_parameters)}
        runs = []
        for run, kind in self._deferred:
            trained_run = [p for p in run if id(p) in trained]
            if trained_run and (can_defer or kind is not DeferredBucket):
                runs.append((trained_run, kind))
        for parameter in chain(*(trained_run for trained_run, _ in runs)):
            if not isinstance(parameter, DeferredParameter):
                parameter.__class__ = DeferredParameter
        if runs or self.reducer.runs:
            self.reducer.defer(runs)

    def look(self) -> None:
        """Look for parameters that the program has put in place, or whose data has other forms.

        The end of a backward names them, but no hook would begin one that reaches no other ones.
        Shown by test_what_is_put_in_place_and_trained_by_hand_is_named. What accumulates gradients
        on a GPU is kept, and is made anew for data of another form: autograd has dropped it then,
        and would make one on the stream of each forward.
        """
        self.watch.is_to_look = False
        if put_in_place := self.put_in_place():
            self._hooks.attach_unknown(put_in_place.values())
        if self.num_backwards and torch.accelerator.current_accelerator() is None:
            return  # nowhere to move to: a look at all forms takes longer than the rest of this
        if self._tracked.have_other_forms():
            self._hooks.renew_nodes(self.parameters)
            self.is_stale |= not self.num_backwards  # moved by hand before the first backward

    def take_move(self) -> None:
        """Continue, from the next backward on, where the module's parameters have been moved to.

        Some devices have other parameters then, with no hooks of torch's to tell of them.
        """
        self.is_stale = True
        self.look()

    def pass_by(self) -> None:
        """Let a backward end that reduced none of its gradients, but others of its group."""
        if self.watch.is_to_look:
            self.look()
        self.watch.backward_ended(self)

    def refuse_distributed_autograd(self) -> None:
        """Let backwards of ``torch.distributed.autograd`` raise, as they don't call the hooks."""
        self._hooks.refuse_distributed(self.parameters)

    def set_buffer_policies(self, policies: BroadcastBuffers) -> None:
        """Exchange buffers by other policies from the next backward on."""
        self._options = self._options._replace(broadcast_buffers=policies)
        if (module := self.module) is not None:
            self._find_buffers(module)

    def _find_buffers(self, module: nn.Module) -> None:
        policies, ignored = self._options.broadcast_buffers, self._options.ignored
        self.buffers.find(module, policies, leave_out=self._inner, ignored=ignored)

    def detach(self) -> None:
        """Remove all hooks from the parameters, whose gradients are not reduced any more."""
        self.reducer.sum_unsummed()
        self._hooks.release()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that its parameters have."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def call_hooks_of_others(self) -> None:
        """Call the program's hooks of parameters whose gradients have been reduced."""
        # In one order on all ranks.
        reducer = self.reducer
        self._hooks.call_others(compress(reducer.table.parameters, reducer.last.used_by_any))

    def stop_syncing(self) -> None:
        """Let backwards accumulate gradients on each rank. Every rank must call it.

        They add to gradients of the last backward, which ranks therefore gather now: a backward
        may be of one rank alone. Shown by test_models_may_come_in_any_order_in_no_sync.
        """
        if self.is_syncing:
            self.reducer.sum_unsummed()
        self.is_syncing = False

    def keep_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient that is ready, and is not to be reduced in this backward."""
        self.reducer.mark_accumulated(parameter)
        autograd.hooks_of(parameter).call_others(parameter)
        if self.when_kept is not None:
            self.when_kept(parameter)

    def mark_ready(self, parameter: torch.Tensor) -> None:
        """Give a gradient to the reducer, behind those that are queued."""
        self._hooks.queue.parameters.append(parameter)
        self.pass_on_queued()

    def pass_on_queued(self) -> None:
        """Give the queued gradients to the reducer, several at a time."""
        queue, reducer = self._hooks.queue, self.reducer
        if queue.parameters:
            if self._hooks.may_have_queued_nested():
                reducer.stop_early_copies()
            reducer.mark_ready(queue.parameters)
            queue.parameters.clear()
            queue.threshold = 1 if self._hooks.queue_themselves else reducer.next_few()

    def is_any_reached(self) -> bool:
        """Whether the backward that is running will reduce some of its gradients."""
        return self.is_syncing and autograd.is_any_reached(self.parameters)

    def reached(self) -> list[int]:
        """The ``id()`` of each parameter to whose gradient the running backward will add."""
        hooked = [*self.parameters, *self._tracked.frozen] if self.is_syncing else []
        return [*map(id, autograd.reached(hooked))]

    def has_changed(self) -> bool:
        """Whether the module may have got other parameters, or others of them may be trained."""
        return self.is_stale or self._tracked.have_changed()

    def put_in_place(self) -> dict[str, nn.Parameter]:
        """Return, by name, trained parameters that the reducer doesn't know yet.

        The program has put them in the places of others since the last refresh, and torch may not
        have told of it.
        """
        module = self.module
        if module is None or self._tracked.are_in_place():
            return {}
        named = self._named_in(module)
        return {n: p for n, p in named if p.requires_grad and id(p) not in self.reducer.table.ids}

    def has_to_tell(self) -> bool:
        """Whether the other ranks have to know of changes that torch hasn't told of.

        Otherwise a rank would wait for ranks that know of none.
        """
        if self.renormed.is_always_told:  # all agree in each backward
            return False
        if self.renormed.noted or self.buffers.has_changed():
            return True
        return not self.is_stale and bool(self.put_in_place())

    def has_to_agree(self) -> bool:
        """Whether all ranks call :meth:`agree`, since all know that one of them has a change."""
        return self.reducer.last.told is WhoTold.ALL or self.renormed.is_always_told

    def refuse_changes_of_one_rank(self) -> None:
        """Raise for changes on a device of which this rank has told, and not all others.

        These learn of it in one of the next backwards, at the end of which all ranks agree.

        Raises:
            ModelMismatch: If this rank has changed anything.
        """
        if self.reducer.last.told is not WhoTold.THIS_RANK:
            return
        changed = [f"the parameter {name!r}, put in its place" for name in self.put_in_place()]
        changed += [f"the buffer {each}" for each in self.buffers.changed()]
        if changed:
            raise ModelMismatch(
                f"Rank {self.process_group.rank()} has changed {', '.join(changed)}, and in this "
                "backward not all other ranks have changed theirs. Change the model in the same "
                "way, at the same time, on every rank; a buffer that each rank makes for its own "
                "samples is left to the ranks by broadcast_buffers={name: 'local'}. Go on from "
                "before this step: others may have taken it."
            )

    def agree(self) -> None:
        """Agree with the other ranks on buffers, rows and parameters. Every rank must call it.

        Raises:
            ModelMismatch: If the ranks' modules have changed in different ways.
            ParameterChanged: On every rank, as :meth:`take_put_in_place`.
            CollectiveFailed: On every rank, if an earlier backward has failed on a GPU.
        """
        failed = self.reducer.table.heard.failed
        here = [self.buffers.has_changed(), bool(self.put_in_place()), failed is not None]
        here += self.renormed.are_noted()
        has_changed, are_put, has_failed, *are_noted = any_rank(self.process_group, here)
        if has_changed:
            self.buffers.agree()
        self.renormed.exchange(self.process_group, are_noted)
        if are_put:
            self.take_put_in_place()
        if has_failed:
            self.reducer.table.heard.failed = None
            raise failed_before(failed, self.process_group)

    def exchange_renormed(self) -> None:
        """Have all ranks take over rows that lookups have scaled. Every rank must call it."""
        if here := self.renormed.are_noted():
            self.renormed.exchange(self.process_group, any_rank(self.process_group, here))

    def take_put_in_place(self) -> None:
        """Continue with parameters that were put in place. Every rank must call it.

        A backward of an earlier forward has added nothing to these.

        Raises:
            ModelMismatch: If the ranks' modules have changed in different ways.
            ParameterChanged: On every rank, if any has a gradient there, which was not reduced.
        """
        put = self.put_in_place()
        is_used = [parameter.grad is not None for parameter in put.values()]
        self.refresh(in_backward=False, is_agreed=True)  # all ranks have the same names then
        if self.number:
            is_used = any_rank(self.process_group, is_used)
        for name in compress(put, is_used):
            raise ParameterChanged(
                f"{name!r} was put in its place without telling torch (say, in "
                "module._parameters, as moving a model to another device does), or after the last "
                "forward of a module, so its gradient was not reduced. Repeat the step: it is "
                "known from now on."
            )

    def refresh(
        self,
        *,
        in_backward: bool,
        is_agreed: bool = False,
        late_ranks: Callable[[int], list[int]] | None = None,
    ) -> None:
        """Continue with the parameters that the module has now; new ones get rank 0's values.

        Every rank must call it, except for a copied model that has not been trained yet. If it
        ``is_agreed``, some rank has others. If there are ``late_ranks``, the end of the next
        backward names the parameters that are new.

        Raises:
            ModelMismatch: If the ranks' modules have changed in different ways.
            CollectiveTimeout: If there are late ranks, and no new parameters.
        """
        self.is_stale, self.watch.refreshing = False, Forwards.NONE
        module = self.module
        if module is None:
            return
        named = self._named_in(module)
        self._find_buffers(module)
        if not is_agreed and self._tracked.are_same(named):
            self._tracked.look_at_places(module, self._inner)
            return  # if there are other buffers, the ranks agree on them after the backward
        if not self.number:
            self.buffers.accept()
            self._take(module, self.reducer)
            return
        trained = {id(p) for _, p in named if p.requires_grad}
        added = {name: p.detach() for name, p in self._tracked.new_among(named).items()}
        left_out = self._options.left_alone(module)
        try:
            if late := late_ranks(self.number) if late_ranks is not None else []:
                if self.put_in_place():
                    return
                who = f"Rank {', '.join(map(str, late))}"
                raise CollectiveTimeout(f"{who} did not come to compare models in time.", late)
            check_same_model(module, self.process_group, left_out=left_out, new=added)
        except ModelMismatch as error:
            error.add_note("They were the same when they were made parallel, but changed since.")
            raise
        except CollectiveFailed as error:
            self.is_stale = True
            table = self.reducer.table
            new = [name for name, p in named if p.requires_grad and id(p) not in table.ids]
            gone = [name for name, p in table.named if id(p) not in trained]
            error.add_note(
                "This rank wanted to compare its model with the others', as it has changed since "
                f"it was made parallel: to be trained by now are {new}, and no longer {gone}. "
                "Change the model in the same way, at the same time, on every rank."
            )
            raise
        more = self.buffers.accept()
        before = [p.clone() for p in added.values()] if in_backward else []
        broadcast_tensors(self.process_group, [*more, *added.values()])
        self._reduce_removed(trained)
        self._take(module, self.reducer)
        if before:
            self._check_same_before(added, before)

    def _check_same_before(
        self, added: dict[str, torch.Tensor], before: Sequence[torch.Tensor]
    ) -> None:
        """Raise, on every rank, if the last forward had other values of ``added`` than rank 0's.

        Compiled code doesn't call the hook before a forward, which would have broadcast them.
        """
        is_other = [not torch.equal(*both) for both in zip(added.values(), before, strict=True)]
        for name, differs in zip(added, any_rank(self.process_group, is_other), strict=True):
            if differs:
                raise ParameterChanged(
                    f"{name!r} was put in its place without telling torch, or since compiled code "
                    "was made of the forward, which therefore didn't wait for rank 0's values, and "
                    "had other ones on some rank. Repeat the step: all ranks have the same now."
                )

    def _reduce_removed(self, trained: Collection[int]) -> None:
        """Reduce accumulated gradients of parameters that are no longer ``trained``, by id()."""
        going = [(name, p) for name, p in self.reducer.table.named if id(p) not in trained]
        is_unreduced = [self.reducer.table.is_unreduced(parameter) for _, parameter in going]
        named = going and [*compress(going, any_rank(self.process_group, is_unreduced))]
        if named:
            last = Reducer(named, self.process_group, cap_bytes=self._options.cap_bytes)
            last.take_over(self.reducer)
            last.begin()
            last.finish()

    def begin_backward(
        self, launch_order: Sequence[Reducer], task: int | None = None, *, sees_graph: bool = False
    ) -> None:
        """Begin a backward that reduces gradients, together with the reducers of ``launch_order``.

        With ``task``, one thread of this task of autograd computes all gradients, which may be
        queued then: that takes no lock. ``sees_graph`` is whether autograd can tell which
        gradients the backward will compute.
        """
        self.num_backwards += 1
        autograd.take_over_optimizers(self.parameters)
        reducer, may_copy = self.reducer, not (self.sees_nested_tasks or torch.is_grad_enabled())
        reducer.begin(launch_order, copies_early=may_copy)
        if sees_graph and not self.sees_nested_tasks and reducer.last.unused:
            unused = reducer.unused_parameters
            ids = {*map(id, autograd.reached(unused))}
            reducer.mark_unused(p for p in unused if id(p) not in ids)
        came_in_order = reducer.is_rearranged and reducer.last.order == reducer.table.order
        ends = reducer.chunk_ends if may_copy and sees_graph and came_in_order else None
        self._hooks.open_queue(task, ends)

    def take_means(self) -> None:
        """Take the gradients that the parameters have as the means over all ranks.

        Another way than its own has reduced them. Every rank must call it.
        """
        self.num_backwards += 1
        self.reducer.table.note_reduced()

    def end_backward(self) -> None:
        """Queue no gradients any more: the backward is over."""
        self._hooks.close_queue()
        self.watch.is_to_look = True
        self.watch.backward_ended(self)

    def fail_backward(self) -> None:
        """Clean up after a backward that has failed."""
        queue = self._hooks.queue
        self._hooks.close_queue()
        while queue.parameters:
            self.reducer.mark_accumulated(queue.parameters.pop())
        self.reducer.fail()

    def tensors_in_step(self) -> list[torch.Tensor]:
        """Return what is kept the same on all ranks: parameters, frozen ones too, and buffers."""
        module = self.module
        named = self._named_in(module) if module is not None else []
        return [*(parameter for _, parameter in named), *self.buffers.named().values()]
