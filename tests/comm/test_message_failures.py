"""Messages that don't come, don't fit or find no room, and ranks that are lost or have left."""

from __future__ import annotations

import errno
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import end_this_rank
from lockstep.comm.shm import mailbox
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, SharedMemoryFull
from tests.comm.groups import LARGE, SMALL, assert_all_are, over_ours, run_on
from tests.ranks import TIMEOUT_SECONDS


@over_ours
@pytest.mark.parametrize("how", ["has aborted the group", "is gone"])
def test_from_anyone_nothing_is_awaited_once_a_rank_is_lost(backend: str, how: str) -> None:
    is_told = threading.Event()

    def body(group: Any) -> None:
        if group.rank() == 0:
            if how == "is gone":  # without a word
                end_this_rank() if backend == "threads" else group.transport.close()
            else:
                group.abort()
        elif group.rank() == 1:
            assert is_told.wait(TIMEOUT_SECONDS)  # it is there, and sends nothing
        else:
            try:
                with pytest.raises(PeerLost, match=f"Rank 0 {how}"):
                    group.recv_anysource([torch.zeros(SMALL)], 0).wait()
            finally:
                is_told.set()

    run_on(backend, 3, body)


@over_ours
def test_from_anyone_the_rest_is_awaited_after_a_rank_has_left(backend: str) -> None:
    has_left = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(SMALL)
        if group.rank() == 0:
            group.shutdown()
            has_left.set()
        elif group.rank() == 1:
            assert has_left.wait(TIMEOUT_SECONDS)
            time.sleep(0.1)  # rank 2 waits, and knows of it
            group.send([tensor], 2, 0).wait()
        else:
            group.recv_anysource([tensor.zero_()], 0).wait()
            assert_all_are(1, tensor)

    run_on(backend, 3, body)


@over_ours
def test_what_does_not_come_in_time_is_an_error(backend: str) -> None:
    late = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            assert late.wait(20)
            return
        with pytest.raises(CollectiveTimeout, match="tag 4"):
            group.recv([torch.zeros(SMALL)], 0, 4).wait(timedelta(seconds=0.05))
        late.set()

    run_on(backend, 2, body)


@over_ours
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_message_of_another_size_or_dtype_is_refused(
    backend: str, shape: tuple[int, ...]
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            for _ in range(3):
                group.send([torch.ones(shape)], 1, 0).wait()
            return
        with pytest.raises(CollectiveMismatch, match="float32"):
            group.recv([torch.ones(shape, dtype=torch.int32)], 0, 0).wait()
        with pytest.raises(CollectiveMismatch, match="bytes"):
            group.recv([torch.ones(2)], 0, 0).wait()
        tensor = torch.zeros(shape)
        group.recv([tensor], 0, 0).wait()
        assert torch.equal(tensor, torch.ones(shape))

    run_on(backend, 2, body)


def test_a_send_that_is_interrupted_loses_no_other_message(monkeypatch: pytest.MonkeyPatch) -> None:
    write, given = os.pwrite, threading.Event()

    def body(group: Any) -> list[float]:
        def interrupted(*arguments: object) -> int:
            monkeypatch.undo()
            write(*arguments)
            # The notice of before may have come to the receiver too early.
            while not given.wait(0.05):
                group.transport.mailbox._notify(1)
            raise KeyboardInterrupt

        tensor = torch.empty(SMALL)
        if group.rank() == 0:
            group.send([tensor.fill_(0)], 1, 0).wait()
            monkeypatch.setattr(os, "pwrite", interrupted)
            with pytest.raises(KeyboardInterrupt):
                group.send([tensor.fill_(1)], 1, 0)
            for number in (2, 3):
                group.send([tensor.fill_(number)], 1, 0).wait()
            return []
        received = []
        for _ in range(4):
            group.recv([tensor], 0, 0).wait()
            received.append(tensor[0].item())
            if len(received) == 2:
                given.set()
        return received

    assert run_on("shm", 2, body)[1] == [0, 1, 2, 3]


@over_ours
def test_a_rank_that_has_left_is_said_to_have_left_after_many_messages(backend: str) -> None:
    has_left = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.empty(SMALL)
        if group.rank() == 0:
            for number in range(300):
                group.send([tensor.fill_(number)], 1, 0).wait()
            group.shutdown()
            has_left.set()
            return
        assert has_left.wait(TIMEOUT_SECONDS)
        for number in range(300):
            group.recv([tensor], 0, 0).wait()
            assert tensor[0] == number
        with pytest.raises(PeerLost, match=r"in good order|has left"):
            group.recv([tensor], 0, 0).wait()

    run_on(backend, 2, body)


@pytest.mark.parametrize("num_refusals", [3, 10**9])
def test_a_full_system_is_waited_for_and_then_told(
    monkeypatch: pytest.MonkeyPatch, num_refusals: int
) -> None:
    refusals, send = iter(range(num_refusals)), mailbox.send_message

    def refusing(*arguments: Any) -> None:
        if next(refusals, None) is not None:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        send(*arguments)

    monkeypatch.setattr(mailbox, "_LAST_RETRY_SECONDS", 0.2)

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.full(SMALL, float(group.rank()))
        group.barrier().wait()
        if group.rank() == 1:
            if num_refusals == 3:
                group.recv([tensor], 0, 0).wait()
                assert tensor[0] == 0
            return
        monkeypatch.setattr(mailbox, "send_message", refusing)
        if num_refusals == 3:
            group.send([tensor], 1, 0).wait()
        else:
            with pytest.raises(SharedMemoryFull, match="Too many references"):
                group.send([tensor], 1, 0).wait()

    run_on("shm", 2, body)


def test_a_receiver_without_room_for_a_descriptor_tells_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive = mailbox.receive_message

    def dropping(*arguments: Any) -> tuple[bytes, list[int]]:
        notice, descriptors = receive(*arguments)
        for descriptor in descriptors:  # as the kernel does beyond the limit
            os.close(descriptor)
        return notice, []

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.zeros(SMALL)
        group.barrier().wait()
        if group.rank() == 1:
            monkeypatch.setattr(mailbox, "receive_message", dropping)
            with pytest.raises(SharedMemoryFull, match="too many files are open"):
                group.recv([tensor], 0, 0).wait()
            return
        group.send([tensor], 1, 0).wait()
        with pytest.raises(PeerLost, match="Rank 1 could not take a message of rank 0"):
            group.recv([tensor], 1, 0).wait()

    run_on("shm", 2, body)
