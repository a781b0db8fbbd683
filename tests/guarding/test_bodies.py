"""Bodies of guards that aren't a step, guards that differ, and what passes through them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import CollectiveMismatch, LockstepError, ModelError, PeerLost, StepSkipped
from tests.guarding.faulty import Fault, Program, Refused, batch
from tests.ranks import run_ranks
from tests.same import assert_same


def raises_on_all(body: Callable[[Program], Any], error: type[Exception], match: str) -> None:
    """Fail unless ``body`` raises on both ranks, leaves nothing changed, and training goes on."""

    def of_rank(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        program.guarded(0)
        before = program.state()
        with pytest.raises(error, match=match):
            body(program)
        assert_same(program.state(), before, 0)
        assert program.guarded(1).skipped is False

    run_ranks(2, of_rank)


def test_a_guard_in_a_guard_is_refused() -> None:
    def body(program: Program) -> None:
        with lockstep.guard(program.model, program.optimizer, program.scheduler) as step:
            program.guarded(1)
        assert step.blame is not None
        raise ModelError(step.blame.error)

    raises_on_all(body, ModelError, "a guard in another guard|in another guard")


def test_two_updates_in_one_body_are_refused_and_undone() -> None:
    def body(program: Program) -> None:
        with lockstep.guard(program.model, program.optimizer, program.scheduler):
            program.body(1)
            program.body(2)

    raises_on_all(body, ModelError, "steps its FaultyAdam twice")


def test_two_updates_on_one_rank_are_an_error_on_all() -> None:
    def body(program: Program) -> None:
        with lockstep.guard(program.model, program.optimizer, program.scheduler):
            program.body(1)
            if program.rank == 1:
                program.optimizer.step()

    raises_on_all(body, ModelError, "twice.*Said by rank 1")


def test_a_loss_that_leaves_the_guard_is_refused() -> None:
    def body(program: Program) -> None:
        with lockstep.guard(program.model, program.optimizer):
            loss = program.model(batch(program.rank, 1)).sum()
        loss.backward()

    raises_on_all(body, ModelError, "without a step of its optimizer")


def test_a_closure_is_refused() -> None:
    def body(program: Program) -> None:
        with lockstep.guard(program.model, program.optimizer):
            program.optimizer.step(lambda: torch.zeros(()))

    raises_on_all(body, ModelError, "steps with a closure in a guard")


def test_guards_that_differ_between_ranks_are_refused() -> None:
    def body(program: Program) -> None:
        others = [program.scheduler][: program.rank]
        with lockstep.guard(program.model, program.optimizer, *others):
            program.model(batch(program.rank, 1)).sum().backward()
            program.optimizer.step()

    raises_on_all(body, ModelError, "guards differ")


def test_a_guard_on_one_rank_alone_is_an_error_that_names_it() -> None:
    def unguarded(program: Program) -> None:
        program.body(0)
        program.optimizer.zero_grad()
        program.body(1)

    def body(rank: int, group: dist.ProcessGroup) -> str:
        program = Program(rank, group)
        with pytest.raises(LockstepError) as caught:
            program.guarded(0) if rank else unguarded(program)
        if rank == 0:
            group.shutdown()  # as its program ends
        return type(caught.value).__name__ + str(caught.value)

    first, second = run_ranks(2, body)
    assert first.startswith(CollectiveMismatch.__name__)
    assert "guarded step" in first
    assert second.startswith(PeerLost.__name__)


def test_arguments_are_checked() -> None:
    model = lockstep.parallelize(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optimizer is"):
        lockstep.guard(model, model)
    with pytest.raises(TypeError, match=r"One of guard\(\)'s others"):
        lockstep.guard(model, optimizer, 3)
    with pytest.raises(TypeError, match="got none"):
        lockstep.guard([], optimizer)
    with pytest.raises(ValueError, match="on_skip is 'rety'"):
        lockstep.guard(model, optimizer, on_skip="rety")
    with pytest.raises(ValueError, match="max_consecutive"):
        lockstep.guard(model, optimizer, max_consecutive=0)
    with pytest.raises(ModelError, match="isn't parallel"):
        lockstep.guard(torch.nn.Linear(2, 2), optimizer)
    with (
        pytest.raises(ModelError, match=r"guard\(...\).run\(body\)"),
        lockstep.guard(model, optimizer, on_skip="retry"),
    ):
        pass
    with pytest.raises(TypeError, match="takes a function that takes the step"):
        lockstep.guard(model, optimizer, on_skip="retry").run(model(torch.zeros(2)))


def test_a_guard_in_join_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        with lockstep.join(program.model), pytest.raises(ModelError, match=r"in join\(\)"):
            program.guarded(0)

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_passes(kind: type[BaseException]) -> None:
    program = Program(0, None)
    with pytest.raises(kind), lockstep.guard(program.model, program.optimizer):
        raise kind
    assert program.guarded(0).skipped is False


def test_so_many_skipped_steps_in_a_row_raise_the_culprits_traceback_on_all_ranks() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program, fault = Program(rank, group, max_consecutive=3), Fault(1, "exception", "forward")
        for step in range(2):
            assert program.guarded(step, fault).in_a_row == step + 1
        assert program.guarded(2).in_a_row == 0
        for step in range(2):
            program.guarded(step, fault)
        before = program.state()
        with pytest.raises(
            StepSkipped, match=r"(?s)^Traceback.*in fail.*3 guarded steps"
        ) as caught:
            program.guarded(4, fault)
        assert caught.value.blame.rank == 1
        assert_same(program.state(), before, 0)
        assert program.guarded(5).skipped is False

    run_ranks(2, body)


def test_without_copies_a_failure_in_the_update_raises_and_one_before_it_is_skipped() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group, undo=False)
        for step, phase in enumerate(("forward", "between")):
            before = program.state()
            assert program.guarded(step, Fault(1, "exception", phase)).skipped
            assert_same(program.state(), before, 0)
        with pytest.raises(ModelError, match=r"(?s)undo=False.*rank 1, in guarded step 2.*in fail"):
            program.guarded(2, Fault(1, "exception", "update"))

    run_ranks(2, body)


def test_what_cannot_be_put_back_on_one_rank_is_an_error_on_all() -> None:
    class Stubborn:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.rank == 1:
                raise Refused

    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        with (
            pytest.raises(ModelError, match="could not be put back on rank 1"),
            lockstep.guard(program.model, program.optimizer, Stubborn(rank)),
        ):
            raise Refused

    run_ranks(2, body)


def test_no_graph_of_a_skipped_step_is_left() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program, left = Program(rank, group), []

        def forward() -> None:
            out = program.model(batch(rank, 0))
            left.append(weakref.ref(out))
            if rank == 1:
                raise Refused
            lockstep.mean(out, process_group=group).backward()
            program.optimizer.step()

        gc.disable()
        try:
            with lockstep.guard(program.model, program.optimizer) as step:
                forward()
            assert step.skipped
            assert left[0]() is None
        finally:
            gc.enable()

    run_ranks(2, body)


def test_buffers_follow_rank_0_behind_a_failed_backward() -> None:
    """Autograd's queue keeps its nodes, and so a reference to what they have saved."""

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        first, second = Program(rank, group), Program(rank, group)
        for step in range(3):
            models, optimizers = zip(
                *((p.model, p.optimizer) for p in (first, second)), strict=True
            )
            with lockstep.guard(models, optimizers):
                hidden = first.model(batch(rank, step))
                out = second.model(hidden.repeat(1, 2))
                if rank == 0 and step == 1:
                    raise Refused
                (out.square().mean() + hidden.square().mean()).backward()
                first.optimizer.step()
                second.optimizer.step()
        return [*first.model.buffers(), *second.model.buffers()]

    assert_same(*run_ranks(2, body), 0)


def test_no_memory_is_kept_of_an_optimizer_that_is_gone() -> None:
    program = Program(0, None)
    program.guarded(0)
    gone = weakref.ref(program.optimizer)
    del program
    gc.collect()
    assert gone() is None
