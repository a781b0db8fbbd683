"""How launchers of several hosts find out together what has failed, over a store in one process."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.launcher import agreement as module
from lockstep.launcher.agreement import Agreement, _decoded
from lockstep.launcher.failures import Outcome

Join = Callable[..., Agreement]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Host 0 of some, in agreements that end with the test; all waits are short."""
    for name, seconds in (("_TALK", 0.02), ("_LOOK", 0.05), ("_SILENT", 0.5), ("_SETTLE", 2.0)):
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
    joined: list[Agreement] = []

    def of(store: dist.Store, num_hosts: int, number: int = 0, patience: float = 60) -> Agreement:
        for host in range(num_hosts):
            Agreement.show_life(store, host)
        names = [f"name-{host}" for host in range(num_hosts)]
        joined.append(Agreement(store, number, names, patience))
        return joined[-1]

    yield of
    for agreement in joined:
        agreement._is_over.set()
        for thread in agreement._threads:
            thread.join()
        os.close(agreement.notice)
        os.close(agreement._notifier)


def go_on() -> bool:
    return False


def tell(store: dist.Store, host: int, *told: object) -> None:
    store.set(f"failure/{host}", json.dumps(told))
    store.set("failed", "")
    store.set(f"done/{host}", "")


@pytest.mark.parametrize("told", [b"", b"[]", b"{}", b'{"exit_status": "x"}', b"\xff"])
def test_failure_of_another_host_that_cannot_be_read_is_a_failure(told: bytes) -> None:
    assert _decoded(told).exit_status == 1


def test_host_of_the_store_lets_others_read_the_failure_if_one_is_gone(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVE_SECONDS", 2.0)
    store = dist.HashStore()
    store.set("done/1", "")  # and host 2 is gone
    agreement = join(store, 3)
    leaving = threading.Timer(1.5, store.add, ("left", 1))
    leaving.start()
    failure = Outcome(1, message="failed", rank=0)
    assert agreement.settle(failure, go_on) == failure
    assert store.add("left", 0) == 2
    leaving.join()


def test_a_launcher_that_was_ended_hides_no_rank_that_failed(join: Join) -> None:
    """One may end it because the ranks of another host have failed."""
    store = dist.HashStore()
    tell(store, 1, 143, 20.0, False, None, "ended by SIGTERM.")
    tell(store, 2, 7, 10.0, False, 4, "rank 4 of 6 failed first: exit code 7.")
    store.add("left", 2)
    outcome = join(store, 3).settle(Outcome(0), go_on)
    assert (outcome.rank, outcome.exit_status) == (4, 7)


def test_waiting_for_other_hosts_to_leave_can_be_interrupted(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVE_SECONDS", 20.0)
    began = time.monotonic()
    store = dist.HashStore()
    store.set("done/1", "")
    join(store, 2).settle(Outcome(0), lambda: time.monotonic() > began + 0.5)
    assert time.monotonic() - began < 10.0


class SilentStore:
    """As that of a host that the network has lost: no connection is closed."""

    def __init__(self) -> None:
        self.ends = threading.Event()

    def add(self, key: str, amount: int) -> int:
        return amount

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return value.encode()

    def __getattr__(self, name: str) -> Any:
        def request(*_: object) -> None:
            self.ends.wait(60)
            raise RuntimeError("the connection is closed")

        return request


def test_store_that_does_not_answer_is_not_waited_for(join: Join) -> None:
    began = time.monotonic()
    store: Any = SilentStore()
    outcome = join(store, 2, number=1, patience=0.5).settle(Outcome(0), go_on)
    store.ends.set()
    assert outcome.exit_status == 1
    assert outcome.message is not None
    assert outcome.message.startswith("host 0 (name-0) is lost: it fell silent")
    assert time.monotonic() - began < 30


PEER_LOST = Outcome(1, message="rank 0 of 4 failed first", rank=0, lost_a_peer=True)


def test_host_that_fell_silent_is_to_blame_and_not_the_rank_that_lost_a_peer(join: Join) -> None:
    outcome = join(dist.HashStore(), 2).settle(PEER_LOST, go_on)
    assert outcome.message is not None
    assert outcome.message.startswith("host 1 (name-1) is lost")


def test_rank_that_failed_before_its_host_fell_silent_is_to_blame(join: Join) -> None:
    failure = Outcome(3, message="rank 0 of 4 failed first", rank=0, at_seconds=time.time() - 9)
    assert join(dist.HashStore(), 2).settle(failure, go_on) == failure


def test_ranks_end_once_nothing_was_heard_of_a_host_for_too_long(join: Join) -> None:
    assert os.read(join(dist.HashStore(), 3, patience=0.3).notice, 1) == b"\0"


def test_interruption_of_one_host_is_passed_on_and_is_to_blame(join: Join) -> None:
    store = dist.HashStore()
    first, second = join(store, 2), join(store, 2, number=1)
    now = time.time()
    first.interrupt(2, now)
    assert os.read(second.notice, 1) == b"\2"
    interrupted = Outcome(130, message="ended by SIGINT.", at_seconds=now)
    answers: list[Outcome] = []
    thread = threading.Thread(target=lambda: answers.append(second.settle(PEER_LOST, go_on)))
    thread.start()
    assert first.settle(interrupted, go_on) == interrupted
    thread.join()
    assert answers[0].exit_status == 130
    assert answers[0].message == "ended by SIGINT at host 0 (name-0); no rank is left running."


def test_rank_that_ended_by_itself_is_to_blame_for_those_that_lost_it(join: Join) -> None:
    suspect = Outcome(1, message="rank 2 of 4 failed first", rank=2, at_seconds=time.time())
    store = dist.HashStore()
    first, second = join(store, 2), join(store, 2, number=1)
    answers: list[Outcome] = []
    own = Outcome(0, suspect=suspect)
    thread = threading.Thread(target=lambda: answers.append(second.settle(own, go_on)))
    thread.start()
    assert first.settle(PEER_LOST, go_on).rank == 2
    thread.join()
    assert answers[0].rank == 2
