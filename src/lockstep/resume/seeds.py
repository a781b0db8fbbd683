"""Random numbers of a step: from the run's seed, the step and the rank alone."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.generators import global_generators, mixed
from lockstep.world import accelerator

# Apart from other seeds that are mixed of a seed and two numbers.
_STEPS = -4


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, those of all devices in use too."""
    number = mixed(seed, step, rank, _STEPS)
    for generator in global_generators().values():
        generator.seed(number)
    if (kind := accelerator()) is not None:
        module: Any = torch.get_device_module(kind)
        if getattr(module, "is_initialized", lambda: True)():
            getattr(module, "manual_seed_all", module.manual_seed)(number)
