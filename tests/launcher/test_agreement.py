"""How launchers of several hosts find out together what has failed, over a store in one process."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import LaunchError
from lockstep.launcher import JobOutcome, endpoint
from lockstep.launcher import agreement as module
from lockstep.launcher.agreement import Agreement, decoded
from tests.waiting import until

Join = Callable[..., Agreement]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Host 0 of some, in agreements that end with the test; all waits are short."""
    seconds_of = {"_TALK": 0.02, "_READ": 0.05, "_LOOK": 0.05, "_SILENT": 0.5, "_SETTLE": 2.0}
    for name, seconds in seconds_of.items():
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
    joined: list[Agreement] = []

    def of(
        store: dist.Store, num_hosts: int, number: int = 0, patience: float = 60, **options: Any
    ) -> Agreement:
        for host in range(num_hosts):
            Agreement.show_life(store, host)
        names = [f"name-{host}" for host in range(num_hosts)]
        joined.append(Agreement(store, number, names, patience, **options))
        return joined[-1]

    yield of
    for agreement in joined:
        agreement._is_over.set()
        for thread in agreement._threads:
            thread.join()
        os.close(agreement.notice)
        os.close(agreement._notifier)


def go_on() -> list[int]:
    return []


def settled(agreement: Agreement, outcome: JobOutcome) -> Callable[[], JobOutcome]:
    """Settle in a thread; return what waits for the answer."""
    answers: list[JobOutcome] = []
    thread = threading.Thread(target=lambda: answers.append(agreement.settle(outcome, go_on)))
    thread.start()

    def answer() -> JobOutcome:
        thread.join()
        return answers[0]

    return answer


def tell(store: dist.Store, host: int, *told: object) -> None:
    store.set(f"failure/{host}", json.dumps(told))
    store.set("failed", "")
    store.set(f"done/{host}", "")


@pytest.mark.parametrize("told", [b"", b"[]", b"{}", b'{"exit_status": "x"}', b"\xff"])
def test_failure_of_another_host_that_cannot_be_read_is_a_failure(told: bytes) -> None:
    assert decoded(told).exit_status == 1


def test_host_of_the_store_lets_others_read_the_failure_if_one_is_gone(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVE_SECONDS", 2.0)
    store = dist.HashStore()
    store.set("done/1", "")  # and host 2 is gone
    agreement = join(store, 3)
    leaving = threading.Timer(1.5, store.add, ("left", 1))
    leaving.start()
    failure = JobOutcome(1, message="failed", rank=0)
    assert agreement.settle(failure, go_on) == failure
    assert store.add("left", 0) == 2
    leaving.join()


@pytest.mark.keeps_descriptors  # libuv's first loop in a process does
def test_a_store_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MOST_BYTES", 8 << 20)
    found = endpoint._open_store(socket.create_server(("127.0.0.1", 0)))
    found.check()

    def fill() -> None:  # beyond all that this process has freed
        for number in range(1000):
            found.store.set(f"rubbish {number}", "x" * (1 << 20))
            found.check()

    with pytest.raises(LaunchError, match="has taken more than 8 MiB"):
        fill()


def test_a_store_that_has_grown_too_large_ends_the_run(join: Join) -> None:
    """On all hosts, whatever the ranks say that are ended for it."""
    store, grown = dist.HashStore(), threading.Event()

    def check() -> None:
        if grown.is_set():
            raise LaunchError("the store is too large")

    agreement = join(store, 2, check=check)
    assert not store.check(["failed"])
    grown.set()
    assert select.select([agreement.notice], [], [], 60)[0]
    assert os.read(agreement.notice, 1) == b"\0"
    assert until(lambda: store.check(["failed"]))
    store.set("done/1", "")
    store.add("left", 1)
    ended = JobOutcome(143, message="ended", at_seconds=time.monotonic())
    assert agreement.settle(ended, go_on).message == "the store is too large"
    assert decoded(store.get("failure/0")).message == "the store is too large"


def test_a_launcher_that_was_ended_hides_no_rank_that_failed(join: Join) -> None:
    """One may end it because the ranks of another host have failed."""
    store = dist.HashStore()
    tell(store, 1, 143, 20.0, False, None, "ended by SIGTERM.")
    tell(store, 2, 7, 10.0, False, 4, "rank 4 of 6 failed first: exit code 7.")
    store.add("left", 2)
    outcome = join(store, 3).settle(JobOutcome(0), go_on)
    assert (outcome.rank, outcome.exit_status) == (4, 7)


def test_waiting_for_other_hosts_to_leave_can_be_interrupted(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVE_SECONDS", 20.0)
    began = time.monotonic()
    store = dist.HashStore()
    store.set("done/1", "")
    signals = iter([[], [signal.SIGINT], [], [signal.SIGINT]])
    assert join(store, 2).settle(JobOutcome(0), lambda: next(signals, [])) == JobOutcome(0)
    assert time.monotonic() - began < 10.0
    assert store.check(["hurry"])


class SilentStore:
    """As that of a host that the network has lost: no connection is closed."""

    def __init__(self) -> None:
        self.ends = threading.Event()

    def set(self, key: str, value: str) -> None:
        """TCPStore's doesn't wait for an answer."""

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
    outcome = join(store, 2, number=1, patience=0.5).settle(JobOutcome(0), go_on)
    store.ends.set()
    assert outcome.exit_status == 1
    assert outcome.message is not None
    assert outcome.message.startswith("host 0 (name-0) is lost: it fell silent")
    assert time.monotonic() - began < 30


PEER_LOST = JobOutcome(1, message="rank 0 of 4 failed first", rank=0, lost_a_peer=True)


def test_host_that_fell_silent_is_to_blame_and_not_the_rank_that_lost_a_peer(join: Join) -> None:
    outcome = join(dist.HashStore(), 2).settle(PEER_LOST, go_on)
    assert outcome.message is not None
    assert outcome.message.startswith("host 1 (name-1) is lost")


def test_rank_that_failed_before_its_host_fell_silent_is_to_blame(join: Join) -> None:
    failure = JobOutcome(
        3, message="rank 0 of 4 failed first", rank=0, at_seconds=time.monotonic() - 9
    )
    assert join(dist.HashStore(), 2).settle(failure, go_on) == failure


def test_ranks_end_once_nothing_was_heard_of_a_host_for_too_long(join: Join) -> None:
    assert os.read(join(dist.HashStore(), 3, patience=0.3).notice, 1) == b"\0"


def test_interruption_of_one_host_is_passed_on_and_is_to_blame(join: Join) -> None:
    store = dist.HashStore()
    first, second = join(store, 2), join(store, 2, number=1)
    interrupted = JobOutcome(130, message="ended by SIGINT.", at_seconds=time.monotonic())
    first.interrupt(2)
    assert os.read(second.notice, 1) == b"\2"
    answer = settled(second, PEER_LOST)
    told = first.settle(interrupted, go_on)
    assert (told.exit_status, answer().exit_status) == (130, 130)
    assert told.message == "ended by SIGINT; no rank is left running."
    assert answer().message == "ended by SIGINT at host 0 (name-0); no rank is left running."


def test_second_ctrl_c_at_one_host_ends_the_ranks_of_all_at_once(join: Join) -> None:
    store = dist.HashStore()
    first, second = join(store, 2), join(store, 2, number=1)
    first.interrupt(signal.SIGINT)
    assert os.read(second.notice, 1) == bytes([signal.SIGINT])
    first.hurry()
    assert os.read(second.notice, 1) == bytes([signal.SIGKILL])


@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_at_a_host_whose_ranks_are_done_is_one_of_all(join: Join, number: int) -> None:
    store = dist.HashStore()
    hosts = join(store, 2), join(store, 2, number=1)
    signals = iter([[], [signal.SIGINT]])
    answers: list[JobOutcome] = []

    def settle() -> None:
        answers.append(hosts[number].settle(JobOutcome(0), lambda: next(signals, [])))

    thread = threading.Thread(target=settle)
    thread.start()
    assert os.read(hosts[1 - number].notice, 1) == bytes([signal.SIGINT])
    others = hosts[1 - number].settle(JobOutcome(0), go_on)
    thread.join()
    assert [outcome.exit_status for outcome in (*answers, others)] == [130, 130]


def test_interruption_that_was_heard_counts_if_its_host_leaves_with_the_store(join: Join) -> None:
    store = KeptStore()
    first, second = join(store, 2), join(store, 2, number=1)
    first.interrupt(signal.SIGINT)
    assert os.read(second.notice, 1) == bytes([signal.SIGINT])
    store.is_gone = True
    assert second.settle(PEER_LOST, go_on).exit_status == 130


class KeptStore:
    """A store that ends with the host that keeps it."""

    def __init__(self) -> None:
        self._store, self.is_gone = dist.HashStore(), False

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise RuntimeError("the connection is closed")
        return getattr(self._store, name)


@pytest.mark.parametrize("behind_seconds", [-1000.0, 1000.0])
def test_first_cause_is_found_though_clocks_differ(join: Join, behind_seconds: float) -> None:
    """Host 1 fails 2 s before host 0 does; its clock is behind that, or before it."""
    store = dist.HashStore()
    first = join(store, 2)
    clock = lambda: time.monotonic() - behind_seconds  # noqa: E731
    second = join(store, 2, number=1, clock=clock)
    assert until(lambda: second._offsets)
    local = JobOutcome(3, message="rank 0", rank=0, at_seconds=time.monotonic())
    others = JobOutcome(4, message="rank 1", rank=1, at_seconds=clock() - 2)
    answer = settled(second, others)
    assert first.settle(local, go_on).rank == 1
    assert answer().rank == 1


def test_launcher_whose_connection_has_ended_is_lost_soon_and_the_others_hear_of_it(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 1 of three; its connection alone doesn't tell, as what is between may end it."""
    monkeypatch.setattr(module, "_GONE_SECONDS", 0.5)
    store = dist.HashStore()
    line, its_end = socket.socketpair()
    hosts = [join(store, 3, lines={1: line}), join(store, 3, number=2)]
    living = join(store, 3, number=1)
    its_end.close()
    assert until(lambda: hosts[1]._ended)
    time.sleep(1.0)
    assert not any(host._is_noticed for host in hosts)
    living._is_over.set()
    for host in hosts:
        assert os.read(host.notice, 1) == b"\0"
    answer = settled(hosts[1], JobOutcome(0))
    told = hosts[0].settle(JobOutcome(0), go_on).message
    assert told is not None
    assert told.startswith("host 1 (name-1) is lost: the connection of its launcher has ended")
    assert answer().message == told
    line.close()


def test_rank_that_ended_by_itself_is_to_blame_for_those_that_lost_it(join: Join) -> None:
    suspect = JobOutcome(1, message="rank 2 of 4 failed first", rank=2, at_seconds=time.monotonic())
    store = dist.HashStore()
    first, second = join(store, 2), join(store, 2, number=1)
    answer = settled(second, JobOutcome(0, suspect=suspect))
    assert first.settle(PEER_LOST, go_on).rank == 2
    assert answer().rank == 2
