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
    """Send this rank the signal that is planned for this place."""
    planned = [*_PLANNED[_ATTEMPT : _ATTEMPT + 1], ""][0].split(":")
    if planned[:3] == [str(step), os.environ.get("RANK", "0"), phase]:
        os.kill(os.getpid(), getattr(signal, planned[3]))


def tell(*tensors: torch.Tensor) -> None:
    """Print a digest of a rank's tensors."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().flatten().view(torch.uint8).numpy().tobytes())
    print(f"rank {os.environ.get('RANK', '0')} has {found.hexdigest()[:16]}", flush=True)
