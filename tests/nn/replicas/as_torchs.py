"""The two forms of DataParallel, and what is compared with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.nn import DataParallel, data_parallel

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Does(nn.Module):
    """Calls a function, with itself as the first argument."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


def by_module(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return DataParallel(module, TWO)(*inputs, **kwargs)


def by_function(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return data_parallel(module, inputs, TWO, module_kwargs=kwargs)


BOTH = pytest.mark.parametrize("call", [by_module, by_function])
