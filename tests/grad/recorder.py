"""A reducer whose collectives are recorded."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.grad import Reducer


class Recorder:
    """A process group of one rank that counts for two, and notes what it is asked to carry."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
        self.sizes.append(tensors[0].numel())
        tensors[0].mul_(2)  # as if the other rank had the same
        return DoneWork()

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
        return DoneWork()


class DoneWork:
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


# The elements at a multiple of which a gradient begins.
LINE = 64 // 4


def reducer_of(count: int) -> tuple[Reducer, list[torch.nn.Parameter], Recorder]:
    """Parameter i has 1 + i lines of elements and a bucket of its own, so sizes tell who went."""
    group = Recorder()
    parameters = [torch.nn.Parameter(torch.zeros((1 + index) * LINE)) for index in range(count)]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    return Reducer(named, group, cap_bytes=1, first_cap_bytes=1), parameters, group


def backward(reducer: Reducer, parameters: list, order: list[int]) -> None:
    reducer.begin()
    for index in order:
        come(reducer, parameters, index)
    reducer.finish()


def come(reducer: Reducer, parameters: list, index: int) -> None:
    parameters[index].grad = torch.full_like(parameters[index], index + 1.0)
    reducer.mark_ready([parameters[index]])
