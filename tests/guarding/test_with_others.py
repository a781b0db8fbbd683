"""Guards with what else a training step has: loss scales, micro-batches, several models, runs."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from tests.guarding.faulty import Fault, Program, Refused, batch, run
from tests.ranks import run_ranks
from tests.same import assert_same, values_of

SHARDS = pytest.mark.parametrize("shards", [False, True], ids=["plain", "sharded"])


@pytest.mark.parametrize("phase", ["forward", "between", "behind"])
def test_a_rank_that_is_alone_skips_steps_too(phase: Any) -> None:
    faults = {step: Fault(0, "exception", phase) for step in (0, 2)}
    told, mine = run(Program(0, None), faults, 4, leaves_out=False)
    _, expected = run(Program(0, None), faults, 4, leaves_out=True)
    assert [step.skipped for step in told] == [True, False, True, False]
    assert told[2].blame.rank == 0
    assert_same(mine, expected, 0)


def test_gradients_that_are_not_finite_are_found_by_a_rank_that_is_alone() -> None:
    told, _ = run(Program(0, None), {1: Fault(0, "nan", "backward")}, 2, leaves_out=False)
    assert told[1].blame.nonfinite == ("first.weight", "first.bias", "norm.weight", "norm.bias")
    assert told[1].blame.finite == ("second.weight", "second.bias", "last.weight", "last.bias")


def test_global_random_states_are_as_before_the_step() -> None:
    program = Program(0, None)
    drawn = []
    for fails in (True, False):
        with lockstep.guard(program.model, program.optimizer):
            drawn.append((torch.rand(3), random.random(), random.gauss(), np.random.normal()))
            if fails:
                raise Refused
            program.body(0)
    (first, *others), (second, *same) = drawn
    assert torch.equal(first, second)
    assert others == same


@SHARDS
def test_a_step_that_a_loss_scale_makes_infinite_is_skipped_and_the_scale_falls(
    shards: bool,
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group, shards=shards)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-20)
        scales, skipped = [], []
        for step in range(5):
            with lockstep.guard(
                program.model, program.optimizer, scaler, max_consecutive=1
            ) as guarded:
                out = program.model(batch(rank, step)).square().mean(1)
                scaler.scale(100 * lockstep.mean(out, process_group=group)).backward()
                scaler.step(program.optimizer)
                scaler.update()
                program.optimizer.zero_grad()
            skipped.append(guarded.skipped)
            scales.append(scaler.get_scale())
            if guarded.skipped:
                assert guarded.blame.kind == "nonfinite"
                assert "loss scale" in guarded.blame.error
        assert skipped == [after < before for before, after in pairwise([2.0**126, *scales])]
        assert skipped[0]
        assert not skipped[-1]

    run_ranks(2, body)


def test_a_step_that_fails_with_a_loss_scale_leaves_the_scaler_as_it_was() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for phase in ("unscaled", "updated", ""):
            before = program.state()
            with lockstep.guard(program.model, program.optimizer, scaler) as step:
                scaler.scale(program.model(batch(rank, 0)).sum()).backward()
                scaler.unscale_(program.optimizer)
                if rank == 1 and phase == "unscaled":
                    raise Refused
                scaler.step(program.optimizer)
                scaler.update()
                if rank == 1 and phase == "updated":
                    raise Refused
            program.optimizer.zero_grad()
            assert step.skipped is bool(phase)
            if phase:
                assert scaler.get_scale() == 4
                assert_same(program.state(), before, 0)
        assert scaler.get_scale() == 8

    run_ranks(2, body)


@SHARDS
@pytest.mark.parametrize("around", ["accumulate", "no_sync"])
def test_a_step_of_micro_batches_is_skipped_as_a_whole(around: str, shards: bool) -> None:
    context = getattr(lockstep, around)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        programs = [Program(rank, group, shards=shards) for _ in range(2)]

        def step(program: Program, number: int, fails_at: int | None = None) -> None:
            for micro in range(3):
                with context(program.model) if micro < 2 else nullcontext():
                    out = program.model(batch(rank, 3 * number + micro)).square().mean(1)
                    if rank == 1 and micro == fails_at:
                        raise Refused
                    lockstep.mean(out, process_group=group).backward()
            program.optimizer.step()

        guarded, alone = programs
        for number in range(5):
            fails_at = {1: 0, 2: 1, 3: 2}.get(number)
            with lockstep.guard(guarded.model, guarded.optimizer) as told:
                step(guarded, number, fails_at)
            guarded.optimizer.zero_grad()
            assert told.skipped is (fails_at is not None)
            if fails_at is None:
                step(alone, number)
                alone.optimizer.zero_grad()
        assert_same(guarded.state(), alone.state(), 0)

    run_ranks(2, body)


@SHARDS
def test_several_models_and_optimizers_are_skipped_together(shards: bool) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        pairs = [[Program(rank, group, shards=shards) for _ in range(2)] for _ in range(2)]

        def step(first: Program, second: Program, number: int, fails_at: str) -> None:
            hidden = first.model(batch(rank, number))
            out = second.model(hidden.repeat(1, 2))
            if rank == 0 and fails_at == "forward":
                raise Refused
            (out.square().mean() + hidden.square().mean()).backward()
            first.optimizer.step()
            if rank == 0 and fails_at == "between updates":
                raise Refused
            second.optimizer.step()

        guarded, alone = pairs
        for number, fails_at in enumerate(["", "forward", "", "between updates", ""]):
            models, optimizers = zip(*((p.model, p.optimizer) for p in guarded), strict=True)
            with lockstep.guard(models, optimizers) as told:
                step(*guarded, number, fails_at)
            for program in guarded:
                program.optimizer.zero_grad()
            assert told.skipped is bool(fails_at)
            if not fails_at:
                step(*alone, number, "")
                for program in alone:
                    program.optimizer.zero_grad()
        for mine, expected in zip(guarded, alone, strict=True):
            assert_same(mine.state(), expected.state(), 0)

    run_ranks(2, body)


@SHARDS
def test_a_step_that_is_retried_is_the_same_step(shards: bool) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        retried, alone = (Program(rank, group, shards=shards) for _ in range(2))
        failures = [Fault(1, "nan", "forward"), Fault(0, "exception", "update"), None]

        def take(step: int) -> str:
            retried.body(step, failures.pop(0) if step == 1 else None)
            return "done"

        for step in range(3):
            guard = lockstep.guard(
                retried.model, retried.optimizer, retried.scheduler, on_skip="retry"
            )
            told = guard.run(take, step)
            assert (told.skipped, told.result) == (False, "done")
            alone.body(step)
            for program in (retried, alone):
                program.optimizer.zero_grad()
        assert not failures
        assert_same(retried.state(), alone.state(), 0)

    run_ranks(2, body)


def test_a_function_is_called_with_each_skipped_step() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[str]:
        told: list[str] = []
        program = Program(rank, group, on_skip=lambda step: told.append(str(step.blame)))
        program.guarded(0, Fault(1, "exception", "between"))
        return told

    first, second = run_ranks(2, body)
    assert first == second
    assert first[0].startswith("rank 1, in guarded step 0: tests.guarding.faulty.Refused: planted")


def test_rows_that_lookups_scale_are_as_before_the_step() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.last = nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.table(x))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Table(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = values_of(model)
        for fails in (True, False):
            with lockstep.guard(model, optimizer) as step:
                loss = model(torch.tensor([rank, 3])).sum()
                if fails and rank == 1:
                    raise Refused
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            assert step.skipped is fails
            if fails:
                assert_same(values_of(model), before, 0)

    run_ranks(2, body)


def test_a_rank_that_fails_ends_the_wait_for_a_hook_over_gloo() -> None:
    """The hook calls Gloo, which knows nothing of guarded steps."""

    def hook(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future:
        return group.allreduce([bucket.buffer()]).get_future()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.DistributedDataParallel(nn.Linear(6, 2), process_group=group)
        model.register_comm_hook(group, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        skipped = []
        for number in range(4):
            with lockstep.guard(model, optimizer) as step:
                if rank == 1 and number == 2:
                    raise Refused
                model(batch(rank, number)).square().sum().backward()
                optimizer.step()
            skipped.append(step.blame and step.blame.rank)
        assert skipped == [None, None, 1, None]

    run_ranks(2, body, backend="gloo")


def test_a_run_of_steps_goes_on_behind_a_skipped_one(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        states = []
        for leaves_out in (True, False):
            program = Program(rank, group)
            loader = lockstep.DataLoader(
                TensorDataset(torch.arange(24.0).view(12, 2)), 4, process_group=group
            )
            steps = lockstep.steps(
                loader,
                tmp_path / str(leaves_out),
                epochs=2,
                seed=0,
                process_group=group,
                model=program.model,
                optimizer=program.optimizer,
            )
            for (x,) in steps:
                fault = Fault(1, "exception", "forward") if steps.step == 2 else None
                if fault is None or not leaves_out:
                    with lockstep.guard(program.model, program.optimizer) as step:
                        program.model.fault = fault if rank == 1 else None
                        out = program.model(x.repeat(1, 3)).square().mean(1)
                        lockstep.mean(out, process_group=group).backward()
                        program.optimizer.step()
                    program.optimizer.zero_grad()
                    assert step.skipped is (fault is not None)
            assert steps.step == 5
            states.append(program.state())
        assert_same(*states, 0)

    run_ranks(2, body)


@SHARDS
@pytest.mark.parametrize(
    ("scale", "max_norm", "is_skipped"),
    [(1e19, None, False), (1.2e38, None, True), (1.0, float("nan"), True), (1e19, 1.0, False)],
)
def test_what_ranks_gradients_add_up_to_is_looked_at(
    scale: float, max_norm: float | None, is_skipped: bool, shards: bool
) -> None:
    """Each rank's own are finite, and some so large that the square of their norm isn't."""

    def body(_: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(3, 2), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-20)
        if shards:
            lockstep.shard_optimizer(optimizer)
        before = model.weight.detach().clone()
        with lockstep.guard(model, optimizer) as step:
            (model(torch.ones(2, 3)).sum() * scale).backward()
            if max_norm is not None:
                lockstep.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        assert step.skipped is is_skipped
        if is_skipped:
            assert (step.blame.kind, step.blame.rank) == ("nonfinite", None)
            assert torch.equal(model.weight, before)

    run_ranks(2, body)
