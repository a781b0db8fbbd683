"""What launchers read from the store may be anybody's: it is read, or told of."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from lockstep.entries import text_in
from lockstep.launcher import JobOutcome
from lockstep.launcher.agreement import decoded, told_interruption
from lockstep.launcher.restarts import Decision, Reaction
from tests.counts import NUM_MUTATIONS
from tests.fuzzing import read_crafted, read_mutated

FAILURE = json.dumps([1, 12.5, False, 3, "ValueError: no", "no", False, None]).encode()
DECISION = Decision(Reaction.RESTART, "restart 1: rank 0 of 2 failed").encoded().encode()
INTERRUPTION = json.dumps([15, 12.5, 1]).encode()


class Store:
    """One that has an entry under every key."""

    def __init__(self, entry: bytes) -> None:
        self._entry = entry

    def check(self, keys: list[str]) -> bool:
        return bool(keys)

    def get(self, key: str) -> bytes:
        return self._entry


def read_failure(entry: bytes) -> None:
    found = decoded(entry)
    assert isinstance(found, JobOutcome)
    assert isinstance(found.message, str)


def read_interruption(entry: bytes) -> None:
    store: Any = Store(entry)
    found = told_interruption(store, 0, str)
    assert found is not None
    assert 0 <= found.exit_status < 256


def read_decision(entry: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(Decision.of(text_in(entry)).words, str)


@pytest.mark.parametrize(
    "num_mutations", [500, pytest.param(NUM_MUTATIONS, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("read", "entry"),
    [(read_failure, FAILURE), (read_interruption, INTERRUPTION), (read_decision, DECISION)],
)
def test_any_entry_is_read_or_told_of(read: Any, entry: bytes, num_mutations: int) -> None:
    read_mutated(read, entry, num_mutations)


@pytest.mark.parametrize("read", [read_failure, read_interruption, read_decision])
def test_an_entry_takes_at_most_twice_its_size(read: Any) -> None:
    read_crafted(read)
