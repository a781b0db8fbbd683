"""Functions that sum over the ranks refuse transforms of torch.func, and say what to do instead."""

from __future__ import annotations

import pytest
import torch

import lockstep
from lockstep import errors

TRANSFORMS = {
    "grad": lambda function, x: torch.func.grad(function)(x),
    "vmap": lambda function, x: torch.func.vmap(function)(x),
    "vjp": torch.func.vjp,
}


@pytest.mark.parametrize("reduces", [lockstep.mean, lambda x: lockstep.reduce(x.sum(), "sum")])
@pytest.mark.parametrize("transform", [*TRANSFORMS.values()], ids=[*TRANSFORMS])
def test_transforms_of_functions_are_refused_and_the_group_goes_on(reduces, transform) -> None:
    def body(world: lockstep.World) -> None:
        x = torch.arange(6.0).view(3, 2) + world.rank
        with pytest.raises(errors.ModelError, match=r"In grad\(\), vmap\(\)"):
            transform(reduces, x)
        # What the refusal advises.
        slope = torch.func.grad(lambda x: x.square().sum())(x)
        total = lockstep.reduce({"slope": slope, "n": x.numel()}, "sum")
        assert total["n"] == 12
        assert torch.equal(total["slope"], 2 * (2 * torch.arange(6.0).view(3, 2) + 1))

    lockstep.launch(body, 2, ranks="threads")
