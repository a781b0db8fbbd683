"""The sum of the replicas' gradients, and the shared memory to which processes write theirs.

A process copies each gradient to shared memory as soon as it is computed, while the CPU's cache has
it, and sets a flag. After its own backward the caller adds the flagged gradients, while other
processes are still computing. The order of a sum doesn't depend on timing: the caller's gradient,
then those in shared memory in the order of the processes, then, in the same order, the later parts
of gradients that autograd accumulated in several parts.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from functools import partial

import torch

from lockstep.nn.replicas.channel import SharedTensors, bytes_of
from lockstep.nn.replicas.devices import move
from lockstep.torch_private import _foreach_add_

Gradients = list[torch.Tensor | None]


class LeftGradients:
    """The gradients that a replica's process writes to shared memory, on the side of that process.

    ``shared`` is the caller's memory: one tensor per parameter for its gradient, and a tensor of
    flags, one byte per parameter, which is set when the gradient is complete in memory.
    """

    def __init__(self, shared: Sequence[torch.Tensor]) -> None:
        # Whether the caller's backward is running, and not one that the module itself started.
        self.is_taking = False
        *self._places, flags = shared
        self._leaves: dict[int, torch.Tensor] = {}
        self._flags = bytes_of(flags)

    def take_from(self, index: int, leaf: torch.Tensor) -> None:
        """Move gradients of ``leaf`` to shared memory as they are accumulated, from now on."""
        if leaf.requires_grad and self._leaves.get(index) is not leaf:
            self._leaves[index] = leaf
            leaf.register_post_accumulate_grad_hook(partial(self._take, index))

    def _take(self, index: int, leaf: torch.Tensor) -> None:
        gradient = leaf.grad
        # With reentrant checkpoints it has several parts, and the caller may have added the first.
        can_take = self.is_taking and not self._flags[index]
        if can_take and gradient is not None and gradient.layout is torch.strided:
            with torch.no_grad():
                self._places[index].copy_(gradient)
            self._flags[index] = 1
            leaf.grad = None

    def taken(self) -> bytes:
        """Return for each parameter 1 if this backward moved its gradient to shared memory."""
        return bytes(self._flags)


class GradientsElsewhere:
    """The gradients that ``count`` processes write to shared memory, on the caller's side.

    ``shared`` has for each process the memory for its :class:`LeftGradients`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], count: int) -> None:
        flags = torch.empty(len(parameters), dtype=torch.uint8, device="cpu")
        self.shared = [SharedTensors([*parameters, flags]) for _ in range(count)]
        self._flags = [bytes_of(own.here[-1]) for own in self.shared]
        # For each parameter the number of processes whose gradient has been added.
        self._num_added = bytearray(len(parameters))
        # On processors that reorder writes, a flag may become visible before its gradient.
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
        self._can_see = is_on_cpu and platform.machine() in ("x86_64", "AMD64")

    def begin(self) -> None:
        """Prepare for a backward."""
        self._num_added = bytearray(len(self._num_added))
        for flags in self._flags:
            ctypes.memset(flags, 0, len(flags))

    def add_those_there(self, total: Gradients) -> None:
        """Add the gradients that are flagged by now to ``total``, in the order of the processes."""
        is_any = self._can_see
        while is_any:
            is_any = False
            for number, own in enumerate(self.shared):
                sums, parts = [], []
                for index, is_there in enumerate(bytes(self._flags[number])):
                    if is_there and self._num_added[index] == number:
                        so_far = total[index]
                        if so_far is not None and so_far.layout is torch.strided:
                            self._num_added[index] += 1
                            sums.append(so_far)
                            parts.append(own.here[index])
                if sums:
                    _foreach_add_(sums, parts)
                    is_any = True

    def rest(
        self, number: int, are_in_place: bytes, others: dict[int, torch.Tensor]
    ) -> tuple[Gradients, Gradients]:
        """Return a process's gradients that are still to be added, and their later parts.

        ``are_in_place`` and ``others`` are results of ``Worker.backward``.
        """
        first: Gradients = []
        later: Gradients = []
        for index, is_in_place in enumerate(are_in_place):
            more = others.get(index)
            is_to_add = is_in_place and self._num_added[index] <= number
            place = self.shared[number].here[index] if is_to_add else None
            first.append(place if is_in_place else more)
            later.append(more if is_in_place else None)
        return first, later


def add_up(of_replicas: Sequence[Gradients], home: torch.device) -> Gradients:
    """Sum each parameter's gradients in the order of the replicas, for reproducible bits.

    The sums are on the device ``home``. They may be the first replica's tensors, written in place;
    other replicas' tensors are neither written to nor returned.
    """
    first, *others = of_replicas
    total = [None if own is None else move(own, home) for own in first]
    for gradients in others:
        sums: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for index, own in enumerate(gradients):
            if own is None:
                continue
            # Moved one by one, so that copies of one replica's gradients exist at a time.
            so_far, gradient = total[index], move(own, home)
            if so_far is None:
                total[index] = gradient.clone()
            elif so_far.layout is gradient.layout is torch.strided:
                sums.append(so_far)
                parts.append(gradient)
            elif so_far.is_sparse and not gradient.is_sparse:  # torch adds sparse to dense only
                total[index] = gradient + so_far
            else:
                total[index] = so_far + gradient
        if sums:
            _foreach_add_(sums, parts)
    return total
