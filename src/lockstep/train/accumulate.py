"""``accumulate(model)``: one step on several micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from lockstep.nn import no_sync
from lockstep.nn.micro_batches import batch_of


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
        batch = batch_of(module)
        batch.num_contexts += 1
        try:
            yield
        except BaseException:
            batch.drop()
            raise
        finally:
            batch.num_contexts -= 1
