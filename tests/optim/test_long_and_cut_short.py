"""Sharded steps that go on for long, and steps in which a rank is killed."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.comm.forked_ranks import run
from tests.optim.programs import adamw
from tests.ranks import run_ranks

KILLED = """
import lockstep
import lockstep.optim.host_copy as host_copy
from torch import nn
join(rank, 2)
torch.manual_seed(0)
model = lockstep.parallelize(nn.Linear(6000, 2, bias=False))
optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

def die(*args, **options):
    time.sleep(0.3)  # the other rank has come, too
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_the_end(group, operation, named_barrier=host_copy.named_barrier):
    die() if operation == "end of an update" else named_barrier(group, operation)

def step(number):
    model(torch.full((1, 6000), number + rank + 1.0)).sum().backward()
    {killed}
    optimizer.step()
    optimizer.zero_grad()

for number in range(3):
    step(number)
committed = model.weight.detach().clone()
error = raised(lambda: step(3))
assert isinstance(error, PeerLost) and error.ranks == (1,), error
assert {note!r} in error.__notes__[-2], error.__notes__
new = [row[100:].any() for row in model.weight != committed]
assert {updated}, new
"""


@pytest.mark.forks
@pytest.mark.parametrize(
    ("killed", "note", "updated"),
    [
        ("number == 3 and rank and die()", "those of the step before", "not new[0] and not new[1]"),
        (
            "if number == 3 and rank: sys.modules['torch.optim.sgd'].sgd = die",
            "some are of this step now and some of the one before",
            "new[0] and not new[1]",
        ),
        (
            "if number == 3 and rank: host_copy.named_barrier = die_at_the_end",
            "those of this step now",
            "new[0] and new[1]",
        ),
    ],
    ids=["before", "in the midst", "after"],
)
def test_after_a_rank_was_killed_it_is_told_whose_parameters_they_are(
    killed: str, note: str, updated: str, tmp_path: Path
) -> None:
    run(tmp_path, KILLED.format(killed=killed, note=note, updated=updated))


@pytest.mark.thorough
def test_memory_is_flat_over_ten_thousand_steps() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(512, 8), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        held = []
        for number in range(10_000):
            model(torch.ones(1, 512)).sum().backward()
            if number % 10 == rank:
                assert model.weight.grad is not None
            if number % 10 > 5:
                lockstep.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number % 2_000 == 1_999:
                gc.collect()
                group.barrier().wait()
                held.append((resident_pages(), Path("/proc/self/maps").read_text().count("\n")))
                group.barrier().wait()
        pages, maps = zip(*held, strict=True)
        assert pages[-1] - pages[0] < (2 << 20) // resource.getpagesize(), pages
        assert maps[-1] - maps[0] < 10, maps

    run_ranks(2, body, backend="shm")


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
