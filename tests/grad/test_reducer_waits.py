"""What the reducer finishes, or leaves running, before it goes on; without other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.grad import CommHook, GradBucket, Phase
from tests.grad.recorder import LINE, backward, come, reducer_of


def test_a_backward_that_failed_is_finished_before_the_next_begins():
    reducer, parameters, group = reducer_of(3)
    backward(reducer, parameters, [2, 1, 0])
    reducer.begin()
    come(reducer, parameters, 2)
    reducer.fail()
    assert reducer.phase is Phase.FAILED
    group.sizes.clear()
    reducer.begin()
    assert group.sizes == [2 * LINE, LINE + 3 + 2]  # and the facts behind the last one
    assert reducer.phase is Phase.COLLECTING


class Running(torch.futures.Future):
    """The future of a hook that goes on until the test ends it."""

    def wait(self) -> torch.Tensor:
        assert self.done(), "the backward waits for a hook, and computes nothing meanwhile"
        return super().wait()


def test_a_full_bucket_waits_for_the_hook_of_the_one_before_and_the_backward_goes_on():
    started: list[tuple[Running, torch.Tensor]] = []
    ends_at_once = True

    def hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future:
        future = Running()
        started.append((future, bucket.buffer()))
        if ends_at_once:
            future.set_result(bucket.buffer())
        return future

    reducer, parameters, group = reducer_of(4)
    reducer.comm_hook = CommHook(group, hook)
    backward(reducer, parameters, [3, 2, 1, 0])
    started.clear()
    ends_at_once = False
    reducer.begin()
    come(reducer, parameters, 3)
    come(reducer, parameters, 2)
    assert len(started) == 1
    future, buffer = started[0]
    ends_at_once = True
    future.set_result(buffer)
    come(reducer, parameters, 1)
    assert len(started) == 3
    come(reducer, parameters, 0)
    reducer.finish()
    assert [p.grad[0].item() for p in parameters] == [1, 2, 3, 4]
