"""Checksums of samples and of datasets, by which ranks tell whether theirs are the same."""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

# How much is read of each attribute of a dataset, and of each tensor in it: rank-wise parts differ
# from their beginning.
_MAX_BYTES = 2**20
_DIGEST_BYTES = 8
# How far functions are followed that others refer to.
_MAX_DEPTH = 3
_PLAIN = (bool, int, float, str, bytes, type(None))


def of_sample(sample: Any) -> int:
    """Return a checksum of ``sample``, all of it that can be pickled."""
    return _checksum(sample, sys.maxsize)[0]


def of_batch(batch: Any) -> str:
    """Return a checksum of all that is in ``batch``; empty if that can't be told."""
    checksum, is_complete = _checksum(batch, sys.maxsize)
    return f"{checksum:016x}" if is_complete else ""


def of_dataset(dataset: Any) -> int:
    """Return a checksum of what a dataset has, and of plain values that its code refers to.

    It may differ where datasets are alike (paths, say): then their samples have to be compared. It
    is the same for datasets that differ in what they are told later, or beyond the first MiB.
    """
    attributes = getattr(dataset, "__dict__", {"itself": dataset})
    parts = [(name, _checksum(value, _MAX_BYTES)[0]) for name, value in attributes.items()]
    return _checksum([type(dataset), parts], _MAX_BYTES)[0]


class _IsEnough(Exception):
    pass


class _Checksum(io.RawIOBase):
    """A file that keeps nothing of what is written but a checksum."""

    def __init__(self, max_bytes: int) -> None:
        self.digest, self._left = hashlib.blake2b(digest_size=_DIGEST_BYTES), max_bytes

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self._left -= len(data)
        if self._left < 0:
            raise _IsEnough
        return len(data)

    def value(self) -> int:
        return int.from_bytes(self.digest.digest())


class _Summary(pickle.Pickler):
    """Pickles everything: of what can't be pickled its class alone."""

    def __init__(self, file: _Checksum, max_bytes: int) -> None:
        super().__init__(file, protocol=4)
        self._max_bytes = max_bytes
        self.is_complete = True

    def persistent_id(self, value: Any) -> Any:
        """Return a description of tensors, arrays, functions and classes."""
        if isinstance(value, type):
            methods = [m for m in vars(value).values() if isinstance(m, types.FunctionType)]
            found = [pair for method in methods for pair in _plain_values(method)]
            return value.__module__, value.__qualname__, repr(found)
        if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
            return self._of_numbers(value)
        if isinstance(value, types.FunctionType):
            return value.__module__, value.__qualname__, repr([*_plain_values(value)])
        return None

    def _of_numbers(self, value: Any) -> Any:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or "object" in str(dtype) or getattr(value, "is_sparse", False):
            return None
        flat = value.detach() if isinstance(value, torch.Tensor) else value
        flat = flat.reshape(-1)[: self._max_bytes]
        if isinstance(flat, torch.Tensor):
            flat = flat.cpu().contiguous().view(torch.uint8).numpy()
        digest = hashlib.blake2b(flat.tobytes(), digest_size=_DIGEST_BYTES)
        return tuple(shape), str(dtype), digest.digest()

    def reducer_override(self, value: Any) -> Any:
        """Pickle ``value`` as usual, if that is possible."""
        try:
            value.__reduce_ex__(4)
        except Exception:  # whatever the pickling of a user's object raises
            self.is_complete = False
            return str, (type(value).__qualname__,)
        return NotImplemented


def _checksum(value: Any, max_bytes: int) -> tuple[int, bool]:
    """Return a checksum, and whether it is of all of ``value``."""
    # First without regard to which objects are the same one, as where they have been pickled before
    # equal ones may be one; what has a circle can't be pickled so.
    for fast in (True, False):
        file = _Checksum(max_bytes)
        summary = _Summary(file, max_bytes)
        summary.fast = fast
        try:
            summary.dump(value)
            return file.value(), summary.is_complete
        except _IsEnough:
            return file.value(), False
        except Exception:  # as above
            file.digest.update(repr(type(value)).encode())
    return file.value(), False


def _plain_values(function: Any, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the plain values that a function refers to: its closure's, and global ones.

    So do the functions that it refers to, and what it names of modules.
    """
    code, names = function.__code__, function.__globals__
    found = {name: names[name] for name in code.co_names if name in names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it isn't set yet
            found[name] = cell.cell_contents
    for module in [*found.values()]:
        if isinstance(module, types.ModuleType) and not _is_of_torch(module.__name__):
            found |= {name: vars(module)[name] for name in code.co_names if name in vars(module)}
    for name, value in found.items():
        yield name, _plain(value)
        if depth and isinstance(value, types.FunctionType) and not _is_of_torch(value.__module__):
            yield from _plain_values(value, depth - 1)


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def _plain(value: Any) -> Any:
    """Return ``value`` if it is plain, and what it calls its rank otherwise: a World has one."""
    if isinstance(value, _PLAIN):
        return value
    attributes = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    rank = attributes.get("rank") if isinstance(attributes, dict) else None
    return rank if isinstance(rank, int) else None
