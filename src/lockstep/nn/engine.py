"""What keeps a module's replicas alike: hooks on its parameters.

The engine never touches the module's class, methods or attributes. It hangs a hook on each
parameter, and these fire whichever method made the loss. That is why any method will do, why
``copy.deepcopy(model)`` gives a plain model, and why nothing has to wrap ``forward``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lockstep.comm import TensorBroadcast
from lockstep.errors import ParameterChanged
from lockstep.grad import MIB, Phase, Reducer


class Engine:
    """Keeps the replicas of one module in step, once they are alike.

    Invariants: an engine holds parameters, never the module, which may hold the engine; and
    hooks hold the engine weakly, since Python's garbage collector doesn't see through a
    parameter's hooks.

    Attributes:
        is_syncing: Whether backwards reduce gradients; without, they add up.
        lock: Held by a hook while it works, where parameters are on several devices.

    Args:
        module: The module, the same on every rank.
        group: The process group to keep it in step with, of several ranks.
        bucket_cap_mb: How much makes a bucket full, in MiB.
        broadcast_buffers: Whether rank 0's buffers go to everyone with each reduced backward.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        bucket_cap_mb: float,
        broadcast_buffers: bool,
    ) -> None:
        self.is_syncing = True
        self.lock = threading.Lock()
        self._module = weakref.ref(module)
        self._group = group
        # Those modules that own buffers: to look through all of them costs a millisecond a step
        # for a few hundred. Their buffers may be set anew.
        self._buffer_owners = [
            weakref.ref(part) for part in module.modules() if broadcast_buffers and part._buffers
        ]
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._left_out: Sequence[int] = ()
        # Of the backward that runs: which of autograd's tasks it is, and its end.
        self._task_id = -1
        self._end: weakref.ref[_EndOfBackward] | None = None
        self._sees_nested_tasks = False
        self.reducer = Reducer(named, group, cap_bytes=int(bucket_cap_mb * MIB))
        # Autograd has a thread for each kind of device, and a collective that one of them
        # launches lets another one run. On one device hooks can do without a lock.
        on_one_device = len({parameter.device for parameter in self._parameters}) == 1
        make_hook = _gradient_hook if on_one_device else _locked_gradient_hook
        me = weakref.ref(self)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(make_hook(me, index))
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                # torch hangs hooks on parameters that require a gradient alone.
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(_thaw_hook(me, name))
                parameter.requires_grad_(False)

    def gradient_has_come(self, index: int) -> None:
        """The backward that runs has added to the gradient of parameter ``index``."""
        if not self.is_syncing:
            self.reducer.mark_accumulated(index)
            return
        if self.reducer.phase is Phase.IDLE:
            self._begin_backward()
        elif torch._C._current_graph_task_id() != self._task_id:
            # A backward inside of a backward, as reentrant checkpoints have. What will come of
            # it can't be foreseen: see _is_reached.
            self._sees_nested_tasks = True
        self.reducer.mark_ready(index)

    def _begin_backward(self) -> None:
        # Mostly the head of the model comes first, and that is in the outermost task. If all
        # parameters are inside of reentrant checkpoints, it is an inner one, whose end comes
        # sooner: then gradients are reduced in several goes, one for each checkpoint.
        self._task_id = torch._C._current_graph_task_id()
        end = _EndOfBackward(self)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        # A backward that raises drops its callbacks without calling them.
        # Shown by test_a_failed_backward_does_not_spoil_the_next.
        self._end = weakref.ref(end, self._backward_is_gone)
        self.reducer.begin()
        if not self._sees_nested_tasks:
            self.reducer.excuse(
                index for index in self._left_out if not _is_reached(self._parameters[index])
            )

    def _backward_is_gone(self, _: object) -> None:
        self.reducer.give_up()

    def end_backward(self) -> None:
        """The backward is over: wait until everything has arrived."""
        self.reducer.launch_rest()
        # Now rather than before the next forward: it travels with the last gradients, and no
        # forward waits for it, whichever method that will be. After the launch of all buckets,
        # of which some ranks may have sent more by now than others.
        on_their_way = TensorBroadcast(self._group, self._buffers())
        self.reducer.finish()
        on_their_way.finish()
        if self._left_out != self.reducer.left_out:
            self._left_out = self.reducer.left_out
            self._check_still_the_same()

    def _buffers(self) -> list[torch.Tensor]:
        owners = filter(None, (owner() for owner in self._buffer_owners))
        return [buffer for owner in owners for buffer in owner.buffers(recurse=False)]

    def _check_still_the_same(self) -> None:
        """Raise if parameters were left out because the module has others now."""
        module = self._module()
        known = {id(parameter) for parameter in self._parameters}
        for name, parameter in module.named_parameters() if module else ():
            if parameter.requires_grad and id(parameter) not in known:
                raise _changed(name, "is another parameter than")


class _EndOfBackward:
    """What autograd calls at the end of a backward; only autograd holds it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self) -> None:
        self._engine.end_backward()


def _is_reached(parameter: nn.Parameter) -> bool:
    """Whether the backward that is running will compute a gradient for ``parameter``.

    It can't see into the segments of reentrant checkpoints, and then says no too often.
    """
    # The node is not kept. While somebody holds it autograd believes the shape that it was made
    # with, and a parameter that has changed fails inside of autograd, without its name.
    return parameter.requires_grad and torch._C._will_engine_execute_node(
        get_gradient_edge(parameter).node
    )


def _gradient_hook(engine: weakref.ref[Engine], index: int) -> Callable[[torch.Tensor], None]:
    def gradient_has_come(_: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.gradient_has_come(index)

    return gradient_has_come


def _locked_gradient_hook(
    engine: weakref.ref[Engine], index: int
) -> Callable[[torch.Tensor], None]:
    def gradient_has_come(_: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            with alive.lock:
                alive.gradient_has_come(index)

    return gradient_has_come


def _thaw_hook(engine: weakref.ref[Engine], name: str) -> Callable[[torch.Tensor], None]:
    def refuse(_: torch.Tensor) -> None:
        if engine() is not None:
            raise _changed(name, "requires a gradient, but was frozen")

    return refuse


def _changed(name: str, how: str) -> ParameterChanged:
    return ParameterChanged(
        f"{name!r} {how} when the model was made parallel, so its gradient is not reduced. Build "
        "the model as it is to be trained, and freeze what comes later only afterwards; then "
        "call parallelize() or DistributedDataParallel()."
    )


@contextlib.contextmanager
def accumulating(engine: Engine | None) -> Iterator[None]:
    """Let backwards in this context add up gradients on each rank, without reducing them."""
    if engine is None:  # a rank that is alone has nothing to reduce
        yield
        return
    was_syncing, engine.is_syncing = engine.is_syncing, False
    try:
        yield
    finally:
        engine.is_syncing = was_syncing
