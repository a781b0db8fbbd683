"""Where a replica's process leaves its gradients, and the caller adds them to its own.

The process copies each as soon as it comes, while it is in the CPU's cache still. On the CPU it
also tells of it in memory that both have, so that the caller, when it is through with its own, adds
up what is there already while the others still compute. The order of a sum doesn't depend on when:
first comes the caller's, then what each process has left, in their order, and then what came to a
gradient after it was left, in the same order.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from functools import partial

import torch

from lockstep.nn.replicas.boundary import Gradients
from lockstep.nn.replicas.shared import SharedTensors
from lockstep.torch_private import _foreach_add_


class LeftGradients:
    """What a replica leaves, as it has it.

    Args:
        places: Memory of the caller's, for each parameter.
        flags: Likewise: a byte for each, which is set when its gradient is there.

    Attributes:
        is_taking: Whether gradients that come are the caller's, and not those of a backward that
            the module runs itself.
    """

    def __init__(self, places: Sequence[torch.Tensor], flags: torch.Tensor) -> None:
        self.is_taking = False
        self._places = places
        self._known: set[int] = set()
        self._is_taken = bytearray(len(places))
        self._flags = bytes_of(flags)

    def take_from(self, index: int, parameter: torch.Tensor) -> None:
        """Take the gradients of that one, which requires them, from now on."""
        if index not in self._known:
            self._known.add(index)
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if not self.is_taking or gradient is None or gradient.layout is not torch.strided:
            return
        # As with reentrant checkpoints, it comes in parts. The caller may have added the first.
        if self._is_taken[index]:
            return
        with torch.no_grad():
            self._places[index].copy_(gradient)
        self._is_taken[index] = self._flags[index] = 1
        parameter.grad = None

    def taken(self) -> bytes:
        """Which have been taken, not 0, since the last time."""
        taken, self._is_taken = bytes(self._is_taken), bytearray(len(self._places))
        return taken


class GradientsElsewhere:
    """What several replicas leave, as the caller has it.

    Args:
        parameters: Whose gradients they are.
        device: Where these are to be.
        count: How many processes there are.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], device: torch.device, count: int
    ) -> None:
        num = len(parameters)
        self.places = [SharedTensors(parameters, device) for _ in range(count)]
        flags = torch.empty(num, dtype=torch.uint8, device="meta")
        self.flags = [SharedTensors([flags], torch.device("cpu")) for _ in range(count)]
        self._flags = [bytes_of(own.here[0]) for own in self.flags]
        # How many processes' have been added to that of the caller.
        self._num_added = bytearray(num)
        # Other processors may see that a gradient is there before they see it.
        self._can_see = device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")

    def close(self) -> None:
        """Let no more processes have this memory: all have it that are to."""
        for own in [*self.places, *self.flags]:
            own.close()

    def begin(self) -> None:
        """A backward is about to begin."""
        self._num_added = bytearray(len(self._num_added))
        for flags in self._flags:
            ctypes.memset(flags, 0, len(flags))

    def add_those_there(self, total: Gradients) -> None:
        """Add to ``total`` what is there by now, in the order of the processes."""
        is_any = self._can_see
        while is_any:
            is_any = False
            for number, places in enumerate(self.places):
                indices = self._next_of(number, total)
                if indices:
                    sums = [gradient for index in indices if (gradient := total[index]) is not None]
                    _foreach_add_(sums, [places.here[index] for index in indices])
                    is_any = True

    def _next_of(self, number: int, total: Gradients) -> list[int]:
        """Which gradients of that process can be added now; they count as added."""
        indices = []
        for index, is_there in enumerate(bytes(self._flags[number])):
            if is_there and self._num_added[index] == number and _is_dense(total[index]):
                self._num_added[index] += 1
                indices.append(index)
        return indices

    def rest(
        self, number: int, are_in_place: bytes, others: dict[int, torch.Tensor]
    ) -> tuple[Gradients, Gradients]:
        """What is still to be added of a process that is through with its backward.

        Args:
            number: Which process.
            are_in_place: Which gradients it has left, not 0.
            others: Those that it hasn't, by index, and what came to those that it has.

        Returns:
            What was left or would have been, and what came to that later.
        """
        first: Gradients = []
        later: Gradients = []
        for index, is_in_place in enumerate(are_in_place):
            is_to_add = is_in_place and self._num_added[index] <= number
            more = others.get(index)
            place = self.places[number].here[index] if is_to_add else None
            first.append(place if is_in_place else more)
            later.append(more if is_in_place else None)
        return first, later


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """The memory of ``tensor``, of uint8 on the CPU, to be read and written without torch."""
    own = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    own._tensor = tensor  # type: ignore[attr-defined]  # as long as this
    return own


def _is_dense(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided
