"""``accumulate(model)``: one step on several micro-batches."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lockstep.comm.rank_threads import this_thread
from lockstep.nn import no_sync
from lockstep.nn.attachment import Attachment, attachment_of
from lockstep.nn.engine import is_any_reached
from lockstep.nn.replicas.boundary import current_task


@contextlib.contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Let backwards add up gradients on each rank; the first one after the context reduces them.

    What counts is where ``backward()`` runs, not where ``forward()`` did. With
    :func:`lockstep.mean`, gradients become those of the mean over all micro-batches of the step,
    the one after the context included; without it they add up, as in torch. ::

        for number, (x, y) in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with contextlib.nullcontext() if last else lockstep.accumulate(model):
                lockstep.mean(loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    Each backward of a mean is a micro-batch. To that end it scales the gradients that are there,
    whatever they are of. A batch that is not to be finished ends with ``zero_grad()``, which sets
    gradients to None.

    Args:
        module: A module that was given to :func:`lockstep.parallelize`, a wrapper, or what is in
            one. Parallel parts of it accumulate too.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    with no_sync(module):
        attachment = attachment_of(module)
        with _lock:
            batch = _batches.setdefault(attachment, _Batch(module))
        batch.rank = this_thread()
        batch.num_contexts += 1
        try:
            yield
        except BaseException:
            batch.forget()
            raise
        finally:
            batch.num_contexts -= 1


def has_begun_batch() -> bool:
    """Whether gradients are there, on this rank, of some micro-batches of a batch."""
    return any(batch.has_gradients() for batch in _batches_of(this_thread()))


def count_micro_batch(
    count: torch.Tensor, goes_on: torch.Tensor, rank: int, has_samples: bool
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

    Raises:
        ValueError: If it is one of two means over different numbers in one backward.
    """
    batches = _batches_of(rank)
    if has_samples:
        # There may be other models, with other batches or none.
        batches = _reached(batches)
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


def _reached(batches: Sequence[_Batch]) -> list[_Batch]:
    """Those of ``batches`` whose model the backward that is running is one of."""
    reached = [batch for batch in batches if batch.is_hidden or batch.is_reached()]
    if not reached:
        # A model wholly inside of reentrant checkpoints can't be seen from outside of them.
        reached = [batch for batch in batches if batch.num_contexts]
        for batch in reached:
            batch.is_hidden = True
    return reached


class _Batch:
    """The batch of one step, of which some micro-batches may have had their backward.

    Attributes:
        num_contexts: How often accumulate() is entered and not yet left. When it is 0, the next
            micro-batch is the last.
        rank: The thread that accumulates.
        is_hidden: Whether its backwards don't seem to reach the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.num_contexts = 0
        self.rank = this_thread()
        self.is_hidden = False
        self._module = weakref.ref(module)
        self._count: torch.Tensor | None = None  # how many samples the gradients are the mean of
        self._last_task = -1
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def is_open(self) -> bool:
        """Whether a mean may be over a part of it."""
        return bool(self.num_contexts) or self._count is not None or self._is_last_task()

    def is_reached(self) -> bool:
        """Whether the backward that is running is one of this model."""
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
            share = before / torch.where(total > 0, total, 1)
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
_batches: weakref.WeakKeyDictionary[Attachment, _Batch] = weakref.WeakKeyDictionary()


def _batches_of(rank: int) -> list[_Batch]:
    """Those that a mean of that thread may be over a part of."""
    with _lock:
        batches = list(_batches.values())
    return [batch for batch in batches if batch.rank == rank and batch.is_open()]
