"""Questions to autograd about the running backward, and its hooks on parameters."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import BackwardCFunction

from lockstep.comm import uncompiled
from lockstep.errors import ModelError
from lockstep.torch_private import (
    _current_autograd_node,
    _current_graph_task_id,
    _will_engine_execute_node,
    is_functorch_wrapped_tensor,
)

_log = logging.getLogger(__name__)

NOT_DISTRIBUTED = (
    "A parallel %s runs in a context of torch.distributed.autograd, which keeps gradients to "
    "itself, so that lockstep can't reduce them. Train it with loss.backward(), or wrap it in "
    "torch.nn.parallel.DistributedDataParallel instead."
)

Hook = Callable[[torch.Tensor], object]


def reached(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the ``leaves`` to whose gradients the running backward will add.

    Leaves that only reentrant checkpoints use are missing: autograd doesn't foresee their graphs.
    """
    # The node that accumulates a gradient refers to its leaf. So a leaf with a single reference,
    # which is Python's, is in no graph: as those of another model, which is not trained now.
    trained = [leaf for leaf in leaves if leaf.requires_grad and leaf._use_count() > 1]  # type: ignore[attr-defined]
    # The nodes are not kept: as long as one lives, autograd expects the shape that it was made
    # with, and a parameter that has changed fails inside of autograd, without its name.
    try:
        return [*compress(trained, [*map(_will_engine_execute_node, accumulators(trained))])]
    except RuntimeError:  # in autograd.grad() of a leaf: no gradient is accumulated
        return []


def accumulators(leaves: Sequence[torch.Tensor]) -> list[Any]:
    """Return what accumulates gradients of ``leaves``, on the stream that is current now if new."""
    if not leaves:
        return []
    with torch.enable_grad():
        uses: Any = _UsesAll.apply(*leaves)  # type: ignore[no-untyped-call]
        return [node for node, _ in uses.grad_fn.next_functions]


def is_any_reached(leaves: Sequence[torch.Tensor]) -> bool:
    """Return whether the running backward will add to the gradient of any of the ``leaves``."""
    return bool(reached(leaves[:1]) or reached(leaves))


def refuse_transforms(*values: object) -> None:
    """Raise ModelError if a transform of torch.func, or forward-mode AD, works with the values.

    Its tensors have no memory that another rank could be sent; a group that met them in a
    collective would end.
    """
    for value in values:
        if isinstance(value, torch.Tensor) and (
            is_functorch_wrapped_tensor(value) or unpack_dual(value).tangent is not None
        ):
            raise ModelError(
                "In grad(), vmap() or jvp() of torch.func, and in forward-mode AD, a number can't "
                "be summed over the ranks. For gradients, use backward() or torch.autograd.grad(); "
                "or let the function return the sum of this rank's losses, and take "
                'lockstep.reduce(gradients, "sum") afterwards, divided by the number of all '
                "samples. Of what vmap() returns, take the mean outside of it."
            )


def may_be_distributed() -> bool:
    """Whether RPC runs, so that there may be backwards of ``torch.distributed.autograd``."""
    rpc: Any = sys.modules.get("torch.distributed.rpc.api")
    return rpc is not None and bool(rpc._is_current_rpc_agent_set())


def refuse_distributed_context(name: str) -> None:
    """Raise in a context of ``torch.distributed.autograd``, for the parallel model ``name``."""
    if not torch.is_grad_enabled():
        return
    from torch.distributed import autograd  # which RPC has imported

    try:
        autograd._current_context()
    except RuntimeError:
        return
    raise ModelError(NOT_DISTRIBUTED % name)


def refuse_distributed(parameter: torch.Tensor) -> object:
    """Refuse distributed backwards that reach ``parameter``, as long as the result is kept.

    They capture its gradient instead of accumulating it, as ``autograd.grad()`` does, but they call
    the hooks of the node that accumulates gradients. torch drops the text of errors in these hooks,
    so it is logged.
    """

    def refuse(_: object) -> None:
        if _current_graph_task_id() != -1 and not reached([parameter]):
            _log.error(NOT_DISTRIBUTED, "model")
            raise ModelError(NOT_DISTRIBUTED % "model")

    (node,) = accumulators([parameter])
    node.register_prehook(refuse)
    return node


class _UsesAll(torch.autograd.Function):
    """A function with a node whose next nodes accumulate the gradients of leaves; it never runs."""

    @staticmethod
    def forward(ctx: object, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(())


def is_compiled_backward() -> bool:
    """Return whether the running backward is one of compiled autograd, which runs no nodes."""
    is_running = _current_graph_task_id() != -1
    return is_running and _current_autograd_node() is None


def outermost_running_node() -> BackwardCFunction | None:
    """Return the outermost node whose ``backward()`` runs the current backward, if there is one.

    The node of a reentrant checkpoint does. Autograd has no function for this, but ``backward()``
    is on the stack of this thread, with the node as its first argument.
    """
    node, frame = None, sys._getframe().f_back
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                node = first
        frame = frame.f_back
    return node


# While a replica's backward runs: autograd's task of its caller's backward.
_task: ContextVar[int | None] = ContextVar("lockstep_task", default=None)


@contextmanager
def as_backward_of_replicas() -> Iterator[None]:
    """Run the backward of a replica as a part of the one that runs in this thread."""
    token = _task.set(current_task())
    try:
        yield
    finally:
        _task.reset(token)


def is_backward_of_replicas() -> bool:
    """Whether a replica's backward runs in this thread."""
    return _task.get() is not None


def current_task() -> int:
    """Autograd's task of the running backward; in a replica, of the caller's backward."""
    task = _task.get()
    return _current_graph_task_id() if task is None else task


@uncompiled
class GradientHooks(OrderedDict[int, Hook]):
    """The post-accumulate hooks of one parameter, of which torch calls only the engine's.

    The program's hooks ("others"), such as an optimizer that steps as soon as a gradient is ready,
    are held back until the gradient is the mean over the ranks. Before, each rank would step with
    its own gradient, and the replicas would differ. Shown by test_hooks_of_others_see_the_mean.

    torch reads the hooks from this dictionary's own storage, past its methods; but
    ``register_post_accumulate_grad_hook()``, and the handles that it returns, call the methods.
    """

    def __init__(self, others: dict[int, Hook]) -> None:
        super().__init__()
        self.others = others  # the dictionary of earlier handles
        self.release()

    def hold_back(self, hook: Hook) -> None:
        """Let torch call only ``hook``, an engine's, which calls :meth:`call_others`."""
        super().__setitem__(0, hook)

    def release(self, hook: Hook | None = None) -> None:
        """Let torch call the others' hooks, unless another one than ``hook`` holds them back."""
        if hook is None or self[0] is hook:
            super().__setitem__(0, self.call_others)

    def call_others(self, parameter: torch.Tensor) -> None:
        """Call the others' hooks, in the order of their registration."""
        for hook in list(self.others.values()):
            hook(parameter)

    def __setitem__(self, key: int, hook: Hook) -> None:
        self.others[key] = hook

    def __contains__(self, key: object) -> bool:
        return key in self.others

    def __delitem__(self, key: int) -> None:
        del self.others[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a plain dictionary: a copied handle may have it, but no parameter does."""
        return OrderedDict, (list(self.others.items()),)


def hooks_of(parameter: torch.Tensor) -> GradientHooks:
    """Return the hooks of ``parameter``, a leaf, which become a :class:`GradientHooks`."""
    hooks = parameter._post_accumulate_grad_hooks
    if not isinstance(hooks, GradientHooks):
        others = hooks if hooks is not None else OrderedDict()
        hooks = parameter._post_accumulate_grad_hooks = GradientHooks(others)
    return hooks


def take_over_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Move the steps of torch's ``_apply_optimizer_in_backward`` to post-accumulate hooks.

    torch's hooks are on the nodes that accumulate gradients, and run before the reduction.
    """
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles: Any = getattr(module, "param_to_optim_hook_handle_map", None)
    if not handles:
        return
    for parameter in parameters:
        if parameter in handles and hasattr(parameter, "_in_backward_optimizers"):
            for handle in handles.pop(parameter):
                handle.remove()
            parameter.register_post_accumulate_grad_hook(_step_in_backward)


def _step_in_backward(parameter: Any) -> None:
    for optimizer in parameter._in_backward_optimizers:
        optimizer.step()
    parameter.grad = None
