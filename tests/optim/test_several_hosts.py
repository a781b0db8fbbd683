"""Sharded optimizers whose ranks are on several hosts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.comm.test_hosts import run_hosts
from tests.nn.models import Digits
from tests.optim.test_shard_optimizer import OPTIMIZERS, train


def test_parameters_have_the_bits_of_an_unsharded_optimizer() -> None:
    torch.manual_seed(0)
    first: nn.Module = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        for name in "AdamW", "Adafactor":
            ends = [train(group, first, OPTIMIZERS[name], sharded=each)[0] for each in (0, 1)]
            plain, sharded = (each.parameters() for each in ends)
            for a, b in zip(plain, sharded, strict=True):
                assert torch.equal(a, b)

    run_hosts([[0, 1], [2, 3]], body)
    run_hosts([[0, 1], [2]], body)
