"""Training loops of different lengths: what ranks that are through do for those that are not."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep.errors import ModelError
from tests.nn.joining import OurDDP, assert_all_are, batches, by_hand, launch, sgd, steps_of
from tests.nn.parallel import net
from tests.ranks import run_ranks
from tests.same import values_of
from tests.training import train

WRAPPERS = pytest.mark.parametrize("wrap", [OurDDP, TorchDDP], ids=["ours", "torch"])
DIVIDE = pytest.mark.parametrize("initial", [True, False], ids=["by all", "by those with data"])
LENGTHS = pytest.mark.parametrize("lengths", [(2, 4, 3), (3, 0, 1), (1, 1, 1)], ids=str)


def joined(model: nn.Module, local: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    with model.join(**options):
        train(model, sgd(model), local)
    return values_of(model)


@LENGTHS
@pytest.mark.parametrize(
    ("wrap", "initial"),
    # With torch's wrapper the other division needs what only Gloo's futures have.
    [(OurDDP, True), (OurDDP, False), (TorchDDP, True)],
    ids=["ours, by all", "ours, by those with data", "torch's, by all"],
)
def test_all_ranks_end_with_the_parameters_of_the_same_steps_by_hand(
    wrap: type[nn.Module], initial: bool, lengths: tuple[int, ...]
) -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrap(net(), find_unused_parameters=True, bucket_cap_mb=0.0002)
        local = batches(lengths)[world.rank]
        return joined(model, local, divide_by_initial_world_size=initial)

    assert_all_are(launch(body, len(lengths)), by_hand(lengths, initial))


@LENGTHS
@DIVIDE
def test_a_loop_of_models_in_place(initial: bool, lengths: tuple[int, ...]) -> None:
    """Two of them, through other methods than forward, in turns as a GAN's."""

    def pair() -> list[nn.Module]:
        models = [net(), net()]
        with torch.no_grad():
            for parameter in models[1].parameters():
                parameter.mul_(-0.5)
        return models

    def steps(first: nn.Module, second: nn.Module, parts: Sequence, divisor: int) -> None:
        for model, other in ((first, second), (second, first)):
            model.zero_grad()
            for part in parts:
                with torch.no_grad():
                    target = other.second(torch.tanh(other.first(part)))
                output = model.second(torch.tanh(model.first(part)))
                ((output - 1 - target).square().mean() / divisor).backward()
            sgd(model).step()

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        models = [lockstep.parallelize(model, process_group=group) for model in pair()]
        with lockstep.join(*models, divide_by_initial_world_size=initial):
            for batch in batches(lengths)[rank]:
                steps(*models, [batch], 1)
        return [p.detach() for model in models for p in model.parameters()]

    expected = pair()
    for parts in steps_of(lengths):
        steps(*expected, parts, len(lengths) if initial else len(parts))
    wanted = [p.detach() for model in expected for p in model.parameters()]
    assert_all_are(run_ranks(len(lengths), body), wanted)


def test_join_on_one_rank_and_of_a_model_that_is_not_parallel() -> None:
    model = lockstep.parallelize(net())
    with lockstep.join(model):
        model(batches((1,))[0][0]).sum().backward()
    with pytest.raises(ModelError, match="isn't parallel"):
        lockstep.join(net())
    with pytest.raises(TypeError, match="got none"):
        lockstep.join()


def test_a_model_that_is_wholly_frozen_by_now_in_a_joined_loop() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        frozen = lockstep.parallelize(nn.Linear(2, 2), process_group=group)
        model = lockstep.parallelize(nn.Linear(2, 1), process_group=group)
        frozen.requires_grad_(False)
        frozen.register_buffer("added", torch.zeros(1))  # so that it is looked at again
        with lockstep.join(frozen, model):
            for _ in range(2 + rank):
                model(frozen(torch.ones(1, 2))).sum().backward()
        return model.weight.detach().clone()

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


@WRAPPERS
def test_join_that_is_not_enabled_does_nothing(wrap: type[nn.Module]) -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrap(net(), find_unused_parameters=True)
        return joined(model, batches((3, 3))[world.rank], enable=False)

    assert_all_are(launch(body), by_hand((3, 3), True))


def test_after_a_join_training_and_one_ranks_evaluation_are_as_before() -> None:
    lengths = (1, 3)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = OurDDP(net(), process_group=group)
        joined(model, batches(lengths)[rank], divide_by_initial_world_size=False)
        if rank == 0:  # alone
            with torch.no_grad():
                for _ in range(3):
                    model(batches((1,))[0][0])
        optimizer = sgd(model)
        optimizer.zero_grad()
        model(batches((1, 1))[rank][0]).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    alone, start = net(), by_hand(lengths, False)
    with torch.no_grad():
        for parameter, value in zip(alone.parameters(), start, strict=True):
            parameter.copy_(value)
    first, second = batches((1, 1))
    alone(torch.cat(first + second)).square().mean().backward()
    expected = [p.grad for p in alone.parameters() if p.grad is not None]
    assert_all_are(run_ranks(2, body), expected)


@WRAPPERS
def test_gradients_may_be_accumulated_in_a_joined_loop(wrap: type[nn.Module]) -> None:
    lengths = (2, 6)

    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrap(net(), find_unused_parameters=True)
        optimizer = sgd(model)
        with model.join():
            for number, batch in enumerate(batches(lengths)[world.rank]):
                is_last = number % 2 == 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    model(batch).square().mean().backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    model = net()
    optimizer = sgd(model)
    for number, parts in enumerate(steps_of(lengths)):
        for part in parts:
            (model(part).square().mean() / 2).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    assert_all_are(launch(body), [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("how", ["torch's", "method", "function", "torch's Join"])
def test_gradients_of_a_rank_that_is_through_are_its_own(how: str) -> None:
    """Gradients are set to zero after each step, so a next epoch must begin with none."""

    def body(world: lockstep.World) -> list[list[float]]:
        model = (TorchDDP if how == "torch's" else OurDDP)(nn.Linear(3, 1, bias=False))
        (weight,) = model.parameters()
        seen, left = [], []
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                if how == "function":
                    stack.enter_context(lockstep.join(model))
                else:
                    stack.enter_context(Join([model]) if how.endswith("Join") else model.join())
                for step in range(2 + 2 * world.rank):
                    model(torch.ones(1, 3)).sum().backward()
                    seen.append(weight.grad.mean().item())
                    weight.grad = None if step < 3 else weight.grad
            left.append(weight.grad if weight.grad is None else weight.grad.mean().item())
            weight.grad = None
        return [seen, left]

    # The mean over both ranks, of which one gives zeros in the last steps of each epoch.
    assert launch(body) == [[[1, 1] * 2, [None] * 2], [[1, 1, 0.5, 0.5] * 2, [0.5, 0.5]]]


def test_gradients_accumulated_by_a_rank_that_is_through_are_reduced_with_the_others() -> None:
    def body(world: lockstep.World) -> float | None:
        model = OurDDP(nn.Linear(1, 1, bias=False))
        (weight,) = model.parameters()
        with model.join():
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
            if world.rank:
                model(torch.full((1, 1), 3.0)).sum().backward()
        return None if weight.grad is None else weight.grad.item()

    assert launch(body) == [None, 2.5]  # the mean of 1 and 1 + 3, and nothing to reduce again


def test_a_gradient_left_in_a_loop_stays_with_the_rank_that_left_it() -> None:
    def body(world: lockstep.World) -> float:
        model = OurDDP(nn.Linear(1, 1, bias=False))
        (weight,) = model.parameters()
        with model.join():
            for step in range(1 + world.rank):
                weight.grad = None
                model(torch.full((1, 1), step + 1.0)).sum().backward()
        return weight.grad.item()

    assert launch(body) == [1, 1]  # of rank 0's first step; half of 2 of rank 1's second


def test_gradients_that_were_reduced_with_those_of_others_are_gone_after_the_loop() -> None:
    def body(world: lockstep.World) -> list[float | None]:
        model = OurDDP(nn.Linear(1, 1, bias=False))
        (weight,) = model.parameters()
        left: list[float | None] = []
        for is_reduced in (True, False):
            weight.grad = None
            with model.join():
                with model.no_sync():
                    model(torch.full((1, 1), 1.0 + world.rank)).sum().backward()
                if is_reduced and world.rank == 1:
                    model(torch.full((1, 1), 3.0)).sum().backward()
            left.append(None if weight.grad is None else weight.grad.item())
        return left

    # Rank 1 has reduced them first, to the mean of 1 and 2 + 3; then each rank keeps its own.
    assert launch(body) == [[None, 1], [3, 2]]


def test_different_branches_in_a_joined_loop() -> None:
    lengths, branches = (1, 3, 4), [[0], [1, 1, 2], [None, 0, None, 1]]

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = OurDDP(net(), process_group=group)
        optimizer = sgd(model)
        with model.join():
            for batch, branch in zip(batches(lengths)[rank], branches[rank], strict=True):
                optimizer.zero_grad()
                model(batch, branch).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    model = net()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        for local, which in zip(batches(lengths), branches, strict=True):
            if step < len(local):
                (model(local[step], which[step]).square().mean() / 3).backward()
        optimizer.step()
    assert_all_are(run_ranks(3, body), [p.detach() for p in model.parameters()])


def test_a_communication_hook_in_a_joined_loop() -> None:
    def body(world: lockstep.World) -> list[list[torch.Tensor]]:
        results = []
        for wrap in (OurDDP, TorchDDP):
            model = wrap(net(), find_unused_parameters=True)
            model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
            results.append(joined(model, batches((1, 3))[world.rank]))
        return results

    for ours, theirs in launch(body):
        assert all(map(torch.equal, ours, theirs))


@WRAPPERS
def test_the_first_rank_that_is_through_may_end_the_loop_for_all(wrap: type[nn.Module]) -> None:
    lengths = (2, 5)
    said = "Rank 0 has exhausted" if wrap is OurDDP else "exhausted"

    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrap(net(), find_unused_parameters=True)
        local = batches(lengths)[world.rank]
        optimizer, steps = sgd(model), 0
        with (  # noqa: PT012
            pytest.raises(RuntimeError, match=said),
            model.join(throw_on_early_termination=True),
        ):
            for batch in local:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                steps += 1
        assert steps == 2
        if wrap is OurDDP:  # the loop is over, and what follows is as ever
            for batch in local[:2]:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    doubled = net()
    optimizer = sgd(doubled)
    for parts in steps_of((2, 2)) * (2 if wrap is OurDDP else 1):
        optimizer.zero_grad()
        doubled(torch.cat(parts)).square().mean().backward()
        optimizer.step()
    both = batches(lengths)
    assert torch.equal(both[0][1], batches((2, 2))[0][1])
    assert torch.equal(both[1][1], batches((2, 2))[1][1])
    assert_all_are(launch(body), [p.detach() for p in doubled.parameters()])


def test_an_error_in_a_joined_loop_leaves_it() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        batch = batches((1, 1))[rank][0]
        with pytest.raises(ArithmeticError), model.join():  # noqa: PT012
            model(batch).square().mean().backward()
            raise ArithmeticError
        expected = net()
        expected(torch.cat([local[0] for local in batches((1, 1))])).square().mean().backward()
        model.zero_grad()
        model(batch).square().mean().backward()
        torch.testing.assert_close(
            model.first.weight.grad, expected.first.weight.grad, rtol=1e-12, atol=1e-12
        )
        if rank == 0:
            model(batch)  # alone

    run_ranks(2, body)


class Normalised(nn.Module):
    """Two layers with a normalisation between them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = norm
        self.second = nn.Linear(5, 2)
        self.double()
        generator = torch.Generator().manual_seed(3)
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


@LENGTHS
@DIVIDE
def test_sync_batch_norm_in_a_joined_loop(initial: bool, lengths: tuple[int, ...]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = OurDDP(
            Normalised(lockstep.SyncBatchNorm(5, process_group=group)), process_group=group
        )
        joined(model, batches(lengths)[rank], divide_by_initial_world_size=initial)
        return [t.detach() for t in model.state_dict().values()]

    model = Normalised(nn.BatchNorm1d(5))
    optimizer = sgd(model)
    for parts in steps_of(lengths):
        optimizer.zero_grad()
        outputs = model(torch.cat(parts)).chunk(len(parts))
        loss = sum(output.square().mean() for output in outputs)
        (loss / (len(lengths) if initial else len(parts))).backward()
        optimizer.step()
    expected = [t.detach() for t in model.state_dict().values()]
    assert_all_are(run_ranks(len(lengths), body), expected)


@LENGTHS
@DIVIDE
def test_a_mean_over_all_ranks_in_a_joined_loop(initial: bool, lengths: tuple[int, ...]) -> None:
    """It is that over the samples that there are, whatever gradients are divided by."""

    def body(rank: int, group: dist.ProcessGroup) -> tuple[list[float], list[torch.Tensor]]:
        model = OurDDP(net(), process_group=group)
        optimizer, losses = sgd(model), []
        with model.join(divide_by_initial_world_size=initial):
            for batch in batches(lengths)[rank]:
                optimizer.zero_grad()
                loss = lockstep.mean(model(batch[rank:]).square(), process_group=group)
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
        return losses, [p.detach() for p in model.parameters()]

    model = net()
    optimizer, expected = sgd(model), []
    for step in range(max(lengths)):
        optimizer.zero_grad()
        parts = [local[step][r:] for r, local in enumerate(batches(lengths)) if step < len(local)]
        loss = model(torch.cat(parts)).square().mean()
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    results = run_ranks(len(lengths), body)
    for losses, _ in results:
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-12)
    assert_all_are([p for _, p in results], [p.detach() for p in model.parameters()])


def test_buffers_follow_a_rank_that_still_has_data() -> None:
    lengths = (1, 3, 2)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = OurDDP(Normalised(nn.BatchNorm1d(5)), process_group=group)
        joined(model, batches(lengths)[rank])
        return [model.norm.running_mean, model.norm.running_var, model.norm.num_batches_tracked]

    # Rank 0's until it is through, and then those of the first that isn't.
    model = Normalised(nn.BatchNorm1d(5))
    optimizer = sgd(model)
    for parts in steps_of(lengths):
        optimizer.zero_grad()
        for part in reversed(parts):
            state = copy.deepcopy(model.norm.state_dict())
            (model(part).square().mean() / 3).backward()
            if part is not parts[0]:
                model.norm.load_state_dict(state)
        optimizer.step()
    expected = [model.norm.running_mean, model.norm.running_var, model.norm.num_batches_tracked]
    assert_all_are(run_ranks(3, body), expected)


def test_a_part_over_other_ranks_is_refused() -> None:
    """Who is through couldn't take part in the reductions of that part."""

    def body(world: lockstep.World) -> None:
        model = net()
        lockstep.parallelize(model.first, process_group=dist.new_group([0, 1]))
        wrapper = OurDDP(model)
        with pytest.raises(ModelError, match="different ranks"), wrapper.join():
            pass

    launch(body)
