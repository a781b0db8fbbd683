"""torch's own loader, whose workers read what they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.utils.data

from lockstep.data.faults import end_worker
from lockstep.torch_private import worker


def loader_with_workers(
    settings: torch.utils.data.DataLoader[Any], reader: Any, sampler: WorkerSampler
) -> torch.utils.data.DataLoader[Any]:
    """Return a loader with the workers of ``settings``: they ask ``reader`` for what is sampled."""
    return torch.utils.data.DataLoader(
        reader,
        batch_size=None,
        sampler=sampler,
        num_workers=settings.num_workers,
        collate_fn=_as_it_is,
        pin_memory=settings.pin_memory,
        timeout=settings.timeout,
        worker_init_fn=_WorkerStart(settings.worker_init_fn),
        multiprocessing_context=settings.multiprocessing_context,
        generator=torch.Generator(),
        prefetch_factor=settings.prefetch_factor,
        persistent_workers=settings.persistent_workers,
        pin_memory_device=settings.pin_memory_device,
    )


class WorkerSampler:
    """The sampler of torch's own loader: what to read in the iteration that begins."""

    stream: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.stream

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy of the loader begins iterations of its own."""
        return {}


class _WorkerStart:
    """Calls the user's function at the start of a worker, which knows of the user's dataset."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        queue: Any = Queue
        end = partial(end_worker, queue._on_queue_feeder_error)
        queue._on_queue_feeder_error = staticmethod(end)  # of this process
        info: Any = worker._worker_info
        worker._worker_info = dataclasses.replace(info, dataset=info.dataset.dataset)
        if self._function is not None:
            self._function(worker_id)


def _as_it_is(batch: Any) -> Any:
    return batch
