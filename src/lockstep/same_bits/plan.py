"""What :func:`lockstep.shards` keeps of a model between steps."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from lockstep.same_bits.sums import SumOverRanks


class StepsInShards:
    """In the context of a group over which models have taken steps in shards."""


class Plan:
    """What is kept of one model.

    Attributes:
        num_steps: The number of steps without a loader's batch.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._parts: list[int] = []  # the modules that were checked, by id()
        # For the number of shards, and the parameters by id().
        self._sums: tuple[tuple[int, list[int]], SumOverRanks] | None = None

    def are_known(self, module: nn.Module) -> bool:
        """Whether the parts of ``module`` are those of the last call."""
        before, self._parts = self._parts, [*map(id, module.modules())]
        return before == self._parts

    def sums(
        self, group: dist.ProcessGroup, num_shards: int, parameters: list[nn.Parameter]
    ) -> SumOverRanks:
        """Return what sums gradients of ``parameters`` over the ranks, with memory of its own."""
        key = num_shards, [*map(id, parameters)]
        if self._sums is None or self._sums[0] != key:
            self._sums = key, SumOverRanks(group, num_shards, parameters)
        return self._sums[1]
