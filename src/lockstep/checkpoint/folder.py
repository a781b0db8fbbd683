"""The folder of checkpoints, and the files of one.

Each checkpoint is a folder of its own, ``000001`` and so on. It has a file of bytes from each rank,
``rank-0.bin`` and so on, and ``manifest.json``, which says what they are. It is written as
``.tmp-000001`` and renamed when all is on the disk, so that one with a number is complete.

The manifest's first line has the version of the format and a digest of the rest, which is JSON:
values (see tree.py), and each tensor's dtype, shape and pieces. A piece is a range of its elements
in one of the files, with a checksum; together the pieces cover every byte of the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.comm import bytes_of
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, SaveFailed
from lockstep.tree import Header, Range, from_flat

VERSION = 1
MANIFEST = "manifest.json"

# Where tensors begin in a file: where any processor reads them fastest.
_ALIGNMENT = 64
# The most bytes of a piece: damage is found, and parts are read, in units of this size.
_PIECE_BYTES = 4 * 1024 * 1024
# How long rank 0 waits for the others' parts of a checkpoint.
PATIENCE_SECONDS = 600.0
_FIRST_LINE = re.compile(rb"lockstep checkpoint ([0-9]+) ([0-9a-f]{64})\n")
_NUMBER = re.compile(r"[0-9]{6}|[1-9][0-9]{6,}")


class Piece(NamedTuple):
    """Elements of a tensor that are in a file, and the padding behind them."""

    start: int  # the first one, of the tensor's
    stop: int
    file: int  # the rank that wrote it
    offset: int  # in bytes
    checksum: int  # CRC-32, of the padding too


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    header: Header
    pieces: tuple[Piece, ...]  # in the order of their elements, of which they have all


def numbers_in(path: Path) -> list[int]:
    """Return the numbers that name checkpoints, or other folders and files, in ascending order."""
    names = os.listdir(path) if path.is_dir() else []
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


class Place:
    """The folder of a checkpoint that is being written, and the lock of the folder around it.

    Rank 0 makes it with ``number=None``, which takes the lock and makes the folder; the others with
    the number that it has found.
    """

    def __init__(self, path: Path, number: int | None) -> None:
        self._path, self._lock = path, -1
        if number is None:
            if (path / MANIFEST).exists():
                raise SaveFailed(
                    f"{path} is a checkpoint, not a folder of checkpoints. Give the folder around "
                    f"it: {path.parent}."
                )
            path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                # What runs left that were killed while saving.
                for left in path.glob(".tmp-*"):
                    if _NUMBER.fullmatch(left.name.removeprefix(".tmp-")):
                        shutil.rmtree(left, ignore_errors=True)
                number = max(numbers_in(path), default=0) + 1
                self._new(number).mkdir()
            except BaseException:
                self.close()
                raise
        self.number, self.folder = number, self._new(number)
        self.final = path / f"{number:06}"

    def _new(self, number: int) -> Path:
        return self._path / f".tmp-{number:06}"

    def _take_lock(self) -> None:
        name = self._path / ".lock"
        lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            holder = os.read(lock, 500).decode(errors="replace")
            os.close(lock)
            raise SaveFailed(
                f"Another run is saving to {self._path}: {holder} holds {name}. Give each run a "
                "folder of its own."
            ) from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def commit(
        self, facts: dict[str, Any], parts: Sequence[dict[str, Any]], keep: int, *, in_thread: bool
    ) -> None:
        """Make the checkpoint of all ranks' ``parts`` visible, and remove all but ``keep``."""
        body = json.dumps(facts | _merged(parts)).encode()
        with open(self.folder / MANIFEST, "wb") as file:
            digest = hashlib.blake2b(body, digest_size=32).hexdigest()
            file.write(f"lockstep checkpoint {VERSION} {digest}\n".encode() + body)
            flush(file)
        sync_folder(self.folder)
        self.folder.rename(self.final)
        sync_folder(self._path)
        folders = [(number, self._path / f"{number:06}") for number in numbers_in(self._path)]
        # The user's own folders may have numbers for names too. They are kept.
        checkpoints = [each for each in folders if (each[1] / MANIFEST).exists()]
        for number, old in checkpoints[:-keep]:
            # Renamed first, so that a checkpoint with a number is whole.
            old.rename(self._new(number))
            remove = partial(shutil.rmtree, self._new(number), ignore_errors=True)
            if in_thread:  # takes as long as a fifth of the save
                threading.Thread(target=remove, name="lockstep-remove").start()
            else:
                remove()

    def put_part(self, rank: int, part: dict[str, Any]) -> None:
        """Write the list of this rank's pieces; a rename shows it to rank 0 when it is complete."""
        unfinished = self._part(rank).with_suffix(".tmp")
        unfinished.write_text(json.dumps(part))
        unfinished.rename(self._part(rank))

    def _part(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def take_parts(self, num_ranks: int) -> list[dict[str, Any]]:
        """Wait for the lists of pieces of all ranks, and return them.

        Raises:
            SaveFailed: If one failed, or isn't done in time.
        """
        parts, end = list[dict[str, Any]](), time.monotonic() + PATIENCE_SECONDS
        while len(parts) < num_ranks:
            path = self._part(len(parts))
            if path.exists():
                parts.append(json.loads(path.read_text()))
                path.unlink()
                continue
            if path.with_suffix(".failed").exists():
                raise SaveFailed(f"Rank {len(parts)} has not written its part of {self.final}.")
            if time.monotonic() > end:
                absent = [
                    r for r in range(num_ranks) if r >= len(parts) and not self._part(r).exists()
                ]
                raise SaveFailed(
                    f"Ranks {absent} have not written their parts of {self.final} within "
                    f"{PATIENCE_SECONDS:g} s. See what keeps them."
                )
            time.sleep(0.005)
        return parts

    def discard(self) -> None:
        """Remove the folder of a save that failed; no rank may be writing to it any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def put_failure(self, rank: int) -> None:
        """Leave a file that tells rank 0 of this rank's failure, if the disk allows it."""
        with suppress(OSError):
            self._part(rank).with_suffix(".failed").touch()


def flush(file: Any) -> None:
    """Wait until what was written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.bin"


def padded(num_bytes: int) -> int:
    """Return the size in a file of a piece of this size."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def in_pieces(ranges: Iterable[Range]) -> Iterable[Range]:
    """Divide ranges into pieces of at most 4 MiB."""
    for key, start, elements in ranges:
        size = _PIECE_BYTES // elements.element_size()
        for first in range(0, elements.numel(), size):
            yield Range(key, start + first, elements[first : first + size])


def write_bytes(
    path: Path, rank: int, ranges: Sequence[Range], *, in_thread: bool
) -> tuple[int, dict[str, list[Piece]]]:
    """Write pieces to a file; return its size, and by tensor where they are.

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
        with open(path, "wb") as file:
            for memory, padding in zip(memories, paddings, strict=True):
                file.write(memory)
                file.write(padding)
            flush(file)
    finally:
        if thread is not None:
            thread.join()
    if thread is None:
        compute()
    offset, pieces = 0, dict[str, list[Piece]]()
    for (key, start, part), memory, checksum in zip(ranges, memories, checksums, strict=True):
        piece = Piece(start, start + part.numel(), rank, offset, checksum)
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
            own = divided.setdefault(name, {})
            for index, pairs in states.items():
                there = own.setdefault(index, [])
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


class Manifest:
    """The manifest of a checkpoint; reads tensors and verifies their checksums.

    Attributes:
        folder: The checkpoint.
        facts: The JSON as a whole.
        entries: The tensors by name.

    Raises:
        CheckpointDamaged: If a file is missing, or isn't as it was written.
        CheckpointNotFound: If there is no checkpoint in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / MANIFEST
        try:
            first, _, body = self._path.read_bytes().partition(b"\n")
        except (FileNotFoundError, NotADirectoryError) as error:
            if not folder.is_dir():
                raise CheckpointNotFound(f"There is no checkpoint {folder}.") from error
            raise self._damaged("is missing") from error
        except OSError as error:
            raise self._damaged(f"can't be read ({error.strerror})") from error
        found = _FIRST_LINE.fullmatch(first + b"\n")
        if found is None:
            raise self._damaged("doesn't begin as a checkpoint of lockstep does")
        if int(found[1]) > VERSION:
            raise CheckpointDamaged(
                f"{self._path} has format {int(found[1])}, and this version of lockstep reads up "
                f"to {VERSION}. Install the version that it was saved with, or a newer one."
            )
        if hashlib.blake2b(body, digest_size=32).hexdigest().encode() != found[2]:
            raise self._damaged("isn't as it was written")
        self.facts, self.entries, self.sizes = self.parse(self._parse, body)

    def _damaged(self, what: str, name: str = MANIFEST) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{self.folder / name} {what}. Nothing was loaded. Load an older checkpoint, by its "
            "number: lockstep.load('.../000001', ...)."
        )

    def plain_values(self) -> set[str]:
        """Return the names of what was saved as it is."""
        return {name for name, thing in self.facts["things"].items() if thing["kind"] == "value"}

    def parse(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)``, in which any error means that the manifest is damaged."""
        try:
            return function(*args)
        except CheckpointDamaged:
            raise
        except Exception as error:
            raise self._damaged(f"can't be understood ({type(error).__name__}: {error})") from error

    def _parse(self, body: bytes) -> tuple[dict[str, Any], dict[str, Entry], list[int]]:
        facts = json.loads(body)
        sizes = [int(size) for size in facts["bytes"]]
        for name, thing in facts["things"].items():
            if not isinstance(thing["kind"], str) or "tree" not in thing:
                raise ValueError(f"{name!r} has no kind and value")
        if not facts["random"]:
            raise ValueError("there are no random states")
        entries = {}
        for key, ((dtype, shape, order), pieces) in facts["tensors"].items():
            header = Header(dtype, tuple(map(int, shape)), tuple(map(int, order)))
            entry = Entry(header, tuple(Piece(*map(int, piece)) for piece in pieces))
            from_flat(torch.empty(header.numel, dtype=header.torch_dtype, device="meta"), header)
            at = 0
            for start, stop, file, offset, _ in entry.pieces:
                size = padded((stop - start) * header.torch_dtype.itemsize)
                is_inside = start == at <= stop and 0 <= offset <= sizes[file] - size and file >= 0
                if not is_inside:
                    raise ValueError(f"the pieces of {key!r} don't fit")
                at = stop
            if at != header.numel:
                raise ValueError(f"the pieces of {key!r} have {at} of {header.numel} elements")
            entries[key] = entry
        for rank, size in enumerate(sizes):
            name = file_of(rank)
            try:
                found = (self.folder / name).stat().st_size
            except OSError as error:
                raise self._damaged(f"is missing ({error.strerror})", name) from error
            if found != size:
                raise self._damaged(f"has {found} bytes, and was written with {size}", name)
        return facts, entries, sizes

    def read(self, key: str, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """Return a tensor, or one in which only the elements of ``ranges`` are set.

        Raises:
            CheckpointDamaged: If an element isn't as it was written.
        """
        header, pieces = self.entries[key]
        flat = torch.empty(header.numel, dtype=header.torch_dtype, device="cpu")
        memory, size = bytes_of(flat), flat.element_size()
        for start, stop, file, offset, checksum in pieces:
            if ranges is None or any(first < stop and start < last for first, last in ranges):
                own = memory[start * size : stop * size]
                padding = bytearray(padded(len(own)) - len(own))
                try:
                    with open(self.folder / file_of(file), "rb", buffering=0) as source:
                        num_read = os.preadv(source.fileno(), [own, padding], offset)
                except OSError as error:
                    raise self._damaged(f"can't be read: {error}", file_of(file)) from error
                is_whole = num_read == len(own) + len(padding)
                if not is_whole or zlib.crc32(padding, zlib.crc32(own)) != checksum:
                    raise self._damaged(
                        f"isn't as it was written: the bytes from {offset} on, of {key!r}, have "
                        "another checksum",
                        file_of(file),
                    )
        return from_flat(flat, header)


def newest(path: Path) -> Path:
    """Return the checkpoint that ``path`` is or, if it has several, the newest one.

    Raises:
        CheckpointNotFound: If there is none.
        CheckpointError: If this user may not look.
    """
    try:
        return _newest(path)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{error.filename} can't be read: {error.strerror}.") from error


def _newest(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise CheckpointNotFound(
            f"{path} is a file, and a checkpoint of lockstep is a folder. Give the folder that was "
            "given to lockstep.save()."
        )
    if (path / MANIFEST).exists():
        return path
    if numbers := numbers_in(path):
        return path / f"{numbers[-1]:06}"
    if not path.exists():
        others = ", ".join(f"{number:06}" for number in numbers_in(path.parent))
        there = f" {path.parent} has {others}." if _NUMBER.fullmatch(path.name) and others else ""
        raise CheckpointNotFound(
            f"The folder {path} is not there.{there} lockstep.save() makes checkpoints."
        )
    if _NUMBER.fullmatch(path.name):  # a checkpoint without its manifest
        return path
    raise CheckpointNotFound(
        f"There is no checkpoint in {path}. Give the folder that was given to lockstep.save()."
    )


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
