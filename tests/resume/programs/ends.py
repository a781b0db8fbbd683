"""Ends a rank where the test wants it, and tells what a program has computed."""

from __future__ import annotations

import hashlib
import os
import signal

import torch

# "step:rank:phase:signal", one for each attempt, by spaces.
_PLANNED = os.environ.get("ENDS", "").split()
_ATTEMPT = int(os.environ.get("LOCKSTEP_RESTARTS", "0"))


def here(step: int, phase: str) -> None:
    """Send this rank the signal that is planned for this place, or for one in a step before."""
    if len(_PLANNED) > _ATTEMPT:
        first, rank, name, kind = _PLANNED[_ATTEMPT].split(":")
        if int(first) <= step and rank == os.environ.get("RANK", "0") and name == phase:
            os.kill(os.getpid(), getattr(signal, kind))


def tell(*tensors: torch.Tensor) -> None:
    """Print a digest of a rank's tensors."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().flatten().view(torch.uint8).numpy().tobytes())
    print(f"rank {os.environ.get('RANK', '0')} has {found.hexdigest()[:16]}", flush=True)
