"""How much memory of a device a step takes, and forks of a process that uses one."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated import control

pytestmark = pytest.mark.forks

MIB = 2**20
PARAMETERS = 16 * 512 * 513 * 4 / MIB


def peak(world: lockstep.World, kind: str) -> float:
    """The greatest number of MiB that a step takes, after the first ones."""
    model: nn.Module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))).to(world.device)
    optimizer = torch.optim.Adam(model.parameters())
    if kind == "torch's":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind != "one process":
        model = lockstep.parallelize(model)
    if kind in ("sharded", "overlapped"):
        lockstep.shard_optimizer(optimizer, overlap=kind == "overlapped")
    x = torch.randn(4, 512, device=world.device)
    for step in range(6):
        if step == 4:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() / MIB


# In sizes of the parameters: they, their gradients, Adam's state, half of which is another rank's,
# and what its step takes.
@pytest.mark.parametrize(
    ("kind", "most"),
    [("one process", 5), ("torch's", 5), ("parallelize", 5), ("sharded", 3.5), ("overlapped", 3.5)],
)
def test_a_step_takes_no_more_memory_than_torchs(kind: str, most: float) -> None:
    for found in lockstep.launch(peak, 2, (kind,)):
        assert found < (most + 0.1) * PARAMETERS


def fork_in_steps(world: lockstep.World, overlaps: bool) -> tuple[int, float]:
    """How often the host waits for the device in forks, and what workers return."""
    model = lockstep.parallelize(nn.Linear(64, 64).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lockstep.shard_optimizer(optimizer, overlap=overlaps)
    x = torch.randn(4, 64, device=world.device)

    def fork() -> None:
        if not (child := os.fork()):
            os._exit(torch.ones(3).sum().item() != 3)
        assert os.waitpid(child, 0)[1] == 0

    num_waits = 0
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        with control.counted_host_waits() as waits:
            fork()  # while gradients are unsummed
            num_waits += waits.total()
        optimizer.step()
        with control.counted_host_waits() as waits:
            fork()  # while parameters are on their way
            num_waits += waits.total()
    loader = torch.utils.data.DataLoader(torch.arange(8.0), 4, num_workers=1)
    return num_waits, sum(batch.sum().item() for batch in loader)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_process_may_fork_after_it_has_used_a_device(overlaps: bool) -> None:
    for num_waits, total in lockstep.launch(fork_in_steps, 2, (overlaps,)):
        assert (num_waits, total) == (0, 28)
