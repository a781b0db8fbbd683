"""The gradients of replicas in processes: where they leave them, and what they add up to."""

from __future__ import annotations

import functools
import itertools
import mmap
import weakref
from collections.abc import Sequence

import torch

from lockstep.nn.replicas.boundary import Gradients, sum_of_two
from lockstep.nn.replicas.messages import Gradients as Answer
from lockstep.nn.replicas.shared import SharedMemory, SharedTensor
from lockstep.nn.replicas.wire import places_for, tensor_at

# For so many sums memory is kept that nobody uses any more.
_MOST_SPARE = 2


class SharedGradients:
    """Memory in which each process leaves its replica's gradients, in the same places.

    Args:
        parameters: What they are the gradients of.
        device: Where they are to be.
        count: How many processes there are.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], device: torch.device, count: int
    ) -> None:
        self._places, num_bytes = places_for(parameters)
        self._memory = [SharedMemory(num_bytes, device) for _ in range(count)]
        self._spare = _SpareMemory(num_bytes, device)

    def of(self, replica: int) -> list[object]:
        """What arrives in its process as its memory."""
        return [SharedTensor(self._memory[replica], place) for place in self._places]

    def close(self) -> None:
        """All processes have theirs."""
        for memory in self._memory:
            memory.close()

    def add_up(self, answers: Sequence[Answer]) -> Gradients:
        """Each parameter's gradients added up, in the order of the replicas, as new tensors."""
        memory = [own.here for own in self._memory[: len(answers)]]
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
            tensor_at(own.here, self._places[index]).clone()
            if is_here
            else answer.others.get(index)
            for own, is_here, answer in zip(self._memory, in_place, answers, strict=False)
        ]
        there = [gradient for gradient in found if gradient is not None]
        return functools.reduce(sum_of_two, there) if there else None


class _SpareMemory:
    """Memory that is taken again when no tensor uses it any more.

    New memory has to come from the kernel first, page by page, which takes as long as the sum. On
    an accelerator torch keeps it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._spare: list[mmap.mmap] = []

    def take(self) -> torch.Tensor:
        """Bytes that may hold anything."""
        if self._device.type != "cpu":
            return torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        memory = self._spare.pop() if self._spare else mmap.mmap(-1, max(self._num_bytes, 1))
        view = memoryview(memory)
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(memory)
