"""Ranks of several hosts: the sum of a host's shards is a node of the tree where it can be one."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lockstep.same_bits.chunks import in_chunks
from tests.comm.ranks_on_hosts import noted_bytes, run_hosts
from tests.same_bits.runs import OPTIMIZERS, Run, bits_on, differing, model_of


def run_of(kind: str, group: dist.ProcessGroup | None, num_shards: int) -> Run:
    run = Run(model_of(kind), OPTIMIZERS["AdamW"], group, num_shards)
    run.steps([*range(3)])
    return run


@pytest.mark.parametrize(
    ("hosts", "num_shards", "kind"),
    [
        ([[0, 1], [2, 3]], 8, "convnet"),
        ([[0, 1], [2, 3]], 5, "partly used"),
        ([[0, 1, 2], [3, 4, 5]], 12, "transformer"),
        ([[0, 1], [2]], 4, "convnet"),
        ([[0], [1], [2]], 3, "partly used"),
        ([[0, 2], [1, 3]], 4, "partly used"),
        ([[0, 1], [2, 3], [4, 5]], 13, "partly used"),
    ],
)
def test_hosts_end_with_the_bits_of_one_process(
    hosts: list[list[int]], num_shards: int, kind: str
) -> None:
    (alone,) = bits_on(1, "", lambda group: run_of(kind, group, num_shards))
    for bits in run_hosts(hosts, lambda _, group: run_of(kind, group, num_shards).bits()):
        assert not differing(bits, alone)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_ranks_each", "num_shards"), [(2, 4), (2, 8), (4, 8)])
def test_a_host_sends_what_a_ring_of_hosts_would(
    num_ranks_each: int, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = noted_bytes(monkeypatch)
    first = [*range(num_ranks_each)]
    hosts = [first, [each + num_ranks_each for each in first]]
    run_hosts(hosts, lambda _, group: run_of("convnet", group, num_shards).bits())
    (chunk,) = in_chunks([*model_of("convnet").parameters()], 2 * num_ranks_each)
    # Each of two hosts sends half of the gradients, and then half of their sum; in three steps.
    of_gradients = [size for size in sent if size >= 4 * chunk.numel // (2 * num_ranks_each)]
    assert sum(of_gradients) == 3 * 2 * 4 * chunk.numel
