"""The gradients of replicas in processes: where they leave them, and what they add up to."""

from __future__ import annotations

import functools
import itertools
import mmap
import weakref
from collections.abc import Sequence

import torch

from lockstep.comm.shm.memory import Segment
from lockstep.nn.replicas.boundary import Gradients, sum_of_two
from lockstep.nn.replicas.messages import Gradients as Answer
from lockstep.nn.replicas.wire import Place, tensor_at

# For so many sums memory is kept that nobody uses any more.
_MOST_SPARE = 2


class SharedGradients:
    """Memory in which each process leaves its replica's gradients, in the same places.

    Attributes:
        segments: The memory of each, for it to map.

    Args:
        places: Where each parameter's gradient is, one behind the other.
        num_bytes: How much memory they take.
        count: How many processes there are.
    """

    def __init__(self, places: Sequence[Place], num_bytes: int, count: int) -> None:
        made = [Segment.create(num_bytes) for _ in range(count)]
        self.segments = [segment for segment, _ in made]
        self._memory = [memory for _, memory in made]
        self._places = places
        self._spare = _SpareMemory(num_bytes)

    def add_up(self, answers: Sequence[Answer]) -> Gradients:
        """Each parameter's gradients added up, in the order of the replicas, as new tensors."""
        memory = self._memory[: len(answers)]
        in_place = [*zip(*(answer.in_place for answer in answers), strict=True)]
        of_all = [all(here) for here in in_place]
        total = self._spare.take()
        sums: Gradients = []
        # Those that all replicas have, one behind the other, are added up as if they were one.
        for (has_all, dtype), run in itertools.groupby(
            range(len(of_all)), lambda index: (of_all[index], self._places[index].dtype)
        ):
            indices = list(run)
            if not has_all:
                sums += [self._sum_of_some(index, in_place[index], answers) for index in indices]
                continue
            first, end = self._places[indices[0]].start, self._places[indices[-1]].end
            into, *parts = (own[first:end].view(dtype) for own in (total, *memory))
            torch.add(parts[0], parts[1], out=into) if parts[1:] else into.copy_(parts[0])
            for part in parts[2:]:
                into.add_(part)
            for index in indices:
                _, start, shape, stride = self._places[index]
                sums.append(into.as_strided(shape, stride, start // dtype.itemsize))
        return sums

    def _sum_of_some(
        self, index: int, in_place: Sequence[bool], answers: Sequence[Answer]
    ) -> torch.Tensor | None:
        """The same for one that may not be there, or not in its place."""
        found = [
            tensor_at(own, self._places[index]).clone() if is_here else answer.others.get(index)
            for own, is_here, answer in zip(self._memory, in_place, answers, strict=False)
        ]
        there = [gradient for gradient in found if gradient is not None]
        return functools.reduce(sum_of_two, there) if there else None


class _SpareMemory:
    """Memory that is taken again when no tensor uses it any more.

    New memory has to come from the kernel first, page by page, which takes as long as the sum.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._spare: list[mmap.mmap] = []

    def take(self) -> torch.Tensor:
        """Bytes that may hold anything."""
        memory = self._spare.pop() if self._spare else mmap.mmap(-1, max(self._num_bytes, 1))
        view = memoryview(memory)
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(memory)
