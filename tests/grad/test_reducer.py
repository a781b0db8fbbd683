"""The reducer's states, without modules, autograd or other ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LateGradient
from lockstep.grad import CommHook, GradBucket, Phase, Reducer
from tests.grad.recorder import LINE, Recorder, backward, come, reducer_of
from tests.ranks import run_ranks

# The last bucket carries one for each of four parameters, and two on ranks that failed.
FACTS = 4 + 2


def test_first_backward_launches_in_reverse_registration_order_at_its_end():
    reducer, parameters, group = reducer_of(4)
    reducer.begin()
    for index in (0, 1, 2, 3):
        come(reducer, parameters, index)
    assert group.sizes == []
    reducer.finish()
    assert group.sizes == [4 * LINE, 3 * LINE, 2 * LINE, LINE + FACTS]


def test_buckets_launch_in_index_order():
    reducer, parameters, group = reducer_of(4)
    backward(reducer, parameters, [3, 2, 1, 0])
    group.sizes.clear()
    reducer.begin()
    come(reducer, parameters, 1)
    come(reducer, parameters, 2)
    assert group.sizes == []  # full, but not their turn
    come(reducer, parameters, 3)
    assert group.sizes == [4 * LINE, 3 * LINE, 2 * LINE]
    come(reducer, parameters, 0)
    assert group.sizes == [
        4 * LINE,
        3 * LINE,
        2 * LINE,
    ]  # the last one waits for the end of the backward
    reducer.finish()
    assert group.sizes == [4 * LINE, 3 * LINE, 2 * LINE, LINE + FACTS]


def test_buckets_are_arranged_once_in_the_order_of_the_first_backward():
    reducer, parameters, _ = reducer_of(4)
    assert reducer.buckets == []
    backward(reducer, parameters, [1, 3, 0])
    assert reducer.buckets == [["p3"], ["p2"], ["p1"], ["p0"]]
    backward(reducer, parameters, [0, 1, 2, 3])
    assert reducer.buckets == [["p1"], ["p3"], ["p0"], ["p2"]]
    backward(reducer, parameters, [0, 1, 2, 3])
    assert reducer.buckets == [["p1"], ["p3"], ["p0"], ["p2"]]


def test_ranks_agree_on_the_order_that_rank_0_saw():
    def body(rank: int, group: dist.ProcessGroup) -> list:
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
        reducer = Reducer(named, group, cap_bytes=1, first_cap_bytes=1)
        for _ in range(2):
            backward(reducer, parameters, [1, 0, 2] if rank == 0 else [2, 1, 0])
        return list(reducer.buckets)

    assert run_ranks(2, body) == [[["p1"], ["p0"], ["p2"]]] * 2


def test_an_order_that_is_known_is_that_of_the_first_backward():
    first, parameters, _ = reducer_of(4)
    assert first.order.agreed(first.last.order) == []
    backward(first, parameters, [1, 3, 0])
    order = first.order.agreed(first.last.order)
    assert order == [1, 3, 0, 2]
    second, parameters, _ = reducer_of(4)
    second.order.expect([0, 1])  # that of other parameters
    second.order.expect(order)
    for _ in range(2):
        backward(second, parameters, [0, 1, 2, 3])
        assert second.buckets == [["p1"], ["p3"], ["p0"], ["p2"]]
    assert second.order.agreed(second.last.order) == order


def test_unused_gradients_hold_nothing_up():
    reducer, parameters, group = reducer_of(3)
    backward(reducer, parameters, [2, 0])
    assert reducer.unused == ["p1"]
    backward(reducer, parameters, [2, 0])  # p1 is in the last bucket from here on
    backward(reducer, parameters, [2, 1, 0])
    assert reducer.unused == []
    backward(reducer, parameters, [2, 1])
    group.sizes.clear()
    reducer.begin()
    reducer.mark_unused(reducer.unused_parameters)
    come(reducer, parameters, 2)
    assert group.sizes == [3 * LINE, LINE]
    reducer.finish()


def test_an_unused_gradient_that_comes_after_all_is_taken():
    reducer, parameters, _ = reducer_of(3)
    backward(reducer, parameters, [2, 1])
    reducer.begin()
    reducer.mark_unused([parameters[0]])
    for index in (0, 1, 2):
        come(reducer, parameters, index)
    reducer.finish()
    assert [p.grad[0].item() for p in parameters] == [1, 2, 3]


def test_an_unused_gradient_may_be_told_of_with_others():
    reducer, parameters, group = reducer_of(3)
    backward(reducer, parameters, [2, 1, 0])
    group.sizes.clear()
    reducer.begin()
    reducer.mark_unused(parameters[2:])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    reducer.mark_ready([parameters[2], parameters[1]])
    assert group.sizes == [3 * LINE, 2 * LINE]
    reducer.finish()
    assert reducer.unused == ["p0"]


def test_a_gradient_that_comes_twice_makes_buckets_wait_for_the_end():
    reducer, parameters, group = reducer_of(3)
    backward(reducer, parameters, [2, 1, 2, 0])
    group.sizes.clear()
    reducer.begin()
    for index in (2, 1, 0):
        come(reducer, parameters, index)
    assert group.sizes == []
    reducer.finish()


def test_a_reducer_of_changed_parameters_knows_that_gradients_come_twice():
    reducer, parameters, group = reducer_of(3)
    backward(reducer, parameters, [2, 1, 2, 0])
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    changed = Reducer(named, group, cap_bytes=1, first_cap_bytes=1)
    changed.take_over(reducer)
    backward(changed, parameters, [2, 1, 0])
    backward(changed, parameters, [2, 1, 2, 0])  # no LateGradient


def test_a_gradient_that_is_not_copied_yet_may_come_twice():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    reducer = Reducer(named, Recorder(), cap_bytes=1 << 20, first_cap_bytes=1 << 20)
    backward(reducer, parameters, [3, 2, 1, 0])
    reducer.begin(copies_early=True)
    for index in (3, 3, 2, 1, 0):
        come(reducer, parameters, index)
    reducer.finish()
    assert [p.grad[0].item() for p in parameters] == [1, 2, 3, 4]


def test_a_late_gradient_is_an_error_once():
    reducer, parameters, _ = reducer_of(3)
    backward(reducer, parameters, [2, 1, 0])
    reducer.begin()
    come(reducer, parameters, 2)
    with pytest.raises(LateGradient, match="'p2' got a gradient"):
        come(reducer, parameters, 2)
    reducer.fail()
    backward(reducer, parameters, [2, 1, 2, 0])
    assert [p.grad[0].item() for p in parameters] == [1, 2, 3]


def test_a_late_gradient_is_an_error_when_a_hook_has_reduced_the_one_before():
    def identity(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future:
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    reducer, parameters, group = reducer_of(4)
    reducer.comm_hook = CommHook(group, identity)
    backward(reducer, parameters, [3, 2, 1, 0])
    reducer.begin()
    for index in (3, 2, 1):
        come(reducer, parameters, index)
    with pytest.raises(LateGradient, match="'p3' got a gradient"):
        come(reducer, parameters, 3)


def test_a_late_gradient_of_a_bucket_that_stays_here_is_an_error():
    group = Recorder()
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    reducer = Reducer(named, group, cap_bytes=1, first_cap_bytes=1, skip_unused=True)
    backward(reducer, parameters, [2, 1, 0])
    reducer.begin()
    reducer.mark_unused(parameters[2:])
    come(reducer, parameters, 1)
    with pytest.raises(LateGradient, match="'p2' got a gradient"):
        come(reducer, parameters, 2)


@pytest.mark.parametrize("numel", [2_000, 20_000])
def test_what_was_scaled_in_a_failed_backward_is_not_scaled_again(numel: int):
    group = Recorder()
    parameters = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(80_000 // numel * 4)]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    half = 80_000 * 2 * 4
    reducer = Reducer(named, group, cap_bytes=half, first_cap_bytes=half // 4)
    order = list(range(len(parameters)))
    backward(reducer, parameters, order)
    assert len(reducer.buckets) > 2
    for parameter in parameters:
        parameter.grad = None
    reducer.begin(copies_early=True)
    came = order[1 : len(order) * 3 // 4]  # without the first, nothing is launched
    for index in came:
        come(reducer, parameters, index)
    reducer.fail()
    reducer.fail()  # as a mismatch does that ends it before the other ranks have it, too
    reducer.begin()
    reducer.finish()
    assert [parameters[index].grad[0].item() for index in came] == [index + 1 for index in came]


@pytest.mark.parametrize("is_first_backward", [True, False])
def test_a_gradient_may_be_replaced_after_its_copy(is_first_backward: bool):
    """By a tensor hook of another parameter, say."""
    parameters = [torch.nn.Parameter(torch.zeros(20_000)) for _ in range(4)]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    reducer = Reducer(named, Recorder(), cap_bytes=320_000, first_cap_bytes=320_000)
    order = list(range(4))
    if not is_first_backward:
        backward(reducer, parameters, order)
    for parameter in parameters:
        parameter.grad = None
    reducer.begin(copies_early=True)
    for index in order[:3]:
        come(reducer, parameters, index)
    parameters[1].grad = torch.full_like(parameters[1], 7)
    come(reducer, parameters, 3)
    reducer.finish()
    assert [parameter.grad[0].item() for parameter in parameters] == [1, 7, 3, 4]
    # All are what was summed: the other ranks' gradient, too, and not only what has replaced it.
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in parameters}) == 1


def test_nothing_is_left_of_buckets_for_which_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    reducer, parameters, _ = reducer_of(3)
    made = []

    def zeros(group: object, numel: int, *args: object) -> torch.Tensor:
        made.append(numel)
        if len(made) == 2:
            raise MemoryError
        return torch.zeros(numel)

    monkeypatch.setattr("lockstep.grad.memory.zero_buffer", zeros)
    with pytest.raises(MemoryError):
        reducer.begin()
    backward(reducer, parameters, [2, 1, 0])
    assert [p.grad[0].item() for p in parameters] == [1, 2, 3]


@given(st.data())
def test_gradients_may_be_told_of_together(data):
    """In whichever order and batches: as if one by one."""
    order = data.draw(st.lists(st.integers(0, 5), unique=True, min_size=1), label="order")
    cuts = data.draw(st.sets(st.integers(1, 5)), label="cuts")
    unused = data.draw(st.sets(st.integers(0, 5)), label="unused")
    outcomes = []
    for together in (False, True):
        reducer, parameters, group = reducer_of(6)
        backward(reducer, parameters, [5, 3, 4, 0, 1, 2])
        reducer.begin()
        reducer.mark_unused(parameters[index] for index in unused - set(order))
        told: list[torch.nn.Parameter] = []
        for number, index in enumerate(order, 1):
            parameters[index].grad = torch.full_like(parameters[index], index + 2.0)
            told.append(parameters[index])
            if not together or number in cuts or number == len(order):
                reducer.mark_ready(told)
                told = []
        sizes = list(group.sizes)
        reducer.finish()
        gradients = [None if p.grad is None else p.grad.tolist() for p in parameters]
        outcomes.append((sizes, gradients, reducer.unused))
    assert outcomes[0] == outcomes[1]


def test_when_to_tell_of_gradients_again():
    group = Recorder()
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(9)]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    reducer = Reducer(named, group, cap_bytes=16, first_cap_bytes=8)
    backward(reducer, parameters, list(range(9)))
    assert [len(bucket) for bucket in reducer.buckets] == [2, 4, 3]
    reducer.begin()
    reducer.mark_ready(parameters[:1])
    assert reducer.next_few() == 1  # the next one fills the first bucket
    reducer.mark_ready(parameters[1:2])
    assert reducer.next_few() == 3  # the last bucket will be full before the next
    reducer.mark_ready(parameters[2:5])
    assert reducer.next_few() == 1
    assert len(group.sizes) == 3 + 1


def test_phases():
    reducer, parameters, _ = reducer_of(2)
    assert reducer.phase is Phase.IDLE
    reducer.begin()
    assert reducer.phase is Phase.COLLECTING
    come(reducer, parameters, 0)
    reducer.finish()
    assert reducer.phase is Phase.IDLE


def test_hooks_of_several_collectives_keep_their_order():
    """A second all-reduce starts when the first is through, in another thread's time."""

    def twice(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future:
        buffer = bucket.buffer().div_(2 * group.size())
        options = dist.AllreduceOptions()

        def again(future: torch.futures.Future) -> torch.Tensor:
            time.sleep(0.001 * (1 + group.rank() * bucket.index() % 3))
            group.allreduce([buffer.div_(group.size())], options).wait()
            return buffer.mul_(2)

        return group.allreduce([buffer], options).get_future().then(again)

    def body(rank: int, group: dist.ProcessGroup) -> list[float]:
        parameters = [torch.nn.Parameter(torch.zeros(3 + index)) for index in range(5)]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
        reducer = Reducer(named, group, cap_bytes=1, first_cap_bytes=1)
        reducer.comm_hook = CommHook(group, twice)
        for _ in range(10):
            for parameter in parameters:
                parameter.grad = None
            backward(reducer, parameters, [4, 3, 2, 1, 0] if rank else [3, 4, 1, 2, 0])
        return [p.grad[0].item() for p in parameters]

    assert run_ranks(3, body) == [pytest.approx([1, 2, 3, 4, 5])] * 3
