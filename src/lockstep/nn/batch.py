"""The batch of one step, while its micro-batches have their backwards one after the other."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from lockstep.comm import this_thread
from lockstep.nn.reached import current_task, is_any_reached, is_backward_of_replicas


class Batch:
    """The batch of one step: the micro-batches that have had their backward.

    Attributes:
        num_contexts: The number of accumulate() contexts that this thread is in. When it is 0, the
            next micro-batch is the last.
        rank: The thread that accumulates.
        is_hidden: Whether its backwards don't seem to reach the model.
        reached_in: The last backward with replicas in it that reached the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.num_contexts = 0
        self.rank = this_thread()
        self.is_hidden = False
        self.reached_in: int | None = None
        self._module = weakref.ref(module)
        # The number of samples that the gradients are the mean of.
        self._count: torch.Tensor | None = None
        # The last backward, with the count of its mean and the sum that it came to.
        self._last: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def is_open(self) -> bool:
        """Whether a mean may be over a part of it."""
        is_last = self._last is not None and self._last[0] == current_task()
        return bool(self.num_contexts) or self._count is not None or is_last

    def is_reached(self) -> bool:
        """Whether the backward that is running is one of this model."""
        if is_backward_of_replicas():
            return self.reached_in == current_task()
        return is_any_reached(self._parameters())

    def has_gradients(self) -> bool:
        """Whether there are gradients of earlier micro-batches."""
        return self._count is not None and bool(self._gradients())

    def drop(self) -> None:
        """The batch is not to be finished."""
        self._count = None

    def _parameters(self) -> list[nn.Parameter]:
        module = self._module()
        return [] if module is None else [p for p in module.parameters() if p.requires_grad]

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]

    def add(self, count: torch.Tensor, goes_on: torch.Tensor, scaled: set[int]) -> torch.Tensor:
        """Add a micro-batch, scale gradients whose id() is not in ``scaled``; return the sum."""
        task = current_task()
        if self._last is not None and self._last[0] == task:
            _, last, total = self._last
            if not torch.equal(last, count.to(last.device)):
                raise ValueError(
                    f"One backward under accumulate() has two means, over {count.item():g} and "
                    f"over {last.item():g} samples, and gradients that are added up can't be "
                    "divided by both. Let both be over as many, or put the values into one mean, "
                    "with weights."
                )
            return total
        total = count
        if self._count is not None:
            # If no rank has gradients any more, zero_grad() has dropped the batch.
            before = torch.where(goes_on > 0, self._count.to(count.device), 0)
            total = before + count
            scale = before / torch.where(total != 0, total, 1)
            with torch.no_grad():
                for gradient in self._gradients():
                    if id(gradient) not in scaled:
                        gradient.mul_(scale.to(gradient.device))
                        scaled.add(id(gradient))
        self._last = (task, count, total) if task != -1 else None
        self._count = total if self.num_contexts else None
        return total
