"""A checkpoint that is being written: its folder, its files, and the lock of the folder around it.

Nothing is written through a link, as others may write to the folder too: see lockstep.folders.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.checkpoint.folder import (
    MANIFEST,
    MAX_PIECE_BYTES,
    NUMBER,
    VERSION,
    StoredPiece,
    file_of,
    padded,
)
from lockstep.comm import bytes_of
from lockstep.deadline import Deadline
from lockstep.errors import CheckpointError, SaveFailed
from lockstep.folders import Folder
from lockstep.printable import printable, shown
from lockstep.tree import Header, Range

# How long rank 0 waits for the others' parts of a checkpoint.
PATIENCE_SECONDS = 600.0
_POLL_SECONDS = 0.005
_OTHERS_SECONDS = 10.0  # for ranks that still write to a checkpoint that failed
_LOCK = ".lock"
_log = logging.getLogger("lockstep")
_HOLDER = re.compile(rb"process [0-9]+ on .*")


class PartMissing(Exception):
    """Another rank has failed, whose own error has the reason."""


class Place:
    """The folder of a checkpoint that is being written, and the lock of the folder around it.

    Rank 0 makes it with ``number=None``, which takes the lock and makes the folder; the others with
    the number that it has found, and open the folder when they write to it.

    Attributes:
        number: That of the checkpoint.
        final: The path that it gets when it is complete.
        is_abandoned: Whether to wait for no rank any more; another thread may set it.
    """

    def __init__(self, path: Path, number: int | None) -> None:
        self._path, self._lock, self.is_abandoned = path, -1, False
        self._num_taken = 0  # parts, from that of rank 0 on
        if number is None:
            if (path / MANIFEST).exists():
                raise SaveFailed(
                    f"{shown(path)} is a checkpoint, not a folder of checkpoints. Give the folder "
                    f"around it: {shown(path.parent)}."
                )
            path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                names = self._around.names()
                for name in names:  # what runs left that were killed while saving
                    if name.startswith(".tmp-") and NUMBER.fullmatch(name.removeprefix(".tmp-")):
                        self._around.remove(name)
                number = max((int(n) for n in names if NUMBER.fullmatch(n)), default=0) + 1
                while self._around.has(_new(number)):  # another user's, which can't be removed
                    number += 1
                self._around.make(_new(number))
            except BaseException:
                self.close()
                raise
        self.number, self.final = number, path / f"{number:06}"

    @cached_property
    def _around(self) -> Folder:
        return Folder(self._path)

    @cached_property
    def folder(self) -> Folder:
        """That of the checkpoint. An OSError if it isn't there."""
        return Folder(Path(_new(self.number)), within=self._around)

    def _take_lock(self) -> None:
        lock = self._around.open_lock(_LOCK)
        try:
            there = os.pread(lock, 500, 0)
            if there and not _HOLDER.fullmatch(there):
                raise SaveFailed(
                    f"{shown(self._path / _LOCK)} is a file of something else than lockstep. Save "
                    "to another folder, or rename that file."
                )
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = printable(there.decode(errors="replace"))
            os.close(lock)
            raise SaveFailed(
                f"Another run is saving to {shown(self._path)}: {holder} holds its {_LOCK}. Give "
                "each run a folder of its own."
            ) from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def close(self) -> None:
        """Release the lock, and leave the folders to a thread that may be removing old ones."""
        for name in ("folder", "_around"):
            vars(self).pop(name, None)
        if self._lock >= 0:
            # A loader's worker that was forked meanwhile has it open, too, as long as it runs.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def new_file(self, rank: int) -> BinaryIO:
        """Make the file of a rank's bytes."""
        return self.folder.new_file(file_of(rank))

    def commit(
        self, facts: dict[str, Any], parts: Sequence[dict[str, Any]], keep: int, *, in_thread: bool
    ) -> None:
        """Make the checkpoint of all ranks' ``parts`` visible, and remove all but ``keep``."""
        body = json.dumps(facts | _merged(parts)).encode()
        with self.folder.new_file(MANIFEST) as file:
            digest = hashlib.blake2b(body, digest_size=32).hexdigest()
            file.write(f"lockstep checkpoint {VERSION} {digest}\n".encode() + body)
            flush(file)
        self.folder.sync()
        self._check_there()
        self._around.rename(_new(self.number), self.final.name)
        try:
            self._around.sync()
        except OSError:  # it might be gone after a power cut, so it isn't there now
            self._around.rename(self.final.name, _new(self.number))
            raise
        try:
            self._prune(keep, in_thread=in_thread)
        except OSError as error:  # this one is saved nevertheless
            _log.warning("Older checkpoints in %s can't be removed: %s.", self._path, str(error))

    def _prune(self, keep: int, *, in_thread: bool) -> None:
        numbers = sorted(int(name) for name in self._around.names() if NUMBER.fullmatch(name))
        # The user's own folders may have numbers for names too. They are kept.
        checkpoints = [n for n in numbers if (self._path / f"{n:06}" / MANIFEST).exists()]
        for number in checkpoints[:-keep]:
            # Renamed first, so that a checkpoint with a number is whole.
            self._around.rename(f"{number:06}", _new(number))
            remove = partial(self._around.remove, _new(number))
            if in_thread:  # takes as long as a fifth of the save
                threading.Thread(target=remove, name="lockstep-remove").start()
            else:
                remove()

    def _check_there(self) -> None:
        if not self.folder.is_at_its_path():
            raise SaveFailed(
                f"The checkpoint was not saved: {self.folder.path} was removed or renamed while it "
                "was written. Leave the folder alone while ranks save to it."
            )

    def put_part(self, rank: int, part: dict[str, Any]) -> None:
        """Write the list of this rank's pieces; a rename shows it to rank 0 when it is complete."""
        with self.folder.new_file(f"rank-{rank}.tmp") as file:
            file.write(json.dumps(part).encode())
        self.folder.rename(f"rank-{rank}.tmp", f"rank-{rank}.json")

    def take_parts(self, num_ranks: int) -> list[dict[str, Any]]:
        """Wait for the lists of pieces of all ranks, and return them.

        Raises:
            SaveFailed: If one failed, or isn't done in time.
        """
        parts, deadline = list[dict[str, Any]](), Deadline(PATIENCE_SECONDS)
        while len(parts) < num_ranks:
            name = f"rank-{len(parts)}.json"
            if self.folder.has(name):
                parts.append(json.loads(self.folder.read(name)))
                self.folder.remove(name)
                self._num_taken += 1
                continue
            self._check_there()
            if self.is_abandoned or self.folder.has(f"rank-{len(parts)}.failed"):
                raise PartMissing(f"Rank {len(parts)} has not written its part of {self.final}.")
            if not deadline.left():
                there = self.folder.names()
                absent = [r for r in range(len(parts), num_ranks) if f"rank-{r}.json" not in there]
                raise SaveFailed(
                    f"Ranks {absent} have not written their parts of {self.final} within "
                    f"{PATIENCE_SECONDS:g} s. See what keeps them."
                )
            time.sleep(_POLL_SECONDS)
        return parts

    def discard(self, num_ranks: int = 1) -> None:
        """On rank 0 remove the folder of a save that failed.

        Another rank that writes to it may finish, or find for itself why it can't: it is waited
        for, for a while, unless the failure has been told to all.
        """
        deadline = Deadline(_OTHERS_SECONDS)
        others = range(max(1, self._num_taken), num_ranks)
        while deadline.left() and not self.is_abandoned and not all(map(self._has_ended, others)):
            time.sleep(_POLL_SECONDS)
        with suppress(OSError):  # the folder around it is gone too
            self._around.remove(_new(self.number))

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank has written its part, or failed to."""
        with suppress(OSError):
            return self.folder.has(f"rank-{rank}.json") or self.folder.has(f"rank-{rank}.failed")
        return True

    def put_failure(self, rank: int) -> None:
        """Tell rank 0 of this rank's failure, if the disk allows it."""
        told = f"rank-{rank}.failed"
        with suppress(OSError):
            # By its name, which the folder hasn't any more once the checkpoint is whole.
            folder = Folder(Path(_new(self.number)), within=self._around)
            try:  # a full disk has room for that
                folder.rename(file_of(rank), told)
            except FileNotFoundError:
                folder.new_file(told).close()


def _new(number: int) -> str:
    """The name of a checkpoint's folder until it is complete."""
    return f".tmp-{number:06}"


def flush(file: BinaryIO) -> None:
    """Wait until what was written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def in_pieces(ranges: Iterable[Range]) -> Iterable[Range]:
    """Divide ranges into pieces of at most 4 MiB."""
    for key, start, elements in ranges:
        size = MAX_PIECE_BYTES // elements.element_size()
        for first in range(0, elements.numel(), size):
            yield Range(key, start + first, elements[first : first + size])


def write_bytes(
    place: Place, rank: int, ranges: Sequence[Range], *, in_thread: bool
) -> tuple[int, dict[str, list[StoredPiece]]]:
    """Write pieces to the rank's file; return its size, and by tensor where they are.

    With ``in_thread`` a thread computes checksums beside the writing.
    """
    elements = [piece.elements.cpu() for piece in ranges]
    memories = [bytes_of(each) for each in elements]
    paddings = [bytes(padded(len(memory)) - len(memory)) for memory in memories]
    checksums: list[int] = []

    def compute() -> None:
        pairs = zip(memories, paddings, strict=True)
        checksums.extend(zlib.crc32(padding, zlib.crc32(memory)) for memory, padding in pairs)

    # Not if this is a thread that outlives the program: it can't start another.
    thread = threading.Thread(target=compute) if in_thread else None
    if thread is not None:
        thread.start()
    try:
        with place.new_file(rank) as file:
            for memory, padding in zip(memories, paddings, strict=True):
                file.write(memory)
                file.write(padding)
            flush(file)
    finally:
        if thread is not None:
            thread.join()
    if thread is None:
        compute()
    offset, pieces = 0, dict[str, list[StoredPiece]]()
    for (key, start, part), memory, checksum in zip(ranges, memories, checksums, strict=True):
        piece = StoredPiece(start, start + part.numel(), rank, offset, checksum)
        pieces.setdefault(key, []).append(piece)
        offset += padded(len(memory))
    return offset, pieces


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the lists of pieces of all ranks into the manifest's entries."""
    tensors: dict[str, Any] = {}
    divided: dict[str, dict[str, list[Any]]] = {}
    for part in parts:
        for key, (header, pieces) in part["tensors"].items():
            entry = tensors.setdefault(key, [header, []])
            assert entry[0] == header, key
            entry[1] += pieces
        for name, states in part["divided"].items():
            entries = divided.setdefault(name, {})
            for index, pairs in states.items():
                there = entries.setdefault(index, [])
                there += [pair for pair in pairs if pair not in there]
    for key, (header, pieces) in tensors.items():
        pieces.sort()
        ends = [0, *(stop for _, stop, *_ in pieces)]
        if [*(start for start, *_ in pieces), Header(*header).numel] != ends:
            raise SaveFailed(
                f"The ranks don't have each element of {key!r} once. Save over those ranks among "
                "which its optimizer is sharded: lockstep.save(..., process_group=...)."
            )
    return {
        "bytes": [part["bytes"] for part in parts],
        "random": [part["random"] for part in parts],
        "tensors": tensors,
        "divided": divided,
    }


def explained(error: Exception, path: Path) -> Exception:
    """Return the error to raise when ``error`` keeps a rank from saving."""
    if not isinstance(error, OSError) or isinstance(error, CheckpointError):
        return error
    failed = SaveFailed(
        f"The checkpoint was not saved: {error.strerror or error} ({error.filename or path}). "
        "Older ones are as they were. All ranks need a folder with room that they can write to."
    )
    failed.__cause__ = error
    return failed
