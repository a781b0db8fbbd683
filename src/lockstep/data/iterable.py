"""Iterable datasets: divided among the workers of all ranks, in steps that all ranks take."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lockstep.comm import all_gather_json, any_rank
from lockstep.data import fingerprint
from lockstep.data.batches import without_samples
from lockstep.data.dataset_generators import RandomState
from lockstep.data.faults import ends_worker, telling
from lockstep.data.self_sharding import (
    NUM_PROBED,
    View,
    WorkerShard,
    check_shards,
    has_rank,
    noting_rank,
    settle,
)
from lockstep.generators import mixed
from lockstep.same_bits import exclusive
from lockstep.torch_private import WorkerInfo, worker


class Request(NamedTuple):
    """Asks a worker for the next part of its shard."""

    iteration: int  # distinguishes iterations over the dataset
    seed: int  # of the epoch
    size: int | None  # the number of samples; None if the dataset makes batches itself
    drop_last: bool  # whether a last part of fewer samples is left out
    view: View = View.ALL  # which workers the dataset is shown
    is_trial: bool = False  # whether that may be the wrong view, in which a dataset may fail


class Answer(NamedTuple):
    """A part of a shard."""

    iteration: int  # that of the request
    worker: int  # its number on this rank
    is_end: bool  # whether the shard has ended, and there is no batch
    shard: tuple[Any, ...]  # a WorkerShard
    batch: Any


class Requests:
    """An endless iterator of what workers are asked for, which may change."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> Request:
        return self.request

    def ask(self, view: View) -> None:
        """Ask for another iteration from now on, in a view that is known."""
        iteration = self.request.iteration + 1
        self.request = self.request._replace(iteration=iteration, view=view, is_trial=False)


class StreamReader:
    """Reads a shard; the dataset of torch's own loader, whose workers have copies."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], rank: int, num_ranks: int
    ) -> None:
        self.dataset, self._collate = dataset, collate
        self._rank, self._num_ranks = rank, num_ranks
        self._iteration = -1
        self._shard = WorkerShard()
        # Of a worker that is to read no more in this iteration: its number, and what it raises.
        self._last_words: tuple[int, BaseException] | None = None
        self._doing = ""  # what an error says of where it was

    def __getitem__(self, request: Request) -> Answer:
        """Return the next part."""
        # The worker info that is shown is the whole process's: another rank, if ranks are threads,
        # would take it for its own. Shown by test_an_iterable_dataset_in_ranks_that_are_threads.
        with exclusive:
            if self._last_words is not None and self._last_words[0] == request.iteration:
                raise self._last_words[1]
            try:
                return self._answer(request)
            except BaseException as error:
                told = telling(error, f"This was in {self._doing}, on rank {self._rank}.")
                if told is error:
                    raise
                ends = ends_worker(error, told)
                self._last_words = (request.iteration, told) if ends else None
            raise told

    def _answer(self, request: Request) -> Answer:
        info = get_worker_info()
        worker_id, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        is_new = self._iteration != request.iteration
        if is_new:
            self._iteration, self._shard = request.iteration, WorkerShard()
        if request.view is not View.PROBE:
            return self._read(request, worker_id, num_workers, is_new=is_new)
        if is_new:
            self._doing = "reading the first samples, to see how the dataset is divided"
            self._shard = self._probe(request, worker_id, num_workers)
        return Answer(request.iteration, worker_id, False, self._shard, None)

    def _read(self, request: Request, worker_id: int, num_workers: int, *, is_new: bool) -> Answer:
        number, num_shards = worker_id, num_workers
        if request.view is View.ALL:
            number, num_shards = self._rank * num_workers + worker_id, self._num_ranks * num_workers
        if is_new:
            self._random = RandomState(mixed(request.seed, number, -4))
            self._samples, self._num_read = self._begin(), 0
        end = Answer(request.iteration, worker_id, True, self._shard, None)
        notes = noting_rank if is_new and self._num_ranks > 1 else nullcontext
        with self._random(), shown_as_worker(number, num_shards, self.dataset):
            size = 1 if request.size is None else request.size
            samples: list[Any] = []
            place = f"of shard {number + 1} of {num_shards} of the dataset"
            try:
                with notes() as asked:
                    samples.extend(itertools.islice(self._samples, size))
            except BaseException as error:
                read = self._num_read + len(samples)
                self._doing = f"reading, after {read:,} samples {place}"
                if not request.is_trial or not isinstance(error, Exception):
                    raise
                self._shard = WorkerShard(asked_rank=bool(asked), has_failed=True)
                return end._replace(shard=self._shard)
            if is_new:
                first = fingerprint.of_sample(samples[0]) if samples else None
                self._shard = WorkerShard(first, bool(asked))
            end = end._replace(shard=self._shard)
            if not samples or (len(samples) < size and request.drop_last):
                return end
            after = f"samples after the first {self._num_read:,} {place}"
            self._doing = f"collating {len(samples):,} {after}"
            batch = self._collate(samples[0] if request.size is None else samples)
            self._num_read += len(samples)
        return end._replace(is_end=False, batch=batch)

    def _probe(self, request: Request, worker_id: int, num_workers: int) -> WorkerShard:
        """Begin twice as each rank's worker of this number does, and with the same seed."""
        firsts = []
        for _ in range(2):
            random = RandomState(mixed(request.seed, worker_id, -4))
            with random(), shown_as_worker(worker_id, num_workers, self.dataset):
                samples = [*itertools.islice(self._begin(), NUM_PROBED)]
            firsts.append(fingerprint.of_sample(samples) if samples else None)
        return WorkerShard(firsts[0], is_repeatable=firsts[0] == firsts[1])

    def _begin(self) -> Iterator[Any]:
        yield from self.dataset  # whose __iter__ runs with the first sample, as a worker's

    def sample_batch(self, size: int | None, seed: int) -> Any:
        """Return a batch of one sample, of which this rank need not have any."""
        with RandomState(mixed(seed, -5))():
            samples = [*itertools.islice(iter(self.dataset), 1)]
            return self._collate(samples[0] if size is None else samples) if samples else None


@contextmanager
def shown_as_worker(shard: int, num_shards: int, dataset: Any) -> Iterator[None]:
    """Let ``get_worker_info()`` be that of one of ``num_shards``; None if there is one shard."""
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


def global_stream(
    asked: Requests,
    answers: Iterator[Any],
    reader: StreamReader,
    num_workers: int,
    group: dist.ProcessGroup | None,
    note_view: Callable[[View], None] | None,
) -> Iterator[Any]:
    """Yield this rank's part of each step, until the shards of all ranks have ended.

    Args:
        asked: What workers are asked for: at first in the view that is known, or else View.ALL.
        answers: Of this rank's workers, in turn.
        reader: The dataset.
        num_workers: How many of them there are.
        group: The ranks.
        note_view: Is told the view in which the dataset gives each sample once; None if that in
            which workers are asked is it.

    Raises:
        SplitError: If several shards begin with the same sample, or it can't be told whether the
            dataset divides itself among the ranks.
    """
    dataset = None if note_view is None else reader.dataset
    first, shards = _first_answers(asked, answers, num_workers, group, dataset)
    if note_view is not None and has_rank(shards):
        asked.ask(View.PROBE)
        _, probed = _first_answers(asked, answers, num_workers, group)
        asked.ask(settle(probed))
        first, shards = _first_answers(asked, answers, num_workers, group)
    elif any(shard.has_failed for of_rank in shards for shard in of_rank):
        asked.ask(asked.request.view)  # now it raises what it raised
        first, shards = _first_answers(asked, answers, num_workers, group)
    check_shards(shards, asked.request.view)
    if note_view is not None:
        note_view(asked.request.view)
    yield from _steps(asked.request, itertools.chain(first, answers), reader, num_workers, group)


def _first_answers(
    asked: Requests,
    answers: Iterator[Any],
    num_workers: int,
    group: dist.ProcessGroup | None,
    dataset: Any = None,
) -> tuple[list[Answer], list[list[WorkerShard]]]:
    """Return each worker's first answer to a request, and the shards of all ranks.

    Workers have been asked for the next parts in advance: those of an earlier request are dropped.
    """
    iteration = asked.request.iteration
    mine = (a for a in itertools.starmap(Answer, answers) if a.iteration == iteration)
    first = [*itertools.islice(mine, num_workers)]
    shards = [WorkerShard(*answer.shard) for answer in first]
    if group is None:
        return first, [shards]
    by_rank = all_gather_json(group, [fingerprint.of_dataset(dataset), shards])
    is_same = len({checksum for checksum, _ in by_rank}) == 1
    return first, [
        [WorkerShard(*s)._replace(is_same=is_same) for s in theirs] for _, theirs in by_rank
    ]


def _steps(
    request: Request,
    answers: Iterator[Any],
    reader: StreamReader,
    num_workers: int,
    group: dist.ProcessGroup | None,
) -> Iterator[Any]:
    last = None
    has_ended = [False] * num_workers
    while True:
        batch, is_given = None, False
        while not all(has_ended) and not is_given:
            answer = Answer(*next(answers))
            has_ended[answer.worker] |= answer.is_end
            is_given = not answer.is_end
            batch = answer.batch
        if group is not None and not any_rank(group, [is_given])[0]:
            return
        if group is None and not is_given:
            return
        if is_given:
            last = batch
        else:
            last = reader.sample_batch(request.size, request.seed) if last is None else last
            last = without_samples(last)
        yield last
