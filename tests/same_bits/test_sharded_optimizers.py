"""Sharded optimizers and clipping after steps in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelError
from tests.ranks import run_ranks
from tests.same_bits.runs import OPTIMIZERS, Run, bits_on, differing, model_of


def sharded(
    make: Callable[[nn.Module], torch.optim.Optimizer], **options: Any
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: lockstep.shard_optimizer(make(model), **options)


def run_of(kind: str, optimizer: str, group: dist.ProcessGroup | None, **options: Any) -> Run:
    run = Run(model_of(kind), sharded(OPTIMIZERS[optimizer], **options), group, 6)
    run.steps([*range(4)])
    return run


@pytest.mark.parametrize(
    ("kind", "optimizer", "num_ranks", "backend", "options"),
    [
        ("convnet", "AdamW", 2, "shm", {}),
        ("partly used", "SGD", 3, "threads", {}),
        ("transformer", "AdamW", 2, "gloo", {"overlap": True}),
    ],
)
def test_a_sharded_optimizer_has_the_bits_of_one_process(
    kind: str, optimizer: str, num_ranks: int, backend: str, options: dict[str, Any]
) -> None:
    (alone,) = bits_on(1, "", lambda group: run_of(kind, optimizer, group))
    (whole,) = bits_on(1, "", lambda group: whole_run(kind, optimizer, group))
    assert not differing(alone, whole)
    ranks = bits_on(num_ranks, backend, lambda group: run_of(kind, optimizer, group, **options))
    for bits in ranks:
        assert not differing(bits, alone)


def whole_run(kind: str, optimizer: str, group: dist.ProcessGroup | None) -> Run:
    run = Run(model_of(kind), OPTIMIZERS[optimizer], group, 6)
    run.steps([*range(4)])
    return run


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        (torch.float32, {"fused": True}, "with fused=True"),
        (torch.bfloat16, {}, "of parameters in bfloat16"),
    ],
)
def test_updates_whose_bits_depend_on_the_cut_are_refused(
    dtype: torch.dtype, options: dict[str, Any], words: str
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(3, 3, dtype=dtype), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.AdamW(model.parameters(), **options))
        for x in lockstep.shards(model, torch.ones(4, 3, dtype=dtype), 2):
            model(x).sum().backward()
        with pytest.raises(ModelError, match=words):
            optimizer.step()

    run_ranks(2, body)
