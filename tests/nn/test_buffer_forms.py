"""Buffers whose shape, dtype or presence depends on the rank, such as caches of masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelMismatch
from tests.counts import pairs
from tests.nn.parallel import BOTH
from tests.ranks import run_ranks

Change = Callable[[nn.Module, int, int], None]


class Cached(nn.Module):
    """A layer that makes a cache for the length of its input in each forward."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 2), change
        self.register_buffer("cache", torch.zeros(2, 4), persistent=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        self.change(self, len(x), rank)
        self.seen += 1 + rank
        return self.layer(x)


def set_anew(module: nn.Module, length: int, rank: int) -> None:
    module.cache = torch.ones(length, 4)


def register_again(module: nn.Module, length: int, rank: int) -> None:
    module.register_buffer("cache", torch.ones(length, 4))


def replace_data(module: nn.Module, length: int, rank: int) -> None:
    module.cache.data = torch.ones(length, 4)


def of_equal_size(module: nn.Module, length: int, rank: int) -> None:
    module.cache = torch.ones(4, 2) if rank else torch.ones(2, 4)


def of_another_dtype(module: nn.Module, length: int, rank: int) -> None:
    module.cache = module.cache.to(torch.int32 if rank else torch.float32)


def gone(module: nn.Module, length: int, rank: int) -> None:
    module.cache = None if rank else torch.ones(2, 4)


def register_on_one_rank(module: nn.Module, length: int, rank: int) -> None:
    if rank == 1:
        module.register_buffer("cache_of_one", torch.ones(length))


CHANGES = [set_anew, register_again, replace_data, of_equal_size, of_another_dtype, gone]
CHANGES += [register_on_one_rank]


@pairs("change, backend, policy", CHANGES, ["threads", "gloo", "shm"], ["rank0", "mean"])
def test_a_buffer_of_another_form_on_a_rank_is_named(
    change: Change, backend: str, policy: str
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        policies = {"*": policy}
        model = lockstep.parallelize(
            Cached(change), process_group=group, broadcast_buffers=policies
        )
        with pytest.raises(ModelMismatch, match=r"'cache.* on rank 1 and .* 'local'}"):
            model(torch.ones(3 + rank, 4), rank).sum().backward()

    run_ranks(2, body, backend=backend)


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_is_left_to_the_ranks_stays_apart(change: Change, parallel: Callable) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> tuple[torch.Size | None, list[float]]:
        model = Cached(change)
        trained = parallel(model, group, broadcast_buffers={"cache*": "local"})
        for _ in range(3):
            trained(torch.ones(3 + rank, 4), rank).sum().backward()
        return None if model.cache is None else model.cache.shape, model.seen.tolist()

    (first, seen), (second, seen_too) = run_ranks(2, body)
    assert seen == seen_too == [3.0] * 3
    assert first != second or change in (of_another_dtype, register_on_one_rank)


def test_buffers_that_grow_alike_on_all_ranks_follow() -> None:
    def grow(module: nn.Module, length: int, rank: int) -> None:
        module.cache = torch.cat([module.cache, torch.full((1, 4), 1.0 + rank)])

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = lockstep.parallelize(Cached(grow), process_group=group)
        for _ in range(3):
            model(torch.ones(3 + rank, 4), rank).sum().backward()
        return model.cache

    for backend in ("threads", "gloo"):
        for cache in run_ranks(2, body, backend=backend):
            assert torch.equal(cache, torch.cat([torch.zeros(2, 4), torch.ones(3, 4)]))
