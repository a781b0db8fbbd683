"""A backward that fails on one rank, whose program catches the error and goes on.

No host waits for a GPU, so that the others go on too: to the step of a sharded optimizer, say.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed, ModelError
from lockstep.nn import backward
from tests.nn.models import Refusing
from tests.simulated import control

pytestmark = pytest.mark.forks

NUM_STEPS, FAILING = 7, 3


class Case(NamedTuple):
    """Who fails, what is sharded, and what comes between backward and step."""

    ranks: Collection[int]
    shard: Callable = lockstep.shard_optimizer
    overlap: bool = False
    clips: bool = False
    scales: bool = False
    # Whether the failing ranks' program catches the error of the backward alone, and steps.
    steps: bool = False
    num_optimizers: int = 1
    # Whether autograd's thread for the GPU has its callback for a while after the error, though
    # not until it runs another backward.
    drops_late: bool = False


@contextlib.contextmanager
def callbacks_dropped_late() -> Iterator[None]:
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback

    def queue(callback: Callable) -> None:
        queue_callback(callback)
        threading.Timer(0.2, id, [callback]).start()

    with mock.patch.object(backward, "_execution_engine", SimpleNamespace(queue_callback=queue)):
        yield


def not_sharded(optimizer: torch.optim.Optimizer, **_: object) -> torch.optim.Optimizer:
    return optimizer


def told_in_steps(world: lockstep.World, case: Case) -> list[str]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    model = lockstep.parallelize(nn.Sequential(*layers).to(world.device), bucket_cap_mb=0.0001)
    parts = [model] if case.num_optimizers == 1 else [model[0], model[2:]]
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]
    optimizers = [case.shard(optimizer, overlap=case.overlap) for optimizer in optimizers]
    scaler = torch.amp.GradScaler(world.device.type, enabled=case.scales)
    told = []

    def forward(step: int) -> torch.Tensor:
        x = model[0](torch.full((2, 8), 1.0 + world.rank, device=world.device))
        if step == FAILING and world.rank in case.ranks:
            x = Refusing.apply(x)
        return model[1:](x).square().sum()

    for step in range(NUM_STEPS):
        error = ""
        try:
            for optimizer in optimizers:
                optimizer.zero_grad()
            late = case.drops_late and step == FAILING
            with callbacks_dropped_late() if late else contextlib.nullcontext():
                scaler.scale(forward(step)).backward()
        except (ArithmeticError, CollectiveFailed) as caught:
            error = str(caught)
        if not error or (case.steps and "refused" in error):
            if case.clips:
                lockstep.clip_grad_norm_(model.parameters(), 1.0)
            try:
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            except ModelError as caught:
                error = str(caught)
        torch.accelerator.synchronize()
        told.append(error)
    return told


def told_by_case(world: lockstep.World, cases: list[Case]) -> list[list[str]]:
    control.set_delay("0,0")
    return [told_in_steps(world, case) for case in cases]


OF_TWO = [
    Case([1]),
    Case([1], overlap=True),
    Case([0], overlap=True, clips=True),
    Case([1], overlap=True, clips=True, steps=True),
    Case([0], steps=True, drops_late=True),
    Case([1], num_optimizers=2),
    Case([0, 1]),
    Case([1], not_sharded),
]
OF_THREE = [Case([0, 2]), Case([1], overlap=True, clips=True)]


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, OF_TWO), (3, OF_THREE)])
def test_a_backward_that_fails_on_one_rank_and_is_caught_is_named_on_all(
    num_ranks: int, cases: list[Case]
) -> None:
    """In the same later step on all; on the CPU it is told at the end of that backward."""
    by_rank = lockstep.launch(told_by_case, num_ranks, (cases,))
    for number, case in enumerate(cases):
        told = [each[number] for each in by_rank]
        for rank, errors in enumerate(told):
            assert errors[FAILING] == "refused" * (rank in case.ranks), (case, told)
            errors[FAILING] = ""
        named = [[step for step, error in enumerate(errors) if error] for errors in told]
        if len(case.ranks) == num_ranks:  # the step is lost for all
            assert not any(named), (case, told)
            continue
        assert len(named[0]) == 1, (case, told)
        assert named[0][0] > FAILING, (case, told)
        assert named == named[:1] * num_ranks, (case, told)
        who = f"rank {case.ranks[0]}" if len(case.ranks) == 1 else "some rank"
        assert any(f"failed on {who} some steps ago" in errors[named[0][0]] for errors in told)


OF_SCALERS = [Case([1], not_sharded, scales=True), Case([0], scales=True)]


def test_a_scaler_that_a_failed_backward_left_out_is_named_on_all() -> None:
    """The others have lowered its scale, as gradients were no numbers."""
    by_rank = lockstep.launch(told_by_case, 2, (OF_SCALERS,))
    for number, case in enumerate(OF_SCALERS):
        told = [each[number] for each in by_rank]
        assert [errors[FAILING] for errors in told] == [
            "refused" * (r in case.ranks) for r in (0, 1)
        ]
        assert not any(any(errors[:FAILING]) for errors in told)
        named = [["scale of this GradScaler is" in text for text in each] for each in told]
        assert named[0] == named[1], (case, told)
        assert named[0][-1], (case, told)


def told_in_time(world: lockstep.World, backend: str) -> tuple[str, float]:
    """What a rank is told on which a backward has failed, if no other goes on, and after when."""
    control.set_delay("0,0")
    hosts = dist.new_group(backend="gloo")
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=2))
    if backend == "simccl":  # which doesn't tell how long it waits, as backends of others needn't
        group.get_group_store().set_timeout(timedelta(seconds=2))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(world.device)
    model = lockstep.parallelize(layers, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lockstep.shard_optimizer(optimizer, overlap=True)
    told, seconds = "", 0.0
    for step in range(4):
        hidden = model[0](torch.ones(2, 4, device=world.device))
        if step == 3 and world.rank == 1:
            with pytest.raises(ArithmeticError):
                model[1](Refusing.apply(hidden)).sum().backward()
            start = time.monotonic()
            with pytest.raises(CollectiveFailed) as caught:
                optimizer.step()
            told, seconds = str(caught.value), time.monotonic() - start
        else:
            model[1](hidden).sum().backward()
            if step < 3:
                optimizer.step()
    dist.monitored_barrier(hosts)
    return told, seconds


@pytest.mark.parametrize("backend", [control.BACKEND, f"cpu:gloo,{control.KIND}:{control.BACKEND}"])
def test_a_failed_backward_waits_for_others_no_longer_than_their_group(backend: str) -> None:
    _, (told, seconds) = lockstep.launch(told_in_time, 2, (backend,))
    assert "in 2 s no other rank has told what it calls after it" in told
    assert 2 <= seconds < 60
