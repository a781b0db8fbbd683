"""Memory of snapshots: what is whole, whose it is, and which step all ranks have."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator

import pytest

from lockstep.launcher import SnapshotHeader, SnapshotMemory, newest_step
from lockstep.launcher.snapshot_memory import HEADER_BYTES
from lockstep.world import restart_environment, restarts_of

PLACES, VALUES = b'{"model": []}', b'{"epoch": 3}'


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    descriptors = SnapshotMemory.create(0)
    memory = SnapshotMemory(descriptors)
    yield memory
    memory.close()
    for descriptor in descriptors:
        os.close(descriptor)


def descriptors_of(memory: SnapshotMemory) -> tuple[int, ...]:
    return memory._descriptors


def write(memory: SnapshotMemory, slot: int, step: int, tensors: bytes = b"t" * 100) -> None:
    memory.discard(slot)
    everything = tensors + PLACES + VALUES
    memory.room(slot, len(everything))[: len(everything)] = everything
    memory.complete(slot, header_of(step, tensors))


def header_of(step: int, tensors: bytes) -> SnapshotHeader:
    return SnapshotHeader(
        step,
        rank=0,
        tensor_bytes=len(tensors),
        places_bytes=len(PLACES),
        value_bytes=len(VALUES),
        tensor_checksum=zlib.crc32(tensors),
        text_checksum=zlib.crc32(PLACES + VALUES),
        key=b"k" * 32,
        path="/data/run",
    )


def test_a_snapshot_is_read_as_it_was_written(memory: SnapshotMemory) -> None:
    assert memory.newest() is None
    write(memory, 0, 5, b"abc")
    header = memory.newest()
    assert header == header_of(5, b"abc")
    assert bytes(memory.view(0)[:3]) == b"abc"
    assert memory.texts(0, header) == (PLACES, VALUES)


def test_the_newest_of_two_slots_is_found(memory: SnapshotMemory) -> None:
    write(memory, 0, 5)
    write(memory, 1, 10)
    newest = memory.newest()
    assert newest is not None
    assert newest.step == 10
    assert [memory.of_step(step)[0] for step in (5, 10)] == [0, 1]


def test_another_process_reads_what_was_written(memory: SnapshotMemory) -> None:
    if (child := os.fork()) == 0:
        write(memory, 1, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    newest = memory.newest()
    assert newest is not None
    assert newest.step == 7


@pytest.mark.parametrize("done", ["discarded", "data", "no header"])
def test_what_a_killed_rank_has_half_written_is_not_whole(
    memory: SnapshotMemory, done: str
) -> None:
    write(memory, 0, 5)
    if done != "no header":
        write(memory, 1, 10)
        memory.discard(1)
    if done != "discarded":
        memory.room(1, 200)[:50] = b"n" * 50
    newest = memory.newest()
    assert newest is not None
    assert newest.step == 5


@pytest.mark.parametrize("at", range(0, 115, 3))
def test_a_changed_byte_of_the_header_is_noticed(memory: SnapshotMemory, at: int) -> None:
    write(memory, 0, 5)
    before = os.pread(descriptors_of(memory)[0], 1, at)
    os.pwrite(descriptors_of(memory)[0], bytes([before[0] ^ 1]), at)
    assert memory.newest() is None


def test_a_changed_byte_of_a_text_is_noticed(memory: SnapshotMemory) -> None:
    write(memory, 0, 5)
    header = memory.newest()
    assert header is not None
    os.pwrite(descriptors_of(memory)[0], b"?", HEADER_BYTES + 100 + 4)
    assert memory.texts(0, header) is None


def test_a_file_that_was_cut_is_not_whole(memory: SnapshotMemory) -> None:
    write(memory, 0, 5)
    os.truncate(descriptors_of(memory)[0], HEADER_BYTES + 10)
    assert memory.newest() is None


def test_memory_stays_where_it_is_until_more_is_needed(memory: SnapshotMemory) -> None:
    first = memory.room(0, 100)
    first[:3] = b"abc"
    assert bytes(memory.room(0, 50)[:3]) == b"abc"
    assert bytes(memory.room(0, 100_000)[:3]) == b"abc"
    assert len(memory.view(0)) == 100_000


def test_a_path_too_long_for_the_header_is_left_out(memory: SnapshotMemory) -> None:
    memory.room(0, 100)
    empty = header_of(5, b"")._replace(places_bytes=0, value_bytes=0)
    memory.complete(0, empty._replace(path="/x" * 3000))
    assert memory.newest() == empty._replace(path="")


def test_the_newest_step_is_that_of_all_ranks(memory: SnapshotMemory) -> None:
    others = SnapshotMemory.create(1)
    other = SnapshotMemory(others)
    write(memory, 0, 5)
    write(memory, 1, 10)
    assert newest_step([memory, other]) is None
    write(other, 1, 5)
    assert newest_step([memory, other]) == 5
    write(other, 0, 10)
    assert newest_step([memory, other]) == 10
    other.close()
    for descriptor in others:
        os.close(descriptor)


def test_descriptors_of_others_are_not_taken_for_snapshots(memory: SnapshotMemory) -> None:
    assert SnapshotMemory.inherited(descriptors_of(memory)) is not None
    with open(os.devnull) as file:
        assert SnapshotMemory.inherited((file.fileno(), file.fileno())) is None
    assert SnapshotMemory.inherited((98765, 98766)) is None


def test_ranks_are_told_their_descriptors_and_restarts() -> None:
    assert restarts_of({}) == (0, ())
    assert restarts_of(restart_environment(3, (7, 8))) == (3, (7, 8))
    assert restarts_of({"TORCHELASTIC_RESTART_COUNT": "2"}) == (2, ())
