"""The engine: hooks on a module's parameters that keep its replicas in step.

The engine never touches the module's class, methods or attributes. It registers a hook on each
parameter, which autograd calls whichever method computed the loss. So ``forward`` need not be
wrapped, and ``copy.deepcopy(model)`` returns a plain model.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm import any_rank, broadcast_tensors, can_share, uncompiled
from lockstep.errors import CollectiveFailed, ModelMismatch, ParameterChanged
from lockstep.grad import (
    MIB,
    DeferredBucket,
    DeferredParameter,
    Reducer,
    UnsummedBucket,
    gradient_dtype,
)
from lockstep.nn import autograd
from lockstep.nn.buffers import BroadcastBuffers, Buffers, policy_of
from lockstep.nn.verify import check_same_model
from lockstep.torch_private import _BatchNorm, _current_graph_task_id

_dtype_of = operator.attrgetter("dtype")
_modules_of = operator.attrgetter("_modules")


class Options(NamedTuple):
    """How the replicas of a module are kept in step; the same on every rank."""

    # The size from which a bucket is full, in MiB, or those of the first buckets.
    bucket_cap_mb: float | tuple[float, ...]
    broadcast_buffers: BroadcastBuffers
    init_sync: bool = True  # whether to compare the models and start from rank 0's values
    ignored: Collection[str] = ()  # names of parameters and buffers that each rank has for itself
    skip_unused: bool = False  # whether buckets are not sent if no rank uses their parameters
    init_buffers: bool = False  # whether "local" buffers start from rank 0's values too

    def left_alone(self, module: nn.Module) -> set[str]:
        """Return the names of parameters and buffers that don't start from rank 0's values."""
        names = [] if self.init_buffers else [name for name, _ in module.named_buffers()]
        local = {name for name in names if policy_of(name, self.broadcast_buffers) == "local"}
        return {*self.ignored, *local}


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
        # The number of backwards in which it has reduced gradients: by now, by the last step of any
        # optimizer of its parameters, and by the last step of each of these optimizers.
        self.num_backwards = self.num_backwards_stepped = 0
        self.stepped_by: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # Whether backwards reduce gradients, or else only accumulate them.
        self.is_syncing = True
        # Whether the module may have got other parameters. Then the engine is refreshed before the
        # next forward or backward.
        self.is_stale = False
        # Whether nested backwards, as of reentrant checkpoints, have computed its gradients.
        self.sees_nested_tasks = False
        self.buffers = Buffers(group)
        # The module and all modules in it.
        self.parts: weakref.WeakSet[nn.Module] = weakref.WeakSet(module.modules())
        self._module = weakref.ref(module)
        self._inner = weakref.WeakSet(inner)
        self._options, cap = options, options.bucket_cap_mb
        self._cap_bytes = (
            [int(mb * MIB) for mb in cap] if isinstance(cap, tuple) else int(cap * MIB)
        )
        self._queue = _ReadyQueue()
        self._hooks: list[tuple[autograd.GradientHooks, autograd.Hook]] = []
        # Runs of parameters with unsummed gradients, in the order of sharded optimizers' memories.
        self._deferred: list[tuple[list[nn.Parameter], type[UnsummedBucket]]] = []
        self._has_runs = False
        self._find_buffers(module)
        self.buffers.accept()
        self._take(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, if it still exists."""
        return self._module()

    def _take(self, module: nn.Module, previous: Reducer | None = None) -> None:
        """Reduce the parameters that ``module`` has now, instead of those of ``previous``."""
        own = self._own_parameters(module)
        self._description = _describe(own)
        trained = [(name, parameter) for name, parameter in own if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        self._look_at_places(module)
        self._dtypes = [*map(_dtype_of, self.parameters)]
        self._frozen = [
            p for _, p in own if not p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]
        self.devices = {parameter.device for parameter in self.parameters}
        # Whether its backwards have other collectives of the same group.
        self.sums_in_backward = _sums_in_backward(module, self.process_group)
        self.reducer: Reducer = Reducer(
            trained,
            self.process_group,
            cap_bytes=self._cap_bytes,
            skip_unused=self._options.skip_unused,
            sparse=sparse_indices(module, self.parameters),
        )
        if previous is not None:
            previous.sum_unsummed()
            self.reducer.take_over(previous)
        self._defer()
        self.detach()
        # The reducer doesn't know a parameter that is unfrozen later, so its gradient must not be
        # queued: its hook has a _ReadyQueue of its own, which no backward fills.
        for parameters, queue in (self.parameters, self._queue), (self._frozen, _ReadyQueue()):
            hook = _gradient_hook(weakref.ref(self), queue)
            self._hooks += [(autograd.hooks_of(parameter), hook) for parameter in parameters]
        for hooks, own_hook in self._hooks:
            hooks.hold_back(own_hook)
        self._hooks_of_others = [hooks.others for hooks, _ in self._hooks]
        # All on one stream: shown by test_gradients_of_branches_on_two_streams.
        self._nodes = autograd.accumulators([p for p in self.parameters if p.device.type != "cpu"])
        if autograd.may_be_distributed():
            self.refuse_distributed_autograd()

    def defer(self, run: Sequence[nn.Parameter], kind: type[UnsummedBucket]) -> None:
        """Let gradients stay unsummed of those parameters of ``run`` that this engine has.

        A run is in the order of a sharded optimizer's memory. Every rank must call it.
        """
        own = {*map(id, run)}
        before = (([p for p in other if id(p) not in own], its) for other, its in self._deferred)
        self._deferred = [*(pair for pair in before if pair[0]), ([*run], kind)]
        self._defer()

    def _defer(self) -> None:
        can_defer = all(can_share(self.process_group, device) for device in self.devices)
        # Not parameters of the program's own classes, which would lose their methods.
        trained = {
            id(p)
            for p in self.parameters
            if type(p) is nn.Parameter or isinstance(p, DeferredParameter)
        }
        trained -= {*map(id, self.reducer.table.sparse_parameters)}
        runs = []
        for run, kind in self._deferred:
            own = [p for p in run if id(p) in trained]
            if own and (can_defer or kind is not DeferredBucket):
                runs.append((own, kind))
        for parameter in chain(*(own for own, _ in runs)):
            if not isinstance(parameter, DeferredParameter):
                parameter.__class__ = DeferredParameter
        if runs or self._has_runs:
            self.reducer.defer(runs)
        self._has_runs = bool(runs)

    def refuse_distributed_autograd(self) -> None:
        """Let backwards of ``torch.distributed.autograd`` raise, as they don't call the hooks."""
        self._nodes += map(autograd.refuse_distributed, self.parameters)

    def _own_parameters(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        others = {id(p) for part in self._inner for p in part.parameters()}
        named = module.named_parameters()
        return [(n, p) for n, p in named if id(p) not in others and n not in self._options.ignored]

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
        for hooks, own in self._hooks:
            hooks.release(own)
        self._hooks, self._hooks_of_others, self._nodes = [], [], []

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that its parameters have."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def call_hooks_of_others(self) -> None:
        """Call the program's hooks of parameters whose gradients have been reduced."""
        if any(self._hooks_of_others):
            with torch.no_grad():  # as autograd calls them
                # In one order on all ranks.
                reducer = self.reducer
                for parameter in compress(reducer.table.parameters, reducer.last.used_by_any):
                    autograd.hooks_of(parameter).call_others(parameter)

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

    def mark_ready(self, parameter: torch.Tensor) -> None:
        """Handle a gradient that is ready in a backward that reduces it."""
        self._queue.parameters.append(parameter)
        self.pass_on_queued()

    def pass_on_queued(self) -> None:
        """Pass queued gradients to the reducer."""
        queue = self._queue
        if queue.parameters:
            queue.threshold = self.reducer.mark_ready(queue.parameters)
            queue.parameters.clear()

    def is_any_reached(self) -> bool:
        """Whether the backward that is running will reduce some of its gradients."""
        return self.is_syncing and autograd.is_any_reached(self.parameters)

    def reached(self) -> list[int]:
        """The ``id()`` of each parameter to whose gradient the running backward will add."""
        hooked = [*self.parameters, *self._frozen] if self.is_syncing else []
        return [*map(id, autograd.reached(hooked))]

    def has_changed(self) -> bool:
        """Whether the module may have got other parameters, or others of them may be trained."""
        return (
            self.is_stale
            or any(parameter.requires_grad for parameter in self._frozen)
            or [*map(_dtype_of, self.parameters)] != self._dtypes
        )

    def _look_at_places(self, module: nn.Module) -> None:
        """Note what is where modules have parameters and modules.

        What is put there directly, as by conversions that overwrite parameters, calls no hook.
        """
        others = {part for inner in self._inner for part in inner.modules()}
        parts = [part for part in module.modules() if part not in others]
        parts = [part for part in parts if isinstance(part._modules, dict)]  # not scripted ones
        # Modules are held weakly: a part may refer to the whole.
        self._weak_parts = [*map(weakref.ref, parts)]
        self._parameter_dicts = [part._parameters for part in parts]
        self._placed = self._in_places()

    def _in_places(self) -> list[int]:
        """Return the id() of each parameter and module, by place; nothing if a module is gone."""
        parts = [each() for each in self._weak_parts]
        if None in parts:
            return []
        dicts: list[Any] = [*self._parameter_dicts, *map(_modules_of, parts)]
        return [*map(id, chain.from_iterable(map(dict.values, dicts)))]

    def put_behind(self) -> dict[str, nn.Parameter]:
        """Return, by name, trained parameters that were put in place without telling torch."""
        module = self.module
        if module is None or self._in_places() == self._placed:
            return {}
        named = self._own_parameters(module)
        return {n: p for n, p in named if p.requires_grad and id(p) not in self.reducer.table.ids}

    def refuse_put_behind(self) -> None:
        """Raise ParameterChanged if parameters with gradients were put in place behind torch."""
        for name, parameter in self.put_behind().items():
            self.is_stale = True
            if parameter.grad is not None:
                raise ParameterChanged(
                    f"{name!r} was put in its place without telling torch (say, in "
                    "module._parameters, as moving a model to another device does), so its "
                    "gradient was not reduced. Repeat the step: it is known from now on."
                )

    def refresh(self, *, in_backward: bool) -> None:
        """Continue with the parameters that the module has now; new ones get rank 0's values.

        Every rank must call it, except for a copied model that has not been trained yet.

        Raises:
            ModelMismatch: If the ranks' modules have changed in different ways.
        """
        self.is_stale = False
        module = self.module
        if module is None:
            return
        own = self._own_parameters(module)
        self._find_buffers(module)
        if _describe(own) == self._description:
            self._look_at_places(module)
            return  # if there are other buffers, the ranks agree on them after the backward
        if not self.number:
            self.buffers.accept()
            self._take(module, self.reducer)
            return
        trained = {id(p) for _, p in own if p.requires_grad}
        try:
            check_same_model(module, self.process_group, left_out=self._options.left_alone(module))
        except ModelMismatch as error:
            error.add_note("They were the same when they were made parallel, but changed since.")
            raise
        except CollectiveFailed as error:
            self.is_stale = True
            table = self.reducer.table
            new = [name for name, p in own if p.requires_grad and id(p) not in table.ids]
            gone = [name for name, p in table.named if id(p) not in trained]
            error.add_note(
                "This rank wanted to compare its model with the others', as it has changed since "
                f"it was made parallel: to be trained by now are {new}, and no longer {gone}. "
                "Change the model in the same way, at the same time, on every rank."
            )
            raise
        more = self.buffers.accept()
        known = {key for key, *_ in self._description}
        added = {name: p.detach() for name, p in own if id(p) not in known}
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
            last = Reducer(named, self.process_group, cap_bytes=self._cap_bytes)
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
        copies_early = not (self.sees_nested_tasks or torch.is_grad_enabled())
        self.reducer.begin(launch_order, copies_early=copies_early)
        self._queue.task, self._queue.threshold = task, 1
        if sees_graph and not self.sees_nested_tasks and self.reducer.last.unused:
            unused = self.reducer.unused_parameters
            ids = {*map(id, autograd.reached(unused))}
            self.reducer.mark_unused(p for p in unused if id(p) not in ids)

    def finish_backward(self) -> CollectiveFailed | None:
        """Finish the reduction; return the error to raise if it failed on another rank.

        Raises:
            ParameterChanged: If the module has got other parameters without telling torch.
        """
        failed_elsewhere = self.reducer.finish()
        if not self.is_stale:  # else torch has told of the change
            self.refuse_put_behind()
        return failed_elsewhere

    def end_backward(self) -> None:
        """Clean up after a backward that is over or has failed."""
        queue = self._queue
        queue.task = None
        while queue.parameters:
            self.reducer.mark_accumulated(queue.parameters.pop())
        self.reducer.fail()

    def everything_that_follows(self) -> list[torch.Tensor]:
        """Return the parameters, frozen ones included, and the buffers that are exchanged."""
        module = self.module
        own = self._own_parameters(module) if module is not None else []
        return [*(parameter for _, parameter in own), *self.buffers.named().values()]


def _describe(own: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[object, ...]]:
    """What a refresh depends on: id(), requires_grad, dtype and device of parameters."""
    return [(id(p), p.requires_grad, gradient_dtype(p), p.device) for _, p in own]


def sparse_indices(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the indices of ``parameters`` of ``module`` that have sparse gradients."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(table.weight) for table in tables if table.sparse}
    return [index for index, parameter in enumerate(parameters) if id(parameter) in sparse]


def _sums_in_backward(module: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether a SyncBatchNorm in ``module``, ours or torch's, is over ``group`` itself."""
    norms = [vars(part) for part in module.modules() if isinstance(part, _BatchNorm)]
    groups = [norm["process_group"] for norm in norms if "process_group" in norm]
    return any((dist.group.WORLD if own is None else own) is group for own in groups)


@dataclass
class _ReadyQueue:
    """Gradients that are ready, but have not been passed to the reducer yet.

    Passing many at once is faster: between two calls, the reducer's memory falls out of the cores'
    caches. The first gradient of a backward, which begins it, is never queued.
    """

    # Autograd's task of the backward whose gradients may be queued.
    task: int | None = None
    # The number of queued gradients at which they are passed to the reducer.
    threshold: int = 1
    # Empty between backwards: hooks hold it, and parameters that hold themselves are never freed.
    parameters: list[torch.Tensor] = field(default_factory=list)


def _gradient_hook(engine: weakref.ref[Engine], queue: _ReadyQueue) -> autograd.Hook:
    # Local names are fast, and every gradient of every step passes here.
    current_task, parameters = _current_graph_task_id, queue.parameters

    @uncompiled
    def gradient_ready(parameter: torch.Tensor) -> None:
        if queue.task == current_task():
            parameters.append(parameter)
            if len(parameters) >= queue.threshold and (alive := engine()) is not None:
                alive.pass_on_queued()
        elif (alive := engine()) is not None:
            alive.gradient_ready(alive, parameter)
        else:
            hooks = autograd.hooks_of(parameter)
            hooks.release()
            hooks.call_others(parameter)

    return gradient_ready
