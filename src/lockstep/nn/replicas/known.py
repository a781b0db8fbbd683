"""What another process has been told of a module."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import nn


class Known:
    """What the processes know of the module: parts, tensors, and all other attributes.

    An attribute is taken for changed if it is another object, or a container of another length.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        self.parts = list(parts)
        self._buffers = list(buffers)
        self._parameters = list(parameters)
        self._starts = [parameter.data_ptr() for parameter in parameters]
        self._attributes = _attributes(parts)
        self._containers = [
            value for value in self._attributes if isinstance(value, dict | list | set)
        ]
        self.take_lengths()

    def take_lengths(self) -> None:
        """Take no container for changed that has the length which it has now."""
        self._lengths = [*map(len, self._containers)]

    def is_still(
        self,
        parts: Sequence[nn.Module],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> bool:
        """Whether the module is as it was, but for what is in its tensors."""
        return (
            _are_same(parts, self.parts)
            and _are_same(parameters, self._parameters)
            and _are_same(buffers, self._buffers)
            and [parameter.data_ptr() for parameter in parameters] == self._starts
            and _are_same(_attributes(parts), self._attributes)
            and [*map(len, self._containers)] == self._lengths
        )


def _attributes(parts: Sequence[nn.Module]) -> list[object]:
    # Whether it is training is told with each call.
    return [v for part in parts for v in (part.__dict__ | {"training": None}).values()]


def _are_same(mine: Sequence[object], others: Sequence[object]) -> bool:
    return len(mine) == len(others) and all(map(operator.is_, mine, others))
