"""What an asynchronous call tells that fails, ends at its time-out, or is not carried out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.collectives import Reduction
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from tests.comm.groups import OURS, run_on
from tests.waiting import until

over_ours = pytest.mark.parametrize("backend", OURS)

SMALL, LARGE = 4, 700_001


@over_ours
@pytest.mark.parametrize("ask", ["wait", "is_completed", "get_future", "result"])
def test_a_work_tells_what_went_wrong(backend: str, ask: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(3 + group.rank())
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if ask == "is_completed":
            assert until(work.is_completed)
            assert not work.is_success()
            assert isinstance(work.exception(), CollectiveMismatch)
        if ask == "get_future":
            # What torch knows in C++, it knows as a RuntimeError.
            with pytest.raises(RuntimeError, match=r"CollectiveMismatch: .* called all_reduce"):
                work.get_future().wait()
        for act in (work.wait, work.result):
            with pytest.raises(CollectiveMismatch):
                act()

    run_on(backend, 2, body)


@over_ours
def test_a_rank_that_fails_halfway_spoils_no_later_sum(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, failing = 100_000, threading.local()
    into = Reduction.into

    def run_out_of_memory(self: Reduction, *args: object) -> None:
        if getattr(failing, "now", False):
            failing.now = False
            raise MemoryError("no room")
        into(self, *args)

    monkeypatch.setattr(Reduction, "into", run_out_of_memory)

    def body(group: dist.ProcessGroup) -> list[object]:
        seen: list[object] = []
        for call in range(4):
            failing.now = group.rank() == 1 and call == 1
            tensor = torch.full((large,), float(call))
            try:
                group.allreduce([tensor]).wait()
                seen.append(tensor.unique().tolist())
            except (MemoryError, PeerLost) as error:
                seen.append(type(error))
        return seen

    first, second = run_on(backend, 2, body)
    assert first == [[0.0], PeerLost, PeerLost, PeerLost]
    assert second == [[0.0], MemoryError, PeerLost, PeerLost]


@over_ours
def test_leaving_waits_for_what_was_called(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> float:
        tensor = torch.ones(3)
        if group.rank():
            time.sleep(1.5)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        time.sleep(0.1)
        group.shutdown()
        work.wait()
        return tensor[0].item()

    assert run_on(backend, 2, body) == [2.0, 2.0]


@over_ours
def test_what_is_called_after_leaving_fails_at_once(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        group.shutdown()
        work = group.allreduce(torch.ones(3), timeout=timedelta(seconds=20))
        assert work.is_completed()
        with pytest.raises(RuntimeError, match="GroupClosed"):
            work.get_future().wait()

    run_on(backend, 2, body)


def test_a_collective_in_a_signal_handler_is_refused() -> None:
    told: list[RuntimeError] = []

    def body(group: dist.ProcessGroup) -> None:
        def handle(*_: object) -> None:
            try:
                group.barrier().wait()
            except RuntimeError as error:
                told.append(error)

        def call_handler(timeout: float) -> None:
            handle()  # as Python does, in the middle of whatever the thread is in

        group._queue.submit([call_handler], [], is_async=False)
        group.allreduce([torch.ones(1)]).wait()

    run_on("threads", 1, body)
    assert "handler of a signal" in str(told[0])


@over_ours
@pytest.mark.parametrize("how", ["of the wait", "of the call", "of the group"])
def test_a_wait_ends_at_its_time_out(backend: str, how: str) -> None:
    over = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        if group.rank():
            assert over.wait(20)
            return
        short = timedelta(seconds=0.1)
        if how == "of the group":
            group.set_timeout(short)
        started = time.monotonic()
        call: Callable[[], object]
        if how == "of the call":
            call = group.allreduce(torch.ones(3), timeout=short).wait
        else:
            work = group.allreduce(torch.ones(3))
            call = (lambda: work.wait(short)) if how == "of the wait" else work.wait
        try:
            with pytest.raises(CollectiveTimeout, match="Rank 1"):
                call()
            assert 0.09 < time.monotonic() - started < 15
        finally:
            over.set()

    run_on(backend, 2, body)


@over_ours
@pytest.mark.parametrize("call", ["a sum", "a message"])
def test_a_wait_ends_at_its_time_out_while_another_thread_waits(backend: str, call: str) -> None:
    """That thread has the limit of the group."""
    over = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        if group.rank():
            assert over.wait(20)
            return
        tensors = [torch.ones(3)]
        work = group.allreduce(tensors) if call == "a sum" else group.recv(tensors, 1, 0)
        work.get_future()
        try:
            assert until(lambda: work._deadline.left())
            error = "Rank 1 did not come" if call == "a sum" else "Nothing came to rank 0"
            with pytest.raises(CollectiveTimeout, match=f"{error} .*within .*0.1 s"):
                work.wait(timedelta(seconds=0.1))
        finally:
            over.set()

    run_on(backend, 2, body)


@over_ours
def test_a_monitored_barrier_of_no_time_waits_for_nobody(backend: str) -> None:
    over = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        if group.rank():
            assert over.wait(20)
            return
        try:
            with pytest.raises(
                CollectiveTimeout, match=r"Rank 1 did not come .* the timeout of 0 s"
            ):
                group.monitored_barrier(timedelta(0))
        finally:
            over.set()

    run_on(backend, 2, body, seconds=2)


@over_ours
def test_interrupted_call_is_not_taken_for_the_next(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come in the middle of the arithmetic, when others have met already."""
    victims: set[int] = set()
    into = Reduction.into

    def interrupted_into(*args: object) -> None:
        if threading.get_ident() in victims:
            raise KeyboardInterrupt
        into(*args)

    monkeypatch.setattr(Reduction, "into", interrupted_into)

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            victims.add(threading.get_ident())
        with pytest.raises(PeerLost if group.rank() else KeyboardInterrupt):
            dist.all_reduce(torch.ones(100_000), group=group)
        victims.clear()
        with pytest.raises(PeerLost, match="Rank 0"):
            dist.all_reduce(torch.ones(100_000), group=group)

    run_on(backend, 2, body)


@over_ours
def test_a_limit_on_threads_leaves_no_future_undone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "lockstep-callback":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)

    def body(group: dist.ProcessGroup) -> None:
        for _ in range(2):  # the queue's own thread carries out both
            work = dist.all_reduce(torch.ones(SMALL), group=group, async_op=True)
            future = work.get_future().then(lambda done: done.value())
            assert until(future.done)

    run_on(backend, 2, body)
