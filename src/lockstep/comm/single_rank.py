"""The group of a single rank, which has nobody to communicate with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class SingleRankGroup:
    """A group of one rank, for code that needs a process group in any case."""

    _device_types = (torch.device("cpu"),)  # of what it is given to tell others

    def rank(self) -> int:
        """The rank."""
        return 0

    def size(self) -> int:
        """The number of ranks."""
        return 1

    def allreduce(self, tensors: Sequence[Tensor], options: object = None) -> _Done:
        """Leave ``tensors`` as they are."""
        return _Done(tensors)

    broadcast = allreduce

    def allgather(
        self,
        gathered: Sequence[Sequence[Tensor]],
        tensors: Sequence[Tensor],
        options: object = None,
    ) -> _Done:
        """Copy the tensor."""
        gathered[0][0].copy_(tensors[0])
        return _Done(gathered[0])

    def _allgather_base(self, gathered: Tensor, tensor: Tensor, options: object = None) -> _Done:
        return _Done([gathered.copy_(tensor)])


ALONE = SingleRankGroup()  # has no state


class _Done:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [*tensors]

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        devices = {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}
        future = torch.futures.Future[list[Tensor]](devices=[*devices])
        future.set_result(self._tensors)
        return future


@contextlib.contextmanager
def default_group() -> Iterator[None]:
    """Let torch.distributed have a default group: of this rank alone, if it has none.

    For functions of the program that call collectives, such as communication hooks.
    """
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.group.WORLD = SingleRankGroup()  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_alone:
            dist.group.WORLD = None
