"""Where a replica's process leaves its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lockstep.nn.replicas.boundary import Gradients


class LeftGradients:
    """Where the replica leaves its gradients: in the caller's memory, each as soon as it comes.

    So it is copied while it is in the CPU's cache still, and is not kept until all have come.

    Args:
        places: That memory, for each parameter.

    Attributes:
        is_taking: Whether gradients that come are the caller's, and not those of a backward that
            the module runs itself.
    """

    def __init__(self, places: Sequence[torch.Tensor]) -> None:
        self.is_taking = False
        self._places = places
        self._known: set[int] = set()
        self._in_place = [False] * len(places)

    def take_from(self, index: int, parameter: torch.Tensor) -> None:
        """Take the gradients of that one, which requires them, from now on."""
        if index not in self._known:
            self._known.add(index)
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        gradient, place = parameter.grad, self._places[index]
        if not self.is_taking or gradient is None or gradient.layout is not torch.strided:
            return
        with torch.no_grad():
            if self._in_place[index]:  # as with reentrant checkpoints, it comes in parts
                place.add_(gradient.to(place.device))
            else:
                place.copy_(gradient)
        self._in_place[index] = True
        parameter.grad = None

    def taken(self, left: Gradients) -> tuple[list[bool], dict[int, torch.Tensor]]:
        """Which have been taken since the last time, and those that were not and are ``left``."""
        in_place, self._in_place = self._in_place, [False] * len(self._places)
        others = {index: gradient for index, gradient in enumerate(left) if gradient is not None}
        for index in [index for index in others if in_place[index]]:
            place = self._places[index]
            place.add_(others.pop(index).to(place.device))
        return in_place, others
