"""Iterable datasets: divided among the workers of all ranks, in steps that all ranks take."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lockstep.comm import all_gather_bytes, any_rank, device_of_facts
from lockstep.data.batches import without_samples
from lockstep.data.random_state import RandomState, exclusive, mixed
from lockstep.errors import SplitError
from lockstep.torch_private import WorkerInfo, worker


class Request(NamedTuple):
    """Asks a worker for the next part of its shard."""

    iteration: int  # distinguishes iterations over the dataset
    seed: int  # of the epoch
    size: int | None  # the number of samples; None if the dataset makes batches itself
    drop_last: bool  # whether a last part of fewer samples is left out


class Answer(NamedTuple):
    """A part of a shard."""

    is_end: bool  # whether the shard has ended, and there is no batch
    fingerprint: int | None  # a checksum of the shard's first sample; None if there is none
    batch: Any


class StreamReader:
    """Reads a shard; the dataset of torch's own loader, whose workers have copies."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], rank: int, num_ranks: int
    ) -> None:
        self.dataset, self._collate = dataset, collate
        self._rank, self._num_ranks = rank, num_ranks
        self._iteration = -1
        self._fingerprint: int | None = None

    def __getitem__(self, request: Request) -> Answer:
        """Return the next part."""
        # The worker info that is shown is the whole process's: another rank, if ranks are threads,
        # would take it for its own. Shown by test_an_iterable_dataset_in_ranks_that_are_threads.
        with exclusive:
            return self._read(request)

    def _read(self, request: Request) -> Answer:
        info = get_worker_info()
        num_workers = 1 if info is None else info.num_workers
        shard = self._rank * num_workers + (0 if info is None else info.id)
        if self._iteration != request.iteration:
            self._iteration, self._fingerprint = request.iteration, None
            self._random = RandomState(mixed(request.seed, shard, -4))
            self._samples = self._begin()
        with self._random(), shown_as_worker(shard, self._num_ranks * num_workers, self.dataset):
            size = 1 if request.size is None else request.size
            samples = [*itertools.islice(self._samples, size)]
            if not samples or (len(samples) < size and request.drop_last):
                return Answer(True, self._fingerprint, None)
            if self._fingerprint is None:
                self._fingerprint = _fingerprint(samples[0])
            batch = self._collate(samples[0] if request.size is None else samples)
        return Answer(False, self._fingerprint, batch)

    def _begin(self) -> Iterator[Any]:
        yield from self.dataset  # whose __iter__ runs with the first sample, as a worker's

    def sample_batch(self, size: int | None) -> Any:
        """Return a batch of one sample, of which this rank need not have any."""
        samples = [*itertools.islice(iter(self.dataset), 1)]
        return self._collate(samples[0] if size is None else samples) if samples else None


@contextmanager
def shown_as_worker(shard: int, num_shards: int, dataset: Any) -> Iterator[None]:
    """Let ``get_worker_info()`` count the workers of all ranks; None if there is one shard."""
    with exclusive:  # there is one worker info in a process
        before = worker._worker_info
        if num_shards > 1:
            seed = 0 if before is None else before.seed
            info = WorkerInfo(id=shard, num_workers=num_shards, seed=seed, dataset=dataset)
            worker._worker_info = info
        elif before is not None:
            worker._worker_info = dataclasses.replace(before, dataset=dataset)
        try:
            yield
        finally:
            worker._worker_info = before


def _fingerprint(sample: Any) -> int:
    try:
        return zlib.crc32(pickle.dumps(sample))
    except Exception:  # whatever the pickling of a user's object raises
        return zlib.crc32(repr(sample).encode())


def global_stream(
    answers: Iterator[Answer],
    reader: StreamReader,
    size: int | None,
    num_workers: int,
    group: dist.ProcessGroup | None,
) -> Iterator[Any]:
    """Yield this rank's part of each step, until the shards of all ranks have ended.

    Args:
        answers: Of this rank's workers, in turn.
        reader: The dataset.
        size: As in requests.
        num_workers: How many of them there are.
        group: The ranks.

    Raises:
        SplitError: If several shards begin with the same sample.
    """
    first = [Answer(*answer) for answer in itertools.islice(answers, num_workers)]
    _check_shards([answer.fingerprint for answer in first], group)
    last = None
    upcoming = itertools.chain(first, answers)
    has_ended = [False] * num_workers
    turn = 0
    while True:
        batch, is_given = None, False
        while not all(has_ended) and not is_given:
            answer = Answer(*next(upcoming))
            has_ended[turn % num_workers] |= answer.is_end
            is_given = not answer.is_end
            batch, turn = answer.batch, turn + 1
        if group is not None and not any_rank(group, [is_given])[0]:
            return
        if group is None and not is_given:
            return
        if is_given:
            last = batch
        else:
            last = without_samples(reader.sample_batch(size) if last is None else last)
        yield last


def _check_shards(own: list[int | None], group: dist.ProcessGroup | None) -> None:
    """Compare the shards' first samples, over all ranks."""
    by_rank = [own]
    if group is not None:
        payload = json.dumps(own).encode()
        by_rank = [*map(json.loads, all_gather_bytes(group, payload, device_of_facts(group)))]
    owners: dict[int, str] = {}
    for rank, theirs in enumerate(by_rank):
        for index, fingerprint in enumerate(theirs):
            name = f"worker {index} of rank {rank}" if len(theirs) > 1 else f"rank {rank}"
            if fingerprint is not None and owners.setdefault(fingerprint, name) != name:
                raise SplitError(
                    f"The iterable dataset gives the same samples to {owners[fingerprint]} and to "
                    f"{name}, so that they would count several times. In its __iter__(), give only "
                    "samples whose number modulo get_worker_info().num_workers is "
                    "get_worker_info().id, which here count the workers of all ranks."
                )
