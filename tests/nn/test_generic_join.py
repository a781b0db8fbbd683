"""torch's generic ``Join`` context, in which models and sharded optimizers join together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep.errors import ModelError
from tests.nn.joining import OurDDP, assert_all_are, batches, by_hand, launch, sgd
from tests.nn.parallel import net
from tests.same import values_of
from tests.training import train

# Of the import of torch.distributed.optim.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")
WRAPPERS = pytest.mark.parametrize("wrap", [OurDDP, TorchDDP], ids=["ours", "torch"])
OPTIMIZERS = pytest.mark.parametrize("kind", ["ours", "torch"])
LENGTHS = pytest.mark.parametrize("lengths", [(2, 4), (3, 1), (0, 2)], ids=str)


def wrapped(wrap: type[nn.Module]) -> nn.Module:
    return wrap(net(), find_unused_parameters=True)


def sharded(model: nn.Module, kind: str) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    its = lockstep.ZeroRedundancyOptimizer if kind == "ours" else ZeroRedundancyOptimizer
    return its(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def joined(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    joinables: list[Joinable],
    local: Sequence[torch.Tensor],
    **options: Any,
) -> list[torch.Tensor]:
    with Join(joinables, **options):
        train(model, optimizer, local)
    return values_of(model)


@LENGTHS
@WRAPPERS
def test_a_model_alone(wrap: type[nn.Module], lengths: tuple[int, ...]) -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrapped(wrap)
        return joined(model, sgd(model), [model], batches(lengths)[world.rank])

    assert_all_are(launch(body), by_hand(lengths))


@LENGTHS
@pytest.mark.parametrize("initial", [True, False], ids=["by all", "by those with data"])
@OPTIMIZERS
def test_a_model_and_a_sharded_optimizer(
    kind: str, initial: bool, lengths: tuple[int, ...]
) -> None:
    """Ranks that are through step for their share, with the gradients of those that are not."""

    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrapped(OurDDP)
        optimizer = sharded(model, kind)
        local, joinables = batches(lengths)[world.rank], [model, optimizer]
        return joined(model, optimizer, joinables, local, divide_by_initial_world_size=initial)

    assert_all_are(launch(body), by_hand(lengths, initial, optimizer_of=momentum))


@WRAPPERS
def test_two_models(wrap: type[nn.Module]) -> None:
    lengths = (2, 4)

    def body(world: lockstep.World) -> list[torch.Tensor]:
        models = [wrapped(wrap), wrapped(wrap)]
        optimizers = [sgd(models[0]), momentum(models[1])]
        with Join(models):
            for batch in batches(lengths)[world.rank]:
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
        return [p.detach() for model in models for p in model.parameters()]

    assert_all_are(launch(body), by_hand(lengths) + by_hand(lengths, optimizer_of=momentum))


@OPTIMIZERS
def test_two_models_each_with_a_sharded_optimizer(kind: str) -> None:
    """A rank that is through takes part in the first one's step before the second's backward."""
    lengths = (2, 4)

    def body(world: lockstep.World) -> list[torch.Tensor]:
        models = [wrapped(OurDDP), wrapped(OurDDP)]
        optimizers = [sharded(model, kind) for model in models]
        pairs = list(zip(models, optimizers, strict=True))
        with Join([each for pair in pairs for each in pair]):
            for batch in batches(lengths)[world.rank]:
                for model, optimizer in pairs:
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
        return [p.detach() for model in models for p in model.parameters()]

    assert_all_are(launch(body), by_hand(lengths, optimizer_of=momentum) * 2)


@WRAPPERS
def test_no_join_where_it_is_not_enabled(wrap: type[nn.Module]) -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrapped(wrap)
        return joined(model, sgd(model), [model], batches((3, 3))[world.rank], enable=False)

    assert_all_are(launch(body), by_hand((3, 3)))


def one_more_step(model: nn.Module, world: lockstep.World) -> list[torch.Tensor]:
    model.zero_grad()
    model(batches((1, 1))[world.rank][0]).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients_at(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    alone = net()
    with torch.no_grad():
        for parameter, value in zip(alone.parameters(), parameters, strict=True):
            parameter.copy_(value)
    alone(torch.cat([local[0] for local in batches((1, 1))])).square().mean().backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


@OPTIMIZERS
def test_after_it_a_rank_may_evaluate_alone(kind: str) -> None:
    lengths = (1, 2)

    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrapped(OurDDP)
        optimizer = sharded(model, kind)
        joined(model, optimizer, [model, optimizer], batches(lengths)[world.rank])
        if world.rank == 0:
            with torch.no_grad():
                for _ in range(3):
                    model(batches((1,))[0][0])
        return one_more_step(model, world)

    assert_all_are(launch(body), gradients_at(by_hand(lengths, optimizer_of=momentum)))


@OPTIMIZERS
@WRAPPERS
def test_the_first_rank_that_is_through_may_end_the_loop_for_all(
    wrap: type[nn.Module], kind: str
) -> None:
    lengths = (1, 3)

    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrapped(wrap)
        optimizer = sharded(model, kind)
        local, joinables = batches(lengths)[world.rank], [model, optimizer]
        with pytest.raises(RuntimeError, match="exhausted"):
            joined(model, optimizer, joinables, local, throw_on_early_termination=True)
        return [p.detach() for p in model.parameters()]

    assert_all_are(launch(body), by_hand((1, 1), optimizer_of=momentum))


def test_an_error_in_it_leaves_it() -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrapped(OurDDP)
        with pytest.raises(ArithmeticError), Join([model]):  # noqa: PT012
            one_more_step(model, world)
            raise ArithmeticError
        return one_more_step(model, world)

    start = [p.detach() for p in net().parameters()]
    assert_all_are(launch(body), gradients_at(start))


@pytest.mark.parametrize("left", ["early", "with an error"])
def test_after_it_was_left_otherwise_a_loop_may_be_joined(left: str) -> None:
    lengths = (1, 3)

    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = wrapped(OurDDP)
        optimizer, local = sgd(model), batches(lengths)[world.rank]
        if left == "early":
            with pytest.raises(RuntimeError, match="exhausted"):
                joined(model, optimizer, [model], local, throw_on_early_termination=True)
        else:
            with pytest.raises(ArithmeticError), Join([model]):
                raise ArithmeticError
        model.load_state_dict(wrapped(OurDDP).state_dict())
        with model.join():
            train(model, optimizer, local)
        return [p.detach() for p in model.parameters()]

    assert_all_are(launch(body), by_hand(lengths))


def test_an_optimizer_that_ranks_without_data_cannot_follow_is_refused() -> None:
    def body(world: lockstep.World) -> None:
        model = wrapped(OurDDP)
        optimizer = lockstep.shard_optimizer(momentum(model))
        with pytest.raises(ModelError, match="ZeroRedundancyOptimizer"):
            joined(model, optimizer, [model], batches((1, 1))[world.rank])

    launch(body)
