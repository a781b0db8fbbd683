"""Snapshots of this rank's state in the launcher's memory: taken, verified, and put back."""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.checkpoint import LiveThings, Snapshot, SnapshotPlan, merged
from lockstep.comm import bytes_of, check_room
from lockstep.errors import SharedMemoryFull
from lockstep.launcher import SnapshotHeader, SnapshotMemory
from lockstep.resume.checkpoints import LOADER
from lockstep.resume.samples import Excerpts, RepeatedStep, room_for
from lockstep.torch_private import _foreach_copy_

# From this size on, a thread copies what only an optimizer's step changes.
_THREAD_BYTES = 10_000_000
_BLOCK_WORDS = 2**17  # of a checksum: a megabyte
_log = logging.getLogger("lockstep")


class Snapshots:
    """This rank's snapshots.

    What a step of an optimizer alone changes is copied by a thread, if it is much; the next step of
    any optimizer waits for it. All else is copied at once.

    Args:
        memory: The rank's slots.
        things: What is in a snapshot, by name.
        key: The digest of the program.
        rank: This rank.
        path: The folder of the program's checkpoints, or "".

    Attributes:
        key: The digest.
        is_torn: Whether the last one was discarded, as it was changed while it was copied.
    """

    is_torn = False

    def __init__(
        self, memory: SnapshotMemory, things: Mapping[str, Any], key: bytes, rank: int, path: str
    ) -> None:
        self._memory, self._things = memory, things
        self.key, self._rank, self._path = key, rank, path
        self._live = LiveThings(things)
        self._places: tuple[SnapshotPlan | None, bytes] = (None, b"")
        self._targets: dict[int, tuple[Any, SnapshotPlan, list[list[torch.Tensor]]]] = {}
        self._sources: list[list[torch.Tensor]] = []  # those copied at once, and late
        self._slot = 0  # the one to write next
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._thread_seconds = 0.0
        self._versions: list[int] = []  # of what the thread copies
        self._copied: tuple[Excerpts, bytes] | None = None  # of that too
        self._copies_at_once = False
        self._is_first = True
        self._repeated = RepeatedStep(memory)
        self._hook: Any = None

    def __enter__(self) -> Snapshots:
        """A loop begins, in which snapshots are taken."""
        self._hook = register_optimizer_step_pre_hook(lambda *_: self.join())
        return self

    def __exit__(self, *_: object) -> None:
        """Complete what is being copied."""
        self._hook.remove()
        self.join()

    def close(self) -> None:
        """Leave the memory to the launcher."""
        try:
            self.join()
        finally:
            self._targets.clear()
            self._copied = None
            self._memory.close()

    def join(self) -> None:
        """Wait until the thread has copied the snapshot.

        If the program has changed meanwhile what it copied, it is no snapshot.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._error is None and self._has_changed():
                self._memory.discard(1 - self._slot)
                self.is_torn = True
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _has_changed(self) -> bool:
        """Whether what the thread has copied was changed since it began; not all can be seen."""
        assert self._copied is not None
        samples, expected = self._copied  # p.data.mul_() isn't among the versions
        return self._versions != _versions(self._sources[1]) or samples.take() != expected

    def retake(self) -> None:
        """Take the next one in place of the last, which is torn on a rank: all of it at once."""
        self._slot = 1 - self._slot
        self._memory.discard(self._slot)
        self.is_torn, self._copies_at_once = False, True

    def take(self, step: int, values: dict[str, Any], loader_state: Any) -> float:
        """Take a snapshot of the state after ``step`` steps; return the seconds that the last took.

        The other slot has to be whole on all ranks.

        Raises:
            OSError: If there is no memory for it.
        """
        start = time.perf_counter()
        self.join()
        seconds = self._thread_seconds + self._repeated.seconds
        self._thread_seconds = self._repeated.seconds = 0.0
        if self._is_first:
            self._discard_others()
        slot = self._slot
        self._memory.discard(slot)
        live = self._live.update()
        if self._places[0] is not live:
            self._places = live, json.dumps(live.places).encode()
        rest = {n: t for n, t in self._things.items() if n not in self._live.names}
        if loader_state is not None:
            rest[LOADER] = loader_state
        changing = SnapshotPlan(rest, live.num_bytes)
        text = json.dumps(
            {"places": changing.places, "options": self._live.options(), "values": values}
        ).encode()
        texts = self._places[1] + text
        header = SnapshotHeader(
            step=step,
            rank=self._rank,
            tensor_bytes=changing.num_bytes,
            places_bytes=len(self._places[1]),
            value_bytes=len(text),
            tensor_checksum=0,
            text_checksum=zlib.crc32(texts),
            key=self.key,
            path=self._path,
        )
        memory = self._room(slot, header.num_bytes + room_for(live))
        memory[header.tensor_bytes : header.num_bytes] = texts
        tensors = torch.frombuffer(memory, dtype=torch.uint8)[: header.tensor_bytes]
        with torch.no_grad():
            for _, offset, elements in changing.placed:
                _target(tensors, offset, elements).copy_(elements)
        self._copy(slot, live, tensors, memory, late=False)
        if live.late_bytes >= _THREAD_BYTES and not self._copies_at_once:
            self._versions = _versions(self._sources[1])
            if self._copied is None or self._copied[0].plan is not live:
                self._copied = Excerpts(live, late=True), b""
            self._copied = self._copied[0], self._copied[0].take()
            self._thread = threading.Thread(
                target=self._finish,
                args=(slot, live, tensors, memory, header),
                name="lockstep-snapshot",
                daemon=True,
            )
            self._thread.start()
        else:
            if live.late:
                self._copy(slot, live, tensors, memory, late=True)
            self._complete(slot, header, tensors)
        self._slot = 1 - slot
        self._repeated.taken = step, slot, header.num_bytes
        return seconds + time.perf_counter() - start

    def sample(self, step: int) -> str | None:
        """Take samples after the step that follows a snapshot, or compare them with those before.

        Every step's end may call it.

        Returns:
            The name of a tensor that isn't as it was before a restart, if there is one.
        """
        return self._repeated.after(step, self._current_plan)

    def _current_plan(self) -> SnapshotPlan:
        self.join()
        return self._live.update()

    def _room(self, slot: int, num_bytes: int) -> memoryview:
        if self._memory.capacity(slot) < num_bytes:  # a look at limits takes milliseconds
            try:
                check_room(num_bytes)
            except SharedMemoryFull as error:
                raise OSError(str(error)) from error
        return self._memory.room(slot, num_bytes)

    def _copy(
        self,
        slot: int,
        live: SnapshotPlan,
        tensors: torch.Tensor,
        memory: memoryview,
        *,
        late: bool,
    ) -> None:
        known = self._targets.get(slot)
        if known is None or known[0] is not memory.obj or known[1] is not live:
            of_late = {id(each) for each in live.late}
            at_once = [each for each in live.placed if id(each) not in of_late]
            targets = [
                [_target(tensors, offset, elements) for _, offset, elements in part]
                for part in (at_once, live.late)
            ]
            known = self._targets[slot] = memory.obj, live, targets
            self._sources = [[each.elements for each in part] for part in (at_once, live.late)]
        if known[2][late]:
            with torch.no_grad():
                _foreach_copy_(known[2][late], self._sources[late])

    def _finish(
        self, slot: int, live: SnapshotPlan, tensors: torch.Tensor, memory: memoryview, header: Any
    ) -> None:
        start = time.thread_time()
        try:
            self._copy(slot, live, tensors, memory, late=True)
            self._complete(slot, header, tensors)
        except Exception as error:
            self._error = error
        self._thread_seconds = time.thread_time() - start

    def _complete(self, slot: int, header: SnapshotHeader, tensors: torch.Tensor) -> None:
        checksum = checksum_of(tensors)
        self._memory.complete(slot, header._replace(tensor_checksum=checksum))

    def usable(self) -> list[int]:
        """Return the steps of the snapshots here that are this program's, and as it wrote them."""
        found = []
        for slot, header in self._memory.headers().items():
            if header.key != self.key or header.rank != self._rank:
                continue
            if not is_as_written(self._memory, slot, header):
                _log.warning(
                    "The snapshot after step %s isn't as rank %s wrote it: its checksum differs. "
                    "The run goes on from an older one, or from the newest checkpoint.",
                    header.step,
                    self._rank,
                )
                self._memory.discard(slot)
                continue
            found.append(header.step)
        return found

    def steps_of_run(self, step: int) -> int:
        """Return how many steps the snapshot of ``step``, which counts all loops, has of its own.

        ``usable()`` has returned it.
        """
        _, _, (_, rest) = self._of_step(step)
        return int(rest["values"]["step"])

    def _of_step(self, step: int) -> tuple[int, SnapshotHeader, list[Any]]:
        """Return the slot of a snapshot, its header, and what its texts have."""
        slot, header = self._memory.of_step(step)
        texts = self._memory.texts(slot, header)
        assert texts is not None  # or it isn't usable
        return slot, header, [*map(json.loads, texts)]

    def restore(self, step: int) -> tuple[dict[str, Any], Any]:
        """Put back the snapshot of ``step``.

        Returns:
            The values that were taken with it, and the state of a foreign loader.

        Raises:
            CheckpointMismatch: If the things are others now.
        """
        slot, header, (places, rest) = self._of_step(step)
        tensors = torch.frombuffer(self._memory.view(slot), dtype=torch.uint8)
        whole = merged(places, rest["places"], rest["options"])
        snapshot = Snapshot(whole, tensors)
        snapshot.restore(self._things)
        self._slot = 1 - slot
        self._repeated.expect(step + 1, slot, header.num_bytes)
        return rest["values"], snapshot.value(LOADER)

    def discard(self, *, but: Collection[int] = ()) -> None:
        """Discard the program's snapshots that the ranks don't go on from; all but these."""
        for slot, header in self._memory.headers().items():
            if header.key == self.key and header.step not in but:
                self._memory.discard(slot)

    def _discard_others(self) -> None:
        """Discard those of another program, or of another loop of this one: theirs is the past."""
        for slot, header in self._memory.headers().items():
            if header.key != self.key:
                self._memory.discard(slot)
        self._is_first = False


def is_as_written(memory: SnapshotMemory, slot: int, header: SnapshotHeader) -> bool:
    """Whether the bytes of a slot are those that were written."""
    tensors = torch.frombuffer(memory.view(slot), dtype=torch.uint8)[: header.tensor_bytes]
    is_same = checksum_of(tensors) == header.tensor_checksum
    return is_same and memory.texts(slot, header) is not None


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often each was changed in place."""
    try:
        return [each._version for each in tensors]
    except RuntimeError:  # tensors made in inference mode don't count
        return []


def _target(tensors: torch.Tensor, offset: int, elements: torch.Tensor) -> torch.Tensor:
    return tensors[offset : offset + elements.nbytes].view(elements.dtype)


def checksum_of(tensors: torch.Tensor) -> int:
    """Return a checksum of bytes, whose number is divisible by 8: of the sums of their megabytes.

    It takes a tenth of CRC-32's time, less than the copy.
    """
    words = tensors.view(torch.int64)
    rest = len(words) % _BLOCK_WORDS
    whole = words[: len(words) - rest].view(-1, _BLOCK_WORDS).sum(1)
    sums = torch.cat([whole, words[len(words) - rest :].sum().view(1)])
    return zlib.crc32(bytes(bytes_of(sums)))
