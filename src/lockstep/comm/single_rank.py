"""The process group of a rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class _Done:
    """A Work that is over."""

    def wait(self) -> bool:
        return True


class SingleRankGroup:
    """A group of one rank, for what goes through a group whether there are others or not."""

    def rank(self) -> int:
        """The rank."""
        return 0

    def size(self) -> int:
        """How many ranks there are."""
        return 1

    def allreduce(self, tensors: Sequence[torch.Tensor], options: object = None) -> _Done:
        """The sum of one is it itself."""
        return _Done()

    def broadcast(self, tensors: Sequence[torch.Tensor], options: object = None) -> _Done:
        """Everyone has it already."""
        return _Done()

    def allgather(
        self, gathered: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
    ) -> _Done:
        """What is gathered from one."""
        gathered[0][0].copy_(tensors[0])
        return _Done()
