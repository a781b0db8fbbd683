"""A sharded optimizer leaves the bits that it leaves without sharding."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

import lockstep
from lockstep.errors import ModelError
from tests.counts import pairs
from tests.nn.models import Digits, Layers, Shared, Unused, Wide
from tests.optim.optimizers import OPTIMIZERS
from tests.optim.programs import adamw, losses, take_steps, trained
from tests.ranks import run_ranks


class Flat(nn.Module):
    """Parameters in each of which a row, or a column, is one element."""

    sample = (7,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 1)
        self.last = nn.Linear(1, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) * self.scale


MODELS = [Digits, Layers, Shared, Unused, Wide, Flat]


def compare_bits(make: Any, kind: type[nn.Module], size: int) -> None:
    """Train with an optimizer as it is, and with it sharded; compare parameters and state."""
    torch.manual_seed(0)
    first = kind()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        plain, its = trained(group, first, make, sharded=False)
        sharded, divided = trained(group, first, make, sharded=True)
        for (key, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert torch.equal(a, b), (key, (a - b).abs().max())
        expected, state = its.state_dict(), divided.state_dict()
        assert expected["param_groups"] == state["param_groups"]
        assert expected["state"].keys() == state["state"].keys()
        for index, values in expected["state"].items():
            assert values.keys() == state["state"][index].keys()
            for key, value in values.items():
                other = state["state"][index][key]
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (index, key)

    run_ranks(size, body)


@pairs("name, kind, size", OPTIMIZERS, MODELS, [1, 2, 3])
def test_parameters_and_state_have_the_bits_of_an_unsharded_optimizer(name, kind, size) -> None:
    compare_bits(OPTIMIZERS[name], kind, size)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_that_are_summed_after_others_have_the_same_bits(name, monkeypatch) -> None:
    monkeypatch.setattr("lockstep.optim.shard._NUMEL", 100)
    compare_bits(OPTIMIZERS[name], Digits, 2)


def test_ranks_may_differ_in_whether_backwards_take_turns_between_two_buffers() -> None:
    first = Wide()

    def body(rank: int, group: dist.ProcessGroup) -> int:
        plain, _ = trained(group, first, adamw, sharded=False)
        model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        for step, loss in enumerate(losses(model, rank, 6)):
            loss.backward()
            optimizer.step()
            if rank == 0 and step == 2:
                time.sleep(0.3)  # rank 1 doesn't wait until this one needs no gradients any more
            optimizer.zero_grad()
            if step != 2:
                group.named_barrier("no rank needs gradients")
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
        (bucket,) = {p._deferred[0]() for p in model.parameters()}
        return len(bucket.shared.local)

    assert run_ranks(2, body) == [1, 2]


def test_each_rank_has_its_part_of_the_state_alone() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        model = lockstep.parallelize(Layers(), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        take_steps(model, optimizer, rank)
        values = [value for entry in optimizer.state.values() for value in entry.values()]
        whole = optimizer.state_dict()["state"]
        return (
            sum(value.numel() for value in values),
            sum(value.numel() for entry in whole.values() for value in entry.values()),
        )

    for local, whole in run_ranks(4, body):
        assert 0.2 < local / whole < 0.35


def test_a_state_dict_goes_to_any_number_of_ranks_and_to_a_plain_optimizer() -> None:
    first = Digits()
    saved: list[Any] = []

    def save(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        take_steps(model, optimizer, 0)
        states = optimizer.state_dict(), optimizer.state_dict(rank0_only=True)
        if rank == 0:
            saved.extend([copy.deepcopy(model), *states])
        else:
            assert not states[1]["state"]
            assert states[1]["param_groups"] == states[0]["param_groups"]

    run_ranks(3, save)
    model, state, of_rank_0 = saved
    torch.testing.assert_close(state, of_rank_0, rtol=0, atol=0)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain.parameters())
    optimizer.load_state_dict(copy.deepcopy(state))
    take_steps(plain, optimizer, 0, first=3)

    def load(rank: int, group: dist.ProcessGroup) -> None:
        local = lockstep.parallelize(copy.deepcopy(model), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(local.parameters()))
        optimizer.load_state_dict(copy.deepcopy(state))
        take_steps(local, optimizer, 0, first=3)
        for a, b in zip(plain.parameters(), local.parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, load)
    run_ranks(4, load)


def test_a_saved_parameter_is_no_larger_than_it_is(tmp_path: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        lockstep.shard_optimizer(adamw(model.parameters()))
        path = tmp_path / f"{rank}.pt"
        torch.save(model.fc2.bias, path)
        assert path.stat().st_size < 4000
        assert torch.equal(torch.load(path), model.fc2.bias)
        assert type(copy.deepcopy(model).fc2.bias) is nn.Parameter

    run_ranks(2, body)


def num_bytes_of_copy(value: Any) -> int:
    """Return the size of the memory that tensors in a deep copy of ``value`` have."""
    tensors, _ = tree_flatten(copy.deepcopy(value))
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pairs("kind, backend", [adamw, torch.optim.Adafactor], ["threads", "shm", "gloo"])
def test_a_deep_copy_takes_no_more_memory_than_what_it_copies(kind: Any, backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(kind(model.parameters()))
        take_steps(model, optimizer, rank)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        next(losses(model, rank, 1)).backward()
        values = [model.fc2.bias.data, model.fc2.bias.detach(), model.state_dict(), state]
        values += [entry for key, entry in optimizer.state.items() if isinstance(key, torch.Tensor)]
        values += [state["state"][0], [*model.buffers()], copy.deepcopy(model).state_dict()]
        if backend != "gloo":  # where gradients are in the memory of a bucket
            values += [parameter.grad for parameter in model.parameters()]
        for value in values:
            tensors, _ = tree_flatten(value)
            needed = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
            assert num_bytes_of_copy(value) <= needed

    run_ranks(2, body, backend=backend)


def test_ranks_may_leave_the_loop_at_different_times() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        results = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(adamw(model.parameters()))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            with lockstep.join(model):
                for loss in losses(model, rank, 2 + rank):
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            results.append(model)
        for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(3, body)


class Matrices(nn.Module):
    """Parameters such as Muon takes."""

    sample = (7,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(n, n - 1, bias=False) for n in (7, 6, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_an_optimizer_that_orthogonalizes_matrices_gets_them_whole() -> None:
    compare_bits(lambda p: torch.optim.Muon(p, lr=0.1), Matrices, 3)


@pytest.mark.parametrize("backend", ["threads", "shm"])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_later_alone_are_divided(size: int, backend: str) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            model[2] = nn.Linear(4, 3)  # other values on each rank
            model[0].requires_grad_(False)
            with torch.no_grad():
                model[2].weight.fill_(rank + 1)
                model[2].bias.fill_(rank + 1)
            optimizer = shard(adamw(model[2].parameters()))
            for step in range(3):
                x = torch.randn(2, 7, generator=torch.Generator().manual_seed(rank + 10 * step))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert len(optimizer.state_dict()["state"]) == 2
            models.append(model)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(size, body, backend=backend)


def test_on_one_rank_the_state_dict_alone_changes() -> None:
    model = lockstep.parallelize(nn.Linear(2, 2))
    optimizer = adamw(model.parameters())
    before = dict(vars(optimizer))
    assert lockstep.shard_optimizer(optimizer) is optimizer
    assert vars(optimizer).keys() - before.keys() == {"state_dict"}
    assert all(vars(optimizer)[name] is value for name, value in before.items())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_rank0_only_is_an_option_of_every_sharded_optimizer(size: int, sparse: bool) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Embedding(3, 2, sparse=sparse), process_group=group)
        kind: Any = torch.optim.SparseAdam if sparse else torch.optim.Adam
        optimizer = lockstep.shard_optimizer(kind(model.parameters()))
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        state, whole = optimizer.state_dict(rank0_only=True), optimizer.state_dict()
        assert whole["state"]
        if rank == 0:
            torch.testing.assert_close(state, whole)

    run_ranks(size, body)


def test_on_one_rank_a_sharded_optimizer_is_copied() -> None:
    model = lockstep.parallelize(nn.Linear(2, 2))
    optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    torch.testing.assert_close(copied.state_dict(), optimizer.state_dict())


class Decayed(torch.optim.SGD):
    """Calls the step of its base class, of which torch has put hooks around as well."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        return super().step(closure)


def test_a_class_that_calls_the_step_of_its_base_takes_the_same_steps() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            torch.optim.SGD(model.parameters())
            take_steps(model, shard(Decayed(model.parameters(), lr=0.1, momentum=0.9)), rank)
            models.append(model)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, body)


def test_a_look_at_the_state_changes_no_state_dict() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        take_steps(model, optimizer, rank)
        before = optimizer.state_dict()
        if rank == 0:
            with pytest.raises(ModelError, match=r"state of .fc1.weight. .* let every rank call"):
                optimizer.state[model.fc1.weight]
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)

    run_ranks(2, body)


def test_graphs_of_what_a_step_leaves_alone_stay_valid() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(
            nn.ModuleList([nn.Linear(3, 3) for _ in range(2)]), process_group=group
        )
        optimizer = adamw(model.parameters())
        x = torch.ones(1, 3)
        early = model[0](model[0](x)).sum()
        lockstep.shard_optimizer(optimizer)
        early.backward()
        optimizer.step()
        optimizer.zero_grad()
        late = model[1](model[1](x)).sum()
        model[0](x).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        stale = model[1](model[1](x)).sum()
        late.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    run_ranks(2, body)


def test_parameters_that_share_memory_stay_equal() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            torch.manual_seed(0)
            model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            lockstep.parallelize(model, process_group=group)
            model[0].weight.data = model[1].weight.data
            optimizer = shard(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                model[1](model[0](torch.ones(1, 3))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        assert torch.equal(models[0][0].weight, models[1][0].weight)
        assert torch.equal(models[1][0].weight, models[1][1].weight)

    run_ranks(2, body)


def test_parameters_with_sparse_gradients_are_not_divided() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
        table, layer = model[0].weight, model[1].weight
        lockstep.parallelize(model, process_group=group)
        storages = [table.untyped_storage().data_ptr(), layer.untyped_storage().data_ptr()]
        optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = table.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([rank, 5])).sum().backward()
            assert table.grad.is_sparse
            rows = table.grad.to_dense()
            optimizer.step()
            before -= 0.1 * rows
        assert type(table) is nn.Parameter
        assert table.untyped_storage().data_ptr() == storages[0]
        assert layer.untyped_storage().data_ptr() != storages[1]
        torch.testing.assert_close(table.detach(), before)

    for backend in ("threads", "shm"):
        run_ranks(2, body, backend=backend)
