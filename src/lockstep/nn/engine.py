"""What makes a module's replicas start alike and stay alike: hooks on its parameters.

The engine never touches the module's class, methods or attributes. It hangs a hook on each
parameter, and these fire whichever method made the loss. That is why any method will do, why
``copy.deepcopy(model)`` gives a plain model, and why nothing has to wrap ``forward``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from lockstep.comm import TensorBroadcast, broadcast_tensors
from lockstep.errors import AlreadyParallel, ModelError, NothingToTrain
from lockstep.grad import MIB, Phase, Reducer
from lockstep.nn.agreement import check_same_model

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)

# Which modules are parallel, and through what. The module itself is left as it was, so that it
# pickles and copies as before; here its entry goes when it does.
_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


class Engine:
    """Keeps the replicas of one module in step.

    Invariants: an engine holds parameters and buffers, never the module, whose entry in
    ``_engines`` would otherwise keep itself alive; and hooks hold the engine weakly, since
    Python's garbage collector doesn't see through a parameter's hooks.

    Args:
        module: The module, the same on every rank.
        group: The process group to keep it in step with; None if this rank is alone.
        bucket_cap_mb: How much makes a bucket full, in MiB.
        broadcast_buffers: Whether rank 0's buffers go to everyone with each reduced backward.
        init_sync: Whether to check the model and start from rank 0's values.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        bucket_cap_mb: float,
        broadcast_buffers: bool,
        init_sync: bool,
    ) -> None:
        trained = _trained_parameters(module)
        self.is_syncing = True
        self.lock = threading.Lock()
        self.process_group = group if group is not None and group.size() > 1 else None
        if self.process_group is None:
            return
        if init_sync:
            check_same_model(module, self.process_group)
            broadcast_tensors(self.process_group, [*module.parameters(), *module.buffers()])
        self._buffers = list(module.buffers()) if broadcast_buffers else []
        self._buffers_on_their_way: TensorBroadcast | None = None
        self.reducer = Reducer(trained, self.process_group, cap_bytes=int(bucket_cap_mb * MIB))
        self._parameters = [parameter for _, parameter in trained]
        for index, (_, parameter) in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(_gradient_hook(weakref.ref(self), index))

    def begin_backward(self) -> None:
        """The first gradient of a backward has come: get ready for the others."""
        assert self.process_group is not None
        # Reentrant checkpoints run a backward inside of a backward. This is the end of the
        # innermost one around this gradient: mostly the head of the model comes first, and that
        # is in the outermost. Should it be an inner one, gradients are reduced in several goes.
        end = _EndOfBackward(self)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        # A backward that raises drops its callbacks without calling them.
        # Shown by test_a_failed_backward_does_not_spoil_the_next.
        self._end = weakref.ref(end, self._backward_is_gone)
        self.reducer.begin()
        if self._buffers:
            # Now rather than before the next forward: it travels while backward computes, and
            # no forward waits for it, whichever method that will be.
            self._buffers_on_their_way = TensorBroadcast(self.process_group, self._buffers)
        self.reducer.excuse(
            index for index in self.reducer.left_out if not _is_reached(self._parameters[index])
        )

    def _backward_is_gone(self, _: object) -> None:
        self.reducer.give_up()

    def end_backward(self) -> None:
        """The backward is over: wait until everything has arrived."""
        self.reducer.finish()
        if self._buffers_on_their_way is not None:
            self._buffers_on_their_way.finish()
            self._buffers_on_their_way = None


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


def _gradient_hook(engine_ref: weakref.ref[Engine], index: int) -> Callable[[torch.Tensor], None]:
    def gradient_has_come(_: torch.Tensor) -> None:
        engine = engine_ref()
        if engine is None:
            return
        reducer = engine.reducer
        # Where parameters are on the CPU and on a GPU, autograd has a thread for each, and a
        # collective that one of them launches lets the other one run.
        with engine.lock:
            if not engine.is_syncing:
                reducer.mark_accumulated(index)
                return
            if reducer.phase is Phase.IDLE:
                engine.begin_backward()
            reducer.mark_ready(index)

    return gradient_has_come


def _trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = list(module.named_parameters())
    lazy = [name for name, parameter in named if is_lazy(parameter)]
    if lazy:
        raise ModelError(
            f"{lazy[0]!r} has no shape yet. Run one forward on a sample before making the model "
            "parallel."
        )
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise NothingToTrain(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is "
            "nothing to keep in step. Use it as it is, or unfreeze a part of it first."
        )
    return trained


def attach(module: nn.Module, make_engine: Callable[[], Engine]) -> Engine:
    """Make ``module`` parallel through the engine that ``make_engine`` makes.

    Raises:
        AlreadyParallel: If the module or one of its parts is parallel already.
    """
    for name, part in module.named_modules():
        if part in _engines or isinstance(part, _WRAPPERS):
            where = f"its part {name!r}" if name else "the model itself"
            raise AlreadyParallel(
                f"{type(module).__name__} can't be made parallel: {where} is parallel already, "
                "and its gradients would be reduced twice. Pass the bare model, once."
            )
    _engines[module] = make_engine()
    return _engines[module]


def attach_wrapper(wrapper: nn.Module, engine: Engine) -> None:
    """Make ``wrapper`` parallel through the engine of the module inside."""
    _engines[wrapper] = engine


def engine_of(module: nn.Module) -> Engine:
    """The engine of a parallel module.

    Raises:
        ModelError: If the module isn't parallel.
    """
    engine = _engines.get(module)
    if engine is None:
        raise ModelError(
            f"This {type(module).__name__} isn't parallel. Call parallelize() on it first, or "
            "pass the module that was given to parallelize()."
        )
    return engine


@contextlib.contextmanager
def accumulating(engine: Engine) -> Iterator[None]:
    """Let backwards in this context add up gradients on each rank, without reducing them."""
    was_syncing, engine.is_syncing = engine.is_syncing, False
    try:
        yield
    finally:
        engine.is_syncing = was_syncing
