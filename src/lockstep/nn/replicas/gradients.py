"""The gradients of replicas in processes: where they leave them, and what they add up to."""

from __future__ import annotations

import functools
import itertools
import mmap
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lockstep.nn.replicas.boundary import Gradients, sum_of_two
from lockstep.nn.replicas.messages import Derived
from lockstep.nn.replicas.shared import (
    Place,
    SharedMemory,
    SharedTensor,
    lone_tensor_at,
    places_for,
    tensor_at,
)

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

    def add_up(self, answers: Sequence[Derived]) -> Gradients:
        """Each parameter's gradients of two replicas or more, added up in their order."""
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
            between = slice(self._places[indices[0]].start, self._places[indices[-1]].end)
            into = total.here[between].view(dtype)
            parts = [own.here[between].view(dtype) for own in self._memory[: len(answers)]]
            torch.add(parts[0], parts[1], out=into)
            for part in parts[2:]:
                into.add_(part)
            sums += [total.at(self._places[index]) for index in indices]
        return sums

    def _sum_of_some(
        self, index: int, in_place: Sequence[bool], answers: Sequence[Derived]
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

    def take(self) -> _Memory:
        """Some that may hold anything."""
        if self._device.type != "cpu":
            here = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
            return _Memory(here, partial(tensor_at, here))
        # Not what a process that is forked has as well.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = self._spare.pop() if self._spare else mmap.mmap(-1, max(self._num_bytes, 1), flags)
        view = memoryview(memory)
        weakref.finalize(view, self._give_back, memory).atexit = False
        return _Memory(torch.frombuffer(view, dtype=torch.uint8), partial(lone_tensor_at, view))

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(memory)


class _Memory(NamedTuple):
    """Bytes, and what makes tensors in them, each with a version of its own."""

    here: torch.Tensor
    at: Callable[[Place], torch.Tensor]
