"""Parameters that one rank updates whole, as optimizers need that aren't element-wise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.optim.flat import FlatParameters
from lockstep.optim.layout import Piece
from lockstep.optim.shard import Shard


class WholeParameter(Shard):
    """A parameter of a memory that keeps parameters whole.

    The optimizer updates the program's own object: with its attributes, its gradient or None, and
    its state in ``optimizer.state[parameter]``. With a finer ``master_dtype`` it updates another
    parameter, with the same attributes.
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
        # During an update, what the parameter has as its data between updates.
        self._data: torch.Tensor | None = None
        if self.has_master:
            self.tensor = nn.Parameter(master, self.parameter.requires_grad)

    def read_values(self) -> None:
        """Let the optimizer update the memory that the ranks of this host share."""
        super().read_values()
        if self.has_master:
            self.tensor.requires_grad_(self.parameter.requires_grad)
            own = {k: v for k, v in vars(self.parameter).items() if not k.startswith("_")}
            vars(self.tensor).update(own)
        else:
            self._data = self.parameter.data
            self.parameter.data = self.values

    def write_values(self) -> None:
        """Put the updated values in the memory, also if the optimizer has replaced the data."""
        super().write_values()
        if not self.has_master and self.parameter.data_ptr() != self.values.data_ptr():
            self.values.copy_(self.parameter.detach())

    def release(self) -> None:
        """Give the parameter its data of before the update, or the master its lack of gradient."""
        if self.has_master:
            super().release()
        elif self._data is not None:
            self.parameter.data, self._data = self._data, None

    def take_gradient(self, *, may_be_view: bool = True) -> None:
        """Let the master have the parameter's gradient."""
        if self.has_master:
            self._use(self.parameter.grad)


def whole_parameters(
    flat: FlatParameters, groups: Sequence[int], master_dtype: torch.dtype | None
) -> list[Shard]:
    """Return the parameters of ``flat`` that this rank updates; ``groups`` has each one's group."""
    return [
        WholeParameter(flat, [piece], groups[piece.parameter], master_dtype)
        for piece in flat.pieces
    ]
