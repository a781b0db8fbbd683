"""``accumulate(model)``: one step on several micro-batches, and the scales of their means."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lockstep.comm import this_thread
from lockstep.nn.parallelize import all_states, no_sync, state_of
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


# Replicas have their backwards at the same time.
_scaling = threading.Lock()


@contextlib.contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Let backwards add up gradients on each rank; the first one after the context reduces them.

    This applies to each ``backward()`` within the context, wherever its ``forward()`` ran. With
    :func:`lockstep.mean`, gradients become those of the mean over all micro-batches of the step,
    the one after the context included; without it they add up, as in torch. ::

        for number, (x, y) in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with contextlib.nullcontext() if last else lockstep.accumulate(model):
                lockstep.mean(loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    Each backward of a mean is a micro-batch: it scales the existing gradients, whatever made them.
    To give up an unfinished batch, call ``zero_grad()``, which sets gradients to None.

    Args:
        module: A module that was given to :func:`lockstep.parallelize`, a wrapper, or the module
            in a wrapper. Its parallel parts accumulate too.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    with no_sync(module):
        batch = _batch_of(module)
        batch.num_contexts += 1
        try:
            yield
        except BaseException:
            batch.drop()
            raise
        finally:
            batch.num_contexts -= 1


def _batch_of(module: nn.Module) -> Batch:
    """Return the batch of a parallel ``module``, which this thread accumulates."""
    state = state_of(module)
    if state.batch is None:
        state.batch = Batch(module)
    state.batch.rank = this_thread()
    return state.batch


def _all_batches() -> list[Batch]:
    return [state.batch for state in all_states() if state.batch is not None]


def _batches_of(rank: int) -> list[Batch]:
    """Return the batches that a mean of that thread may be over a part of."""
    return [batch for batch in _all_batches() if batch.rank == rank and batch.is_open()]


def has_begun_batch() -> bool:
    """Return whether this rank has gradients of some micro-batches of a batch."""
    return any(batch.has_gradients() for batch in _batches_of(this_thread()))


def count_micro_batch(
    count: torch.Tensor, goes_on: torch.Tensor, rank: int, has_samples: bool, is_backward: bool
) -> torch.Tensor:
    """Scale the gradients to make room for those of a micro-batch; return its divisor.

    It is called in the backward of a mean over ``count`` samples, before any gradient comes. If
    the backward is one of several for a batch, gradients that are there are those of a mean over
    fewer samples than the batch has now.

    Args:
        count: The number of samples, or their weight, of the mean; of all ranks.
        goes_on: The number of ranks that had gradients of earlier micro-batches.
        rank: The thread that took the mean. Autograd may have another one for its backward.
        has_samples: Whether this rank has any of them.
        is_backward: Whether gradients are accumulated, as they aren't in
            ``torch.autograd.grad()``.

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
    with _scaling:
        totals = [batch.add(count, goes_on, scaled) for batch in batches]
    if has_samples and any(not torch.equal(total, totals[0]) for total in totals[1:]):
        numbers = ", ".join(f"{total.item():g}" for total in totals)
        raise ValueError(
            "One backward under accumulate() runs through several models whose batches have come "
            f"to different numbers of samples: {numbers}. Accumulate them in the same backwards."
        )
    return totals[0] if totals else count


def _reached(batches: Sequence[Batch], is_backward: bool) -> list[Batch]:
    reached = [
        batch for batch in batches if (is_backward and batch.is_hidden) or batch.is_reached()
    ]
    if is_backward and not reached:
        # A model wholly inside of reentrant checkpoints can't be seen from outside of them.
        reached = [batch for batch in batches if batch.num_contexts]
        for batch in reached:
            batch.is_hidden = True
    return reached


def remember_reached() -> None:
    """Note which models the backward that is running reaches, before those of replicas run.

    From the replicas' backwards, which reach only leaves of their own, it can't be seen.
    """
    if not is_backward_of_replicas():
        for batch in _all_batches():
            if batch.is_open() and batch.is_reached():
                batch.reached_in = current_task()
