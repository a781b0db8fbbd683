"""Memory that the ranks of a host have once, of which each sees its own changes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.comm import Segment, one_copy
from lockstep.comm.shm import one_copy as module
from lockstep.comm.shm.one_copy import OneCopy, name_of
from tests.ranks import run_ranks

PAGE = 4096


@pytest.fixture
def memory() -> Any:
    segment, _ = Segment.create(8 * PAGE)
    found = OneCopy(name_of(segment.descriptor), 8 * PAGE)
    segment.close()
    yield found
    found.close()


def test_what_others_write_is_seen(memory: OneCopy) -> None:
    memory.shared[PAGE : PAGE + 3] = 7
    assert memory.private[PAGE : PAGE + 4].tolist() == [7, 7, 7, 0]
    assert [*memory.changed()] == []


def test_pages_that_were_written_are_told_in_runs(memory: OneCopy) -> None:
    memory.private[PAGE + 5] = 1
    memory.private[3 * PAGE : 5 * PAGE] = 2
    memory.private[8 * PAGE - 1] = 3
    runs = [(PAGE, 2 * PAGE), (3 * PAGE, 5 * PAGE), (7 * PAGE, 8 * PAGE)]
    assert [*memory.changed()] == runs
    assert not memory.shared.any()


def test_a_page_that_was_written_is_this_ranks_own_until_it_is_dropped(memory: OneCopy) -> None:
    memory.private[0] = 1
    memory.shared[:2] = 9
    assert memory.private[:2].tolist() == [1, 0]
    memory.drop([*memory.changed()])
    assert memory.private[:2].tolist() == [9, 9]
    assert [*memory.changed()] == []


def test_the_kernel_is_asked_for_pages_only_after_a_page_fault(
    memory: OneCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = SimpleNamespace(ru_minflt=1, ru_majflt=0)
    monkeypatch.setattr(module.resource, "getrusage", lambda who: faults)
    assert [*memory.changed()] == []
    memory.private[PAGE] = 1
    assert [*memory.changed()] == []  # the write's own page fault isn't counted here
    faults.ru_minflt += 1
    assert [*memory.changed()] == [(PAGE, 2 * PAGE)]
    memory.private[3 * PAGE] = 1
    assert [*memory.changed()] == [(PAGE, 2 * PAGE)]
    memory.drop(memory.changed())
    assert [*memory.changed()] == [(3 * PAGE, 4 * PAGE)]


def test_where_page_faults_are_not_counted_each_rank_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = SimpleNamespace(ru_minflt=0, ru_majflt=0)
    monkeypatch.setattr(module.resource, "getrusage", lambda who: faults)
    assert run_ranks(2, lambda rank, group: one_copy(group, PAGE), backend="shm") == [None, None]


def test_a_group_without_processes_has_none() -> None:
    assert run_ranks(2, lambda rank, group: one_copy(group, PAGE)) == [None, None]


def test_where_the_kernel_does_not_tell_each_rank_has_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    empty = tmp_path / "pagemap"
    empty.touch()
    monkeypatch.setattr(module, "_PAGEMAP", str(empty))
    assert run_ranks(2, lambda rank, group: one_copy(group, PAGE), backend="shm") == [None, None]


def test_a_forked_child_does_not_see_later_values() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 3 * 4096)
    mine = OneCopy(name_of(descriptor), 3 * 4096)
    go, told = os.pipe(), os.pipe()
    mine.shared.fill_(1)
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)
        os.write(told[1], bytes(mine.private[::4096].tolist()))
        os._exit(0)
    mine.drop(mine.changed())
    mine.shared.fill_(2)
    os.write(go[1], b"1")
    assert os.read(told[0], 3) == b"\1\1\1"
    assert mine.private[::4096].tolist() == [2, 2, 2]
    os.waitpid(child, 0)
    for end in (*go, *told, descriptor):
        os.close(end)
