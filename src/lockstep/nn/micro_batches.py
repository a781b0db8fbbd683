"""``accumulate(model)``: one step on several micro-batches, and the scales of their means."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lockstep.comm import this_thread
from lockstep.nn.batch import Batch
from lockstep.nn.parallelize import all_states, no_sync, state_of
from lockstep.nn.reached import current_task, is_backward_of_replicas

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
