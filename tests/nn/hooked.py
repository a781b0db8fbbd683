"""A network of several buckets, for communication hooks."""

from __future__ import annotations

import copy

import torch
from torch import nn

import lockstep

OurDDP = lockstep.DistributedDataParallel
SEVERAL_BUCKETS_MB = 0.004
FEATURES = 16


def _build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(FEATURES, 32),
            nn.BatchNorm1d(32),  # whose buffers travel, too
            nn.Tanh(),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 8),
        ).double()


_NET = _build()


def hooked_net() -> nn.Module:
    """The same network every time, on every rank."""
    return copy.deepcopy(_NET)
