"""What ranks tell each other as they meet may be anybody's: it is read, or told of."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.entries import has_room_for, name_in, text_in, value_in
from lockstep.errors import RendezvousFailed
from lockstep.world import Placement, Starter, reach
from lockstep.world.agreement import _read
from lockstep.world.rendezvous import roll_call
from tests.counts import NUM_MUTATIONS
from tests.fuzzing import read_crafted, read_mutated

NETWORK = ["a0b1 4026531840", "10.0.0.1"]
OFFER = ["first", [[["10.0.0.1", 4000], ["fd00::1", 4001]]], ["127.0.0.1", "10.0.0.1"], "eth0"]
WAYS = [{}, {"10.0.0.2": "Connection refused", "fd00::2": ""}]
DEVICE = ["cpu", True, "", ""]


def read_note(read: Any, entry: bytes) -> None:
    """As HostsOfRun reads it."""
    with suppress(ValueError, TypeError, AttributeError, OverflowError):
        read(value_in(text_in(entry)))


def read_offer(entry: bytes) -> None:
    """And what is made of it: who doesn't reach whom, and where."""
    found: list[Any] = []
    read_note(lambda note: found.append(reach._read_offer(note)), entry)
    for name, offers, _, asked in found:
        ways = [[{}, {address: "" for each in offers for address, _ in each}]] * 2
        reach._choice([offers, offers], ways)
        assert (name + asked).isprintable()
        assert reach._missing([name, name], [offers, offers], ways).isprintable()


def read_device(entry: bytes) -> None:
    with suppress(RendezvousFailed):
        assert isinstance(_read(text_in(entry))[1], bool)


READERS: list[Any] = [
    (partial(read_note, reach._read_network), NETWORK),
    (read_offer, OFFER),
    (partial(read_note, partial(reach._read_ways, 2)), WAYS),
    (partial(read_note, reach._read_texts), ["10.0.0.9"]),
    (read_device, DEVICE),
]


@pytest.mark.parametrize(
    "num_mutations", [200, pytest.param(NUM_MUTATIONS, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("read", "entry"), READERS)
def test_any_note_is_read_or_told_of(read: Any, entry: Any, num_mutations: int) -> None:
    read_mutated(read, json.dumps(entry).encode(), num_mutations)


@pytest.mark.parametrize("read", [*(read for read, _ in READERS), name_in])
def test_a_note_takes_at_most_twice_its_size(read: Any) -> None:
    read_crafted(read)


def test_what_ranks_write_has_room() -> None:
    options = [{"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}] * 500
    assert has_room_for(json.dumps(options).encode())
    assert value_in(json.dumps(options)) == options


def test_a_note_of_another_writer_is_no_other_rank() -> None:
    """A rank knows its own note, and that of another need not be text."""
    store, late = dist.HashStore(), timedelta(seconds=5)
    store.set("present/1", b"\x1b[2J\xff")
    place = Placement(Starter.TORCHRUN, 0, 2, None, None)
    notes = roll_call(store, place, late, "mine")
    assert notes[0] == "mine"
    assert notes[1].startswith("\x1b")
