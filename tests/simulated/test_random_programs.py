"""Random programs: branches, optimizers and reads on several streams, against one process."""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lockstep
from tests.counts import SHORT
from tests.simulated import control

pytestmark = pytest.mark.forks

WIDTH = 16
LOCAL_BATCH = 4
NUM_STEPS = 4


class Program(NamedTuple):
    """A model, and how it is trained. A stream's number is 0 for the current one."""

    seed: int
    depths: list[int]  # of each branch
    streams: list[int]  # of each branch
    leaves_out: bool  # whether each rank leaves out branches in each step
    wraps: bool
    bucket_cap_mb: float
    uses_adam: bool
    overlap: bool | None  # of the sharded optimizer; None for the plain one
    clips: bool
    num_micro_batches: int
    means: bool  # whether the loss is lockstep's mean
    steps_on: int
    reads_on: int  # where parameters are summed after a step
    delay: str


def program_of(seed: int) -> Program:
    chance = random.Random(seed)
    num_branches = chance.randint(1, 3)
    return Program(
        seed,
        [chance.randint(1, 3) for _ in range(num_branches)],
        [chance.randint(0, 2) for _ in range(num_branches)],
        leaves_out=chance.random() < 0.4,
        wraps=chance.random() < 0.3,
        bucket_cap_mb=chance.choice([0.002, 0.005, 25]),
        uses_adam=chance.random() < 0.5,
        overlap=chance.choice([None, False, True]),
        clips=chance.random() < 0.5,
        num_micro_batches=chance.choice([1, 1, 2]),
        means=chance.random() < 0.3,
        steps_on=chance.choice([0, 0, 1]),
        reads_on=chance.choice([0, 1, 2]),
        delay=chance.choice(["lazy", "lazy,0", "0,lazy", "0,5", "5,0"]),
    )


@contextlib.contextmanager
def on(streams: list[torch.Stream], number: int):
    """Work on a stream behind the current one, which waits for it."""
    if not number or not streams:
        yield
        return
    current, stream = torch.accelerator.current_stream(), streams[number - 1]
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


class Branches(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.streams = program, []
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
            for depth in program.depths
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        total = x
        for number, branch in enumerate(self.branches):
            if number not in left_out:
                with on(self.streams, self.program.streams[number]):
                    out = branch(x).tanh()
                if self.streams:
                    out.record_stream(torch.accelerator.current_stream())
                total = total + out
        return self.last(total)


def made(program: Program, device: torch.device) -> tuple[Branches, torch.optim.Optimizer]:
    torch.manual_seed(program.seed)
    model = Branches(program).double().to(device)
    if program.uses_adam:
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def left_out_by(program: Program, rank: int, step: int) -> set[int]:
    chance = random.Random(f"{program.seed} {rank} {step}")
    numbers = range(len(program.depths)) if program.leaves_out else ()
    return {number for number in numbers if chance.random() < 0.4}


def batches_of(program: Program, world_size: int, step: int) -> list[torch.Tensor]:
    """Return the micro-batches of all ranks."""
    generator = torch.Generator().manual_seed(1000 * program.seed + step)
    size = (program.num_micro_batches, LOCAL_BATCH * world_size, WIDTH)
    return [*torch.randn(size, dtype=torch.float64, generator=generator)]


def trained(world: lockstep.World, program: Program) -> tuple[list[torch.Tensor], list[float]]:
    """Return the parameters, and their sum after each step."""
    model, optimizer = made(program, world.device)
    model.streams = [torch.Stream(control.KIND) for _ in range(2)]
    make = lockstep.DistributedDataParallel if program.wraps else lockstep.parallelize
    parallel = make(model, bucket_cap_mb=program.bucket_cap_mb)
    if program.overlap is not None:
        optimizer = lockstep.shard_optimizer(optimizer, overlap=program.overlap)
    sums = []
    torch.accelerator.synchronize()
    with control.delayed(program.delay):
        for step in range(NUM_STEPS):
            left_out = left_out_by(program, world.rank, step)
            *others, last = batches_of(program, world.world_size, step)
            for batch in [*others, last]:
                x = batch.chunk(world.world_size)[world.rank].to(world.device)
                with contextlib.nullcontext() if batch is last else lockstep.no_sync(parallel):
                    losses = parallel(x, left_out).square().sum(1)
                    loss = lockstep.mean(losses) if program.means else losses.mean()
                    (loss / program.num_micro_batches).backward()
            if program.clips:
                lockstep.clip_grad_norm_(parallel.parameters(), 0.05)
            with on(model.streams, program.steps_on):
                optimizer.step()
            with on(model.streams, program.reads_on), torch.no_grad():
                sums.append(sum(parameter.sum() for parameter in model.parameters()))
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        return [parameter.detach().cpu() for parameter in model.parameters()], [*map(float, sums)]


def trained_alone(program: Program, world_size: int) -> tuple[list[torch.Tensor], list[float]]:
    model, optimizer = made(program, torch.device("cpu"))
    sums = []
    for step in range(NUM_STEPS):
        for batch in batches_of(program, world_size, step):
            for rank, x in enumerate(batch.chunk(world_size)):
                loss = model(x, left_out_by(program, rank, step)).square().sum(1).mean()
                (loss / world_size / program.num_micro_batches).backward()
        if program.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        sums.append(float(sum(parameter.detach().sum() for parameter in model.parameters())))
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], sums


def trained_each(world: lockstep.World, programs: list[Program]) -> list[tuple]:
    return [trained(world, program) for program in programs]


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_programs_are_those_of_one_process(world_size: int) -> None:
    if torch.accelerator.device_count() < world_size:
        pytest.skip("needs a device for each rank")
    programs = [program_of(1000 * world_size + number) for number in range(SHORT)]
    for of_rank in lockstep.launch(trained_each, world_size, (programs,)):
        for program, found in zip(programs, of_rank, strict=True):
            expected = trained_alone(program, world_size)
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-9, msg=lambda text, p=program: f"{text}\n{p}"
            )
