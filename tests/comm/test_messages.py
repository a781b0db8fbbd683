"""Messages from one rank to another, on every backend."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import messages
from tests.comm.groups import (
    BACKENDS,
    DTYPES,
    GLOO_DTYPES,
    LARGE,
    OURS,
    SHAPES,
    SMALL,
    assert_all_are,
    assert_same_bits,
    laid_out,
    over_ours,
    run_on,
    values,
)
from tests.ranks import TIMEOUT_SECONDS
from tests.waiting import until

over_backends = pytest.mark.parametrize("backend", BACKENDS)


@over_backends
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_arrives(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        for dtype in DTYPES if backend in OURS else GLOO_DTYPES:
            for shape in SHAPES:
                tensor = values(dtype, shape, seed=rank)
                received = torch.empty(shape, dtype=dtype)
                for turn in range(2):  # even ranks send first
                    if rank % 2 == turn:
                        dist.isend(tensor, group_dst=(rank + 1) % size, group=group).wait()
                    else:
                        dist.irecv(received, group_src=(rank - 1) % size, group=group).wait()
                if size % 2:  # there are two even ones next to each other
                    continue
                assert_same_bits(received, values(dtype, shape, seed=(rank - 1) % size))

    if size % 2 == 0:
        run_on(backend, size, body)
    else:
        run_on(backend, size, _around)


def _around(group: dist.ProcessGroup) -> None:
    """Hand a number on from rank to rank, each adding to it."""
    rank, size = group.rank(), group.size()
    total = torch.zeros(SMALL)
    if rank > 0:
        dist.irecv(total, group_src=rank - 1, group=group).wait()
    total += rank + 1
    dist.isend(total, group_dst=(rank + 1) % size, group=group).wait()
    if rank == 0:
        dist.irecv(total, group_src=size - 1, group=group).wait()
        assert total.tolist() == [size * (size + 1) / 2] * 3


@over_backends
@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_may_send_to_all_at_once(backend: str, size: int, shape: tuple[int, ...]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        others = [other for other in range(size) if other != rank]
        for _ in range(3):
            received = {other: torch.empty(shape) for other in others}
            works = [
                dist.isend(values(torch.float32, shape, rank * size + o), group_dst=o, group=group)
                for o in others
            ]
            works += [dist.irecv(received[o], group_src=o, group=group) for o in others]
            for work in reversed(works):
                work.wait()
            for other in others:
                expected = values(torch.float32, shape, other * size + rank)
                assert_same_bits(received[other], expected)

    run_on(backend, size, body)


@over_backends
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_batches_go_both_ways_in_any_order(backend: str, shape: tuple[int, ...]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank, other = group.rank(), 1 - group.rank()
        sent = [values(torch.float32, shape, 10 * rank + i) for i in range(4)]
        received = [torch.empty(shape) for _ in range(4)]

        def send(i: int) -> dist.Work:
            return group.send([sent[i]], other, 0)

        def receive(i: int) -> dist.Work:
            return group.recv([received[i]], other, 0)

        for calls in ((send, receive), (receive, send)):
            works = [call(i) for call in calls for i in range(4)]
            for work in works:
                work.wait()
            for i, tensor in enumerate(received):
                assert_same_bits(tensor, values(torch.float32, shape, 10 * other + i))
                tensor.zero_()

    run_on(backend, 2, body)


@over_backends
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_tags_tell_messages_apart_whatever_their_order(
    backend: str, shape: tuple[int, ...]
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            works = [
                dist.isend(torch.full(shape, float(tag)), group_dst=1, group=group, tag=tag)
                for tag in (5, 6, 7, 5, 50)
            ]
            for work in works:  # Gloo's wait until they are received
                work.wait()
            return
        tensor = torch.empty(shape)
        for tag in (50, 7, 5, 6, 5):
            dist.irecv(tensor, group_src=0, group=group, tag=tag).wait()
            assert_all_are(tag, tensor)

    run_on(backend, 2, body)


@over_backends
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_messages_of_one_tag_come_in_the_order_in_which_they_were_sent(
    backend: str, shape: tuple[int, ...]
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            works = [group.send([torch.full(shape, float(i))], 1, 0) for i in range(20)]
        else:
            tensors = [torch.empty(shape) for _ in range(20)]
            works = [group.recv([tensor], 0, 0) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        if group.rank() == 1:
            assert [tensor[0].item() for tensor in tensors] == list(range(20))

    run_on(backend, 2, body)


@over_backends
def test_small_messages_do_not_overtake_large_ones(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        numels = [3, 700_001, 5, 100_000, 0, 9, 4_000_000, 1] * 3
        if group.rank() == 0:
            works = [group.send([torch.full((n,), float(n))], 1, 3) for n in numels]
            for work in works:
                work.wait()
            return
        time.sleep(0.05)
        for n in numels:
            tensor = torch.empty(n)
            group.recv([tensor], 0, 3).wait()
            assert torch.equal(tensor, torch.full((n,), float(n)))

    run_on(backend, 2, body)


@over_backends
def test_from_anyone_comes_what_was_sent_and_who_sent_it(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        size = group.size()
        if group.rank():
            for shape in (SMALL, LARGE):
                tensor = torch.full(shape, float(group.rank()))
                dist.isend(tensor, group_dst=0, group=group, tag=shape[0]).wait()
            return
        for shape in (SMALL, LARGE):
            sources = []
            for _ in range(size - 1):
                tensor = torch.empty(shape)
                work = group.recv_anysource([tensor], shape[0])
                work.wait()
                source = work._source_rank()
                assert_all_are(source, tensor)
                sources.append(source)
            assert sorted(sources) == list(range(1, size))

    run_on(backend, 4, body)


@over_ours
def test_a_rank_may_send_to_itself(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        received = torch.zeros(LARGE)
        work = group.recv([received], group.rank(), 0)
        assert not work.is_completed()
        tensor = values(torch.float32, LARGE)
        group.send([tensor], group.rank(), 0).wait()
        work.wait()
        assert_same_bits(received, tensor)

    run_on(backend, 2, body)


@over_ours
def test_a_message_to_itself_wakes_the_rank_that_waits_for_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "LOOK_SECONDS", 2.0 * TIMEOUT_SECONDS)

    def body(group: dist.ProcessGroup) -> None:
        received = torch.zeros(SMALL)
        work = group.recv([received], group.rank(), 0)
        sent = threading.Timer(0.1, lambda: group.send([torch.ones(SMALL)], group.rank(), 0))
        sent.start()
        work.wait()
        assert_all_are(1, received)
        sent.join()

    run_on(backend, 2, body, seconds=2.0 * TIMEOUT_SECONDS)


@over_ours
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_what_was_sent_may_be_written_to_at_once(backend: str, shape: tuple[int, ...]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(shape)
        if group.rank() == 0:
            works = [group.send([tensor.fill_(i)], 1, 0) for i in range(10)]
            tensor.fill_(-1)
            assert all(work.wait() for work in works)
        else:
            for i in range(10):
                group.recv([tensor], 0, 0).wait()
                assert_all_are(i, tensor)

    run_on(backend, 2, body)


@over_ours
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("transposed", (2, 3, 40, 50)),
        ("strided", (2, 3, 40, 50)),
        ("channels_last", (2, 3, 40, 50)),
        ("conj", (2, 3, 40, 50)),
        ("strided", (1,)),
        ("strided", (0,)),
        ("transposed", (3, 0, 2)),
    ],
)
def test_tensors_of_any_layout_are_sent(backend: str, layout: str, shape: tuple[int, ...]) -> None:
    dtype = torch.complex64 if layout == "conj" else torch.float32

    def body(group: dist.ProcessGroup) -> None:
        plain = values(dtype, shape)
        if group.rank() == 0:
            group.send([laid_out(plain, layout)], 1, 0).wait()
            return
        received = laid_out(torch.zeros(shape, dtype=dtype), layout)
        group.recv([received], 0, 0).wait()
        assert_same_bits(received, plain)

    run_on(backend, 2, body)


@over_ours
def test_a_receipt_is_a_work(backend: str) -> None:
    ready = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            assert ready.wait(20)
            for i in range(3):
                work = group.send([torch.full(SMALL, float(i))], 1, i)
                assert work.is_completed()
                assert work.is_success()
                assert work.get_future().wait() is not None
            return
        tensors = [torch.zeros(SMALL) for _ in range(3)]
        works = [group.recv([tensor], 0, i) for i, tensor in enumerate(tensors)]
        future = works[2].get_future().then(lambda done: done.value()[0].sum().item())
        assert not any(work.is_completed() for work in works)
        assert not future.done()
        ready.set()
        assert future.wait() == 6
        assert until(works[1].is_completed)
        assert works[1].is_success()
        assert works[1].exception() is None
        assert tensors[1].tolist() == [1] * 3
        assert works[0].wait(timedelta(seconds=20))
        assert works[0].result()[0].tolist() == [0] * 3
        assert works[0].source_rank() == 0

    run_on(backend, 2, body)


@over_ours
def test_several_threads_of_one_rank_may_wait_at_once(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        other = 1 - group.rank()
        failures: list[BaseException] = []

        def converse(tag: int) -> None:
            try:
                for i in range(20):
                    group.send([torch.full((1000 * tag,), float(i))], other, tag).wait()
                    received = torch.empty(1000 * tag)
                    group.recv([received], other, tag).wait()
                    assert received[0] == i
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=converse, args=(tag,)) for tag in (1, 2, 50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    run_on(backend, 2, body)
