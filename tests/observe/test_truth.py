"""What the report says of programs of many kinds, against what they have counted themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.observe import report
from lockstep.observe.analysis import step_times
from lockstep.observe.ladder import ladder
from lockstep.observe.quantities import duration, in_three_digits, size
from lockstep.observe.sections import global_batch, loaders
from lockstep.observe.summary import counted_of, summary
from lockstep.observe.trace_files import read_folder
from lockstep.observe.words import in_words

STEPS, BATCH, IN, OUT = 6, 12, 8, 4
# What goes with gradients: for each parameter whether it was used, and who failed.
MOST_FACTS = 128


class Truth(NamedTuple):
    """What a program has counted on one rank; "any" is None."""

    num_steps: int
    batch: int | None  # of all ranks
    gradient_bytes: int  # of a step, without facts
    evaluates: bool = False


class Setting:
    """A model, an optimizer and a loader of one rank."""

    def __init__(self, world: lockstep.World, *, is_parallel: bool = True) -> None:
        self.group = world.process_group
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(IN, OUT)
        if is_parallel:
            self.model = lockstep.parallelize(self.model, process_group=self.group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.bytes = sum(p.nbytes for p in self.model.parameters())
        self.loader = self.loader_of(STEPS)

    def loader_of(self, num_batches: int, size: int = BATCH) -> Any:
        dataset = TensorDataset(torch.ones(num_batches * size, IN))
        return lockstep.DataLoader(dataset, size, seed=0, process_group=self.group)

    def backward(self, x: torch.Tensor) -> None:
        loss = self.model(x).square().mean(1)
        lockstep.mean(loss, process_group=self.group).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take_step(self, x: torch.Tensor) -> None:
        self.backward(x)
        self.step()


def plain(world: lockstep.World) -> Truth:
    job = Setting(world)
    for (x,) in job.loader:
        job.take_step(x)
    return Truth(STEPS, BATCH, job.bytes)


def micro_batches(world: lockstep.World) -> Truth:
    job = Setting(world)
    for (x,) in job.loader:
        for index, part in enumerate(x.split(2)):
            is_last = index == BATCH // world.world_size // 2 - 1
            with contextlib.nullcontext() if is_last else lockstep.accumulate(job.model):
                job.backward(part)
        job.step()
    return Truth(STEPS, BATCH, job.bytes)


def several_batches_a_step(world: lockstep.World) -> Truth:
    job = Setting(world)
    for index, (x,) in enumerate(job.loader):
        with lockstep.no_sync(job.model) if index % 2 == 0 else contextlib.nullcontext():
            job.backward(x)
        if index % 2:
            job.step()
    return Truth(STEPS // 2, 2 * BATCH, job.bytes)


def evaluate(job: Setting, batches: Any, kind: str) -> None:
    if kind == "around":
        with torch.no_grad():
            for (x,) in batches:
                job.model(x)
    else:
        for (x,) in batches:
            with torch.inference_mode():
                job.model(x)


def evaluating(kind: str, num_batches: int) -> Callable[[lockstep.World], Truth]:
    def program(world: lockstep.World) -> Truth:
        job = Setting(world)
        held_out = job.loader_of(num_batches, 33)
        for index, (x,) in enumerate(job.loader):
            job.take_step(x)
            if index % 2:
                evaluate(job, held_out, kind)
        return Truth(STEPS, BATCH, job.bytes, evaluates=True)

    return program


def evaluating_on_its_own_data(world: lockstep.World) -> Truth:
    job = Setting(world)
    for _ in range(2):
        for (x,) in job.loader:
            job.take_step(x)
        evaluate(job, job.loader, "around")
    return Truth(2 * STEPS, BATCH, job.bytes, evaluates=True)


def adversaries(world: lockstep.World) -> Truth:
    job, other = Setting(world), Setting(world)
    for (x,) in job.loader:
        other.take_step(x)
        job.take_step(x)
    return Truth(STEPS, BATCH, 2 * job.bytes)


def in_stages(world: lockstep.World) -> Truth:
    job = Setting(world)
    for (x,) in job.loader:
        job.take_step(x)
    first, job.optimizer = job.optimizer, torch.optim.SGD(job.model.parameters(), lr=0.02)
    for (x,) in job.loader:
        job.take_step(x)
    assert first.state is not None  # it is still there
    # Until the second one has stepped three times, it might be one of two that take turns.
    return Truth(2 * STEPS - 2, None, job.bytes)


def averaging(world: lockstep.World) -> Truth:
    job = Setting(world, is_parallel=False)
    parameters = [*job.model.parameters()]
    for (x,) in job.loader:
        gradients = torch.autograd.grad(job.model(x).square().mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        lockstep.average_gradients(job.model, process_group=job.group)
        job.step()
    return Truth(STEPS, BATCH, job.bytes)


def sparse(world: lockstep.World) -> Truth:
    job = Setting(world)
    table = nn.Embedding(50, IN, sparse=True)
    job.model = lockstep.parallelize(
        nn.Sequential(table, nn.Linear(IN, OUT)), process_group=job.group
    )
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    for _ in job.loader:
        rows = torch.arange(5) + 3 * world.rank
        loss = job.model(rows).square().mean((1,))
        lockstep.mean(loss, process_group=job.group).backward()
        job.step()
    # The number of rows, and for each row its index and its numbers.
    return Truth(STEPS, BATCH, job.bytes + 8 + 5 * (8 + 4 * IN))


def failing(world: lockstep.World) -> Truth:
    job = Setting(world)
    for index, (x,) in enumerate(job.loader):
        if index % 3 != 1:  # the others are left out before their forward
            job.take_step(x)
    return Truth(STEPS - STEPS // 3, BATCH, job.bytes)


def without_loader(world: lockstep.World) -> Truth:
    job = Setting(world)
    for index in range(STEPS):
        job.take_step(torch.full((3, IN), float(index + world.rank)))
    return Truth(STEPS, None, job.bytes)


def evaluating_on_tensors(world: lockstep.World) -> Truth:
    job, held_out = Setting(world), torch.ones(50, IN)
    for index in range(STEPS):
        job.take_step(torch.full((3, IN), float(index + world.rank)))
        if index % 2 == 0:
            job.model.eval()
            with torch.no_grad():
                job.model(held_out)
            job.model.train()
    return Truth(STEPS, None, job.bytes, evaluates=True)


def without_gradients_but_no_evaluation(world: lockstep.World) -> Truth:
    """A teacher, an average of weights, and a model's own samples."""
    job, teacher, average = Setting(world), nn.Linear(IN, OUT).eval(), nn.Linear(IN, OUT)
    for (x,) in job.loader:
        with torch.no_grad():
            teacher(x)
            job.model(x)
        job.take_step(x)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), job.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    return Truth(STEPS, BATCH, job.bytes)


def with_loaders_for_each_epoch(world: lockstep.World) -> Truth:
    job = Setting(world)
    job.loader = None
    for _ in range(3):
        for (x,) in job.loader_of(STEPS):
            job.take_step(x)
        evaluate(job, job.loader_of(2), "within")
    return Truth(3 * STEPS, BATCH, job.bytes, evaluates=True)


PROGRAMS = {
    "plain": plain,
    "micro-batches": micro_batches,
    "several batches a step": several_batches_a_step,
    "evaluation under no_grad": evaluating("around", 3),
    "evaluation, batch by batch": evaluating("within", 3),
    "evaluation of one batch": evaluating("within", 1),
    "evaluation on its own data": evaluating_on_its_own_data,
    "two models in turn": adversaries,
    "two optimizers, one after the other": in_stages,
    "average_gradients": averaging,
    "sparse": sparse,
    "failing iterations": failing,
    "without a loader": without_loader,
    "evaluation without a loader": evaluating_on_tensors,
    "no_grad without an evaluation": without_gradients_but_no_evaluation,
    "loaders for each epoch": with_loaders_for_each_epoch,
}


def traced(world: lockstep.World, folder: Path, name: str) -> Truth:
    with lockstep.trace(folder):
        return PROGRAMS[name](world)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_report_is_what_was_counted(tmp_path: Path, capsys: Any, name: str) -> None:
    [truth, _] = lockstep.launch(traced, 2, (tmp_path, name), ranks="threads")
    ranks = read_folder(tmp_path)
    steps = step_times(ranks)
    found = summary(ranks, steps)
    assert found.num_steps == truth.num_steps
    assert 0 <= found.gradient_bytes - truth.gradient_bytes <= MOST_FACTS
    assert found.num_unmatched == 0
    has_loader = "without a loader" not in name
    if truth.batch is not None or not has_loader:
        assert global_batch(ranks) == truth.batch
    assert (found.evaluations.seconds > 0) == truth.evaluates
    uses = loaders(ranks, steps)
    used_for = [] if uses is None else [row[1] for row in uses.rows]
    if name != "evaluation on its own data":
        kinds = ["training"] + ["evaluation"] * truth.evaluates
        assert used_for == (kinds if has_loader else [])
    # One step time, on the whole page.
    report(str(tmp_path), text=True)
    told = " ".join(capsys.readouterr().out.split())
    [taken] = [sum(s.total for each in steps[1:] for s in each) / 2e9 / len(steps[1:])]
    assert found.seconds_per_step == pytest.approx(taken, abs=1e-9)
    assert f"A step takes {duration(taken)} on average" in told
    assert f"2 measured {in_three_digits(1e3 * taken)}" in told
    assert f"a step {in_three_digits(1e3 * taken)}" in told
    assert f"{size(found.gradient_bytes)} of gradients" in told
    rungs = ladder(ranks, counted_of(ranks, steps), truth.batch)
    assert rungs.ideal + sum(rung.seconds for rung in rungs.rungs) == pytest.approx(taken)
    assert in_words(found, rungs) in told


def test_forwards_of_micro_batches_are_forwards(tmp_path: Path) -> None:
    lockstep.launch(traced, 2, (tmp_path, "micro-batches"), ranks="threads")
    for found in read_folder(tmp_path):
        forwards = [s for s in found.spans if s.name == "forward"]
        backwards = [s for s in found.spans if s.name == "backward"]
        assert len(forwards) == len(backwards) == 3 * STEPS
        assert all(f.stop <= b.start for f, b in zip(forwards, backwards, strict=True))


def test_a_program_that_sends_nothing(tmp_path: Path) -> None:
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lockstep.trace(tmp_path):
        for _ in range(4):
            F.mse_loss(model(torch.ones(2, IN)), torch.ones(2, OUT)).backward()
            optimizer.step()
    ranks = read_folder(tmp_path)
    found = summary(ranks, step_times(ranks))
    assert (found.num_steps, found.gradient_bytes, found.collective_bytes) == (4, 0, 0)
