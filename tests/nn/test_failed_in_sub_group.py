"""A backward that fails in a group of some of the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import CollectiveFailed
from tests.nn.failing import batch, layers


def test_a_failed_backward_names_ranks_of_a_sub_group_by_their_numbers_in_the_run() -> None:
    def body(world: lockstep.World) -> None:
        group = dist.new_group([1, 2])
        if world.rank == 0:
            return
        model = layers(4, group)
        if world.rank == 2:
            with pytest.raises(ArithmeticError):
                model(batch(2, 4), fails_at=3).backward()
        else:
            with pytest.raises(CollectiveFailed, match=r"failed on rank 2,.* on rank 1,"):
                model(batch(1, 4)).backward()
        # With it rank 2 finishes its backward, so that rank 1 learns of it.
        lockstep.mean(torch.ones(1), process_group=group)

    lockstep.launch(body, 3, ranks="threads")
