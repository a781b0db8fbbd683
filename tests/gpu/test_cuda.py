"""What can only be seen on a GPU. Skipped where there is none."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.gpu.sharing import launch_sharing
from tests.nn.models import build
from tests.same import assert_same

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
    pytest.mark.forks,
]


def gradients(world: lockstep.World, name: str, wrapped: bool) -> list[torch.Tensor | None]:
    """Three steps on this rank's part; the gradients of the last."""
    model = build(name).to(world.device)
    if wrapped:
        parallel = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.01)
    else:
        parallel = lockstep.parallelize(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.001, momentum=0.9)
    for batch in batches(model):
        part = batch.chunk(world.world_size)[world.rank].to(world.device)
        optimizer.zero_grad()
        parallel(part).square().sum(1).mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return [None if p.grad is None else p.grad.cpu() for p in parallel.parameters()]


def batches(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(12, *model.sample, dtype=torch.float64) for _ in range(3)]


def oracle(name: str) -> list[torch.Tensor | None]:
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for batch in batches(model):
        optimizer.zero_grad()
        model(batch).square().sum(1).mean().backward()
        optimizer.step()
    return [p.grad for p in model.parameters()]


def where(world: lockstep.World) -> tuple[str, str]:
    return str(world.device), str(dist.get_backend_config(world.process_group))


def test_one_rank_takes_its_gpu_and_nccl() -> None:
    assert lockstep.launch(where, 1) == [("cuda:0", "cpu:gloo,cuda:nccl")]


@pytest.mark.parametrize("name", ["digits", "layers", "shared", "unused", "checkpointed", "odd"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_one_rank_over_nccl(name: str, wrapped: bool) -> None:
    (mine,) = lockstep.launch(gradients, 1, (name, wrapped))
    assert_same(mine, oracle(name), 1e-8, single=1e-4)


@pytest.mark.parametrize("name", ["digits", "layers", "shared", "unused"])
def test_two_ranks_sharing_a_gpu_over_gloo(name: str) -> None:
    for mine in launch_sharing(gradients, 2, (name, False)):
        assert_same(mine, oracle(name), 1e-8, single=1e-4)


def test_more_ranks_than_gpus_compute_on_the_cpu() -> None:
    too_many = torch.cuda.device_count() + 1
    assert lockstep.launch(where, too_many) == [("cpu", "cpu:shm")] * too_many


def test_nccl_that_fails_is_replaced_on_all_ranks() -> None:
    """NCCL refuses two ranks on one GPU; init(device=...) lets them ask for that."""
    script = """
import logging, sys, torch, torch.distributed as dist, lockstep
logging.basicConfig(stream=sys.stdout, format="%(message)s")
world = lockstep.init(device="cuda:0")
total = torch.ones(1, device=world.device)
dist.all_reduce(total)
print("sum", total.item(), dist.get_backend_config(), flush=True)
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        run = subprocess.run(
            [sys.executable, "-m", "lockstep", "run", "-n", "2", file.name],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("sum 2.0 cpu:gloo,cuda:gloo") == 2
    assert run.stdout.count("cpu:gloo,cuda:nccl can't be used, going on with Gloo") == 1


def test_wrapper_moves_inputs_to_its_device() -> None:
    def body(world: lockstep.World) -> str:
        class Nested(nn.Linear):
            def forward(self, inputs: dict[str, list[torch.Tensor]]) -> torch.Tensor:
                return super().forward(inputs["x"][0])

        model = lockstep.DistributedDataParallel(Nested(2, 2).cuda(), device_ids=[0])
        return str(model({"x": [torch.ones(1, 2)]}).device)

    assert lockstep.launch(body, 1) == ["cuda:0"]


def test_a_deep_copy_on_the_gpu_is_plain() -> None:
    def body(world: lockstep.World) -> bool:
        model = copy.deepcopy(lockstep.parallelize(nn.Linear(2, 2).cuda()))
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        return model.weight.grad is not None

    assert lockstep.launch(body, 1) == [True]
