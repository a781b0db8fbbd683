"""Tensors of which this rank has only some elements, and state that an optimizer doesn't have yet.

Both are for state that is saved and loaded without being gathered.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer, SparseAdam

from lockstep.optim.flat import elements_of
from lockstep.optim.known import updating_class


class PartialTensor(torch.Tensor):
    """A tensor of which this rank has only some elements; no function computes with it.

    Attributes:
        ranges: The elements that this rank has: pairs of the index of the first, in the memory
            order of the whole tensor, and a tensor of one dimension.
    """

    ranges: list[tuple[int, torch.Tensor]]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        ranges: Sequence[tuple[int, torch.Tensor]],
        device: torch.device | None = None,
    ) -> PartialTensor:
        """Create it with the shape, strides and device of ``like``, and the dtype of ``ranges``."""
        dtype, device = ranges[0][1].dtype, device or like.device
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=device
        )
        made.ranges = [*ranges]
        return made

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from ``start`` to ``stop``, all of which this rank has."""
        parts = [
            held[max(start - first, 0) : stop - first]
            for first, held in self.ranges
            if first < stop and start < first + len(held)
        ]
        assert sum(map(len, parts)) == stop - start
        return torch.cat(parts or [self.ranges[0][1][:0]])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Convert the elements to another dtype, make another such tensor, and do nothing else."""
        tensor, options = args[0], kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            converted = [(start, func(elements, **options)) for start, elements in tensor.ranges]
            return PartialTensor(tensor, converted, options.get("device"))
        if func is torch.ops.aten.new_empty.default:
            # torch.distributed.checkpoint.async_save gives it copies of the attributes.
            return type(tensor)(tensor, tensor.ranges, options.get("device"))
        raise TypeError(
            f"{func} can't be computed from a tensor of which this rank has only some elements. "
            "Let every rank call the optimizer's state_dict(), which has whole tensors."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe it without its elements."""
        return f"PartialTensor(shape={[*self.shape]}, dtype={self.dtype})"


def elements_from(value: torch.Tensor, like: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return some elements of ``value``, flat, by their indices in the memory order of ``like``."""
    if isinstance(value, PartialTensor):
        return value.elements(start, stop)
    return elements_of(value, like)[start:stop]


def state_to_come(optimizer: Optimizer, group: int, tensor: torch.Tensor) -> dict[str, Any]:
    """Return the state that a step would make for ``tensor``, in its own memory.

    A shallow copy of the optimizer takes a step with a copy of ``tensor`` alone, without hooks. So
    the values say nothing; names, shapes, dtypes and devices do.

    Raises:
        TypeError: If that step fails, as it does with an optimizer that needs a closure.
    """
    trial: Any = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = {}, {}
    copy = tensor.detach().clone()
    gradient = torch.zeros_like(copy)
    copy.grad = gradient.to_sparse(1) if isinstance(optimizer, SparseAdam) else gradient
    groups = enumerate(optimizer.param_groups)
    trial.param_groups = [{**each, "params": [copy] if i == group else []} for i, each in groups]
    trial.state = defaultdict(dict)
    try:
        with torch.no_grad():
            inspect.unwrap(updating_class(type(optimizer)).step)(trial)
    except Exception as error:
        raise TypeError(
            f"{type(optimizer).__name__}.step() can't be called without a closure and with "
            f"gradients of zeros ({error}), so that the names and shapes of state that isn't there "
            "yet aren't known. Save and load the optimizer itself, by its state_dict()."
        ) from error
    return dict(trial.state[copy])
