"""``parallel_apply``: calls at the same time, in threads where all is as in the caller's."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
import time
import traceback

import pytest
import torch
from torch import nn

from lockstep.nn import parallel_apply
from lockstep.nn.replicas.group import this_replica
from lockstep.nn.replicas.worker_threads import WorkerThreads, nothing

setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="none")


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def apply(function, count: int = 3):
    """What ``function(index)`` returns in each of so many threads."""
    return parallel_apply([Calls(function)] * count, list(range(count)))


def test_inputs_are_a_collection_or_one_argument() -> None:
    module = Calls(lambda *args, **kwargs: (args, kwargs))
    assert parallel_apply([module] * 3, [(1, 2), [3], 4]) == [
        ((1, 2), {}),
        ((3,), {}),
        ((4,), {}),
    ]
    assert parallel_apply([module] * 2, [(), 1], [{"a": 1}, {}]) == [((), {"a": 1}), ((1,), {})]


def test_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    assert apply(lambda index: barrier.wait(20) is not None) == [True] * 3


def test_a_single_call_is_made_in_the_callers_thread() -> None:
    assert apply(lambda _: threading.get_ident(), count=1) == [threading.get_ident()]


def modes(_: int) -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.empty(0).device.type,
        setting.get(),
    )


def set_default_dtype(request: pytest.FixtureRequest) -> None:
    before = torch.get_default_dtype()
    request.addfinalizer(lambda: torch.set_default_dtype(before))
    torch.set_default_dtype(torch.float64)


def test_threads_have_the_callers_modes(request: pytest.FixtureRequest) -> None:
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.device("meta"),
    ):
        with context:
            assert apply(modes) == [modes(0)] * 3
        assert apply(modes) == [modes(0)] * 3
    set_default_dtype(request)
    setting.set("here")
    assert apply(modes) == [modes(0)] * 3


def test_autocast_casts_as_in_the_caller() -> None:
    """torch's hands on that autocast is enabled, but not the dtype."""
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", torch.float16):
        outputs = parallel_apply([layer, layer], [x, x])
    assert [output.dtype for output in outputs] == [torch.float16] * 2


def test_gradients_flow() -> None:
    layer, x = nn.Linear(2, 1), torch.randn(4, 2, requires_grad=True)
    outputs = parallel_apply([layer, layer], [x[:2], x[2:]])
    torch.cat(outputs).sum().backward()
    assert torch.equal(x.grad, layer.weight.detach().expand(4, 2))


def test_the_threads_share_the_callers_intra_op_threads() -> None:
    mine = torch.get_num_threads()
    assert apply(lambda _: torch.get_num_threads(), count=2) == [max(1, mine // 2)] * 2
    assert torch.get_num_threads() == mine
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [mine]  # also in threads to come


def failing(index: int) -> int:
    if index:
        raise ArithmeticError(f"no {index}")
    return index


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(ArithmeticError, match="no 1") as caught:
        apply(failing)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "failing"
    first, second = caught.value.__notes__
    assert first == "(raised in replica 1 on cpu)"
    assert second.startswith("Replica 2 on cpu failed as well:")
    assert "ArithmeticError: no 2" in second


def test_all_have_ended_when_one_has_failed() -> None:
    ended = []

    def slow_or_failing(index: int) -> None:
        if index == 0:
            raise ArithmeticError
        threading.Event().wait(0.1)
        ended.append(index)

    with pytest.raises(ArithmeticError):
        apply(slow_or_failing)
    assert sorted(ended) == [1, 2]


def test_an_interruption_after_a_failure_is_not_lost() -> None:
    """It comes while the other thread is waited for."""
    ended = threading.Event()

    def fail() -> None:
        raise ArithmeticError

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.set()

    workers = WorkerThreads(2)
    with workers.sharing(), pytest.raises(KeyboardInterrupt):
        workers.run([nothing, interrupt], meanwhile=fail)
    assert ended.is_set()


def test_an_error_of_a_signal_handler_ends_the_wait() -> None:
    may_end = threading.Event()

    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            apply(lambda index: index and may_end.wait(20), 2)
    finally:
        signal.signal(signal.SIGALRM, before)
        may_end.set()
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_nothing_is_added_up_without_a_replica_that_is_interrupted(
    interruption: type[BaseException],
) -> None:
    """The other has come, and what ranks would make of its part alone is not what all want."""
    finished = []

    def add_up(index: int) -> torch.Tensor:
        if index == 0:
            time.sleep(0.2)
            raise interruption
        replica = this_replica()
        assert replica is not None
        return replica.add_up(torch.ones(()), lambda total: finished.append(total) or total)

    with pytest.raises(interruption):
        apply(add_up, count=2)
    assert not finished


@pytest.mark.parametrize(
    ("inputs", "options"),
    [([1, 2, 3], {}), ([1, 2], {"kwargs_tup": [{}]}), ([1, 2], {"devices": ["cpu"]})],
)
def test_different_numbers_are_refused(inputs: list[int], options: dict) -> None:
    with pytest.raises(ValueError, match="as many modules as inputs"):
        parallel_apply([nn.Identity()] * 2, inputs, **options)
