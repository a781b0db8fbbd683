"""Files as others might hand them to us: mutations of real ones; and what reading them may not do.

``mutated`` changes bytes, ``mutated_json`` what JSON says. Both take a ``random.Random``, whose
seed makes a mutation that failed again. :func:`watched` fails a test whose reader takes more memory
or time than a file of that size is worth, or writes or runs anything.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode

from tests.memory import FIXED_BYTES, peak_of


class _Raw(str):
    """JSON that is written as it is."""


_LIMITS = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
_MOST_PATIENCE = 30
# What is taken whatever a file's size is: caches, code, errors and their frames.
_CONSTANT_BYTES = 24 << 20
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"}
_RUNS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}

_MAKING = {"empty", "zeros", "ones", "full", "tensor", "clone", "contiguous", "zeros_like"}
_MAKING |= {"empty_like", "arange", "repeat"}

_NUMBERS: list[Any] = [-1, 0, 1, 7, 255, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400]
_NUMBERS += [0.5, 1e308, float("nan"), float("inf"), -(2**63), "1", None, True]
_NUMBERS += [_Raw("[]"), _Raw("[1]")]
_TEXTS: list[Any] = ["", "\0", "\n", "\x1b[2J\x1b]0;x\a", "[/nope]", "[red]", "../../x", "/etc/x"]
_TEXTS += ["\ud800", "\u202e", "x" * 3000, "tensor", "dict", 3, None, _Raw('["a"]')]
_DEPTHS = 3, 200, 100_000


class _Pairs(list[Any]):
    """A JSON object, whose names may be there twice."""


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return ``data`` with one to three places changed, cut out, repeated or put elsewhere."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        data = chance.choice(_changed(data, chance))
    return data


def _changed(data: bytes, chance: random.Random) -> list[bytes]:
    """Return what a single change may make of ``data``, from a bit to all of it."""
    at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    few = data[at : min(to, at + chance.choice((1, 8, 64)))]
    before, after = data[:at], data[at + len(few) :]
    number = str(chance.choice(_NUMBERS)).encode()
    return [
        _with_bit_flipped(data, at, chance),
        before,
        before + data[to:],
        data[:to] + data[at:],
        data[:to] + few + data[to:],
        before + few[::-1] + after,
        before + chance.randbytes(len(few)) + after,
        before + bytes(len(few)) + after,
        before + number + after,
        before + b"\x1b[2J" + data[at:],
    ]


def _with_bit_flipped(data: bytes, at: int, chance: random.Random) -> bytes:
    at = min(at, len(data) - 1)
    return data and data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def mutated_json(text: bytes, chance: random.Random) -> bytes:
    """Return JSON with one to three values replaced, removed, repeated, nested or swapped."""
    document = [json.loads(text, object_pairs_hook=_Pairs)]
    for _ in range(chance.choice((1, 1, 2, 3))):
        # By a walk from the top, so that a value with few others beside it is as likely as many.
        holder, key = document, 0
        while isinstance(holder[key], list) and holder[key] and chance.random() < 0.9:
            inner = holder[key]
            index = chance.randrange(len(inner))
            if isinstance(inner, _Pairs):
                inner[index] = [*inner[index]]
                holder, key = inner[index], int(chance.random() < 0.9)  # the name, or its value
            else:
                holder, key = inner, index
        _change(holder, key, document, chance)
    return _dumped(document[0]).encode(errors="backslashreplace")


def _change(holder: list[Any], key: int, document: list[Any], chance: random.Random) -> None:
    value = holder[key]
    what = chance.random()
    if isinstance(value, list) and value and what < 0.6:
        index = chance.randrange(len(value))
        if what < 0.25:
            del value[index]
        elif what < 0.4:
            value.insert(chance.randrange(len(value) + 1), value[index])
        else:
            other = chance.randrange(len(value))
            value[index], value[other] = value[other], value[index]
    elif what < 0.1:
        depth = chance.choice(_DEPTHS)
        left, right = chance.choice((("[", "]"), ('{"dict":{"a":', "}}"), ('{"tuple":[', "]}")))
        holder[key] = _Raw(left * depth + _dumped(value) + right * depth)
    elif what < 0.2:
        holder[key] = _anywhere(document, chance)
    else:
        is_number = isinstance(value, int | float) and what < 0.9
        near = [value + 1, value - 1, -value, value * 64] if isinstance(value, int) else []
        holder[key] = chance.choice([*near, *_NUMBERS] if is_number else [*_TEXTS, *_NUMBERS])


def _anywhere(value: Any, chance: random.Random) -> Any:
    """Some value of a document."""
    while isinstance(value, list) and value and chance.random() < 0.8:
        value = chance.choice(value)
        if isinstance(value, tuple):
            value = value[1]
    return _Raw(_dumped(value))


def _dumped(value: Any) -> str:
    if isinstance(value, _Raw):
        return value
    if isinstance(value, _Pairs):
        pairs = (f"{json.dumps(str(name))}:{_dumped(each)}" for name, each in value)
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_dumped, value)) + "]"
    return json.dumps(value)


class Excess(BaseException):
    """More than reading a file is worth; no Exception, which a reader may catch."""


class _Allocations(TorchFunctionMode):
    """Counts the bytes of the tensors that are made."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._total = most, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            made = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "allocate memory" in str(error):
                raise Excess(str(error)) from error
            raise
        if getattr(func, "__name__", "") in _MAKING and made.device.type != "meta":
            self._total += made.nbytes
            if self._total > self._most:
                raise Excess(f"tensors of {self._total:,} bytes, and {self._most:,} are fit")
        return made


class _Hook:
    """What audit events are refused, once it is added; in one thread, while it is on."""

    is_added = False

    def __init__(self) -> None:
        self.thread, self.within = 0, ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.thread != threading.get_ident():
            return
        if event == "open":
            path, mode, flags = args
            is_written = any(c in (mode or "") for c in "wax+") or bool((flags or 0) & _WRITING)
            if is_written and path != os.devnull and not self._is_within(path):
                raise Excess(f"{path!r} is opened for writing")
        elif event in _CHANGES and not self._is_within(args[0]):
            raise Excess(f"{event} of {args[0]!r}")
        elif event in _RUNS:
            raise Excess(f"{event}{args!r}")

    def _is_within(self, path: object) -> bool:
        """Whether a path is in the folder; a single name is, of which the folder is open."""
        if not self.within or isinstance(path, int):
            return False
        name = os.fsdecode(path)  # type: ignore[arg-type]
        return "/" not in name or os.path.realpath(name).startswith(self.within + os.sep)


_hook = _Hook()


@contextmanager
def watched(
    num_bytes: int, *, writes_in: Path | None = None, seconds: float = 20.0
) -> Iterator[None]:
    """Fail if what runs inside takes too much, or writes or runs anything.

    Memory is that of Python's objects and of torch's tensors: twice ``num_bytes``, and a constant.

    Args:
        num_bytes: The size of all files that are read.
        writes_in: A folder that may be written to, if any.
        seconds: How long it may compute. It may wait, for a pipe say, thirty times as long, as a
            busy machine makes everything wait.

    Raises:
        Excess: If it does.
    """
    if not _hook.is_added:
        sys.addaudithook(_hook)
        _hook.is_added = True
    most = 2 * num_bytes + _CONSTANT_BYTES
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start(1)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    former = {each: signal.signal(each, _end) for each in _LIMITS.values()}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _MOST_PATIENCE * seconds)
    _hook.within = "" if writes_in is None else os.path.realpath(writes_in)
    _hook.thread = threading.get_ident()
    try:
        with _Allocations(most):
            yield
    finally:
        _hook.thread = 0
        for timer, number in _LIMITS.items():
            signal.setitimer(timer, 0)
            signal.signal(number, former[number])
        peak = tracemalloc.get_traced_memory()[1] - before
        if not was_tracing:
            tracemalloc.stop()
    if peak > most:
        raise Excess(f"Python's objects took {peak:,} bytes, and {most:,} are fit")


def read_mutated(read: Callable[[bytes], object], entry: bytes, num_mutations: int) -> None:
    """Read an entry of a store, and so many mutations of it: of JSON mostly, or of bytes."""
    read(entry)
    with watched(1 << 20, seconds=600):
        for seed in range(num_mutations):
            chance = random.Random(seed)
            change = mutated_json if chance.random() < 0.7 else mutated
            try:
                read(change(entry, chance))
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error


def read_crafted(read: Callable[[bytes], object]) -> None:
    """Read entries of a store that take as much memory as they can, of a few sizes."""
    for number in (10_000, 30_000, 500_000):
        for entry in (
            b"[" + b"[]," * number + b"[]]",
            b"[1," + b"0," * number + b"[]]",
            b"[" + b"{}," * number + b"0]",
            b"{" + b",".join(b'"%x":0' % n for n in range(min(number, 100_000))) + b"}",
            b'["RESTART","' + b"\\n" * number + b'"]',
            b'["' + "\U0001f600".encode() + b"x" * number + b'",1,2]',
            b"[" * number + b"]" * number,
            b"\xff" * number,
            b"1" * number,
        ):
            peak = peak_of(partial(read, entry))
            assert peak < 2 * len(entry) + FIXED_BYTES, (entry[:20], len(entry), peak)


def _end(number: int, frame: FrameType | None) -> None:
    raise Excess("it hangs")
