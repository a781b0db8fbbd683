"""``trace(folder)``: what every rank does and when, in files that Perfetto opens.

Each rank writes its spans to a file of its own at the ends of steps, so that a trace takes little
memory, and a rank that is killed leaves all but its last step, or steps of the last 10 ms. At the
end a rank makes JSON of its file; the last rank that has ended puts those of all into one.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep import spans
from lockstep.arguments import as_whole_number, refusal
from lockstep.comm import uncompiled
from lockstep.folders import path_given
from lockstep.launcher import num_cores
from lockstep.observe.clock import Offset, boot_id, measure_offset
from lockstep.observe.evaluations import CONTEXTS, EvaluationWatch
from lockstep.observe.faults import Spool, only_observing
from lockstep.observe.machine import memory_in_use
from lockstep.observe.records import END_OF_EPOCH, MOST_BUCKETS, MOST_LOADERS
from lockstep.observe.trace_files import (
    drop_later_ranks,
    in_lines,
    merge,
    remove_json,
    spool_of,
    write_json,
)
from lockstep.torch_private import _BaseDataLoaderIter
from lockstep.world import World, when_joined

Steps = tuple[int, int]
_WRITING_INTERVAL_NS, _MEMORY_INTERVAL_NS = 10_000_000, 500_000_000
_MOST_LINES = 10_000  # that wait for the end of a step
# What is over when a forward begins.
_BEFORE_FORWARD = ("data", "backward", "average", "optimizer")


@contextmanager
def trace(folder: str | os.PathLike[str], *, steps: Steps | None = None) -> Iterator[None]:
    """Record what this rank does while the context is open, on every rank that opens it. ::

        with lockstep.trace("run1"):
            train()

    ``run1/trace.json`` then has all ranks, on one clock, for https://ui.perfetto.dev or
    ``chrome://tracing``. Spans are: data, forward (from the batch to the backward), backward, wait
    (for other ranks), optimizer, save; and for each bucket of gradients the time from its last
    gradient to its sums, and that of its all-reduce. While torch.profiler runs, data, wait and save
    are ranges of it, too.

    ``lockstep run --trace FOLDER`` does the same for a whole script. Every rank opens it, after
    :func:`lockstep.init`: over several hosts, the ranks measure by how much their clocks differ.

    Args:
        folder: Where to write; it is made if there is none. Files of an earlier trace are replaced.
        steps: The first step to record and the one after the last, from 0; by default all. A step
            ends with that of the program's first optimizer.

    A file that can't be written, on a full disk say, ends the trace of that rank and not the
    program: that is told of once, with what is lost.

    Raises:
        ValueError: If ``steps`` aren't two such numbers, or a trace is being recorded already.
        FileExistsError: If the folder is a file.
    """
    from lockstep.world import init

    world = init()
    path = Path(path_given("folder", folder, "run1"))
    with recording(path, world.rank, _checked(steps)) as rank_trace:
        rank_trace.join(world)
        yield


def _checked(steps: Steps | None) -> Steps | None:
    if steps is None:
        return None
    wanted = "two whole numbers, such as (10, 20)"
    if not isinstance(steps, tuple | list) or len(steps) != 2:
        raise ValueError(refusal("steps", steps, wanted))
    first, stop = (as_whole_number("steps", step, wanted, at_least=0) for step in steps)
    if first >= stop:
        raise ValueError(refusal("steps", steps, wanted + ", the second one larger"))
    return first, stop


@contextmanager
def recording(folder: Path, rank: int, steps: Steps | None = None) -> Iterator[_RankTrace]:
    """Record as rank ``rank``, which need not have joined the others yet."""
    what, lost = f"rank {rank}'s trace", "What this rank does from now on isn't recorded."
    with closing(Spool(spool_of(folder, rank), what, lost)) as spool:
        rank_trace = _RankTrace(spool, rank, steps)
        _process.add(rank_trace)
        try:
            # Not before: a trace that this rank is recording already may have these files.
            rank_trace.start()
            if spool.is_open:
                remove_json(folder, rank)
            yield rank_trace
        finally:
            _process.remove(rank_trace)
            rank_trace.write()
            is_whole = spool.is_open
    if is_whole:  # otherwise it was told what is missing, and report makes JSON of the rest
        lost = f"'lockstep report {folder}' makes them of the spans, where there is room."
        with only_observing(f"The JSON files of {what} can't be written to {folder}", lost):
            write_json(folder, rank)
            merge(folder)


class _RankTrace:
    """The spans of one rank, and the file that takes them, one in a line: a Recorder."""

    def __init__(self, spool: Spool, rank: int, steps: Steps | None) -> None:
        self._spool, self._has_started = spool, False
        # The words of each line that is yet to be written. A line costs less among many, and after
        # a step: between two operations of a model, every call takes memory out of the caches.
        self._lines: deque[tuple[object, ...]] = deque()
        self._written_at = 0
        self._first, self._stop = steps or (0, 2**62)
        self.step = 0  # the number of the one that the rank is in
        # By thread, the names of the spans that are open.
        self._open: dict[int, list[str]] = {}
        # The numbers of buckets, in the order in which they were sent first; and those of their
        # contents, as average_gradients() makes its buckets anew in each call.
        self._buckets: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._contents: dict[tuple[object, ...], tuple[weakref.ref[Any], int]] = {}
        self._bucket_numbers = itertools.count()
        self._loaders: dict[int, tuple[Callable[[], object], int]] = {}  # by id(), their numbers
        self._alike_loaders: dict[tuple[object, ...], tuple[Callable[[], object], int]] = {}
        self._loader_numbers = itertools.count()
        self._steps = spans.StepCounter()
        self._evaluations = EvaluationWatch()
        # When the program got a batch, stepped or ended a backward: its forward begins.
        self._since: int | None = None
        self._memory_noted_at = 0
        self._device = torch.device("cpu")
        self.thread = threading.get_ident()  # the program's own
        self.put(
            {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "boot": boot_id()}
        )

    def start(self) -> None:
        """Empty the file, and write to it from now on; other threads may have noted lines since."""
        self._spool.empty()
        self._has_started = True

    def put(self, facts: dict[str, Any]) -> None:
        """Note facts, in a line of their own."""
        self._lines.append((json.dumps(facts),))

    def join(self, world: World) -> None:
        """The rank has joined the others: note how many there are, and compare clocks."""
        if world.rank == 0:
            drop_later_ranks(self._spool.path.parent, world.world_size)
        facts: dict[str, Any] = {"world_size": world.world_size, "device": str(world.device)}
        facts |= {"local_world_size": world.local_world_size, "cores": num_cores()}
        facts |= {"threads": torch.get_num_threads()}
        self._device = world.device
        if world.process_group is not None and world.local_world_size < world.world_size:
            facts |= measure_offset(world.process_group)._asdict()
        else:
            facts |= Offset(0, 0)._asdict()
        self.put(facts)
        self.write()

    def write(self) -> None:
        """Write the lines; other threads may add some meanwhile."""
        if not self._has_started:
            return
        number = len(self._lines)
        lines = [" ".join(map(str, self._lines.popleft())) + "\n" for _ in range(number)]
        self._spool.write("".join(lines).encode())

    def log(self, values: Mapping[str, float]) -> None:
        if self._is_on:
            facts = {"step": self.step, "time": spans.now()}
            for some in in_lines(values):
                self.put({**facts, "log": some})

    def batch(self, loader: object, num_samples: int) -> None:
        thread = threading.get_ident()
        if not self._is_on or "data" in self._open.get(thread, ()):  # a loader in a loader
            return
        self._lines.append(
            (
                "batch",
                spans.now(),
                self.step,
                0 if thread == self.thread else thread,
                self._number_of(loader),
                num_samples,
                int(torch.is_grad_enabled()),
            )
        )

    def end_of_epoch(self, loader: object) -> None:
        self.batch(loader, END_OF_EPOCH)

    def _number_of(self, loader: Any) -> int:
        """The number of a loader, whose facts are noted when it gives its first batch."""
        # An iterator of torch's doesn't know its loader; what it draws from outlives it.
        same = getattr(loader, "_index_sampler", loader)
        found = self._loaders.get(id(same))
        if found is not None and found[0]() is same:
            return found[1]
        facts = _described(loader)
        # One that is made anew in each epoch keeps its number.
        alike = *facts, torch.is_grad_enabled()
        former, number = self._alike_loaders.get(alike, (None, 0))
        if former is None or former() is not None:
            number = min(next(self._loader_numbers), MOST_LOADERS - 1)
            self.put({"loader": number, **facts._asdict()})
        try:
            reference: Callable[[], object] = weakref.ref(same)
        except TypeError:
            reference = partial(_same, same)  # a list of batches, say, which is kept
        self._loaders[id(same)] = self._alike_loaders[alike] = reference, number
        return number

    @property
    def _is_on(self) -> bool:
        return self._first <= self.step < self._stop and self._spool.is_open

    def begin(self, name: str) -> bool:
        open_spans = self._open.setdefault(threading.get_ident(), [])
        if name in open_spans:
            return False
        if name == "backward":
            self._end_forward()
        elif name == "optimizer" and self._since is not None:
            self._since = spans.now()  # a closure's forward
        open_spans.append(name)
        return True

    def end(self, name: str, start: int, detail: str, num_bytes: int) -> None:
        thread, stop = threading.get_ident(), spans.now()
        self._open[thread].remove(name)
        if self._is_on:
            index = 0 if thread == self.thread else thread
            words = detail.replace(" ", "_")
            self._lines.append((name, start, stop, self.step, index, words, num_bytes))
            if len(self._lines) > _MOST_LINES and index == 0:
                self.write()
        if name in _BEFORE_FORWARD and thread == self.thread:
            self._since = stop

    def enter_context(self, context: object) -> None:
        """A context that may switch gradients off is entered."""
        if threading.get_ident() == self.thread and not self._open.get(self.thread):
            self._evaluations.enter(context)

    def leave_context(self, context: object) -> None:
        """It is left."""
        if threading.get_ident() != self.thread:
            return
        start = self._evaluations.leave(context)
        if start is not None:
            stop = spans.now()
            if self._is_on:
                self._lines.append(("evaluation", start, stop, self.step, 0, "", 0))
            self._since = None if self._since is None else stop

    def _end_forward(self) -> None:
        if self._since is not None and self._is_on:
            self._lines.append(("forward", self._since, spans.now(), self.step, 0, "", 0))
        self._since = None

    def bucket(self, bucket: Any, index: int, times: tuple[int, int, int]) -> None:
        if not self._is_on:
            return
        number = self._buckets.get(bucket)
        if number is None:
            number = self._buckets[bucket] = self._number_of_bucket(bucket, index)
        self._lines.append(("bucket", *times, self.step, number))

    def _number_of_bucket(self, bucket: Any, index: int) -> int:
        """The number of a bucket that is sent for the first time."""
        names = bucket.contents.parameter_names
        contents = index, bucket.num_bytes, *names
        former, number = self._contents.get(contents, (None, 0))
        if former is None or former() is not None:
            number = min(next(self._bucket_numbers), MOST_BUCKETS - 1)
            facts = {"bucket": number, "bytes": bucket.num_bytes, "index": index}
            kinds = {"hooked": bucket.is_hooked, "deferred": bucket.is_deferred}
            for some in in_lines(dict.fromkeys(names)):
                self.put({**facts, "parameters": [*some], **kinds})
        self._contents[contents] = weakref.ref(bucket), number
        return number

    def end_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._evaluations.note(optimizer)
        if self._steps.counts(optimizer):
            now = spans.now()
            if self._is_on:
                self._put_step(now)
            self.step += 1
            if now - self._written_at >= _WRITING_INTERVAL_NS:
                self._written_at = now
                self.write()

    def _put_step(self, now: int) -> None:
        """Note that the step ends and, now and then, the memory."""
        facts: dict[str, Any] = {"end_of": self.step, "time": now}
        if now - self._memory_noted_at >= _MEMORY_INTERVAL_NS:
            self._memory_noted_at = now
            facts["memory"] = memory_in_use(self._device)
        self.put(facts)


def _same(loader: object) -> object:
    return loader


class _DescribedLoader(NamedTuple):
    """What the report says of a loader."""

    dataset: str
    samples: int | None  # of the dataset
    workers: int
    persistent: bool


def _described(loader: Any) -> _DescribedLoader:
    """Return what the report says of one of our loaders, or of an iterator over one of torch's."""
    dataset = getattr(loader, "dataset", getattr(loader, "_dataset", None))
    workers = getattr(loader, "num_workers", getattr(loader, "_num_workers", 0))
    persists = getattr(loader, "persistent_workers", getattr(loader, "_persistent_workers", False))
    try:
        num_samples = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a stream
        num_samples = None
    return _DescribedLoader(type(dataset).__name__, num_samples, workers, bool(persists))


def _in_span(name: str) -> Callable[[Any], Any]:
    """Return what puts a function's calls into spans."""

    def wrapper(original: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            with spans.span(name):
                return original(*args, **options)

        return wrapped

    return wrapper


def _noting_batches(original: Any) -> Any:
    """Put the calls of an iterator's ``__next__`` into spans, and note what it returns."""

    def wrapped(iterator: Any) -> Any:
        try:
            with spans.span("data"):
                batch = original(iterator)
        except StopIteration:
            if spans.recorder is not None:
                spans.recorder.end_of_epoch(iterator)
            raise
        if spans.recorder is not None:
            spans.recorder.batch(iterator, 0)
        return batch

    return wrapped


def _passed_on(name: str) -> Callable[..., None]:
    """Return a method that passes its calls on to the trace of the rank that calls."""

    def method(process: _Process, *args: Any) -> None:
        if (rank_trace := process._of_this_thread()) is not None:
            getattr(rank_trace, name)(*args)

    return method


class _Process:
    """The traces of all ranks in this process, which are one, or several if they are threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: list[_RankTrace] = []
        self._undo = ExitStack()

    def add(self, rank_trace: _RankTrace) -> None:
        with self._lock:
            if any(rank_trace.thread == other.thread for other in self._traces):
                raise ValueError("This rank is traced already. End that before, or leave this out.")
            self._traces.append(rank_trace)
            if len(self._traces) == 1:
                self._begin()
            self._choose()

    def remove(self, rank_trace: _RankTrace) -> None:
        with self._lock:
            self._traces.remove(rank_trace)
            self._choose()
            if not self._traces:
                self._undo.close()

    def _choose(self) -> None:
        """Take the spans of one rank without a detour."""
        spans.recorder = self if len(self._traces) > 1 else next(iter(self._traces), None)

    def _begin(self) -> None:
        self._wrap(torch.autograd, "backward", _in_span("backward"))
        self._wrap(torch.autograd, "grad", _in_span("backward"))
        self._wrap(_BaseDataLoaderIter, "__next__", _noting_batches)
        starts: dict[tuple[int, int], int] = {}
        for handle in (
            register_optimizer_step_pre_hook(partial(self._before_step, starts)),
            register_optimizer_step_post_hook(partial(self._after_step, starts)),
        ):
            self._undo.callback(handle.remove)
        for kind in CONTEXTS:
            self._wrap(kind, "__enter__", self._entering)
            self._wrap(kind, "__exit__", self._leaving)
        when_joined.append(self._joined)
        self._undo.callback(when_joined.remove, self._joined)

    def _wrap(self, owner: Any, attribute: str, wrapper: Callable[[Any], Any]) -> None:
        original = getattr(owner, attribute)
        setattr(owner, attribute, uncompiled(functools.wraps(original)(wrapper(original))))
        self._undo.callback(setattr, owner, attribute, original)

    def _of_this_thread(self) -> _RankTrace | None:
        thread = threading.get_ident()
        traces = self._traces
        if len(traces) == 1:  # helper threads are that rank's, too
            return traces[0]
        return next((rank_trace for rank_trace in traces if thread == rank_trace.thread), None)

    def begin(self, name: str) -> bool:
        rank_trace = self._of_this_thread()
        return rank_trace is not None and rank_trace.begin(name)

    end = _passed_on("end")
    bucket, batch, end_of_epoch = map(_passed_on, ("bucket", "batch", "end_of_epoch"))
    log, _joined = _passed_on("log"), _passed_on("join")
    _enter_context, _leave_context = map(_passed_on, ("enter_context", "leave_context"))

    def _entering(self, original: Any) -> Any:
        def entering(context: Any) -> Any:
            result = original(context)
            self._enter_context(context)
            return result

        return entering

    def _leaving(self, original: Any) -> Any:
        def leaving(context: Any, *error: Any) -> Any:
            self._leave_context(context)
            return original(context, *error)

        return leaving

    @uncompiled
    def _before_step(self, starts: dict[Any, int], optimizer: Optimizer, *_: object) -> None:
        rank_trace = self._of_this_thread()
        if rank_trace is not None and rank_trace.begin("optimizer"):
            starts[threading.get_ident(), id(optimizer)] = spans.now()

    @uncompiled
    def _after_step(self, starts: dict[Any, int], optimizer: Optimizer, *_: object) -> None:
        rank_trace = self._of_this_thread()
        start = starts.pop((threading.get_ident(), id(optimizer)), None)
        if rank_trace is not None and start is not None:
            rank_trace.end("optimizer", start, "", 0)
            rank_trace.end_step(optimizer)


_process = _Process()
