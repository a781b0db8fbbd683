"""Parameters that lie side by side in one memory, of which each rank owns a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import all_gather_in_place, zero_buffer
from lockstep.grad import view_like
from lockstep.optim.layout import Layout, Piece, cut_evenly, keep_whole, pieces_of


class FlatParameters:
    """Parameters of one dtype and device, moved to one memory.

    Every rank of ``group`` creates it with the same parameters. Each rank has its own copy of the
    memory, and alone changes its block in it.

    Attributes:
        group: The ranks.
        parameters: The parameters, which are views of the memory from now on.
        keeps_whole: Whether each parameter is one rank's, or the blocks are cut anywhere.
        pieces: The elements that this rank owns, in the order of the memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], *, keeps_whole: bool
    ) -> None:
        self.group, self.parameters = group, list(parameters)
        self.keeps_whole = keeps_whole
        numels = [parameter.numel() for parameter in parameters]
        self._layout: Layout = (keep_whole if keeps_whole else cut_evenly)(numels, group.size())
        self.pieces = pieces_of(self._layout, numels, group.rank())
        self._kinds = [_kind(parameter) for parameter in parameters]
        self._memory = self.new_memory(parameters[0].dtype)
        self._views = self.views_of(self._memory)
        self._pointers = [view.data_ptr() for view in self._views]
        self.take_back()

    def new_memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros of the size and on the device of the memory."""
        first, numel = self.parameters[0], self.group.size() * self._layout.block
        return zero_buffer(self.group, numel, dtype, first.device)

    def views_of(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return for each parameter its part of ``memory``, in its shape, with its strides."""
        offsets = self._layout.offsets
        return [view_like(memory, *pair) for pair in zip(offsets, self.parameters, strict=True)]

    def is_valid(self) -> bool:
        """Whether the parameters have the shapes, dtype and device that they had."""
        return [*map(_kind, self.parameters)] == self._kinds

    def take_back(self) -> None:
        """Move parameters to the memory whose data the program has replaced (``p.data = ...``)."""
        if [*map(torch.Tensor.data_ptr, self.parameters)] == self._pointers:
            return
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = _with_storage_of_its_own(view)

    def offset_of(self, piece: Piece) -> int:
        """Return where a piece begins in the memory."""
        return self._layout.offsets[piece.parameter] + piece.start

    def part(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the elements of ``memory`` from the first piece to the last, which follow it."""
        first, last = pieces[0], pieces[-1]
        start = self.offset_of(first)
        return memory[start : self.offset_of(last) + last.stop - last.start].data

    def own_part(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the values that this rank is to change; in the parameter's shape if kept whole."""
        if self.keeps_whole:
            return self._views[pieces[0].parameter]
        return self.part(self._memory, pieces)

    def publish(self, updated: Sequence[nn.Parameter]) -> None:
        """Copy each rank's block to the others, after an update of the parameters ``updated``.

        Every rank calls it; it blocks.
        """
        all_gather_in_place(self.group, self._memory)
        torch.autograd.graph.increment_version(updated)


def elements_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` in the order in which ``like``, which is dense, has its."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.detach().as_strided((like.numel(),), (1,))


def _kind(parameter: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return parameter.shape, parameter.dtype, parameter.device


def _with_storage_of_its_own(view: torch.Tensor) -> torch.Tensor:
    """Return the same elements in a storage without the others, which would be saved along."""
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(
        storage, 0, view.shape, view.stride()
    )
