"""The folder of checkpoints, and the files of one.

Each checkpoint is a folder of its own, ``000001`` and so on. It has a file of bytes from each rank,
``rank-0.bin`` and so on, and ``manifest.json``, which says what they are. It is written as
``.tmp-000001`` and renamed when all is on the disk, so that one with a number is complete.

The manifest's first line has the version of the format and a digest of the rest, which is JSON:
values (see tree.py), and each tensor's dtype, shape and pieces. A piece is a range of its elements
in one of the files, with a checksum; together the pieces cover every byte of the files. The JSON
stays text, of which objects are made member by member: see json_text.py.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import itertools
import os
import re
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.json_text import Elements, Members, TextRange, value_at
from lockstep.comm import bytes_of
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from lockstep.folders import Folder
from lockstep.printable import printable, shown
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
# The longest of these, and of a tensor's dtype and shape, as they are in the JSON.
_MOST_FACT_BYTES, _MOST_HEADER_BYTES = 1 << 10, 1 << 16
_FIRST_LINE = re.compile(rb"lockstep checkpoint ([0-9]{1,9}) ([0-9a-f]{64})\n")
# How things, tensors and pieces begin in the JSON.
_THING = re.compile(rb'\{\s*"kind"\s*:\s*"([a-z]{1,20})"\s*,\s*"tree"\s*:\s*')
_NUMBERS = rb"\[([0-9,\s]*+)\]\s*"
_SIZES, _NUMBER = re.compile(_NUMBERS), re.compile(rb"[0-9]{1,18}")
_HEADER = re.compile(
    rb'\[\s*\[\s*"(\w{1,30})"\s*,\s*' + _NUMBERS + rb",\s*" + _NUMBERS + rb"\]\s*,\s*\[\s*"
)
_PIECE = re.compile(rb"\[\s*" + rb"\s*,\s*".join([rb"([0-9]{1,18})"] * 5) + rb"\s*\]\s*(?:,\s*)?")
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
    pieces: Iterable[StoredPiece]  # in the order of their elements, of which they have all


class _Pieces:
    """Pieces that are in a manifest; each is made when it is its turn."""

    def __init__(self, value: TextRange) -> None:
        self._value = value

    def __iter__(self) -> Iterator[StoredPiece]:
        text, at, stop = self._value
        while at < stop:
            found = _PIECE.match(text, at, stop)
            if found is None:
                raise ValueError(f"there is no piece at byte {at}")
            yield StoredPiece(*map(int, found.groups()))
            at = found.end()


class _Entries(Mapping[str, Entry]):
    """The tensors that a manifest lists; an entry is made when it is asked for."""

    def __init__(self, value: TextRange) -> None:
        self._members = Members(value)

    def __getitem__(self, key: str) -> Entry:
        text, start, stop = self._members.value(key)
        found = _HEADER.match(text, start, stop)
        if found is None or found.end() - found.start() > _MOST_HEADER_BYTES:
            raise ValueError(f"{key[:100]!r} has no dtype and shape")
        dtype, *numbers = found.groups()
        shape, order = (tuple(map(int, each.split(b","))) if each else () for each in numbers)
        pieces = text.rindex(b"]", start, text.rindex(b"]", start, stop))
        return Entry(
            Header(dtype.decode(), shape, order), _Pieces(TextRange(text, found.end(), pieces))
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


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
        facts: What the JSON has, but for the tensors.
        entries: The tensors by name.

    Raises:
        CheckpointDamaged: If a file is missing, or isn't as it was written.
        CheckpointNotFound: If there is no checkpoint in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / MANIFEST
        self._read = weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor]()
        self._buffer = bytearray()  # for the elements of a piece
        try:
            self._files = Folder(folder)
            text = self._files.read(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not folder.is_dir():
                raise CheckpointNotFound(f"There is no checkpoint {shown(folder)}.") from error
            raise self._damaged("is missing") from error
        except OSError as error:
            raise self._damaged(f"can't be read ({error.strerror})") from error
        found = _FIRST_LINE.match(text)
        if found is None:
            raise self._damaged("doesn't begin as a checkpoint of lockstep does")
        if int(found[1]) > VERSION:
            raise CheckpointDamaged(
                f"{shown(self._path)} has format {int(found[1])}, and this version of lockstep "
                f"reads up to {VERSION}. Install the version that it was saved with, or a newer "
                "one."
            )
        digest = hashlib.blake2b(memoryview(text)[found.end() :], digest_size=32).hexdigest()
        if digest.encode() != found[2]:
            raise self._damaged("isn't as it was written")
        self.facts, self.entries, self.sizes = self.parse(self._parse, text, found.end())

    def _damaged(self, what: str, name: str = MANIFEST) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{shown(self.folder / name)} {printable(what)}. Nothing was loaded. Load an older "
            "checkpoint by its number: lockstep.load('.../000001', ...)."
        )

    def plain_values(self) -> set[str]:
        """Return the names of what was saved as it is."""
        return {name for name in self.facts["things"] if self.thing(name)[0] == "value"}

    def some_names(self) -> str:
        """Return the names of some things, for an error."""
        names = map(repr, itertools.islice(self.facts["things"], 20))
        return excerpt(", ".join(names)) or "nothing"

    def thing(self, name: str) -> tuple[str, TextRange]:
        """Return of which kind a thing is, and where its value is in the manifest."""
        text, start, stop = self.facts["things"].value(name)
        found = _THING.match(text, start, stop)
        if found is None or (kind := found[1].decode()) not in _KINDS:
            raise ValueError(f"{name[:100]!r} has no kind and value")
        return kind, TextRange(text, found.end(), stop - 1)

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

    def _parse(self, text: bytearray, start: int) -> tuple[dict[str, Any], _Entries, Sequence[int]]:
        body = Members(value_at(text, start))
        facts: dict[str, Any] = {}
        for name, kind in _FIELDS.items():
            value = body.value(name)
            if value.num_bytes > _MOST_FACT_BYTES or not isinstance(value.read(), kind):
                raise TypeError(f"{name!r} is {text[value.start : value.stop][:100]!r}")
            facts[name] = value.read()
        self.facts = facts  # which thing() looks at
        facts["things"], facts["divided"] = map(Members, map(body.value, ("things", "divided")))
        for name in facts["things"]:
            self.thing(name)
        sizes = _sizes(body.value("bytes"), len(self._files.names()))
        facts["random"] = Elements(body.value("random"), len(sizes))
        if len(facts["random"]) != len(sizes) or not sizes:
            raise ValueError("the ranks have no random states")
        entries = _Entries(body.value("tensors"))
        _check(entries, sizes)
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

    def verify(self, key: str) -> None:
        """Verify all elements of a tensor, in the memory of its largest piece.

        Raises:
            CheckpointDamaged: If one isn't as it was written.
        """
        header, pieces = self.entries[key]
        size = header.torch_dtype.itemsize
        for piece in pieces:
            num_bytes = (piece.stop - piece.start) * size
            if len(self._buffer) < num_bytes:
                self._buffer = bytearray(num_bytes)
            self._read_piece(key, piece, memoryview(self._buffer)[:num_bytes])

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


def _sizes(value: TextRange, num_files: int) -> array[int]:
    """Return the sizes of the ranks' files, of which there are ``num_files`` at most."""
    if _SIZES.fullmatch(*value) is None:
        raise ValueError("the sizes of files aren't numbers")
    if value.text.count(b",", value.start, value.stop) >= num_files:
        raise ValueError("there are sizes of more files than are there")
    return array("q", (int(found[0]) for found in _NUMBER.finditer(*value)))


def _check(entries: _Entries, sizes: Sequence[int]) -> None:
    """Check that the pieces of each tensor have all of it, and are in the files.

    No byte of a file is in two pieces: all tensors together are as large as files.
    """
    starts = array("q", itertools.accumulate(sizes, initial=0))  # if one file follows the other
    places, lengths = array("q"), array("i")
    for key, (header, pieces) in entries.items():
        from_flat(torch.empty(header.numel, dtype=header.torch_dtype, device="meta"), header)
        at = 0
        for start, stop, file, offset, _ in pieces:
            num_bytes = (stop - start) * header.torch_dtype.itemsize
            is_inside = start == at < stop and num_bytes <= MAX_PIECE_BYTES
            if not (is_inside and offset <= sizes[file] - padded(num_bytes)):
                raise ValueError(f"the pieces of {key[:100]!r} don't fit")
            places.append(starts[file] + offset)
            lengths.append(padded(num_bytes))
            at = stop
        if at != header.numel:
            raise ValueError(f"the pieces of {key[:100]!r} have {at} of {header.numel} elements")
    if not places:
        return
    ordered, order = torch.frombuffer(places, dtype=torch.int64).sort()
    ends = ordered + torch.frombuffer(lengths, dtype=torch.int32)[order]
    if (overlapping := (ends[:-1] > ordered[1:]).nonzero()).numel():
        at = int(ordered[int(overlapping[0]) + 1])
        file = bisect.bisect_right(starts, at) - 1
        raise ValueError(f"pieces overlap at byte {at - starts[file]} of {file_of(file)}")


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
        raise CheckpointError(
            f"{shown(error.filename)} can't be read: {error.strerror}."
        ) from error


def _newest(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise CheckpointNotFound(
            f"{shown(path)} is a file, and a checkpoint of lockstep is a folder. Give the folder "
            "that was given to lockstep.save()."
        )
    if (path / MANIFEST).exists():
        return path
    if numbers := numbers_in(path):
        return path / f"{numbers[-1]:06}"
    if not path.exists():
        others = ", ".join(f"{number:06}" for number in numbers_in(path.parent))
        there = (
            f" {shown(path.parent)} has {others}." if NUMBER.fullmatch(path.name) and others else ""
        )
        raise CheckpointNotFound(
            f"The folder {shown(path)} is not there.{there} lockstep.save() makes checkpoints."
        )
    if NUMBER.fullmatch(path.name):  # a checkpoint without its manifest
        return path
    raise CheckpointNotFound(
        f"There is no checkpoint in {shown(path)}. Give the folder that was given to "
        "lockstep.save()."
    )
