"""The micro-batches of a step, as far as ``lockstep.mean`` has to know of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from lockstep.comm import this_thread
from lockstep.nn.parallelize import ParallelState
from lockstep.nn.reached import is_any_reached
from lockstep.nn.replicas.enclosing import current_task, is_backward_of_replicas


def batch_of(module: nn.Module, attachment: ParallelState) -> Batch:
    """The batch of ``module``, which this thread accumulates."""
    with _lock:
        batch = _batches.setdefault(attachment, Batch(module))
    batch.rank = this_thread()
    return batch


def has_begun_batch() -> bool:
    """Whether gradients are there, on this rank, of some micro-batches of a batch."""
    return any(batch.has_gradients() for batch in _batches_of(this_thread()))


def count_micro_batch(
    count: torch.Tensor, goes_on: torch.Tensor, rank: int, has_samples: bool, is_backward: bool
) -> torch.Tensor:
    """Make room in the gradients for those of a micro-batch; return what to divide it by.

    It is called in the backward of a mean over ``count`` samples, before any gradient comes. If
    the backward is one of several for a batch, gradients that are there are those of a mean over
    fewer samples than the batch has now.

    Args:
        count: Over how many samples, or what weight, the mean is; of all ranks.
        goes_on: On how many ranks gradients of earlier micro-batches were there.
        rank: The thread that took the mean. Autograd may have another one for its backward.
        has_samples: Whether this rank has any of them.
        is_backward: Whether it is a backward of all that the mean depends on. In
            ``torch.autograd.grad()`` it isn't, and then no gradient is added to any other.

    Raises:
        ValueError: If it is one of two means over different numbers in one backward.
    """
    batches = _batches_of(rank)
    if has_samples:
        # There may be other models, with other batches or none.
        batches = _reached(batches, is_backward)
    elif not is_backward:
        batches = []
    # Parallel parts of a parallel model share parameters with it: each is scaled once.
    scaled: set[int] = set()
    with _counting:  # replicas have their backwards at the same time
        totals = [batch.add(count, goes_on, scaled) for batch in batches]
    if has_samples and any(not torch.equal(total, totals[0]) for total in totals[1:]):
        numbers = ", ".join(f"{total.item():g}" for total in totals)
        raise ValueError(
            "One backward under accumulate() runs through several models whose batches have come "
            f"to different numbers of samples: {numbers}. Accumulate them in the same backwards."
        )
    return totals[0] if totals else count


def remember_reached() -> None:
    """Remember which models the backward that is running reaches, as replicas' come next.

    They ask from theirs, which reach only leaves of their own.
    """
    if not is_backward_of_replicas():
        with _lock:
            batches = list(_batches.values())
        for batch in batches:
            if batch.is_open() and batch.is_reached():
                batch.reached_in = current_task()


def _reached(batches: Sequence[Batch], is_backward: bool) -> list[Batch]:
    """Those of ``batches`` whose model the backward that is running is one of."""
    reached = [
        batch for batch in batches if (is_backward and batch.is_hidden) or batch.is_reached()
    ]
    if is_backward and not reached:
        # A model wholly inside of reentrant checkpoints can't be seen from outside of them.
        reached = [batch for batch in batches if batch.num_contexts]
        for batch in reached:
            batch.is_hidden = True
    return reached


class Batch:
    """The batch of one step, of which some micro-batches may have had their backward.

    Attributes:
        num_contexts: How often accumulate() is entered and not yet left. When it is 0, the next
            micro-batch is the last.
        rank: The thread that accumulates.
        is_hidden: Whether its backwards don't seem to reach the model.
        reached_in: Which backward with replicas in it was the last to reach the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.num_contexts = 0
        self.rank = this_thread()
        self.is_hidden = False
        self.reached_in = -1
        self._module = weakref.ref(module)
        self._count: torch.Tensor | None = None  # how many samples the gradients are the mean of
        self._last_task = -1
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def is_open(self) -> bool:
        """Whether a mean may be over a part of it."""
        return bool(self.num_contexts) or self._count is not None or self._is_last_task()

    def is_reached(self) -> bool:
        """Whether the backward that is running is one of this model."""
        if is_backward_of_replicas():
            return self.reached_in == current_task()
        return is_any_reached(self._parameters())

    def has_gradients(self) -> bool:
        """Whether there are gradients of earlier micro-batches."""
        return self._count is not None and bool(self._gradients())

    def forget(self) -> None:
        """The batch is not to be finished."""
        self._count = None

    def _is_last_task(self) -> bool:
        return current_task() == self._last_task != -1

    def _parameters(self) -> list[nn.Parameter]:
        module = self._module()
        return [] if module is None else [p for p in module.parameters() if p.requires_grad]

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]

    def add(self, count: torch.Tensor, goes_on: torch.Tensor, scaled: set[int]) -> torch.Tensor:
        """Add a micro-batch, scale gradients whose id() is not in ``scaled``; return the sum."""
        if self._is_last_task() and self._last is not None:
            return self._add_to_same_backward(count)
        total = count
        if self._count is not None:
            # If no rank has gradients any more, zero_grad() has dropped the batch.
            before = torch.where(goes_on > 0, self._count.to(count.device), 0)
            total = before + count
            share = before / torch.where(total != 0, total, 1)
            with torch.no_grad():
                for gradient in self._gradients():
                    if id(gradient) not in scaled:
                        gradient.mul_(share.to(gradient.device))
                        scaled.add(id(gradient))
        self._last_task, self._last = current_task(), (count, total)
        self._count = total if self.num_contexts else None
        return total

    def _add_to_same_backward(self, count: torch.Tensor) -> torch.Tensor:
        assert self._last is not None
        last, total = self._last
        if not torch.equal(last, count.to(last.device)):
            raise ValueError(
                f"One backward under accumulate() has two means, over {count.item():g} and over "
                f"{last.item():g} samples, and gradients that are added up can't be divided by "
                "both. Let both be over as many, or put the values into one mean, with weights."
            )
        return total


# Ranks may be threads, and a dictionary that another thread changes can't be gone through.
_lock = threading.Lock()
_counting = threading.Lock()
_batches: weakref.WeakKeyDictionary[ParallelState, Batch] = weakref.WeakKeyDictionary()


def _batches_of(rank: int) -> list[Batch]:
    """Those that a mean of that thread may be over a part of."""
    with _lock:
        batches = list(_batches.values())
    return [batch for batch in batches if batch.rank == rank and batch.is_open()]
