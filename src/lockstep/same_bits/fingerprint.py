"""What the bits of a step depend on, besides the program, its data and its seeds."""

from __future__ import annotations

import platform
from typing import Any

import torch

Fingerprint = dict[str, Any]


def fingerprint_of(num_shards: int) -> Fingerprint:
    """Return what has to be the same for the same bits, by name, of values that JSON has."""
    return {
        "number of shards": num_shards,
        "intra-op threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
    }


def use_threads() -> None:
    """Let operators of this process compute with one thread: of two, many give other bits."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def difference(mine: Fingerprint, theirs: Fingerprint) -> str | None:
    """Return the name of what differs first, if anything does."""
    return next((name for name in mine if mine[name] != theirs.get(name)), None)
