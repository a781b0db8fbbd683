"""A run that was stopped and resumed has the bits of one that wasn't; wrappers leave no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.checkpoint import Manifest
from lockstep.checkpoint.loading import _read_random_states
from tests.checkpoint.training import same, states_of, trained
from tests.nn.models import Digits
from tests.optim.optimizers import OPTIMIZERS
from tests.processes import Processes, processes
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with processes(2) as started:
        yield started


def run(folder: str, first: int, last: int, stop: int, *, is_sharded: bool) -> Any:
    """Train from one step to another with dropout; save after step ``stop``."""
    group = dist.group.WORLD
    torch.manual_seed(7 + group.rank())
    random.seed(group.rank())
    model = nn.Sequential(nn.Linear(20, 300), nn.Dropout(0.5), nn.Linear(300, 3))
    lockstep.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_sharded:
        lockstep.shard_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 5], 0.5)
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if first:
        assert lockstep.load(folder, **things, step=0) == {"step": first - 1}
    for step in range(first, last):
        x = torch.randn(8, 20) * random.random() + np.random.rand()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == stop:
            lockstep.save(folder, **things, step=step, async_=is_sharded)
    found = [p.detach().clone() for p in model.parameters()]
    lockstep.load(folder, step=0, random_state=False)  # waits for the save
    return [p.tolist() for p in found], scheduler.get_last_lr(), torch.rand(3).tolist()


def run_sharded(folder: str, first: int, last: int, stop: int) -> Any:
    return run(folder, first, last, stop, is_sharded=True)


def run_plain(folder: str, first: int, last: int, stop: int) -> Any:
    return run(folder, first, last, stop, is_sharded=False)


@pytest.mark.parametrize("body", [run_plain, run_sharded])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path, ranks, body) -> None:
    expected = ranks.run(body, "shm", 2, str(tmp_path), 0, 6, 2)
    found = ranks.run(body, "shm", 2, str(tmp_path), 3, 6, 9)
    assert found == expected


def test_ranks_that_were_not_there_get_random_numbers_of_their_own(tmp_path) -> None:
    lockstep.save(tmp_path, step=1)
    before = torch.get_rng_state(), random.getstate()
    torch.rand(5)
    random.random()
    lockstep.load(tmp_path, step=0, random_state=False)
    assert not torch.equal(torch.get_rng_state(), before[0])
    lockstep.load(tmp_path, step=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    seeds = run_ranks(3, lambda rank, group: states_on(rank, group, tmp_path))
    assert "seed" not in seeds[0]
    assert seeds[1]["seed"] != seeds[2]["seed"]


def states_on(rank: int, group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    lockstep.load(folder, process_group=group, step=0)
    return _read_random_states(Manifest(folder / "000001"), rank, group.size())


def test_wrappers_leave_no_trace(tmp_path) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        wrapped: list[nn.Module] = [
            lockstep.DistributedDataParallel(copy.deepcopy(plain), process_group=group),
            lockstep.parallelize(copy.deepcopy(plain), process_group=group),
            nn.Sequential(nn.DataParallel(copy.deepcopy(plain[0])), copy.deepcopy(plain[1])),
            torch.compile(copy.deepcopy(plain), backend="eager"),
            lockstep.DataParallel(copy.deepcopy(plain), ["cpu", "cpu"]),
        ]
        for module in wrapped:
            lockstep.save(tmp_path, process_group=group, model=module)
            found = lockstep.load(tmp_path, process_group=group, model=None)["model"]
            assert same(found, dict(plain.state_dict()))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            lockstep.load(tmp_path, process_group=group, model=module)
            values = zip(module.parameters(), plain.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in values)

    run_ranks(2, body)


def test_master_values_are_saved_by_part(tmp_path) -> None:
    make = OPTIMIZERS["AdamW"]

    def save(rank: int, group: dist.ProcessGroup) -> tuple[Path, Any]:
        model, optimizer = trained(
            group, Digits, make, sharded=True, master=torch.float32, dtype=torch.bfloat16
        )
        path = lockstep.save(tmp_path, process_group=group, async_=True, opt=optimizer, model=model)
        return path, copy.deepcopy(states_of(model, optimizer))

    def load(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = trained(
            group, Digits, make, sharded=True, master=torch.float32, dtype=torch.bfloat16, steps=1
        )
        lockstep.load(tmp_path, process_group=group, opt=optimizer, model=model)
        assert same(states_of(model, optimizer), expected)

    expected: Any = None
    path, expected = run_ranks(3, lambda rank, group: waited(save(rank, group), group, tmp_path))[0]
    sizes = [file.stat().st_size for file in sorted(path.glob("*.bin"))]
    assert len(sizes) == 3
    assert max(sizes) < 1.3 * min(sizes) + 60_000
    assert "master" in expected[1]["state"][0]
    run_ranks(2, load)


def waited(found: Any, group: dist.ProcessGroup, folder: Path) -> Any:
    lockstep.load(folder, process_group=group)
    return found


def test_generators_and_values_of_the_program_are_restored(tmp_path) -> None:
    generator = torch.Generator().manual_seed(5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    lockstep.save(tmp_path, keep=1, generator=generator, scaler=scaler, mask=torch.arange(3))
    expected = torch.rand(4, generator=generator)
    other, mask = torch.amp.GradScaler("cpu"), torch.zeros(3, dtype=torch.int64)
    assert lockstep.load(tmp_path, generator=generator, scaler=other, mask=mask) == {}
    assert torch.equal(torch.rand(4, generator=generator), expected)
    assert other.state_dict() == scaler.state_dict()
    assert mask.tolist() == [0, 1, 2]
    assert lockstep.save(tmp_path, keep=2, step=2).name == "000002"
    assert lockstep.save(tmp_path, keep=2, step=3).name == "000003"
    assert lockstep.load(tmp_path / "000002", step=0) == {"step": 2}
    assert lockstep.load(tmp_path, step=0) == {"step": 3}


class Following(torch.optim.SGD):
    """Begins with averages of the parameters, as they are when its state is loaded."""

    averages: tuple[torch.Tensor, ...] = ()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        each = (parameter for group in self.param_groups for parameter in group["params"])
        self.averages = tuple(parameter.detach().clone() for parameter in each)


def test_an_optimizer_that_is_loaded_finds_the_loaded_parameters(tmp_path) -> None:
    saved, model = nn.Linear(2, 1), nn.Linear(2, 1)
    lockstep.save(tmp_path, following=Following(saved.parameters()), model=saved)
    optimizer = Following(model.parameters())
    lockstep.load(tmp_path, following=optimizer, model=model)
    assert same(optimizer.averages, (saved.weight.detach(), saved.bias.detach()))
