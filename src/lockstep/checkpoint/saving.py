"""``save``: a checkpoint of all ranks' things, of which each rank writes a part.

With ``async_`` a thread writes it while the program goes on.
"""

from __future__ import annotations

import atexit
import math
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.arguments import as_whole_number, check_flag
from lockstep.checkpoint.folder import padded
from lockstep.checkpoint.place import PartMissing, Place, explained, in_pieces, write_bytes
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.things import encode, kind_of
from lockstep.comm import context_of
from lockstep.deadline import Deadline
from lockstep.errors import SaveFailed
from lockstep.folders import path_given
from lockstep.generators import generator_of_device
from lockstep.nn import refuse_in_shard
from lockstep.spans import span
from lockstep.tree import Collector, Range
from lockstep.world import accelerator, num_accelerators

# Smaller tensors are written by rank 0 alone, so that those that may differ between the ranks, such
# as buffers, are those of one rank.
_SMALL_BYTES = 64 * 1024
_TO_SAVE_SECONDS = 10.0  # for what can't be saved any more
_EXCHANGE_SECONDS = 1.0  # between words of how an asynchronous save goes
_LOOK_SECONDS = 0.1  # between looks for Ctrl-C, whose signal another thread may have taken


def save(
    path: str | os.PathLike[str],
    *,
    keep: int = 2,
    async_: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **things: Any,
) -> Path:
    """Save ``things`` in a new checkpoint in the folder ``path``. ::

        lockstep.save("run", model=model, optimizer=optimizer, epoch=epoch)

    A thing is a module, an optimizer, a tensor, a ``torch.Generator``, any object that has
    ``state_dict()`` and ``load_state_dict()`` (a learning rate scheduler, a GradScaler, a data
    loader), or a plain value: numbers, strings, bytes, tensors, dtypes, devices, and lists, tuples,
    sets and dictionaries of them. The random states of every rank (Python's, NumPy's, torch's, and
    those of its accelerators) are saved along.

    Models have the keys that they have without a wrapper, and optimizers are saved by parameter,
    sharded or not: a checkpoint loads at any number of ranks, into parallel models and others. The
    ranks are expected to hold the same; each writes about as many bytes of it as any other. Of
    tensors of less than 64 KiB, such as most buffers, the values of rank 0 are saved.

    The checkpoint is a sub-folder, ``000001`` and so on. It gets that name when all of it is on the
    disk: whatever happens before leaves the older ones as they are. All ranks have to see the
    folder, so on several hosts it is on a file system that they share.

    Every rank calls it, with things of the same names; it blocks. With ``async_`` only until the
    tensors are copied to memory, which is kept for the next time; a thread writes them. The next
    ``save()`` or :func:`lockstep.load` of the same ranks waits for that, and so does the end of the
    program. If it failed, that ``save()`` or ``load()`` raises; at the end of the program the
    error is printed, and its exit code is 1.

    Args:
        path: The folder, which is made if it isn't there.
        keep: How many checkpoints are left there, the new one among them.
        async_: Whether to write while the program goes on.
        process_group: The ranks; by default all of ``lockstep.init()``.
        things: What to save, by name.

    Returns:
        The path of the checkpoint; with ``async_`` it is there when it is complete.

    Raises:
        SaveFailed: If it can't be written, on any rank.
        CheckpointMismatch: If the ranks' things differ.
        TypeError: If something is of a type that isn't saved.
        ValueError: If an argument is out of range.
    """
    refuse_in_shard("lockstep.save() is called")
    keep = as_whole_number("keep", keep, "1 or more", at_least=1)
    check_flag("async_", async_)
    options = {"path": path_given("path", path, "run"), "keep": keep, "async_": async_}
    with span("save"):
        return _save(Ranks(process_group), things, options)


def _save(ranks: Ranks, things: dict[str, Any], options: dict[str, Any]) -> Path:
    folder = Path(options["path"]).absolute()
    background = background_of(ranks.group)
    background.finish_on(ranks)
    kinds = {name: kind_of(things[name]) for name in sorted(things)}
    ranks.check_same(options | {"things": kinds}, "save")
    shared, local, number = Collector(), Collector(), 0
    place, failure, divided, trees = None, None, {}, {}
    random_state = None
    try:
        for name in kinds:
            trees[name] = encode(name, things[name], shared, local)
            divided[name] = trees[name].pop("divided")
        random_state = local.encode(random_states(), f"random.{ranks.rank}")
        if ranks.rank == 0:
            place = Place(folder, None)
            number = place.number
    except Exception as error:
        failure = explained(error, folder)
    try:
        number = ranks.gather(failure, number)[0]
        place = place or Place(folder, number)
        ranks.check_same({"things": trees, "tensors": shared.headers}, "save")
        ranges = [*_local_ranges(shared.whole, ranks.rank, ranks.size), *local.ranges]
        ranges += [Range(key, 0, flat) for key, flat in local.whole.items()]
        facts = {
            "lockstep": metadata.version("torch-lockstep"),
            "torch": str(torch.__version__),
            "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ranks": ranks.size,
            "things": trees,
        }
        part = {
            "random": random_state,
            "divided": divided,
            "headers": {**shared.headers, **local.headers},
        }
        writing = Writing(
            place, ranks.rank, ranks.size, options["keep"], facts, part, [*in_pieces(ranges)]
        )
        if options["async_"]:
            writing.ranges = background.copied(writing.ranges)
            background.start(writing)
            place = None
        else:
            for step in writing.write, writing.commit:
                ranks.gather(writing.tried(partial(step, in_thread=True)))
    except BaseException:
        if place is not None and ranks.rank == 0:
            place.discard()
        raise
    finally:
        if place is not None:
            place.close()
    return folder / f"{number:06}"


@dataclass
class Writing:
    """One rank's part of a checkpoint, and the steps that write it."""

    place: Place
    rank: int
    size: int
    keep: int
    facts: dict[str, Any]  # of the checkpoint
    part: dict[str, Any]  # of this rank
    ranges: Sequence[Range]  # in pieces

    def write(self, *, in_thread: bool = False) -> None:
        """Write this rank's file, and then tell rank 0 what is in it."""
        self.part["bytes"], pieces = write_bytes(
            self.place, self.rank, self.ranges, in_thread=in_thread
        )
        headers = self.part.pop("headers").items()
        self.part["tensors"] = {key: [header, pieces.get(key, [])] for key, header in headers}
        self.place.put_part(self.rank, self.part)

    def commit(self, *, in_thread: bool = False) -> None:
        """On rank 0 wait for what all ranks have written, and make the checkpoint visible."""
        if self.rank == 0:
            parts = self.place.take_parts(self.size)
            self.place.commit(self.facts, parts, self.keep, in_thread=in_thread)

    def tried(self, *steps: Callable[[], None]) -> Exception | None:
        """Take steps, and return the error of the one that failed."""
        try:
            for step in steps:
                step()
        except Exception as error:
            self.place.put_failure(self.rank)
            return explained(error, self.place.final)
        return None

    def run_alone(self, tell: Callable[[Exception], None]) -> None:
        """Do all of it without collectives; if that fails, tell the error, and leave no folder."""
        try:
            if (error := self.tried(self.write, self.commit)) is not None:
                tell(error)
                if self.rank == 0:
                    self.place.discard(self.size)
        finally:
            self.place.close()


def _local_ranges(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> Iterator[Range]:
    """Yield this rank's ranges of replicated tensors: an equal part of their bytes."""
    large = {key: flat for key, flat in tensors.items() if flat.nbytes >= _SMALL_BYTES}
    if rank == 0:
        yield from (Range(key, 0, flat) for key, flat in tensors.items() if key not in large)
    total = sum(flat.nbytes for flat in large.values())
    first, last, begin = total * rank // size, total * (rank + 1) // size, 0
    for key, flat in large.items():
        start, stop = (
            min(max(at - begin, 0), flat.nbytes) // flat.element_size() for at in (first, last)
        )
        if start < stop:
            yield Range(key, start, flat[start:stop])
        begin += flat.nbytes


def random_states() -> dict[str, Any]:
    """Return the states of the generators of random numbers that this process uses."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (kind := accelerator()) is not None and _is_in_use(kind):
        devices = (torch.device(kind, index) for index in range(num_accelerators()))
        states[kind] = [generator_of_device(each).generator.get_state() for each in devices]
    return states


def _is_in_use(kind: str) -> bool:
    return bool(getattr(torch.get_device_module(kind), "is_initialized", lambda: True)())


class Background:
    """Saves one checkpoint at a time in a thread of this rank.

    The thread calls no collectives: their order among the program's would differ between ranks.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._thread: threading.Thread | None = None
        self._place: Place | None = None  # of the save that is going on
        self._error: Exception | None = None

    def copied(self, ranges: Sequence[Range]) -> list[Range]:
        """Copy all elements into one buffer, which is kept for the next save."""
        total = sum(padded(piece.elements.nbytes) for piece in ranges)
        if self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu")
        at, copies = 0, []
        for key, start, elements in ranges:
            target = self._memory[at : at + elements.nbytes].view(elements.dtype)
            copies.append(Range(key, start, target.copy_(elements)))
            at += padded(elements.nbytes)
        return copies

    def start(self, writing: Writing) -> None:
        """Start a thread that writes, and keeps the error if that fails."""

        def keep(error: Exception) -> None:
            if not writing.place.is_abandoned:  # else all ranks have raised the reason
                self._error = error

        self._place = writing.place
        if not _backgrounds:
            atexit.register(_at_exit)
        _backgrounds.add(self)
        # No daemon: the interpreter waits for it.
        self._thread = threading.Thread(
            target=writing.run_alone, args=(keep,), name="lockstep-save"
        )
        self._thread.start()

    def finish(self, seconds: float = math.inf) -> Exception | None:
        """Wait so long for the save that is going on; return its error, as soon as it fails."""
        deadline = Deadline(seconds)
        while self._thread is not None:
            self._thread.join(_LOOK_SECONDS)
            if not self._thread.is_alive():
                self._thread, self._place = None, None
            elif self._error is not None or not deadline.left():
                break
        error, self._error = self._error, None
        return error

    def finish_on(self, ranks: Ranks) -> None:
        """Wait for the save that is going on on any of ``ranks``, each of which calls it.

        The ranks tell each other how it goes, so that none waits for what another can't do, nor
        longer than the group's timeout for one that only takes long.

        Raises:
            CheckpointError: If it failed on any.
        """
        missing = None
        while True:
            error = self.finish(_EXCHANGE_SECONDS)
            if isinstance(error, PartMissing):  # the rank that has failed is about to tell why
                missing, error = SaveFailed(str(error)), None
            try:
                if all(ranks.gather(error, self._thread is None)):
                    ranks.gather(missing)
                    return
            except BaseException:
                if self._place is not None:
                    self._place.is_abandoned = True
                self.finish(_TO_SAVE_SECONDS)  # the disk may be stuck, and the others have raised
                raise


# Those that have started a thread, which may go on when their group is gone.
_backgrounds: set[Background] = set()


def background_of(group: Any) -> Background:
    """Return this rank's :class:`Background` for saves over ``group``."""
    return context_of(group).get(Background)


def _at_exit() -> None:
    errors = [error for each in _backgrounds if (error := each.finish()) is not None]
    for error in errors:
        traceback.print_exception(error)
    if errors:
        for each in _backgrounds:
            each.finish(_TO_SAVE_SECONDS)
        print("lockstep: the last checkpoint was not saved.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # An exception of an exit handler wouldn't be the program's exit code.
        os._exit(1)
