"""Time limits of waits, and errors that name the ranks at fault over groups that name none.

Gloo and NCCL raise a RuntimeError that names no rank. The ranks of our own groups send each other
the reason why they leave; for other groups the reason is found here, after the failure: each rank
that gets an error leaves a note in the group's store. A rank whose connection has ended and that
left no note is gone; if time was up, a rank that left no note has not come.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lockstep.comm.threads.ranks import passed_on
from lockstep.deadline import Deadline
from lockstep.entries import value_in
from lockstep.errors import CollectiveFailed, CollectiveTimeout, PeerLost, RendezvousFailed

# The wait for the note of a rank whose connection has ended: the rank may be about to leave it.
_GRACE_SECONDS = 0.3
# The wait for notes if no connection has ended. Ranks time out as far apart as they came.
_NOTE_SECONDS = 2.0
# The limit for the store, which may be stopped or gone.
STORE_SECONDS = 5.0
_POLL_SECONDS = 0.02
# The beginnings of errors of Gloo's, and of ours.
_KINDS = ("gloo/", "PeerLost: ", "CollectiveTimeout: ", "CollectiveMismatch: ")
# Where torch's loader raises an error, whatever runs, when a worker has ended.
_LOADERS_HANDLER = "torch/utils/data/_utils/signal_handling.py"
# The tag of messages without a receive: sending one fails if the connection has ended.
_TAG = 0x6C6F636B

_Failure = TypeVar("_Failure", bound=CollectiveFailed)
_Result = TypeVar("_Result")


class NoAnswer(RuntimeError):
    """What :func:`answered` raises; a RuntimeError, as torch's stores raise if they are gone."""


def answered(call: Callable[[], _Result], seconds: float) -> _Result:
    """Return ``call()``, which is made in a thread of its own; signals are handled meanwhile.

    Torch's stores have no limit for most requests: if the network is cut, they wait until TCP gives
    up, a quarter of an hour later, and no signal is handled.

    Raises:
        NoAnswer: If there is none within ``seconds``; the thread goes on waiting.
    """
    results, errors = list[_Result](), list[BaseException]()

    def make() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make, name="lockstep-asking", daemon=True)
    thread.start()
    with passed_on():
        thread.join(min(seconds, threading.TIMEOUT_MAX))
    if errors:
        raise errors.pop()  # kept, it would keep itself and, in its frames, the store
    if not results:
        raise NoAnswer(f"there was no answer within {round(seconds, 1):g} s")
    return results[0]


def silent_store(what: str, error: Exception) -> RendezvousFailed:
    """Return the error of a rank of which ``what`` is so, as its store doesn't answer."""
    first_line = str(error).partition("\n")[0]
    return RendezvousFailed(
        f"{what}: of the store where the ranks meet, {first_line}. See whether the process that "
        "keeps it was ended or suspended, or the network cut."
    )


def named(ranks: Sequence[int]) -> str:
    """Return ``ranks`` as the subject of a sentence."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def loss(
    ranks: Sequence[int], rank: int, operation: str, advice: str, how: str = "", call: str = ""
) -> PeerLost:
    """Return the error of ``rank``, which waited in ``call`` for ``ranks``, which are gone."""
    is_gone, it = ("are gone", "them") if len(ranks) > 1 else ("is gone", "it")
    waited = f"rank {rank} waited for {it} in {call or operation}"
    text = f"{named(ranks)} {how or is_gone}; {waited}. {advice}"
    return PeerLost(text, tuple(ranks), operation)


def without_traceback(error: _Failure) -> _Failure:
    """Return a copy of ``error`` without its traceback, whose frames hold the group."""
    return type(error)(str(error), error.ranks, error.operation)


def is_from_group(error: RuntimeError) -> bool:
    """Whether ``error`` is one that groups raise when ranks can't go on together."""
    text = str(error)  # of an error in a future, only the text is left
    return isinstance(error, dist.DistError) or any(kind in text for kind in _KINDS)


def is_of_loader(error: RuntimeError) -> bool:
    """Whether torch's loader raised it, in a signal's handler, as a worker has ended."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith(_LOADERS_HANDLER) for frame in frames)


def global_rank(group: ProcessGroup, rank: int) -> int:
    """Return the number of ``rank`` of ``group`` in the whole run."""
    try:
        return dist.get_global_rank(group, rank)
    except (ValueError, RuntimeError):  # torch.distributed doesn't know the group
        return rank


def explained(group: ProcessGroup, operation: str, error: RuntimeError) -> CollectiveFailed:
    """Return the error to raise in place of ``error``, which ``group`` raised in ``operation``.

    It takes up to some seconds to find out which rank is to blame.
    """
    if isinstance(error, CollectiveFailed):
        return error
    try:
        if (check_open := getattr(group, "check_open", None)) is not None:
            check_open()
    except CollectiveFailed as fault:
        return fault
    note = _Note(is_late="timed out" in str(error).lower(), gone=[])
    found: dict[int, _Note] = {}
    with suppress(NoAnswer):
        answered(partial(_exchange_notes, group, note, found), STORE_SECONDS)
    gone, late = _blame(range(group.size()), group.rank(), note, dict(found))
    rank, said = global_rank(group, group.rank()), f"Torch says: {error}"
    names = [global_rank(group, each) for each in gone or late or []]
    if gone:
        return loss(names, rank, operation, f"What was written there last tells why. {said}")
    if late is not None:
        return CollectiveTimeout(
            f"{named(names) if names else 'Not every rank'} did{' not' if names else ''} come to "
            f"{operation} in time: stopped, busy with something else, or ended without it. See "
            f"what happens there. {said}",
            names,
            operation,
        )
    return CollectiveFailed(
        f"Rank {rank} could not carry out {operation}: {error}\nAnother rank has failed, or has "
        "called something else. Look at what the others wrote."
    )


class _Note(NamedTuple):
    """The facts known to a rank that got an error."""

    is_late: bool  # whether its time was up
    gone: list[int]  # the ranks to which its connections have ended

    @classmethod
    def decode(cls, told: bytes, ranks: range) -> _Note:
        """Return what another rank has told, as far as it can be read."""
        with suppress(ValueError, TypeError):
            is_late, gone = value_in(told)
            return cls(bool(is_late), [rank for rank in ranks if rank in gone])
        return cls(False, [])


def _blame(
    ranks: range, rank: int, local_note: _Note, others: Mapping[int, _Note]
) -> tuple[list[int], list[int] | None]:
    """Return the ranks that are gone, and those that have not come; None if no time was up."""
    notes = {**others, rank: local_note}
    silent = set(ranks) - set(notes)
    lost = {each for note in notes.values() if not note.is_late for each in note.gone} & silent
    # A rank whose time is up ends its connections, and may be slow to leave its note. So to one
    # whose own time was up they tell nothing, as long as there is a rank that has not come.
    ended = {each for note in notes.values() for each in note.gone} & silent
    gone = lost or (ended if ended == silent else set())
    is_late = not gone and any(note.is_late for note in notes.values())
    return sorted(gone), sorted(silent - ended) if is_late else None


def _exchange_notes(group: ProcessGroup, note: _Note, found: dict[int, _Note]) -> None:
    """Complete this rank's note, leave it in the store, and collect the others'."""
    ranks, here = range(group.size()), group.rank()
    others = [rank for rank in ranks if rank != here]
    note.gone[:] = [rank for rank in others if _has_ended(group, rank)]
    # The store may be gone with the rank that held it.
    with suppress(RuntimeError, AttributeError):
        store = dist.PrefixStore("lockstep/failed", group.get_group_store())
        store.set(str(here), json.dumps(note))
        # A rank whose time is up as well ends its connections some time before it leaves its note.
        grace = Deadline(_NOTE_SECONDS if note.is_late else _GRACE_SECONDS)
        patience = Deadline(_NOTE_SECONDS)
        while len(found) < len(others) and patience.left():
            for rank in others:
                if rank not in found and store.check([str(rank)]):
                    found[rank] = _Note.decode(bytes(store.get(str(rank))), ranks)
            is_known = not grace.left() or set(note.gone) <= set(found)
            if is_known and _blame(ranks, here, note, found)[0]:
                return
            time.sleep(_POLL_SECONDS)


def _has_ended(group: ProcessGroup, rank: int) -> bool:
    """Whether Gloo's connection to ``rank`` has ended, and not because this rank gave up on it."""
    cpu = torch.device("cpu")
    try:
        if cpu not in group._device_types or group._get_backend(cpu).name() != "gloo":
            return False
    except RuntimeError:
        return False
    try:
        group.send([torch.zeros(1, device=cpu)], rank, _TAG)
    except RuntimeError as error:
        return "timeout" not in str(error).lower()
    return False
