"""check_replicas() names what differs between ranks, and repairs what most of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveMismatch, ReplicasDiffer
from lockstep.guarding.replicas import _facts_of
from tests.ranks import run_ranks
from tests.same import assert_same


class Program:
    """A model with buffers that some steps have changed, and its optimizer."""

    def __init__(self, rank: int, group: dist.ProcessGroup, shard: Callable | None = None) -> None:
        weights = torch.Generator().manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        for parameter in self.net.parameters():
            nn.init.uniform_(parameter, generator=weights)
        lockstep.parallelize(self.net, process_group=group)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.optimizer = optimizer if shard is None else shard(optimizer)
        self.group = group
        self.data = torch.Generator().manual_seed(rank)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        x = torch.randn(5, 4, generator=self.data)
        losses = self.net(x).square().sum(1)
        lockstep.mean(losses, process_group=self.group).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.net.state_dict().values()]


def change_a_weight(program: Program) -> None:
    with torch.no_grad():
        program.net[2].weight[1, 2] += 1e-6


def flip_the_sign_of_a_zero(program: Program) -> None:
    program.net[0].bias.data[0] = -0.0


def change_a_frozen_one(program: Program) -> None:
    program.net[2].bias.requires_grad_(False).data[0] = 3


def change_a_buffer(program: Program) -> None:
    program.net[1].running_var[0] = 3


def change_the_state(program: Program) -> None:
    program.optimizer.state[program.net[0].weight]["exp_avg"][0] = 3


def change_an_option(program: Program) -> None:
    program.optimizer.param_groups[0]["lr"] = 0.2


def change_a_pair(program: Program) -> None:
    program.optimizer.param_groups[0]["betas"] = (0.9, 0.99)


class Change(NamedTuple):
    apply: Callable[[Program], None]
    name: str
    prepare: Callable[[Program], None] | None = None  # on all ranks


def zero_it(program: Program) -> None:
    program.net[0].bias.data[0] = 0.0


CHANGES = [
    Change(change_a_weight, "parameter 2.weight"),
    Change(flip_the_sign_of_a_zero, "parameter 0.bias", zero_it),
    Change(change_a_frozen_one, "parameter 2.bias"),
    Change(change_a_buffer, "buffer 1.running_var"),
    Change(change_the_state, "exp_avg of 0.weight"),
    Change(change_an_option, "lr of group 0"),
    Change(change_a_pair, "betas of group 0"),
]


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.apply.__name__)
def test_the_rank_that_differs_is_named_and_takes_what_the_others_have(
    backend: str, change: Change
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        if change.prepare is not None:
            change.prepare(program)
        assert lockstep.check_replicas(program.net, program.optimizer) == []
        before = program.state()
        if rank == 1:
            change.apply(program)
        with pytest.raises(ReplicasDiffer, match=f"{change.name} of rank 1 isn't") as caught:
            lockstep.check_replicas(program.net, program.optimizer)
        (difference,) = caught.value.differences
        assert difference.name == change.name
        assert difference.ranks == (1,)
        assert difference.source == 0
        assert lockstep.check_replicas(program.net, program.optimizer, repair=True) == [difference]
        assert lockstep.check_replicas(program.net, program.optimizer) == []
        assert_same(program.state(), before, 0)
        program.step()
        assert lockstep.check_replicas(program.net, program.optimizer) == []

    run_ranks(3, body, backend=backend)


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
def test_two_ranks_have_no_majority(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        if rank == 1:
            change_a_weight(program)
        before = program.state()
        with pytest.raises(ReplicasDiffer, match=r"2\.weight differs between ranks 0, 1, of"):
            lockstep.check_replicas(program.net, program.optimizer, repair=True)
        assert_same(program.state(), before, 0)

    run_ranks(2, body, backend=backend)


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
def test_what_has_a_majority_is_repaired_where_other_things_have_none(
    backend: str,
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        if rank == 2:
            change_a_weight(program)
        program.optimizer.param_groups[0]["lr"] = 0.1 * rank
        with pytest.raises(ReplicasDiffer, match="Everything else") as caught:
            lockstep.check_replicas(program.net, program.optimizer, repair=True)
        assert [each.name for each in caught.value.differences] == ["lr of group 0"]
        assert lockstep.check_replicas(program.net) == []

    run_ranks(3, body, backend=backend)


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_states_of_a_sharded_optimizer_are_different_parts(backend: str, overlap: bool) -> None:
    def shard(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return lockstep.shard_optimizer(optimizer, overlap=overlap)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group, shard)
        assert lockstep.check_replicas(program.net, program.optimizer) == []
        if rank == 0:
            change_a_weight(program)
        (difference,) = lockstep.check_replicas(program.net, program.optimizer, repair=True)
        assert (difference.name, difference.ranks) == ("parameter 2.weight", (0,))
        program.step()
        assert lockstep.check_replicas(program.net, program.optimizer) == []

    run_ranks(3, body, backend=backend)


def lose_a_parameter(program: Program) -> None:
    program.net[0].bias = None


def lose_the_state(program: Program) -> None:
    program.optimizer.state.pop(program.net[0].bias)


def widen(program: Program) -> None:
    program.net[0].bias.data = program.net[0].bias.data.double()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lose_a_parameter, ["parameter 0.bias"]),
        (lose_the_state, ["step of 0.bias", "exp_avg of 0.bias", "exp_avg_sq of 0.bias"]),
        (widen, ["parameter 0.bias"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_a_rank_lacks_or_has_in_another_form_is_named_and_not_repaired(
    change: Callable, names: list[str]
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        if rank == 1:
            change(program)
        optimizers = [program.optimizer] * (change is lose_the_state)
        with pytest.raises(ReplicasDiffer, match=r"0\.bias of rank 1 isn't that") as caught:
            lockstep.check_replicas(program.net, *optimizers, repair=True)
        found = caught.value.differences
        assert [each.name for each in found] == names
        assert {(each.ranks, each.source, each.can_repair) for each in found} == {((1,), 0, False)}

    run_ranks(3, body)


def test_values_in_lists_are_compared_and_a_repair_is_a_new_version() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        kept = program.optimizer.state[program.net[0].bias]
        kept["last"] = [torch.zeros(2), 3.0]
        if rank == 1:
            kept["last"][0][1] = 5
            change_a_weight(program)
        version = program.net[2].weight._version
        found = lockstep.check_replicas(program.net, program.optimizer, repair=True)
        assert {each.name for each in found} == {"parameter 2.weight", "last[0] of 0.bias"}
        assert program.net[2].weight._version > version
        assert kept["last"][0].tolist() == [0, 0]

    run_ranks(3, body)


def test_tensors_without_memory_of_their_own_are_compared_by_shape() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    facts = [_facts_of(parameter) for parameter in net.parameters()]
    assert not any("bits" in each for each in facts)
    assert _facts_of(torch.ones(3, 1).expand(3, 4))["form"].endswith("expanded")
    for size in (), (0,), (2, 3):
        assert "bits" in _facts_of(torch.ones(size, dtype=torch.complex64).conj())


def differences_where_parts_are_of_some_ranks(world: lockstep.World) -> list:
    """Of a model of which each half of the ranks keeps a part of its own in step."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    lockstep.parallelize(net[1], process_group=halves[world.rank // 2])
    lockstep.parallelize(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.full((3, 4), 1.0 + world.rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lockstep.check_replicas(net, optimizer) == []
    if world.rank == 3:
        optimizer.state[net[1].weight]["exp_avg"][0] = 7
    try:
        return lockstep.check_replicas(net, optimizer)
    except ReplicasDiffer as error:
        return [(each.name, each.ranks) for each in error.differences]


def test_each_group_has_its_own_parameters_and_state() -> None:
    found = lockstep.launch(differences_where_parts_are_of_some_ranks, 4, ranks="threads")
    assert found[:2] == [[], []]
    assert found[2:] == [[("exp_avg of 1.weight", (2, 3))]] * 2


def told_of_a_model_that_is_not_parallel(world: lockstep.World) -> str:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    net[1].running_mean[0] = world.rank
    assert lockstep.check_replicas(net) == []
    if world.rank == 1:
        net[0].bias.data[0] = 3
    with pytest.raises(ReplicasDiffer) as caught:
        lockstep.check_replicas(net)
    return str(caught.value)


def test_a_model_that_is_not_parallel_is_compared_without_buffers() -> None:
    for told in lockstep.launch(told_of_a_model_that_is_not_parallel, 3, ranks="threads"):
        assert "parameter 0.bias of rank 1 isn't that of the others" in told


def test_a_rank_alone_has_nothing_to_compare() -> None:
    net = nn.Linear(2, 2)
    assert lockstep.check_replicas(net, torch.optim.SGD(net.parameters())) == []


@pytest.mark.parametrize("arguments", [["net"], [nn.Linear(2, 2), "Adam"]])
def test_other_things_are_refused(arguments: list) -> None:
    with pytest.raises(TypeError, match=r"not a torch\."):
        lockstep.check_replicas(*arguments)


@pytest.mark.parametrize("shard", [None, lockstep.shard_optimizer], ids=["plain", "sharded"])
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_replicas_are_compared_again_after_some_steps(backend: str, shard: Callable | None) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group, shard)
        assert lockstep.check_replicas(program.net, program.optimizer, every=3) == []
        program.step()
        if rank == 1:
            change_an_option(program)
        program.step()  # of which the second isn't looked at
        with pytest.raises(ReplicasDiffer, match="lr of group 0 differs between ranks 0, 1"):
            program.step()
        with pytest.raises(ReplicasDiffer):
            lockstep.check_replicas(program.net, program.optimizer, every=0)
        for _ in range(4):
            program.step()

    run_ranks(2, body, backend=backend)


def test_ranks_that_ask_for_something_else_are_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        program.net[0].weight.data[0, rank] += rank
        with pytest.raises(CollectiveMismatch, match="every is 3 on rank 1 and 2 on rank 0"):
            lockstep.check_replicas(program.net, program.optimizer, every=2 + rank, repair=True)
        with pytest.raises(CollectiveMismatch, match="repair is True on rank 1 and False on"):
            lockstep.check_replicas(program.net, program.optimizer, repair=bool(rank))
        for _ in range(4):  # nothing is to be looked at again
            program.optimizer.step()

    run_ranks(2, body)


def test_what_is_compared_again_may_be_repaired(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        lockstep.check_replicas(program.net, program.optimizer, every=1, repair=True)
        if rank == 1:
            change_a_frozen_one(program)
        program.step()
        lockstep.check_replicas(program.net, program.optimizer)

    run_ranks(3, body, backend="threads")
    assert (
        "Repaired after a step: parameter 2.bias of rank 1 isn't that of the others" in caplog.text
    )


def test_replicas_that_part_end_a_guarded_step() -> None:
    """There is nothing to skip to: no step makes them alike again."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        program = Program(rank, group)
        lockstep.check_replicas(program.net, program.optimizer, every=1)
        if rank == 1:
            change_a_frozen_one(program)
        guard = lockstep.guard(program.net, program.optimizer)
        with pytest.raises(ReplicasDiffer), guard:
            program.step()

    run_ranks(2, body, backend="threads")


def test_steps_are_those_of_an_optimizer() -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"every=\) counts an optimizer's steps"):
        lockstep.check_replicas(net, every=2)
    with pytest.raises(ValueError, match="every"):
        lockstep.check_replicas(net, torch.optim.SGD(net.parameters()), every=-1)


def test_a_step_that_is_undone_does_not_count() -> None:
    """Whatever hooks have run on each rank: else ranks would compare behind different steps."""

    class Bad(torch.optim.SGD):
        fails = False

        def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
            if self.fails:
                raise ArithmeticError("planted")
            super().step(closure)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(4, 2), process_group=group)
        optimizer = Bad(model.parameters(), 0.1)
        lockstep.check_replicas(model, optimizer, every=3)
        skipped = []
        for number in range(8):
            optimizer.fails = number == 1 and rank == 1
            with lockstep.guard(model, optimizer) as step:
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
            skipped.append(step.skipped)
        assert [n for n, is_skipped in enumerate(skipped) if is_skipped] == [1]

    run_ranks(2, body, backend="threads")
