"""Training on accelerators of any kind: what comes out is what one process has on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated.control import BACKEND, KIND, NUM_DEVICES

pytestmark = pytest.mark.forks

# Each device of this process.
ALL = [torch.device(KIND, index) for index in range(NUM_DEVICES)]


def layers() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
    return model.append(nn.Linear(12, 3)).double()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(12, 6, dtype=torch.float64, generator=generator) for _ in range(5)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def expected() -> list[torch.Tensor]:
    """The parameters after some steps of one process on the CPU."""
    model = layers()
    optimizer = adam(model)
    for x in batches():
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def parallelized(model: nn.Module) -> tuple[nn.Module, Any]:
    return lockstep.parallelize(model, bucket_cap_mb=0.001), adam(model)


def wrapped(model: nn.Module) -> tuple[nn.Module, Any]:
    index = next(model.parameters()).device.index
    parallel = lockstep.DistributedDataParallel(
        model, device_ids=[index], output_device=index, bucket_cap_mb=0.001
    )
    assert parallel._get_ddp_logging_data()["backend_name"] == BACKEND
    assert f"over {BACKEND};" in str(lockstep.explain(parallel))
    return parallel, adam(model)


def sharded(model: nn.Module) -> tuple[nn.Module, Any]:
    model, optimizer = parallelized(model)
    return model, lockstep.shard_optimizer(optimizer)


def overlapped(model: nn.Module) -> tuple[nn.Module, Any]:
    model, optimizer = parallelized(model)
    return model, lockstep.shard_optimizer(optimizer, overlap=True)


def zero(model: nn.Module) -> tuple[nn.Module, Any]:
    model, _ = parallelized(model)
    kind = torch.optim.AdamW
    return model, lockstep.ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.01)


def train_wrapped(world: lockstep.World, wrap: Callable) -> list[torch.Tensor]:
    assert world.device == torch.device(KIND, world.rank)
    model, optimizer = wrap(layers().to(world.device))
    for batch in batches():
        x = batch.chunk(world.world_size)[world.rank].pin_memory()
        x = x.to(world.device, non_blocking=True)
        optimizer.zero_grad()
        lockstep.mean(model(x).square().sum(1)).backward()
        lockstep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def assert_close(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for parameter, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wrap", [parallelized, wrapped, sharded, overlapped, zero])
def test_ranks_with_a_device_each_train_as_one_process(wrap: Callable, world_size: int) -> None:
    for mine in lockstep.launch(train_wrapped, world_size, (wrap,)):
        assert_close(mine, expected())


def in_low_precision(world: lockstep.World, shards: bool) -> tuple[list[torch.Tensor], float]:
    model = lockstep.parallelize(layers().float().to(world.device))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if shards:
        lockstep.shard_optimizer(optimizer, overlap=True)
    scaler = torch.amp.GradScaler(KIND)
    for batch in batches():
        x = batch.float().chunk(world.world_size)[world.rank].to(world.device)
        optimizer.zero_grad()
        with torch.autocast(KIND, torch.float16):
            outputs = model(x)
        assert outputs.dtype == torch.float16
        loss = lockstep.mean(outputs.float().square().sum(1))
        if world.rank == 1 and batch is batches()[0]:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().cpu() for parameter in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("shards", [False, True])
def test_autocast_and_a_gradient_scaler_keep_ranks_together(shards: bool) -> None:
    (first, scale), (second, _) = lockstep.launch(in_low_precision, 2, (shards,))
    assert scale > 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("devices", [[0, 1, 2], [2, 0], [*map(str, ALL[:3])], ["cpu", 1], None])
def test_replicas_on_several_devices_train_as_one_process(devices: Any) -> None:
    plain = layers()
    first = devices[0] if devices else 0
    home = ALL[first] if isinstance(first, int) else torch.device(first)
    model = lockstep.DataParallel(layers().to(home), devices)
    optimizers = [adam(model.module), adam(plain)]
    for x in batches():
        for optimizer, each in zip(optimizers, (model, plain), strict=True):
            optimizer.zero_grad()
            each(x).square().sum(1).mean().backward()
            optimizer.step()
    assert model(batches()[0]).device == home
    assert_close(
        [parameter.detach().cpu() for parameter in model.parameters()],
        [parameter.detach() for parameter in plain.parameters()],
    )


def draw() -> list[torch.Tensor]:
    return [torch.rand(3, device=device).cpu() for device in ALL]


def test_a_checkpoint_has_the_random_states_of_all_devices(tmp_path: Path) -> None:
    for index, device in enumerate(ALL):
        torch.rand(1 + index, device=device)
    model = layers().to(ALL[1])
    lockstep.save(tmp_path, model=model)
    first = draw()
    assert not torch.equal(draw()[0], first[0])
    torch.manual_seed(7)
    lockstep.load(tmp_path, model=model)
    assert all(torch.equal(a, b) for a, b in zip(draw(), first, strict=True))


def doctor(*options: str) -> str:
    command = [sys.executable, "-m", "lockstep", "doctor", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_doctor_tells_of_the_devices_and_tries_them() -> None:
    told = doctor("-n", "2")
    name, noun = ("Simulated GPU", "GPU") if KIND == "cuda" else (f"{KIND} device", KIND)
    for index in range(NUM_DEVICES):
        assert f"{noun} {index}" in told
    assert f"{name}, 64 GiB" in told
    assert "an all-reduce of" in told
    assert f"chooses {KIND} and cpu:gloo,{KIND}:{BACKEND}" in " ".join(told.split())
    found = json.loads(doctor("-n", "2", "--json"))
    assert found["choice"]["device"] == found["kind"] == KIND
    assert found["backends"][BACKEND] == ""
    assert len(found["gpus"]) == NUM_DEVICES
    assert KIND == "cuda" or "GPU" not in told
