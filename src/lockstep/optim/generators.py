"""The generators of random numbers that an optimizer may draw from."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lockstep import generators


class Generators(generators.Generators):
    """The global generators of torch, Python and NumPy, and those that ``optimizer`` has itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(generators.global_generators())
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for name in sorted({str(p.device) for p in parameters if p.device.type != "cpu"}):
            self[name] = generators.generator_of_device(torch.device(name))
        held = [*vars(optimizer).items()]
        held += [item for group in optimizer.param_groups for item in group.items()]
        for number, (name, value) in enumerate(held):
            if (generator := generators.generator_of(value)) is not None:
                self[f"{name} {number}"] = generator
