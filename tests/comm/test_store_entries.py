"""What ranks read from the store may be anybody's: it is read, or told of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.comm.failures import _blame, _Note
from lockstep.comm.shm.barrier import Fault
from lockstep.errors import LockstepError
from tests.counts import NUM_MUTATIONS
from tests.fuzzing import read_crafted, read_mutated

FAULT = Fault("CollectiveTimeout", "The all_reduce of rank 1 took 30 s.", [1, 3]).encode()
NOTE = json.dumps(_Note(True, [1, 2])).encode()


def read_fault(entry: bytes) -> None:
    error = Fault.decode(entry).error("all_reduce", 1)
    assert isinstance(error, LockstepError)
    assert all(isinstance(rank, int) for rank in error.ranks)


def read_note(entry: bytes) -> None:
    note = _Note.decode(entry, range(4))
    gone, late = _blame(range(4), 0, _Note(False, []), {1: note})
    assert {*gone, *(late or ())} <= {*range(4)}


@pytest.mark.parametrize(
    "num_mutations", [500, pytest.param(NUM_MUTATIONS, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("read", "entry"),
    [(read_fault, FAULT), (read_note, NOTE)],
)
def test_any_entry_is_read_or_told_of(read: Any, entry: bytes, num_mutations: int) -> None:
    read_mutated(read, entry, num_mutations)


@pytest.mark.parametrize("read", [read_fault, read_note])
def test_an_entry_takes_at_most_twice_its_size(read: Any) -> None:
    read_crafted(read)
