"""What ranks and launchers read from the store may be anybody's: it is read, or told of."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from lockstep.comm.failures import _blame, _Note
from lockstep.comm.shm.barrier import Fault
from lockstep.errors import LockstepError
from lockstep.launcher.agreement import decoded, told_interruption
from lockstep.launcher.failures import Outcome
from tests.counts import NUM_MUTATIONS
from tests.fuzzing import mutated, mutated_json, watched

FAULT = Fault("CollectiveTimeout", "The all_reduce of rank 1 took 30 s.", [1, 3]).encode()
NOTE = json.dumps(_Note(True, [1, 2])).encode()
FAILURE = json.dumps([1, 12.5, False, 3, "ValueError: no"]).encode()
INTERRUPTION = json.dumps([15, 12.5, 1]).encode()


class Store:
    """One that has an entry under every key."""

    def __init__(self, entry: bytes) -> None:
        self._entry = entry

    def check(self, keys: list[str]) -> bool:
        return bool(keys)

    def get(self, key: str) -> bytes:
        return self._entry


def read_fault(entry: bytes) -> None:
    error = Fault.decode(entry).error("all_reduce", 1)
    assert isinstance(error, LockstepError)
    assert all(isinstance(rank, int) for rank in error.ranks)


def read_note(entry: bytes) -> None:
    note = _Note.decode(entry, range(4))
    gone, late = _blame(range(4), 0, _Note(False, []), {1: note})
    assert {*gone, *(late or ())} <= {*range(4)}


def read_failure(entry: bytes) -> None:
    found = decoded(entry)
    assert isinstance(found, Outcome)
    assert isinstance(found.message, str)


def read_interruption(entry: bytes) -> None:
    store: Any = Store(entry)
    found = told_interruption(store, 0, str)
    assert found is not None
    assert 0 <= found.exit_status < 256


@pytest.mark.parametrize(
    "num_mutations", [500, pytest.param(NUM_MUTATIONS, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("read", "entry"),
    [
        (read_fault, FAULT),
        (read_note, NOTE),
        (read_failure, FAILURE),
        (read_interruption, INTERRUPTION),
    ],
)
def test_any_entry_is_read_or_told_of(read: Any, entry: bytes, num_mutations: int) -> None:
    read(entry)
    with watched(1 << 20, seconds=600):
        for seed in range(num_mutations):
            chance = random.Random(seed)
            change = mutated_json if chance.random() < 0.7 else mutated
            try:
                read(change(entry, chance))
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
