"""The engine: hooks on a module's parameters that keep its replicas alike.

The engine never touches the module's class, methods or attributes. It hangs a hook on each
parameter, which fires whichever method computed the loss. So ``forward`` need not be wrapped, and
``copy.deepcopy(model)`` gives a plain model.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import Announcement, any_rank, broadcast_tensors, uncompiled
from lockstep.errors import CollectiveFailed, ModelMismatch, ParameterChanged
from lockstep.grad import MIB, Reducer, gradient_dtype
from lockstep.nn.buffers import BroadcastBuffers, Buffers, policy_of
from lockstep.nn.gradient_hooks import GradientHooks, Hook, hooks_of, take_over_optimizers
from lockstep.nn.reached import is_any_reached, is_reached
from lockstep.nn.verify import check_same_model
from lockstep.torch_private import _BatchNorm, _current_graph_task_id

_dtype_of = operator.attrgetter("dtype")


class _BackwardSync(Protocol):
    """The methods of :class:`lockstep.nn.backward.BackwardSync` that are called on engines' own."""

    def add(self, engine: Engine, *, is_copy: bool) -> int: ...
    def remove(self, engine: Engine) -> None: ...
    def gradient_ready(self, engine: Engine, parameter: torch.Tensor) -> None: ...
    def is_reducing(self, engine: Engine) -> bool: ...
    def is_running(self) -> bool: ...
    def take_part(self, engine: Engine) -> None: ...
    def finish_failed(self) -> None: ...
    def follow(self, engines: Sequence[Engine], announcement: Announcement) -> None: ...


class Options(NamedTuple):
    """How the replicas of a module are kept alike; the same on every rank.

    Attributes:
        bucket_cap_mb: The size from which a bucket is full, in MiB.
        broadcast_buffers: Whether buffers follow rank 0's, or a policy for each pattern of names.
        init_sync: Whether to check the model and start from rank 0's values.
        ignored: Names of parameters and buffers to leave alone.
        skip_unused: Whether buckets of which no rank uses anything are not sent.
        init_buffers: Whether buffers start from rank 0's values even if they are "local".
    """

    bucket_cap_mb: float
    broadcast_buffers: BroadcastBuffers
    init_sync: bool = True
    ignored: Collection[str] = ()
    skip_unused: bool = False
    init_buffers: bool = False

    def left_alone(self, module: nn.Module) -> set[str]:
        """Return the names of parameters and buffers that may differ from the start."""
        local = {
            name
            for name, _ in module.named_buffers()
            if policy_of(name, self.broadcast_buffers) == "local"
        }
        return {*self.ignored, *(() if self.init_buffers else local)}


class Engine:
    """Reduces the gradients of one module, and keeps its buffers alike on all ranks.

    Invariants: an engine holds parameters, never the module, which may hold the engine; and
    hooks hold the engine weakly, since Python's garbage collector doesn't see through a
    parameter's hooks.

    Attributes:
        process_group, backward_sync: As given.
        is_syncing: Whether backwards reduce gradients; without, they add up.
        is_stale: Whether the module may have other parameters by now. Then :meth:`refresh` is
            called before the next forward or backward.
        num_backwards: The number of backwards in which it has reduced gradients.
        num_backwards_stepped: ``num_backwards`` at the last step of an optimizer of its parameters.
        number: Its number among its group's engines, the same on every rank; 0 for a copy that has
            not been trained yet.
        parts: The module and all modules in it.
        parameters, devices: The parameters whose gradients it reduces, and their devices.
        sees_nested_tasks: Whether there have been backwards inside of backwards.
        sums_in_backward: Whether its backwards have other collectives of the same group.
        reducer: Reduces its gradients.
        buffers: Exchanges its buffers.

    Args:
        module: The module, the same on every rank.
        group: The process group of its replicas.
        options: How they are kept alike.
        inner: Modules in it that have engines of their own.
        backward_sync: Begins and ends backwards, for all engines of the group.
        is_copy: Whether other ranks may not have made one.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        options: Options,
        inner: Collection[nn.Module] = (),
        *,
        backward_sync: _BackwardSync,
        is_copy: bool = False,
    ) -> None:
        self.process_group = group
        self.backward_sync = backward_sync
        self.is_syncing = True
        self.is_stale = False
        self.num_backwards = 0
        self.num_backwards_stepped = 0
        self.buffers = Buffers(
            module, group, options.broadcast_buffers, leave_out=inner, ignored=options.ignored
        )
        self.sees_nested_tasks = False
        self._module = weakref.ref(module)
        self.parts: weakref.WeakSet[nn.Module] = weakref.WeakSet(module.modules())
        self._inner = weakref.WeakSet(inner)
        self._options = options
        self._cap_bytes = int(options.bucket_cap_mb * MIB)
        self._pending = _Pending()
        self._hooks: list[tuple[GradientHooks, Hook]] = []
        self._hooks_of_others: list[dict[int, Hook]] = []
        self._take(module)
        self.number = backward_sync.add(self, is_copy=is_copy)

    @property
    def module(self) -> nn.Module | None:
        """The module, if it still exists."""
        return self._module()

    def has(self, ids: Collection[int]) -> bool:
        """Return whether it reduces one of the parameters of these ``id()``."""
        return not self._trained.keys().isdisjoint(ids)

    def _take(self, module: nn.Module, previous: Reducer | None = None) -> None:
        """Reduce the parameters that ``module`` has now, instead of those of ``previous``."""
        own, sparse = self._own_parameters(module), with_sparse_gradients(module)
        named = [(name, p) for name, p in own if p.requires_grad]
        self._names = {id(parameter): name for name, parameter in own}
        self.parameters = [parameter for _, parameter in named]
        self._trained = {id(parameter): parameter for parameter in self.parameters}
        self._dtypes = [*map(_dtype_of, self.parameters)]
        self._description = _describe(own, module)
        self._frozen = [
            p for _, p in own if not p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]
        reducer = Reducer(
            named,
            self.process_group,
            cap_bytes=self._cap_bytes,
            skip_unused=self._options.skip_unused,
            sparse=[i for i, p in enumerate(self.parameters) if id(p) in sparse],
        )
        if previous is not None:
            reducer.take_over(previous)
        self.reducer: Reducer = reducer
        self.sums_in_backward = _sums_in_backward(module, self.process_group)
        self.devices = {parameter.device for parameter in self.parameters}
        self._hang_hooks()

    def _own_parameters(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        others = {id(p) for part in self._inner for p in part.parameters()}
        named = module.named_parameters()
        return [(n, p) for n, p in named if id(p) not in others and n not in self._options.ignored]

    def _hang_hooks(self) -> None:
        self.detach()
        me = weakref.ref(self)
        hook = _gradient_hook(me, self._pending)
        # A parameter that is unfrozen isn't the reducer's yet, so its gradient must not be pending.
        unfreeze_hook = _gradient_hook(me, _Pending())
        self._hooks = [(hooks_of(parameter), hook) for parameter in self.parameters]
        self._hooks += [(hooks_of(parameter), unfreeze_hook) for parameter in self._frozen]
        for hooks, own in self._hooks:
            hooks.hold_back(own)
        self._hooks_of_others = [hooks.others for hooks, _ in self._hooks]

    def detach(self) -> None:
        """Take all hooks off the parameters: gradients stay this rank's own."""
        for hooks, own in self._hooks:
            hooks.release(own)
        self._hooks, self._hooks_of_others = [], []

    def call_hooks_of_others(self) -> None:
        """Call the hooks of others on parameters whose gradients have been reduced."""
        if any(self._hooks_of_others):
            with torch.no_grad():  # as in hooks
                for parameter in self.reducer.reduced:
                    hooks_of(parameter).call_others(parameter)

    def is_in_backward(self) -> bool:
        """Whether a backward runs that will reduce its gradients, and hasn't."""
        return self.backward_sync.is_reducing(self) and _current_graph_task_id() != -1

    def keep_gradient(self, parameter: torch.Tensor) -> None:
        """A gradient has come that is not to be reduced yet."""
        # One that was unfrozen isn't the reducer's yet, which will find its gradient.
        if id(parameter) in self._trained:
            self.reducer.mark_accumulated(parameter)
        hooks_of(parameter).call_others(parameter)

    def mark_ready(self, parameter: torch.Tensor) -> None:
        """A gradient has come in the backward that is reduced."""
        self._pending.parameters.append(parameter)
        self.flush_pending()

    def flush_pending(self) -> None:
        """Tell the reducer of pending gradients."""
        pending = self._pending
        if pending.parameters:
            pending.threshold = self.reducer.mark_ready(pending.parameters)
            pending.parameters.clear()

    def is_any_reached(self) -> bool:
        """Whether the backward that is running will reduce some of its gradients."""
        return self.is_syncing and is_any_reached(self.parameters)

    def reached(self) -> list[int]:
        """The ``id()`` of each parameter whose gradient comes in the backward that is running."""
        hooked = [*self.parameters, *self._frozen] if self.is_syncing else []
        return [id(parameter) for parameter in hooked if is_reached(parameter)]

    def refresh_if_changed(self) -> None:
        """Call :meth:`refresh` if the module may have changed. All ranks must call it."""
        if (
            self.is_stale
            or any(parameter.requires_grad for parameter in self._frozen)
            or [*map(_dtype_of, self.parameters)] != self._dtypes
        ):
            self.refresh()

    def refresh(self) -> None:
        """Continue with the parameters that the module has now; new ones get rank 0's values.

        Every rank must call it, unless it is a copy that hasn't been trained.

        Raises:
            ModelMismatch: If the ranks' modules have changed in different ways.
        """
        self.is_stale = False
        self.backward_sync.finish_failed()
        module = self.module
        if module is None:
            return
        own = self._own_parameters(module)
        if _describe(own, module) == self._description:
            return
        if not self.number:
            self.buffers.look(module, self._inner)
            self._take(module, self.reducer)
            return
        trained = {id(p): name for name, p in own if p.requires_grad}
        try:
            check_same_model(module, self.process_group, left_out=self._options.left_alone(module))
        except ModelMismatch as error:
            error.add_note("They were the same when they were made parallel, but changed since.")
            raise
        except CollectiveFailed as error:
            self.is_stale = True
            new = [name for key, name in trained.items() if key not in self._trained]
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
        added = {name: p.detach() for name, p in own if id(p) not in self._names}
        before = [p.clone() for p in added.values()] if self.backward_sync.is_running() else []
        broadcast_tensors(self.process_group, [*more, *added.values()])
        self._reduce_removed(trained)
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
        for name, differs in zip(added, any_rank(self.process_group, is_other), strict=True):
            if differs:
                raise ParameterChanged(
                    f"{name!r} was put in its place since compiled code was made of the forward, "
                    "which therefore didn't wait for rank 0's values, and had other ones on some "
                    "rank. Repeat the step: all ranks have the same ones now."
                )

    def _reduce_removed(self, trained: Collection[int]) -> None:
        """Reduce accumulated gradients of parameters that are not trained any more."""
        going = [
            (self._names[key], parameter)
            for key, parameter in self._trained.items()
            if key not in trained
        ]
        if not going:
            return
        is_unreduced = [self.reducer.is_unreduced(parameter) for _, parameter in going]
        named = [*compress(going, any_rank(self.process_group, is_unreduced))]
        if named:
            last = Reducer(named, self.process_group, cap_bytes=self._cap_bytes)
            last.take_over(self.reducer)
            last.begin()
            last.finish()

    def begin_backward(
        self, launch_order: Sequence[Reducer], task: int | None = None, *, sees_graph: bool = False
    ) -> None:
        """A backward begins whose gradients are to be reduced.

        Args:
            launch_order: The reducers in it, in the order in which they launch.
            task: Autograd's task if all gradients come from one of its threads: then they may be
                pending without a lock.
            sees_graph: Whether autograd can tell which gradients it will compute.
        """
        self.num_backwards += 1
        take_over_optimizers(self.parameters)
        copies_early = not (self.sees_nested_tasks or torch.is_grad_enabled())
        self.reducer.begin(launch_order, copies_early=copies_early)
        self._pending.task, self._pending.threshold = task, 1
        if sees_graph and not self.sees_nested_tasks:
            unused = self.reducer.unused_parameters
            self.reducer.mark_unused(p for p in unused if not is_reached(p))

    def finish_backward(self) -> CollectiveFailed | None:
        """Finish the reduction; return the error to raise if it failed on another rank.

        Raises:
            ParameterChanged: If parameters were unused because the module has others now.
        """
        before = [*map(id, self.reducer.unused_parameters)]
        failed_elsewhere = self.reducer.finish()
        module = self.module
        if module is None or before == [*map(id, self.reducer.unused_parameters)]:
            return failed_elsewhere
        for name, parameter in self._own_parameters(module):
            if parameter.requires_grad and id(parameter) not in self._trained:
                self.is_stale = True
                raise ParameterChanged(
                    f"{name!r} was put in its place without telling torch (say, in "
                    "module._parameters, as moving a model to another device does), so its "
                    "gradient was not reduced. Repeat the step: it is known from now on."
                )
        return failed_elsewhere

    def end_backward(self) -> None:
        """The backward is over, or has failed."""
        pending = self._pending
        pending.task = None
        while pending.parameters:
            self.reducer.mark_accumulated(pending.parameters.pop())
        self.reducer.give_up()

    def drop_reduced_gradients(self) -> None:
        """Set the gradients of an earlier step to None, unless some are yet to be reduced."""
        if not self.reducer.has_unreduced:
            for parameter in self.parameters:
                parameter.grad = None

    def everything_that_follows(self) -> list[torch.Tensor]:
        """Return its parameters, and the buffers that are kept alike."""
        module = self.module
        own = self._own_parameters(module) if module is not None else []
        return [*(parameter for _, parameter in own), *self.buffers.named().values()]


def _describe(own: Sequence[tuple[str, nn.Parameter]], module: nn.Module) -> tuple[object, ...]:
    """Identity, requires_grad and dtype of own parameters, and names of buffers."""
    parameters = [(id(p), p.requires_grad, gradient_dtype(p)) for _, p in own]
    return parameters, [name for name, _ in module.named_buffers()]


def with_sparse_gradients(module: nn.Module) -> set[int]:
    """Return the id() of each parameter of ``module`` whose gradients are sparse."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return {id(table.weight) for table in tables if table.sparse}


def _sums_in_backward(module: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether a SyncBatchNorm in ``module``, ours or torch's, is over ``group`` itself."""
    norms = [vars(part) for part in module.modules() if isinstance(part, _BatchNorm)]
    groups = [norm["process_group"] for norm in norms if "process_group" in norm]
    return any((dist.group.WORLD if own is None else own) is group for own in groups)


class _Pending:
    """Gradients that have come, and that the reducer doesn't know of yet.

    Telling it of many at once is faster: its memory isn't in the cores' caches in between. The
    first gradient of a backward, which begins it, is never pending.

    Attributes:
        task: Autograd's task of the backward whose gradients may be pending; None for no backward.
        parameters: Their parameters; empty between backwards, as the parameters' hooks hold this.
        threshold: The number of pending gradients at which the reducer is told.
    """

    def __init__(self) -> None:
        self.task: int | None = None
        self.parameters: list[torch.Tensor] = []
        self.threshold = 1


def _gradient_hook(engine: weakref.ref[Engine], pending: _Pending) -> Hook:
    # As local names, since every gradient of every step passes here.
    current_task, parameters = _current_graph_task_id, pending.parameters

    @uncompiled
    def gradient_ready(parameter: torch.Tensor) -> None:
        if pending.task == current_task():
            parameters.append(parameter)
            if len(parameters) < pending.threshold:
                return
            alive = engine()
            if alive is not None:
                alive.flush_pending()
            return
        alive = engine()
        if alive is not None:
            alive.backward_sync.gradient_ready(alive, parameter)
        else:
            hooks = hooks_of(parameter)
            hooks.release()
            hooks.call_others(parameter)

    return gradient_ready
