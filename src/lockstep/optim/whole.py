"""Parameters that one rank updates whole, as optimizers need that aren't element-wise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.grad import gradient_of, set_gradient, unsummed_bucket_of, view_like
from lockstep.optim.blocks import Piece
from lockstep.optim.flat import FlatParameters
from lockstep.optim.shard import OptimizerShard


class WholeParameter(OptimizerShard):
    """A parameter of a memory that keeps parameters whole.

    The optimizer updates the program's own object: with its attributes, a copy of its gradient or
    None, and its state in ``optimizer.state[parameter]``. With a finer ``master_dtype`` it updates
    another parameter, with the same attributes.
    """

    def __init__(
        self,
        flat: FlatParameters,
        pieces: Sequence[Piece],
        group: int,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(flat, pieces, group, master_dtype)
        master, self.parameter = self.tensor, flat.parameters[self.pieces[0].parameter]
        self.tensor = self.parameter
        # During an update, what the parameter has as its data between updates; and its gradient,
        # with the bucket in which that may be unsummed.
        self._data: torch.Tensor | None = None
        self._gradient_between: tuple[torch.Tensor | None, Any] | None = None
        if self.has_master:
            self.tensor = nn.Parameter(master, self.parameter.requires_grad)

    def read_values(self) -> None:
        """Let the optimizer update the memory that the ranks of this host share."""
        super().read_values()
        if self.has_master:
            self.tensor.requires_grad_(self.parameter.requires_grad)
            attributes = {k: v for k, v in vars(self.parameter).items() if not k.startswith("_")}
            vars(self.tensor).update(attributes)
        else:
            self._data = self.parameter.data
            self.parameter.data = self.values

    def write_values(self) -> None:
        """Put the updated values in the memory, also if the optimizer has replaced the data."""
        super().write_values()
        if not self.has_master and self.parameter.data_ptr() != self.values.data_ptr():
            self.values.copy_(self.parameter.detach())

    def release(self) -> None:
        """Give the parameter its data and gradient of before the update."""
        if self.has_master:
            super().release()
        if self._gradient_between is not None:
            (gradient, deferred), self._gradient_between = self._gradient_between, None
            set_gradient(self.parameter, gradient)
            if deferred is not None:
                self.parameter._deferred = deferred  # type: ignore[attr-defined]
        if self._data is not None:
            self.parameter.data, self._data = self._data, None

    def take_gradient(self, *, may_be_view: bool = True) -> None:
        """Let the optimizer have a copy: what it changes there would change on this rank alone."""
        parameter, copy = self.parameter, self._copied_gradient()
        if self.has_master:
            self._use(copy)
            return
        self._gradient_between = gradient_of(parameter), vars(parameter).pop("_deferred", None)
        set_gradient(parameter, copy)

    def _copied_gradient(self) -> torch.Tensor | None:
        gradient, found = gradient_of(self.parameter), unsummed_bucket_of(self.parameter)
        if found is None:
            return None if gradient is None else gradient.clone()
        bucket, position = found
        start = bucket.contents.offsets[position]
        summed = bucket.new_sum(start, start + self.parameter.numel())
        return view_like(summed, 0, self.parameter)


def whole_parameters(
    flat: FlatParameters, groups: Sequence[int], master_dtype: torch.dtype | None
) -> list[OptimizerShard]:
    """Return the parameters of ``flat`` that this rank updates; ``groups`` has each one's group."""
    return [
        WholeParameter(flat, [piece], groups[piece.parameter], master_dtype)
        for piece in flat.pieces
    ]
