"""Ranks that train apart are told of: nothing keeps their parameters in step, or options differ."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import lockstep
from tests.launcher.bench import Bench
from tests.nn.parallel import net, parts

APART = "Nothing keeps the parameters of this SGD in step"
OPTIONS = "The options of this SGD differ between the ranks"
CHANGED = "isn't the same on all ranks, in this SGD"


def steps(model: nn.Module, rank: int, num: int = 5, optimizer: Any = None) -> Any:
    optimizer = SGD(model.parameters(), 0.1) if optimizer is None else optimizer
    for _ in range(num):
        optimizer.zero_grad()
        model(parts(2)[rank]).square().mean().backward()
        optimizer.step()
        dist.barrier()
    return optimizer


def forgotten(world: lockstep.World) -> None:
    steps(net(), world.rank)


def loaded_copy(world: lockstep.World) -> None:
    model = lockstep.parallelize(net())
    other = net()
    other.load_state_dict(model.state_dict())
    steps(other, world.rank)


def deep_copy(world: lockstep.World) -> None:
    model = lockstep.parallelize(net())
    model.more = nn.Linear(2, 2)
    steps(copy.deepcopy(model), world.rank)


def pickled_after_a_wrapper(world: lockstep.World) -> None:
    model = net()
    lockstep.DistributedDataParallel(model)
    lockstep.DistributedDataParallel(model)
    steps(pickle.loads(pickle.dumps(model)), world.rank)


def one_of_two(world: lockstep.World) -> None:
    generator, critic = lockstep.parallelize(net()), net()
    first, second = SGD(generator.parameters(), 0.1), SGD(critic.parameters(), 0.1)
    for _ in range(3):
        steps(generator, world.rank, 1, first)
        steps(critic, world.rank, 1, second)


def parallel(world: lockstep.World) -> None:
    steps(lockstep.parallelize(net()), world.rank)


def sharded(world: lockstep.World) -> None:
    model = lockstep.parallelize(net())
    steps(model, world.rank, optimizer=lockstep.shard_optimizer(SGD(model.parameters(), 0.1)))


def by_hand(world: lockstep.World) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(parts(2)[world.rank]).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()


def averaged(world: lockstep.World) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(parts(2)[world.rank]).square().mean().backward()
        lockstep.average_gradients(model)
        optimizer.step()


def in_torchs_wrapper(world: lockstep.World) -> None:
    group = dist.new_group(backend="gloo")
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    steps(nn.parallel.DistributedDataParallel(model, process_group=group), world.rank)


def with_local_steps(world: lockstep.World) -> None:
    model = lockstep.parallelize(net())
    with lockstep.no_sync(model):
        steps(model, world.rank)


def on_one_rank(world: lockstep.World) -> None:
    model = lockstep.parallelize(net())
    probe = nn.Linear(4, 2).double()
    optimizer = SGD(probe.parameters(), 0.1)
    for _ in range(5):
        if world.rank == 0:
            probe(parts(2)[0]).sum().backward()
            optimizer.step()
        dist.barrier()
    steps(model, world.rank)


def other_models(world: lockstep.World) -> None:
    steps(nn.Sequential(nn.Linear(4, 3 + world.rank), nn.Tanh()).double(), world.rank)


def copy_in_torchs_wrapper(world: lockstep.World) -> None:
    group = dist.new_group(backend="gloo")
    copied = copy.deepcopy(lockstep.parallelize(nn.Sequential(nn.Linear(4, 3)).double()))
    steps(nn.parallel.DistributedDataParallel(copied, process_group=group), world.rank)


def average_of_weights(world: lockstep.World) -> None:
    model = lockstep.parallelize(net())
    average = copy.deepcopy(model)
    steps(model, world.rank)
    average.load_state_dict(model.state_dict())


def said_by(body: Callable[[lockstep.World], None], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.WARNING)
    lockstep.launch(body, nprocs=2, ranks="threads")
    said = [record.getMessage() for record in caplog.records]
    return [text for text in said if any(one in text for one in (APART, OPTIONS, CHANGED))]


@pytest.mark.parametrize(
    "body", [forgotten, loaded_copy, deep_copy, pickled_after_a_wrapper, one_of_two]
)
def test_parameters_that_nothing_keeps_in_step_are_told_of_once(
    body: Callable[[lockstep.World], None], caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = said_by(body, caplog)
    assert "parameter 0 of shape (6, 4)" in said
    assert "lockstep.parallelize(model)" in said


QUIET = [
    *(parallel, sharded, by_hand, averaged, with_local_steps, on_one_rank, other_models),
    average_of_weights,
    *(
        pytest.param(body, marks=pytest.mark.keeps_descriptors("torch's DDP keeps Gloo's"))
        for body in (in_torchs_wrapper, copy_in_torchs_wrapper)
    ),
]


@pytest.mark.parametrize("body", QUIET)
def test_nothing_is_said_of_others(
    body: Callable[[lockstep.World], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert said_by(body, caplog) == []


def plateau(world: lockstep.World, sharded: bool) -> None:
    model = lockstep.parallelize(net())
    optimizer = SGD(model.parameters(), 0.1)
    optimizer = lockstep.shard_optimizer(optimizer) if sharded else optimizer
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for step in range(9):
        steps(model, world.rank, 1, optimizer)
        scheduler.step(step if world.rank else -step)


@pytest.mark.parametrize("sharded", [False, True])
def test_options_that_differ_are_told_of(sharded: bool, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = said_by(lambda world: plateau(world, sharded), caplog)
    assert "'lr' of group 0 is 0.1 on rank 0 and 0.0" in said
    assert "ReduceLROnPlateau" in said


def test_options_that_are_equal_are_not(caplog: pytest.LogCaptureFixture) -> None:
    def body(world: lockstep.World) -> None:
        model = lockstep.parallelize(net())
        optimizer = SGD(model.parameters(), torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for _ in range(9):
            steps(model, world.rank, 1, optimizer)
            scheduler.step()

    assert said_by(body, caplog) == []


def changed(world: lockstep.World, what: str, shard: str) -> None:
    """Let rank 0 alone read or change a gradient or a parameter before each step."""
    model = lockstep.parallelize(net())
    optimizer: Any = SGD(model.parameters(), 0.1)
    if shard:
        optimizer = lockstep.shard_optimizer(optimizer, overlap=shard == "overlap")
    weight = model.second.weight
    for step in range(4):
        optimizer.zero_grad()
        model(parts(2)[world.rank]).square().mean().backward()
        is_first = world.rank == 0
        if what == "gradient" and (is_first or shard == "overlap"):
            weight.grad.mul_(2.0 if is_first else 1.0)
        elif what == "replaced" and is_first:
            weight.grad = torch.zeros_like(weight)
        elif what == "NaN" and (is_first or shard == "overlap") and step == 1:
            weight.grad[:] = torch.nan if is_first else 0.0
        elif what == "value" and is_first:
            with torch.no_grad():
                weight.mul_(0.5)
        elif what == "data" and is_first:
            weight.data = torch.ones_like(weight)
        elif what == "read" and is_first:
            assert weight.grad is not None
        elif what == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        elif what == "clipped by ours":
            lockstep.clip_grad_norm_(model.parameters(), 0.01)
            if is_first:
                assert weight.grad is not None
        optimizer.step()


@pytest.mark.parametrize(
    ("what", "shard"),
    [
        *itertools.product(["gradient", "replaced", "NaN", "value"], ["", "sharded"]),
        ("data", ""),  # under a sharded optimizer it raises an error
    ],
)
def test_what_one_rank_alone_has_changed_is_told_of_by_name(
    what: str, shard: str, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = said_by(lambda world: changed(world, what, shard), caplog)
    kind = "value" if what in ("value", "data") else "gradient"
    assert f"The {kind} of 'second.weight' isn't the same on all ranks" in said
    assert "on rank 0 and" in said
    assert "on rank 1 before step" in said


@pytest.mark.parametrize("what", ["gradient", "NaN"])
def test_gradients_that_arrive_are_compared_once_gathered(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = said_by(lambda world: changed(world, what, "overlap"), caplog)
    assert "The gradient of 'second.weight'" in said


@pytest.mark.parametrize("shard", ["", "sharded"])
@pytest.mark.parametrize("what", ["read", "clipped", "clipped by ours"])
def test_what_all_ranks_have_is_not(
    what: str, shard: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert said_by(lambda world: changed(world, what, shard), caplog) == []


TRAINS = """
    import torch
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""
LATE = """
    import torch
    import lockstep
    world = lockstep.init()
    model = lockstep.parallelize(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range({num_steps}):
        model(torch.ones(2, 3)).sum().backward()
        if step == {num_steps} - 2 and world.rank:
            optimizer.param_groups[0]["lr"] = 0.025
        optimizer.step()
"""


@pytest.mark.forks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_that_have_not_met_are_told_of(bench: Bench, num_ranks: int) -> None:
    bench.script(TRAINS, "train.py")
    done = bench.run("run", "-n", num_ranks, "train.py")
    assert done.returncode == 0
    assert done.stderr.count("without having met the others") == num_ranks - 1


@pytest.mark.forks
@pytest.mark.parametrize("num_steps", [7, 70])
def test_options_are_compared_at_the_end_too(bench: Bench, num_steps: int) -> None:
    bench.script(LATE.replace("{num_steps}", str(num_steps)), "train.py")
    done = bench.run("run", "-n", 2, "train.py")
    assert done.returncode == 0
    assert done.stderr.count("'lr' of group 0 is 0.1 on rank 0 and 0.025 on rank 1") == 1
