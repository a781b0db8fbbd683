"""Checkpoints, pickles and copies of the wrapper."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep.errors import ModelError
from tests.nn.models import saved_and_loaded
from tests.nn.parallel import Net, net, parts
from tests.ranks import run_ranks
from tests.same import assert_same

OurDDP = lockstep.DistributedDataParallel
State = dict[str, torch.Tensor]


def launch(body: Callable[[lockstep.World], Any], world_size: int = 2) -> list[Any]:
    return lockstep.launch(body, world_size, ranks="threads")


class Nested(nn.Module):
    """Has a child of the name that wrappers give to the model, and other things beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(x) @ self.weight)


class Renamed(nn.Module):
    """Knows by its version which of its parameters was negative in old checkpoints."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(self, state, prefix, metadata, *args, **kwargs):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}shift"] = -state[f"{prefix}shift"]
        super()._load_from_state_dict(state, prefix, metadata, *args, **kwargs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": lambda: net().float(),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "a child called module": Nested,
    "only a child called module": lambda: nn.ModuleDict({"module": nn.Linear(4, 4)}),
    "versions": lambda: nn.ModuleDict({"inner": Renamed()}),
}


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.fill_(value + number)
    return model


SAVED: dict[str, Callable[[nn.Module], State]] = {
    "a bare model": lambda model: model.state_dict(),
    "our wrapper": lambda model: OurDDP(model).state_dict(),
    "torch's wrapper": lambda model: TorchDDP(model).state_dict(),
    "DataParallel": lambda model: nn.DataParallel(model).state_dict(),
}


def through_a_file(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_those_of_torchs_wrapper(name: str) -> None:
    def body(world: lockstep.World) -> None:
        ours, theirs = (wrap(filled(MODELS[name](), 5)).state_dict() for wrap in (OurDDP, TorchDDP))
        assert list(ours) == list(theirs)
        assert all(map(torch.equal, ours.values(), theirs.values()))

    launch(body)


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("name", MODELS)
def test_what_any_of_them_saved_is_loaded(name: str, saved: str) -> None:
    def body(world: lockstep.World) -> None:
        state = through_a_file(SAVED[saved](filled(MODELS[name](), 5)))
        before = {key: value.clone() for key, value in state.items()}
        model = OurDDP(filled(MODELS[name](), 50))
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert list(state) == list(before)
        expected = filled(MODELS[name](), 5).state_dict()
        loaded = model.module.state_dict()
        assert list(loaded) == list(expected)
        assert all(map(torch.equal, loaded.values(), expected.values()))

    launch(body)


@pytest.mark.parametrize("saved", ["a bare model", "our wrapper"])
@pytest.mark.parametrize("name", ["net", "a child called module"])
def test_a_wrapper_that_is_a_part_loads_its_part(name: str, saved: str) -> None:
    build = MODELS[name]

    def body(world: lockstep.World) -> None:
        whole = nn.ModuleDict({"net": filled(build(), 5), "head": nn.Linear(2, 2)})
        if saved == "our wrapper":
            whole["net"] = OurDDP(whole["net"])
        state = through_a_file(whole.state_dict())
        other = nn.ModuleDict({"net": OurDDP(filled(build(), 50)), "head": nn.Linear(2, 2)})
        other.load_state_dict(state)
        assert torch.equal(other["head"].weight, whole["head"].weight)
        loaded = other["net"].module.state_dict()
        assert all(map(torch.equal, loaded.values(), filled(build(), 5).state_dict().values()))

    launch(body)


@pytest.mark.parametrize("saved", ["a bare model", "torch's wrapper"])
def test_wrong_keys_are_named(saved: str) -> None:
    def body(world: lockstep.World) -> None:
        model = OurDDP(net().float())
        state = SAVED[saved](net().float())
        prefix = "" if saved == "a bare model" else "module."
        state[f"{prefix}nowhere.weight"] = state.pop(f"{prefix}second.bias")
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        said = str(caught.value)
        assert 'Missing key(s) in state_dict: "module.second.bias"' in said
        assert "nowhere.weight" in said.partition("Unexpected key(s)")[2]
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert missing == ["module.second.bias"]
        assert len(unexpected) == 1
        assert unexpected[0].endswith("nowhere.weight")
        state[f"{prefix}second.bias"] = torch.zeros(7)
        with pytest.raises(RuntimeError, match=r"size mismatch for module\.second\.bias"):
            model.load_state_dict(state, strict=False)

    launch(body)


def test_a_state_of_another_model_altogether_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        with pytest.raises(RuntimeError, match=r"Missing key.*module\.first\.weight"):
            model.load_state_dict({"other": torch.ones(1)})
        with pytest.raises(RuntimeError, match=r"Missing key.*module\.first\.weight"):
            model.load_state_dict({})

    run_ranks(2, body)


def one_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected_gradients(model: nn.Module) -> list[torch.Tensor]:
    return one_step(copy.deepcopy(model), parts(2).flatten(0, 1))


@pytest.mark.parametrize("assign", [False, True])
def test_training_goes_on_from_what_was_loaded(assign: bool) -> None:
    start = net()
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.mul_(1.5)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = OurDDP(net(), process_group=group)
        one_step(model, parts(2)[rank])
        model.load_state_dict(copy.deepcopy(start).state_dict(), assign=assign)
        assert torch.equal(model.module.first.weight, start.first.weight)
        return one_step(model, parts(2)[rank])

    for gradients in run_ranks(2, body):
        assert_same(gradients, expected_gradients(start))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


COPIES["torch.save"] = saved_and_loaded


@pytest.mark.parametrize("before", [0, 2], ids=["at once", "after two steps"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_a_wrapper_that_trains_in_step(way: str, before: int) -> None:
    def body(world: lockstep.World) -> None:
        x = parts(2)[world.rank]
        model = OurDDP(net(), bucket_cap_mb=3, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(before):
            one_step(model, x)
            optimizer.step()
        copied = COPIES[way](model)
        assert type(copied) is OurDDP
        assert copied.process_group is model.process_group
        assert copied.bucket_bytes_cap == model.bucket_bytes_cap
        assert copied.find_unused_parameters
        assert copied.training
        here, there = list(model.parameters()), list(copied.parameters())
        assert all(map(torch.equal, here, there))
        assert not {id(p) for p in here} & {id(p) for p in there}
        expected = expected_gradients(model.module)
        for _ in range(2):
            assert_same(one_step(copied, x), expected)
            assert_same(one_step(model, x), expected)
        with torch.no_grad():
            copied.module.first.weight.add_(1)
        assert not torch.equal(copied.module.first.weight, model.module.first.weight)

    launch(body)


def test_a_deep_copy_keeps_to_a_group_of_its_own() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        expected = expected_gradients(net())
        one_step(model, parts(2)[rank])
        copied = copy.deepcopy(model)
        assert copied.process_group is group
        assert_same(one_step(copied, parts(2)[rank]), expected)

    run_ranks(2, body)


def test_a_deep_copy_on_one_rank_keeps_the_others_waiting_for_nothing() -> None:
    """An average of the model, or the best one so far, that rank 0 alone keeps."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        expected = expected_gradients(net())
        kept = copy.deepcopy(model).eval() if rank == 0 else None
        for _ in range(3):
            assert_same(one_step(model, parts(2)[rank]), expected)
        if kept is not None:
            kept(parts(2)[rank])
        # A model that is made later, on every rank, with a loop that ends earlier on one.
        other = OurDDP(net(), process_group=group)
        with other.join():
            for _ in range(1 + rank):
                one_step(other, parts(2)[rank])
        assert_same(one_step(other, parts(2)[rank]), expected)

    run_ranks(2, body)


def test_pickling_with_a_group_of_its_own_is_refused() -> None:
    def body(world: lockstep.World) -> None:
        group = dist.new_group([0, 1])
        model = OurDDP(net(), process_group=group)
        for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(RuntimeError, match=r"process group of its own, which can't be"):
                save(model)
        pickle.loads(pickle.dumps(model.module))

    launch(body)


def test_a_pickle_is_loaded_where_a_rank_is_alone() -> None:
    pickles = launch(lambda world: pickle.dumps(OurDDP(filled(net(), 3))))
    model = pickle.loads(pickles[0])
    assert model.process_group is None
    assert isinstance(model.module, Net)
    assert all(map(torch.equal, model.parameters(), filled(net(), 3).parameters()))
    x = parts(1)[0]
    assert_same(one_step(model, x), one_step(filled(net(), 3), x))


def test_a_copy_of_the_model_inside_is_a_plain_model() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        one_step(model, parts(2)[rank])
        for plain in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
            assert type(plain) is Net
            with pytest.raises(ModelError, match="isn't parallel"):
                lockstep.no_sync(plain)
            if rank == 0:  # alone
                one_step(plain, parts(2)[rank])

    run_ranks(2, body)
