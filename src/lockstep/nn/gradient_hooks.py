"""Post-accumulate hooks of others on parameters: they are called when the gradient is the mean."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lockstep.comm import uncompiled

Hook = Callable[[torch.Tensor], object]


@uncompiled
class GradientHooks(OrderedDict[int, Hook]):
    """The post-accumulate hooks of one parameter, of which torch calls lockstep's alone.

    Hooks of others, such as an optimizer that steps as soon as a gradient is there, are held back
    until the gradient is the mean over the ranks. Before, each rank would step with its own
    gradient, and the replicas would differ. Shown by test_hooks_of_others_see_the_mean.

    torch takes the hooks out of this dictionary's own storage, without its methods.
    ``register_post_accumulate_grad_hook()`` and the handles that it returns call the methods.

    Attributes:
        others: The hooks of others. Handles that were made before hold this dictionary.
    """

    def __init__(self, others: dict[int, Hook]) -> None:
        super().__init__()
        self.others = others
        self.release()

    def hold_back(self, own: Hook) -> None:
        """Let torch call the engine's hook ``own`` alone; the engine calls :meth:`call_others`."""
        super().__setitem__(0, own)

    def release(self, own: Hook | None = None) -> None:
        """Let torch call the hooks of others, unless another hook than ``own`` holds them back."""
        if own is None or self[0] is own:
            super().__setitem__(0, self.call_others)

    def call_others(self, parameter: torch.Tensor) -> None:
        """Call the hooks of others, in the order of their registration."""
        for hook in list(self.others.values()):
            hook(parameter)

    def __setitem__(self, key: int, hook: Hook) -> None:
        self.others[key] = hook

    def __contains__(self, key: object) -> bool:
        return key in self.others

    def __delitem__(self, key: int) -> None:
        del self.others[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, which a handle may hold, is a plain dictionary, as no parameter has it."""
        return OrderedDict, (list(self.others.items()),)


def hooks_of(parameter: torch.Tensor) -> GradientHooks:
    """Return the hooks of ``parameter``, a leaf; from now on they are of this class."""
    hooks = parameter._post_accumulate_grad_hooks
    if not isinstance(hooks, GradientHooks):
        others = hooks if hooks is not None else OrderedDict()
        hooks = parameter._post_accumulate_grad_hooks = GradientHooks(others)
    return hooks


def take_over_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Move steps of torch's ``_apply_optimizer_in_backward`` to hooks of parameters.

    Its own hooks are on the nodes that accumulate gradients, and run before gradients are reduced.
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
