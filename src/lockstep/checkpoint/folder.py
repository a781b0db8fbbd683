"""The folder of checkpoints, and the files of one.

Each checkpoint is a folder of its own, ``000001`` and so on. It has a file of bytes from each rank,
``rank-0.bin`` and so on, and ``manifest.json``, which says what they are. It is written as
``.tmp-000001`` and renamed when all is on the disk, so that one with a number is complete.

The manifest's first line has the version of the format and a digest of the rest, which is JSON:
values (see tree.py), and each tensor's dtype, shape and pieces. A piece is a range of its elements
in one of the files, with a checksum; together the pieces cover every byte of the files.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.comm import bytes_of
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from lockstep.folders import Folder
from lockstep.printable import printable
from lockstep.tree import Header, from_flat

VERSION = 1
MANIFEST = "manifest.json"

# Where tensors begin in a file: where any processor reads them fastest.
_ALIGNMENT = 64
# The most bytes of a piece: damage is found, and parts are read, in units of this size.
MAX_PIECE_BYTES = 4 * 1024 * 1024
# How often a checkpoint may be removed while it is opened, before that is an error.
MAX_REMOVED = 20
# Of how many ranks the files are kept open.
_MAX_OPEN = 128
# What the manifest tells of a checkpoint as a whole.
_KINDS = {"module", "optimizer", "tensor", "generator", "state", "value"}
_FIELDS = {"lockstep": str, "torch": str, "saved": str, "ranks": int}
_FIRST_LINE = re.compile(rb"lockstep checkpoint ([0-9]{1,9}) ([0-9a-f]{64})\n")
NUMBER = re.compile(r"[0-9]{6}|[1-9][0-9]{6,}")


class StoredPiece(NamedTuple):
    """Elements of a tensor that are in a file, and the padding behind them."""

    start: int  # the first one, of the tensor's
    stop: int
    file: int  # the rank that wrote it
    offset: int  # in bytes
    checksum: int  # CRC-32, of the padding too


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    header: Header
    pieces: tuple[StoredPiece, ...]  # in the order of their elements, of which they have all


def numbers_in(path: Path) -> list[int]:
    """Return the numbers that name checkpoints, or other folders and files, in ascending order."""
    names = os.listdir(path) if path.is_dir() else []
    return sorted(int(name) for name in names if NUMBER.fullmatch(name))


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.bin"


def padded(num_bytes: int) -> int:
    """Return the size in a file of a piece of this size."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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
        self._read = weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor]()
        try:
            self._files = Folder(folder)
            first, _, body = self._files.read(MANIFEST).partition(b"\n")
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
            f"{self.folder / name} {printable(what)}. Nothing was loaded. Load an older checkpoint "
            "by its number: lockstep.load('.../000001', ...)."
        )

    def plain_values(self) -> set[str]:
        """Return the names of what was saved as it is."""
        return {name for name, thing in self.facts["things"].items() if thing["kind"] == "value"}

    def parse(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)``, in which any error means that the manifest is damaged."""
        try:
            return function(*args)
        except CheckpointError:
            raise
        except MemoryError as error:
            raise self._too_large(self._path.stat().st_size) from error
        except Exception as error:
            what = f"{type(error).__name__}: {excerpt(error)}"
            raise self._damaged(f"can't be understood ({what})") from error

    def _too_large(self, num_bytes: int) -> CheckpointError:
        return CheckpointError(
            f"There is no memory for {num_bytes:,} bytes of {self.folder}. Nothing was loaded. "
            "Load fewer things, or on a machine with more memory."
        )

    def _parse(self, body: bytes) -> tuple[dict[str, Any], dict[str, Entry], list[int]]:
        facts = json.loads(body)
        sizes = [int(size) for size in facts["bytes"]]
        for name, thing in facts["things"].items():
            if thing["kind"] not in _KINDS or "tree" not in thing:
                raise ValueError(f"{name!r} has no kind and value")
        for name, kind in _FIELDS.items():
            if not isinstance(facts[name], kind):
                raise TypeError(f"{name!r} is {facts[name]!r}")
        if not isinstance(facts["random"], list) or len(facts["random"]) != len(sizes) or not sizes:
            raise ValueError("the ranks have no random states")
        entries = {
            key: _entry(key, header, pieces, sizes)
            for key, (header, pieces) in facts["tensors"].items()
        }
        _check_apart(entries)
        self._open(sizes)
        return facts, entries, sizes

    def _open(self, sizes: Sequence[int]) -> None:
        """Open the ranks' files, which then can be read even if a newer checkpoint replaces them.

        Those of a very large number of ranks are opened again when they are read; all of them if
        this process may not have so many files open.
        """
        self._descriptors: list[int] = []
        weakref.finalize(self, _close, self._descriptors)
        most = _MAX_OPEN
        for rank, size in enumerate(sizes):
            try:
                descriptor = self._open_file(rank)
            except CheckpointError as error:
                if not (most and _is_limit(error.__cause__)):
                    raise
                _close(self._descriptors)
                most = 0
                descriptor = self._open_file(rank)
            if (found := os.fstat(descriptor).st_size) != size:
                os.close(descriptor)
                what = f"has {found} bytes, and was written with {size}"
                raise self._damaged(what, file_of(rank))
            if rank < most:
                self._descriptors.append(descriptor)
            else:
                os.close(descriptor)

    def _open_file(self, rank: int) -> int:
        try:
            return self._files.open_file(file_of(rank))
        except OSError as error:
            if _is_limit(error):
                raise CheckpointError(
                    f"{error.filename} can't be opened: {error.strerror}. Close files, or raise "
                    "the limit with 'ulimit -n'."
                ) from error
            what = "is missing" if error.errno == errno.ENOENT else "can't be read"
            raise self._damaged(f"{what} ({error.strerror})", file_of(rank)) from error

    def _fill(self, memories: Sequence[Any], rank: int, offset: int) -> bool:
        """Read from a rank's file, and return whether there is enough."""
        is_kept = rank < len(self._descriptors)
        descriptor = self._descriptors[rank] if is_kept else self._open_file(rank)
        try:
            return all(
                _read_whole(descriptor, memory, offset + before)
                for memory, before in zip(
                    memories, itertools.accumulate(map(len, memories), initial=0), strict=False
                )
            )
        except OSError as error:
            raise self._damaged(f"can't be read ({error.strerror})", file_of(rank)) from error
        finally:
            if not is_kept:
                os.close(descriptor)

    def forget(self) -> None:
        """Read each tensor anew, instead of giving what was read of it before."""
        self._read.clear()

    def verify(self, key: str) -> int:
        """Verify all elements of a tensor, in little memory; return the number of its bytes.

        Raises:
            CheckpointDamaged: If one isn't as it was written.
        """
        header, pieces = self.entries[key]
        memory, size = memoryview(bytearray(MAX_PIECE_BYTES)), header.torch_dtype.itemsize
        for piece in pieces:
            self._read_piece(key, piece, memory[: (piece.stop - piece.start) * size])
        return int(header.numel * size)

    def _read_piece(self, key: str, piece: StoredPiece, memory: memoryview) -> None:
        padding = bytearray(padded(len(memory)) - len(memory))
        is_whole = self._fill([memory, padding], piece.file, piece.offset)
        if not is_whole or zlib.crc32(padding, zlib.crc32(memory)) != piece.checksum:
            raise self._damaged(
                f"isn't as it was written: the bytes from {piece.offset} on, of {key!r}, have "
                "another checksum",
                file_of(piece.file),
            )

    def read(self, key: str, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """Return a tensor, or one in which only the elements of ``ranges`` are set.

        Raises:
            CheckpointDamaged: If an element isn't as it was written.
        """
        # What is named several times is in memory once, until forget().
        request = key, *(ranges or ())
        if (known := self._read.get(request)) is not None:
            return known
        header, pieces = self.entries[key]
        try:
            flat = torch.empty(header.numel, dtype=header.torch_dtype, device="cpu")
        except RuntimeError as error:
            raise self._too_large(header.numel * header.torch_dtype.itemsize) from error
        memory, size = bytes_of(flat), flat.element_size()
        for piece in pieces:
            start, stop = piece.start, piece.stop
            if ranges is None or any(first < stop and start < last for first, last in ranges):
                self._read_piece(key, piece, memory[start * size : stop * size])
        tensor = from_flat(flat, header)
        self._read[request] = tensor
        return tensor


def excerpt(words: object) -> str:
    """Return the first 300 characters of what may be all of a file that others wrote."""
    return printable(f"{words!s:.300}")


def _is_limit(error: BaseException | None) -> bool:
    """Whether this process may not open another file."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _read_whole(descriptor: int, memory: Any, offset: int) -> bool:
    """Fill ``memory``, in several reads if need be; return whether there is enough."""
    num_read = 0
    while num_read < len(memory):
        more = os.preadv(descriptor, [memoryview(memory)[num_read:]], offset + num_read)
        if not more:
            return False
        num_read += more
    return True


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _entry(key: str, header: Any, pieces: Sequence[Any], sizes: Sequence[int]) -> Entry:
    """Return the entry of a tensor, whose pieces have all of it and are in the files."""
    dtype, shape, order = header
    header = Header(dtype, tuple(map(int, shape)), tuple(map(int, order)))
    entry = Entry(header, tuple(StoredPiece(*map(int, piece)) for piece in pieces))
    from_flat(torch.empty(header.numel, dtype=header.torch_dtype, device="meta"), header)
    at = 0
    for start, stop, file, offset, _ in entry.pieces:
        num_bytes = (stop - start) * header.torch_dtype.itemsize
        is_inside = start == at <= stop and file >= 0 and num_bytes <= MAX_PIECE_BYTES
        is_inside = is_inside and 0 <= offset <= sizes[file] - padded(num_bytes)
        if not is_inside:
            raise ValueError(f"the pieces of {key!r} don't fit")
        at = stop
    if at != header.numel:
        raise ValueError(f"the pieces of {key!r} have {at} of {header.numel} elements")
    return entry


def _check_apart(entries: Mapping[str, Entry]) -> None:
    """Check that no byte of a file is in two pieces: all tensors together are as large as files."""
    places = sorted(
        (piece.file, piece.offset, (piece.stop - piece.start) * entry.header.torch_dtype.itemsize)
        for entry in entries.values()
        for piece in entry.pieces
    )
    for (file, offset, size), (next_file, next_offset, _) in itertools.pairwise(places):
        if file == next_file and offset + padded(size) > next_offset:
            raise ValueError(f"pieces overlap at byte {next_offset} of {file_of(file)}")


def open_newest(path: Path) -> Manifest:
    """Return the manifest of :func:`newest`, of the one after it if a save removes that meanwhile.

    Raises:
        CheckpointNotFound: If there is none.
        CheckpointDamaged: If a file is missing, or isn't as it was written.
    """
    for _ in range(MAX_REMOVED):
        folder = newest(path)
        try:
            return Manifest(folder)
        except CheckpointError:
            if folder.exists():
                raise
    return Manifest(newest(path))


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
        there = f" {path.parent} has {others}." if NUMBER.fullmatch(path.name) and others else ""
        raise CheckpointNotFound(
            f"The folder {path} is not there.{there} lockstep.save() makes checkpoints."
        )
    if NUMBER.fullmatch(path.name):  # a checkpoint without its manifest
        return path
    raise CheckpointNotFound(
        f"There is no checkpoint in {path}. Give the folder that was given to lockstep.save()."
    )
