"""What one rank has recorded in a trace, as its file has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

END_OF_EPOCH = -1  # in place of a number of samples


class Span(NamedTuple):
    """Something that a rank did, by the clock of rank 0, in nanoseconds."""

    name: str
    start: int
    stop: int
    step: int
    thread: int  # 0 for the program's own
    detail: str  # of a wait, the operation
    num_bytes: int  # of a wait, what this rank gave to the operation


class Bucket(NamedTuple):
    """The way of one bucket in one step."""

    ready: int
    launched: int
    done: int
    step: int
    number: int


class Batch(NamedTuple):
    """What a loader returned at some time: a batch, or that the epoch is over."""

    time: int
    step: int
    thread: int
    loader: int
    num_samples: int  # of this rank; 0 if the loader doesn't tell, or END_OF_EPOCH
    with_gradients: bool  # whether autograd was on


class StepEnd(NamedTuple):
    """What a rank noted at the end of a step."""

    step: int
    time: int
    num_samples: int  # of this rank, from which it computed gradients; 0 if they aren't known
    memory: dict[str, int]  # in bytes, by kind; empty at the end of most steps


class RankSpans(NamedTuple):
    """All that one rank has recorded."""

    rank: int
    facts: dict[str, Any]
    spans: list[Span]
    buckets: list[Bucket]
    logged: list[dict[str, Any]]
    bucket_facts: dict[int, dict[str, Any]]  # by number: index, parameters, bytes
    step_ends: Sequence[StepEnd] = ()
    batches: Sequence[Batch] = ()
    loaders: dict[int, dict[str, Any]] = {}  # noqa: RUF012  by number: dataset, workers, persistent
