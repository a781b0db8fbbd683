"""What an asynchronous call gives back, on every backend."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.work import GroupWork, WorkQueue
from tests.comm.groups import BACKENDS, OURS, all_gather_single, assert_all_are, run_on
from tests.waiting import until

over_backends = pytest.mark.parametrize("backend", BACKENDS)
over_ours = pytest.mark.parametrize("backend", OURS)

SMALL, LARGE = 4, 700_001


@over_backends
@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_works_may_be_waited_for_in_any_order(backend: str, numel: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensors = [torch.full((numel,), float(i)) for i in range(6)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        order = range(6) if group.rank() else reversed(range(6))
        for i in order:
            assert works[i].wait()
            assert_all_are(i * group.size(), tensors[i])

    run_on(backend, 3, body)


@over_backends
@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_a_work_tells_when_it_is_completed(backend: str, numel: int) -> None:
    goes = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(numel)
        if group.rank():
            assert goes.wait(20)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if group.rank() == 0:
            assert not work.is_completed()
            goes.set()
        assert until(work.is_completed)
        assert work.is_success()
        assert_all_are(group.size(), tensor)
        assert work.wait()
        assert work.result()[0].data_ptr() == tensor.data_ptr()

    run_on(backend, 2, body)


@over_backends
@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_a_future_is_of_the_results(backend: str, numel: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        seen = []
        for _ in range(3):
            tensor = torch.ones(numel)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            future = work.get_future().then(lambda done: done.value()[0] / 2)
            future.add_done_callback(lambda done: seen.append(done.value()[0].item()))
            assert future.wait()[0].item() == group.size() / 2
            assert work.get_future().done()
            # Of one that has long been waited for, too.
            assert torch.equal(work.get_future().wait()[0], tensor)
        assert until(lambda: len(seen) >= 3)
        assert seen == [group.size() / 2] * 3

    run_on(backend, 2, body)


@over_ours
def test_a_callback_may_make_calls_itself(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        def again(done: torch.futures.Future) -> torch.Tensor:
            (tensor,) = done.value()
            dist.all_reduce(tensor, group=group)
            return tensor

        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work.get_future().then(again).wait().tolist() == [4.0] * 3

    run_on(backend, 2, body)


@over_ours
@pytest.mark.parametrize("then", ["nothing", "other calls of its own"])
def test_a_call_that_nobody_waits_for_keeps_no_rank_waiting(backend: str, then: str) -> None:
    done = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(3)
        if group.rank():
            dist.all_reduce(tensor, group=group)
            done.set()
        else:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            deadline = time.monotonic() + 15
            later = []
            while not done.wait(0.005):
                assert time.monotonic() < deadline
                if then != "nothing" and len(later) < 300:
                    later.append(group.send([tensor], 0, 0))
                    later.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))
            work.wait()
            calls = torch.tensor([len(later) // 2])
        if group.rank():
            calls = torch.empty(1, dtype=torch.int64)
            group.recv([calls], 0, 1).wait()
            for _ in range(int(calls)):
                dist.all_reduce(torch.ones(1), group=group)
        else:
            group.send([calls], 1, 1).wait()

    run_on(backend, 2, body)


@over_ours
def test_a_wait_for_a_call_is_not_one_for_later_calls(backend: str) -> None:
    # Several times: between two calls the thread that waits may get its turn by chance.
    times = [(threading.Event(), threading.Event()) for _ in range(8)]

    def body(group: dist.ProcessGroup) -> None:
        for is_there, is_through in times:
            first, second = torch.ones(3), torch.ones(1)
            if group.rank():
                assert is_there.wait(15)
                time.sleep(0.1)  # rank 0 waits by then
                dist.all_reduce(first, group=group)
                assert is_through.wait(15)
                dist.all_reduce(second, group=group)
                continue
            works = [dist.all_reduce(each, group=group, async_op=True) for each in (first, second)]
            works[0].is_completed()  # so that the queue's own thread carries out both
            assert until(lambda: group._queue._running is not None)
            is_there.set()
            works[0].wait()
            is_through.set()
            works[1].wait()

    run_on(backend, 2, body)


@over_ours
def test_a_call_takes_the_values_of_when_it_is_carried_out_and_not_before_others(
    backend: str,
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(3)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(5)]
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0**6] * 3
        assert all(work.is_completed() for work in works)

    run_on(backend, 2, body)


@over_ours
def test_all_calls_may_be_asynchronous(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        mine = torch.full((2,), float(rank))
        everyone = [torch.full((2,), float(r)) for r in range(size)]
        total = sum(everyone)

        def lists() -> list[torch.Tensor]:
            return [torch.empty(2) for _ in range(size)]

        gathered, sent, exchanged, part, outputs = lists(), lists(), lists(), torch.empty(2), []
        reduced, broadcast, scattered = mine.clone(), mine.clone(), torch.empty(2)
        single, exchanged_single = torch.empty(2 * size), torch.empty(2 * size)
        if rank == 1:
            outputs = sent
        scatter_list = everyone if rank == 1 else None
        kwargs = {"group": group, "async_op": True}
        works = [
            dist.all_gather(gathered, mine, **kwargs),
            dist.gather(mine, outputs or None, group_dst=1, **kwargs),
            dist.all_to_all(exchanged, [mine.clone() for _ in range(size)], **kwargs),
            dist.reduce_scatter(part, everyone, **kwargs),
            dist.reduce(reduced, group_dst=1, **kwargs),
            dist.broadcast(broadcast, group_src=1, **kwargs),
            dist.scatter(scattered, scatter_list, group_src=1, **kwargs),
            all_gather_single(single, mine, **kwargs),
            dist.all_to_all_single(exchanged_single, mine.repeat(size), **kwargs),
            dist.barrier(**kwargs),
        ]
        for work in works if rank else works[::-1]:
            work.wait()
        assert torch.equal(torch.stack(gathered), torch.stack(everyone))
        if rank == 1:
            assert torch.equal(torch.stack(sent), torch.stack(everyone))
            assert torch.equal(reduced, total)
        assert torch.equal(torch.stack(exchanged), torch.stack(everyone))
        assert torch.equal(part, mine * size)
        assert torch.equal(broadcast, everyone[1])
        assert torch.equal(scattered, mine)
        assert torch.equal(single, torch.cat(everyone))
        assert torch.equal(exchanged_single, torch.cat(everyone))

    run_on(backend, 3, body)


@over_ours
@pytest.mark.parametrize("thread", ["the queue's own", "one that waits"])
def test_a_callback_may_wait_for_another_calls_future(
    backend: str, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, hurry = threading.local(), WorkQueue.hurry

    def hurry_later(queue: WorkQueue) -> None:
        if not getattr(late, "now", False):
            hurry(queue)

    monkeypatch.setattr(WorkQueue, "hurry", hurry_later)

    def body(group: dist.ProcessGroup) -> float:
        def again(future: torch.futures.Future) -> torch.Tensor:
            first = future.value()[0].clone()
            return dist.all_reduce(first, group=group, async_op=True).get_future().wait()[0]

        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        late.now = thread == "one that waits"
        future = work.get_future().then(again)
        late.now = False
        if thread == "one that waits":
            work.wait()
        return future.wait()[0].item()

    assert run_on(backend, 2, body) == [4.0, 4.0]


@over_ours
def test_a_work_that_only_cpp_has_can_be_waited_for(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        boxed = [group.allreduce(torch.full((n,), 1.0)).boxed() for n in (1, 100_000)]
        group.barrier().wait()  # the calls before it are carried out, and no more Python's
        for each, is_small in zip(boxed, (True, False), strict=True):
            work = dist.Work.unbox(each)
            assert isinstance(work, GroupWork)  # that of the base class would wait without end
            assert work.wait(timedelta(0))
            # What is large isn't kept in memory on suspicion.
            assert [t.tolist() for t in work.get_future().wait()] == ([[2.0]] if is_small else [])

    run_on(backend, 2, body)


@over_ours
def test_several_threads_may_wait_for_works_of_one_group(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensors = [torch.full((1000 * (i + 1),), float(i)) for i in range(8)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        threads = [threading.Thread(target=work.wait) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, tensor in enumerate(tensors):
            assert_all_are(2 * i, tensor)

    run_on(backend, 2, body)


@over_ours
def test_results_are_ordinary_tensors_in_every_mode(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        parameter = torch.ones(3, requires_grad=True)
        gradient = torch.sparse_coo_tensor([[group.rank()]], [1.0], (3,), check_invariants=True)
        with torch.no_grad():
            dist.all_reduce(parameter, group=group)
        group.allreduce([gradient]).wait()
        # Neither may be a tensor of inference mode, of which autograd knows nothing.
        (parameter * gradient.to_dense()).sum().backward()
        assert parameter.grad.tolist() == [1, 1, 0]
        assert not gradient._values().is_inference()
        with torch.inference_mode():
            inference = torch.ones(3)
            dist.all_reduce(inference, group=group)
            assert inference.tolist() == [2] * 3

    run_on(backend, 2, body)
