"""lockstep.seed(): the same model on all ranks, and random numbers of each rank's own after it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import ModelMismatch
from lockstep.world import seed_of_run
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def no_seed_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("seed", "begin_noise"):
        monkeypatch.setattr(f"lockstep.world.world._of_process.{name}", None)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.rand()]


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), numpy.random.rand()]) + torch.rand(())


def program(world: lockstep.World, seed: int) -> dict[str, Any]:
    """What a rank draws before its model is parallel, and after it."""
    lockstep.seed(seed)
    found = {"before": draw()}
    model = nn.Linear(3, 2)
    found["model"] = model.weight.tolist()
    lockstep.parallelize(model)
    found["noise"] = draw()
    found["model"] = [found["model"], model.weight.tolist()]
    lockstep.parallelize(nn.Linear(3, 2))  # a second one changes nothing any more
    found["more noise"] = draw()
    loader = lockstep.DataLoader(Noise(), 4, shuffle=True, num_workers=2)
    batches = [lockstep.reduce(batch, "cat") for batch in loader]
    found["samples"] = torch.cat(batches).tolist()
    found["seed"] = seed_of_run()
    return found


@pytest.mark.forks
def test_ranks_have_one_model_and_noise_of_their_own() -> None:
    (alone,) = lockstep.launch(program, 1, (5,))
    first, second = lockstep.launch(program, 2, (5,))
    assert first == alone  # numbers of rank 0 are those of one process, the loader's too
    for name in ("before", "model", "samples", "seed"):
        assert second[name] == first[name], name
    for name in ("noise", "more noise"):
        assert not set(second[name]) & set(first[name]), name
    assert first["model"][0] == first["model"][1]
    (other,) = lockstep.launch(program, 1, (6,))
    for name, value in other.items():
        assert value != first[name], name


def test_one_process_draws_what_torch_draws_with_this_seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    expected = draw(), nn.Linear(2, 1).weight.tolist(), draw()
    lockstep.seed(3)
    first, model = draw(), lockstep.parallelize(nn.Linear(2, 1))
    assert (first, model.weight.tolist(), draw()) == expected
    assert seed_of_run() == torch.initial_seed() == 3


def test_the_largest_seed_is_taken_and_numpy_has_its_part() -> None:
    lockstep.seed(2**63 - 1)
    found = draw()
    lockstep.seed(torch.tensor(2**63 - 1))
    assert draw() == found
    assert torch.initial_seed() == 2**63 - 1


@pytest.mark.parametrize(
    ("number", "kind"), [(-1, ValueError), (2**63, ValueError), (0.5, TypeError), (True, TypeError)]
)
def test_no_seed(number: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"number is .* not a whole number from 0 to 2 \*\* 63 - 1"):
        lockstep.seed(number)


def other_seeds(world: lockstep.World) -> str:
    lockstep.seed(world.rank)
    with pytest.raises(ModelMismatch) as caught:
        lockstep.parallelize(nn.Linear(2, 1))
    return str(caught.value)


def test_ranks_of_other_seeds_are_named() -> None:
    for told in lockstep.launch(other_seeds, 2, ranks="threads"):
        assert told.startswith("'seed' is 1 on rank 1 and 0 on rank 0.\n")


def thread(world: lockstep.World) -> list[float]:
    if world.is_main:
        lockstep.seed(4)
    before = torch.get_rng_state()
    assert not lockstep.any(False)
    if not world.is_main:
        lockstep.seed(4)
    lockstep.parallelize(nn.Linear(2, 1).requires_grad_())
    return before.tolist()


def test_threads_leave_the_generators_that_they_share_to_the_first() -> None:
    lockstep.launch(thread, 2, ranks="threads")
    state = torch.get_rng_state()
    lockstep.seed(4)
    for _ in range(2):
        nn.Linear(2, 1)
    assert torch.equal(state, torch.get_rng_state())


def test_models_of_other_groups_leave_the_numbers_alone() -> None:
    """Threads that are no ranks of a launch: all are rank 0 of the run."""
    lockstep.seed(1)
    state = torch.get_rng_state()
    models = [nn.Linear(1, 1) for _ in range(2)]
    torch.set_rng_state(state)
    run_ranks(2, lambda rank, group: lockstep.parallelize(models[rank], process_group=group))
    assert torch.equal(state, torch.get_rng_state())
