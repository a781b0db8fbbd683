"""torch.distributed.checkpoint saves and loads each rank's part of an optimizer's state."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from lockstep.checkpoint import ShardedState
from lockstep.checkpoint.sharded_state import boxes_of
from lockstep.errors import CheckpointMismatch
from lockstep.optim import PartialTensor
from tests.checkpoint.training import batches, same, states_of, trained
from tests.counts import some
from tests.nn.models import Digits, Empty, Strided, Unused
from tests.optim.optimizers import OPTIMIZERS
from tests.processes import Processes, processes
from tests.training import train

PARTIAL = DefaultLoadPlanner(allow_partial_load=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with processes(3) as started:
        yield started


def made(
    kind: type[nn.Module], name: str, *, sharded: bool, steps: int, **options: Any
) -> tuple[nn.Module, Optimizer]:
    return trained(
        dist.group.WORLD, kind, OPTIMIZERS[name], sharded=sharded, steps=steps, **options
    )


def folder_of(folder: str, *case: object) -> str:
    return os.path.join(folder, "-".join(map(str, case)))


def check_saved(folder: str, cases: list[Any], options: dict[str, Any]) -> None:
    """Save a checkpoint for each case, and beside it the ordinary state."""
    for kind, name, sharded in cases:
        model, optimizer = made(kind, name, sharded=sharded, steps=3, **options)
        path = folder_of(folder, kind.__name__, name, sharded)
        state = {"model": model, "optimizer": ShardedState(optimizer), "step": 3}
        dcp.save(state, checkpoint_id=path)
        states = states_of(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(states, os.path.join(path, "states.pt"))


def check_loaded(folder: str, cases: list[Any], steps: list[int], options: dict[str, Any]) -> None:
    """Load each case's checkpoint into sharded and other optimizers that took some steps before."""
    for kind, name, saved in cases:
        path = folder_of(folder, kind.__name__, name, saved)
        expected = torch.load(os.path.join(path, "states.pt"), weights_only=False)
        for sharded, before in itertools.product([False, True], steps):
            like, its = made(kind, name, sharded=sharded, steps=0, **options)
            like.load_state_dict(expected[0])
            its.load_state_dict(copy.deepcopy(expected[1]))
            model, optimizer = made(kind, name, sharded=sharded, steps=before, **options)
            state = {"model": model, "optimizer": ShardedState(optimizer), "step": 0}
            dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
            assert state["step"] == 3
            case = kind.__name__, name, saved, sharded, before
            assert same(states_of(model, optimizer), expected), case
            train(like, its, batches(like, range(3, 5)))
            train(model, optimizer, batches(model, range(3, 5)))
            assert same(states_of(model, optimizer), states_of(like, its)), case


@pytest.mark.shortened
@pytest.mark.parametrize(("first", "second"), some([(3, 2), (1, 3), (2, 1), (2, 2)], 2))
def test_state_is_loaded_at_any_number_of_ranks(ranks, tmp_path, first, second) -> None:
    kinds, names = [Digits, Strided], ["AdamW", "momentum", "Adafactor"]
    cases = some([*itertools.product(kinds, names, [True, False]), (Empty, "AdamW", True)], first)
    ranks.run(check_saved, "shm", first, str(tmp_path), cases, {})
    ranks.run(check_loaded, "shm", second, str(tmp_path), cases, [0, 2], {})


@pytest.mark.long
@pytest.mark.shortened
def test_state_of_any_optimizer_is_loaded_in_one_that_has_none(ranks, tmp_path) -> None:
    cases = [(Strided, name, True) for name in some(OPTIMIZERS, 0)]
    ranks.run(check_saved, "gloo", 3, str(tmp_path), cases, {})
    ranks.run(check_loaded, "gloo", 2, str(tmp_path), cases, [0], {})


def test_master_values_are_saved_too(ranks, tmp_path) -> None:
    cases = [(Digits, name, True) for name in ("AdamW", "SGD")]
    options = {"dtype": torch.bfloat16, "master": torch.float32}
    ranks.run(check_saved, "shm", 2, str(tmp_path), cases, options)
    ranks.run(check_masters, "shm", 3, str(tmp_path), cases, options)


def check_masters(folder: str, cases: list[Any], options: Any) -> None:
    for kind, name, saved in cases:
        path = folder_of(folder, kind.__name__, name, saved)
        expected = torch.load(os.path.join(path, "states.pt"), weights_only=False)
        assert all("master" in entry for entry in expected[1]["state"].values())
        model, optimizer = made(kind, name, sharded=True, steps=0, **options)
        dcp.load({"model": model, "optimizer": ShardedState(optimizer)}, checkpoint_id=path)
        assert same(states_of(model, optimizer), expected)


def check_sizes(folder: str) -> tuple[int, int]:
    _, optimizer = made(Digits, "AdamW", sharded=True, steps=3)
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder)
    parts = ShardedState(optimizer).state_dict()["state"].values()
    values = [value for entry in parts for value in entry.values() if value.dim()]
    here = {flat.untyped_storage().data_ptr() for value in values for _, flat in value.ranges}
    live = {
        value.untyped_storage().data_ptr()
        for entry in optimizer.state.values()
        for value in entry.values()
    }
    assert here <= live  # no copies
    return sum(len(flat) for value in values for _, flat in value.ranges), dist.get_rank()


def test_each_rank_saves_its_part_without_copies(ranks, tmp_path) -> None:
    total = 2 * sum(parameter.numel() for parameter in Digits().parameters())
    counts = [count for count, _ in ranks.run(check_sizes, "shm", 3, str(tmp_path))]
    assert sum(counts) == total
    assert max(counts) < total / 2
    sizes = [path.stat().st_size for path in Path(tmp_path).glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < sum(sizes) / 2


def check_as_gathered(folder: str) -> None:
    model, optimizer = made(Digits, "AdamW", sharded=True, steps=3)
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder)  # which gathers
    _, other = made(Digits, "AdamW", sharded=True, steps=0)
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder)
    assert same(states_of(model, other)[1], states_of(model, optimizer)[1])
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder + "-parts")
    model, plain = made(Digits, "AdamW", sharded=False, steps=1)
    dcp.load({"optimizer": plain}, checkpoint_id=folder + "-parts")
    assert same(states_of(model, plain)[1], states_of(model, optimizer)[1])


def test_the_checkpoint_is_that_of_an_ordinary_state_dict(ranks, tmp_path) -> None:
    ranks.run(check_as_gathered, "shm", 2, str(tmp_path / "whole"))


def check_unused(folder: str) -> None:
    model, optimizer = made(Unused, "AdamW", sharded=True, steps=3)
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder)
    before = copy.deepcopy(states_of(model, optimizer))
    _, other = made(Unused, "AdamW", sharded=True, steps=0)
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder)
    assert not other.state
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder, planner=PARTIAL)
    assert same(states_of(model, other), before)
    # What isn't in the checkpoint stays.
    empty = {"optimizer": ShardedState(made(Unused, "AdamW", sharded=True, steps=0)[1])}
    dcp.save(empty, checkpoint_id=folder + "-empty")
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder + "-empty", planner=PARTIAL)
    assert same(states_of(model, other), before)


def test_parameters_without_state_need_a_partial_load(ranks, tmp_path) -> None:
    ranks.run(check_unused, "shm", 2, str(tmp_path / "run"))


class Single(nn.Linear):
    """One element, which one rank has."""

    sample = (1,)

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)


def check_single(folder: str) -> None:
    _, optimizer = made(Single, "AdamW", sharded=True, steps=1)
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder)
    _, other = made(Single, "AdamW", sharded=True, steps=0)
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder)
    assert other.state
    with pytest.raises(TypeError, match="divided among the ranks"):
        copy.deepcopy(other)


def test_no_rank_s_optimizer_seems_empty_after_a_load(ranks, tmp_path) -> None:
    ranks.run(check_single, "shm", 2, str(tmp_path))


def check_frozen(folder: str) -> None:
    def frozen(steps: int) -> tuple[nn.Module, Optimizer]:
        model, optimizer = made(Digits, "AdamW", sharded=True, steps=0)
        [*model.parameters()][1].requires_grad_(False)
        train(model, optimizer, batches(model, range(steps)))
        return model, optimizer

    model, optimizer = frozen(3)
    before = states_of(model, optimizer)[1]
    assert 1 not in before["state"]
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder)
    model, optimizer = frozen(0)
    dcp.load({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder)
    assert same(states_of(model, optimizer)[1], before)


def test_frozen_parameters_need_no_partial_load(ranks, tmp_path) -> None:
    ranks.run(check_frozen, "shm", 2, str(tmp_path))


def check_without_masters(folder: str) -> None:
    options = {"sharded": True, "dtype": torch.bfloat16}
    model, optimizer = made(Digits, "AdamW", steps=3, **options)
    before = {"model": model, "optimizer": ShardedState(optimizer)}
    dcp.save(before, checkpoint_id=folder)
    for steps in (0, 2):
        other, its = made(Digits, "AdamW", steps=steps, master=torch.float32, **options)
        state = {"model": other, "optimizer": ShardedState(its)}
        dcp.load(state, checkpoint_id=folder, planner=PARTIAL)
        found = its.state_dict()["state"]
        assert not any("master" in entry for entry in found.values())
        for index, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(found[index]["exp_avg"], entry["exp_avg"].float())


def test_master_values_may_be_missing(ranks, tmp_path) -> None:
    ranks.run(check_without_masters, "shm", 2, str(tmp_path))


def test_options_that_are_tensors_stay_as_they_are_until_all_is_loaded() -> None:
    rate = torch.tensor(0.5)
    state = ShardedState(torch.optim.Adam([torch.zeros(2)], lr=rate)).state_dict()
    assert torch.equal(state["param_groups"][0]["lr"], rate)
    assert state["param_groups"][0]["lr"] is not rate


def test_state_to_come_is_that_of_the_parameter_s_group() -> None:
    first, last = (torch.zeros(2, requires_grad=True) for _ in range(2))
    groups = [{"params": [first]}, {"params": [last], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    calls = []
    hook = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    state = ShardedState(optimizer).state_dict()["state"]
    hook.remove()
    assert [*state["0"]] == []
    assert [*state["1"]] == ["momentum_buffer"]
    assert not calls


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_optimizers_of_sparse_gradients_are_loaded(tmp_path) -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer, other = (torch.optim.SparseAdam(table.parameters()) for _ in range(2))
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=tmp_path, no_dist=True)
    assert same(other.state_dict(), optimizer.state_dict())
    # Momentum is sparse here.
    sgd = torch.optim.SGD(table.parameters(), momentum=0.9)
    sgd.step()
    with pytest.raises(TypeError, match=r"state.0.momentum_buffer.*only dense tensors"):
        ShardedState(sgd).state_dict()


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    optimizer = torch.optim.LBFGS([torch.zeros(2, requires_grad=True)])
    with pytest.raises(TypeError, match=r"(?s)LBFGS\.step\(\) can't .* the optimizer itself"):
        ShardedState(optimizer).state_dict()


def check_failures(folder: str) -> None:
    _, optimizer = made(Digits, "momentum", sharded=True, steps=3)
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder)
    model, other = made(Digits, "AdamW", sharded=True, steps=2)
    before = copy.deepcopy(states_of(model, other))
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder)
    assert same(states_of(model, other), before)
    _, nadam = made(Digits, "NAdam", sharded=True, steps=3)
    dcp.save({"optimizer": ShardedState(nadam)}, checkpoint_id=folder + "-nadam")
    _, amsgrad = made(Digits, "amsgrad", sharded=True, steps=0)
    with pytest.raises(CheckpointMismatch, match=r"exp_avg, .*, and no max_exp_avg_sq"):
        dcp.load(
            {"optimizer": ShardedState(amsgrad)}, checkpoint_id=folder + "-nadam", planner=PARTIAL
        )
    assert not amsgrad.state
    # State that is there isn't mixed with that of the checkpoint.
    other_model, amsgrad = made(Digits, "amsgrad", sharded=True, steps=1)
    before = copy.deepcopy(states_of(other_model, amsgrad))
    with pytest.raises(CheckpointMismatch, match=r"exp_avg, .*, and no max_exp_avg_sq"):
        dcp.load(
            {"optimizer": ShardedState(amsgrad)}, checkpoint_id=folder + "-nadam", planner=PARTIAL
        )
    assert same(states_of(other_model, amsgrad), before)
    # A file that ends early, after other parts have been read.
    dist.barrier()
    path = os.path.join(folder, f"__{dist.get_rank()}_0.distcp")
    os.truncate(path, os.path.getsize(path) // 2)
    dist.barrier()
    before = copy.deepcopy(states_of(model, optimizer))
    train(model, other, batches(model, range(2)))
    _, third = made(Digits, "momentum", sharded=True, steps=1)
    before = copy.deepcopy(states_of(model, third))
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load({"optimizer": ShardedState(third)}, checkpoint_id=folder)
    assert same(states_of(model, third), before)


def check_failure_of_one_rank() -> None:
    _, optimizer = made(Digits, "AdamW", sharded=True, steps=1)
    state = ShardedState(optimizer).state_dict()
    if dist.get_rank() == 1:
        next(iter(state["state"].values()))["exp_avg"].is_filled = True  # and nothing else
    with pytest.raises(CheckpointMismatch, match=r"has exp_avg of parameter \d of this AdamW"):
        ShardedState(optimizer).load_state_dict(state)


def test_all_ranks_are_told_what_one_rank_lacks(ranks) -> None:
    ranks.run(check_failure_of_one_rank, "shm", 2)


def test_a_load_that_fails_leaves_the_optimizer_as_it_was(ranks, tmp_path) -> None:
    ranks.run(check_failures, "shm", 2, str(tmp_path / "run"))


class Counting(torch.optim.SGD):
    """Its state has numbers and None; its step calls that of its base class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    entry = self.state[parameter]
                    entry["count"] = entry.get("count", 0) + 1
                    entry["nothing"] = None
        return super().step(closure)


def check_numbers(folder: str) -> None:
    def optimizer_of(steps: int) -> tuple[nn.Module, Optimizer]:
        make = lambda p: Counting(p, lr=0.1, momentum=0.9)  # noqa: E731
        return trained(dist.group.WORLD, Digits, make, sharded=True, steps=steps)

    model, optimizer = optimizer_of(3)
    dcp.save({"optimizer": ShardedState(optimizer)}, checkpoint_id=folder)
    other_model, other = optimizer_of(0)
    steps = []
    other.register_step_post_hook(lambda *_: steps.append(1))
    dcp.save({"optimizer": ShardedState(other)}, checkpoint_id=folder + "-empty")
    empty = {"optimizer": ShardedState(other)}
    dcp.load(empty, checkpoint_id=folder + "-empty", planner=PARTIAL)
    assert not other.state
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder)
    assert not steps
    found = states_of(other_model, other)[1]
    assert same(found, states_of(model, optimizer)[1])
    assert {entry["count"] for entry in found["state"].values()} == {3}


def test_state_that_is_not_a_tensor_is_saved_too(ranks, tmp_path) -> None:
    ranks.run(check_numbers, "shm", 2, str(tmp_path))


def check_async(folder: str) -> None:
    model, optimizer = made(Strided, "AdamW", sharded=True, steps=3)
    before = copy.deepcopy(states_of(model, optimizer))
    saving = dcp.async_save(
        {"optimizer": ShardedState(optimizer)}, checkpoint_id=folder, process_group=dist.new_group()
    )
    train(model, optimizer, batches(model, range(3, 5)))
    saving.result()
    _, other = made(Strided, "AdamW", sharded=True, steps=0)
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder)
    assert same(states_of(model, other)[1], before[1])


def test_a_save_in_the_background_has_the_state_of_its_call(ranks, tmp_path) -> None:
    ranks.run(check_async, "gloo", 2, str(tmp_path))


def check_zero(folder: str) -> None:
    torch.manual_seed(0)
    model = lockstep.parallelize(Digits())
    zero = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, zero, batches(model, range(3)))
    dcp.save({"optimizer": ShardedState(zero)}, checkpoint_id=folder)
    _, other = made(Digits, "AdamW", sharded=True, steps=0)
    dcp.load({"optimizer": ShardedState(other)}, checkpoint_id=folder)
    zero.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        expected = zero.state_dict()["state"]
    found = other.state_dict()["state"]
    if dist.get_rank() == 0:
        assert all(same(found[index], expected[index]) for index in expected)


def test_a_zero_redundancy_optimizer_is_saved_too(ranks, tmp_path) -> None:
    ranks.run(check_zero, "shm", 2, str(tmp_path))


class Prepared(Optimizer):
    """A trainer's wrapper, whose groups and state are those of the optimizer in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, groups: setattr(self.optimizer, "param_groups", groups),
    )
    state = property(
        lambda self: self.optimizer.state,
        lambda self, state: setattr(self.optimizer, "state", state),
    )

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_trainers_wrapper_is_saved_as_the_optimizer_in_it(tmp_path) -> None:
    model, optimizer = trained(None, Digits, OPTIMIZERS["AdamW"], steps=3)
    state = {"optimizer": ShardedState(Prepared(optimizer))}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    other, fresh = trained(None, Digits, OPTIMIZERS["AdamW"], steps=0)
    groups = fresh.param_groups
    state = {"optimizer": ShardedState(Prepared(fresh))}
    assert fresh.param_groups is groups
    assert not fresh.state
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert same(states_of(other, fresh)[1], states_of(model, optimizer)[1])


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"(?s)optimizer is .*, not a torch\.optim\.Optimizer"):
        ShardedState(Digits())


def check_computing() -> None:
    _, optimizer = made(Digits, "AdamW", sharded=True, steps=1)
    parts = ShardedState(optimizer).state_dict()["state"].values()
    part = next(entry["exp_avg"] for entry in parts)
    with pytest.raises(TypeError, match=r"has only some elements. Let every rank call"):
        part.sum()
    assert repr(part).startswith("PartialTensor(shape=[")


def test_a_part_is_not_computed_with(ranks) -> None:
    ranks.run(check_computing, "shm", 2)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_boxes_are_the_elements_of_a_range(shape, data) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, max(numel - 1, 0)))
    stop = data.draw(st.integers(min(start + 1, numel), numel))
    whole = torch.arange(numel).view(shape)
    found = []
    for offsets, sizes in boxes_of(shape, start, stop):
        place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        found += whole[place].flatten().tolist()
    assert found == [*range(start, stop)]
    assert len([*boxes_of(shape, start, stop)]) <= max(2 * len(shape) - 1, 1)
    assert [*boxes_of(shape, 0, numel)] == [((0,) * len(shape), tuple(shape))]


def test_elements_are_found_in_several_ranges() -> None:
    part = PartialTensor(torch.empty(9), [(2, torch.arange(2, 5)), (5, torch.arange(5, 8))])
    assert part.elements(3, 7).tolist() == [3, 4, 5, 6]
    assert part.elements(2, 4).tolist() == [2, 3]
    assert part.elements(6, 6).tolist() == []
