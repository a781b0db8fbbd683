"""``DataParallel(workers="processes")``: the same, from processes that share the parameters."""

from __future__ import annotations

import collections
import copy
import gc
import io
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import ReplicaLost
from lockstep.nn.replicas import DataParallel
from tests.same import assert_same, assert_same_gradients, gradients_of

# Processes that are kept for several tests get more memory when it is needed.
pytestmark = [pytest.mark.keeps_descriptors, pytest.mark.forks]
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Something of everything that has to be brought to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=1.0)
        self.unused = nn.Linear(2, 2)
        self.second = nn.Linear(4, 3)
        self.second.weight = nn.Parameter(self.second.weight.detach())
        self.scale, self.calls = 1.0, 0
        self.double()

    def forward(self, x: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        x = torch.relu_(self.first(x if words is None else x + self.embed(words)))
        return self.second(torch.tanh(self.norm(x))) * self.scale

    def pair(self, x: torch.Tensor, *, name: str) -> dict:
        return {name: (self.first(x), len(x)), "calls": self.calls}

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return lockstep.mean(F.cross_entropy(self(x), y, reduction="none"))

    def modes(self, x: torch.Tensor) -> tuple:
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        return torch.is_grad_enabled(), autocast, torch.get_default_dtype(), os.getpid()

    def fail(self, x: torch.Tensor) -> None:
        raise ArithmeticError(f"{len(x)} rows")

    def die(self, x: torch.Tensor) -> None:
        if len(x) == 3:  # the second replica's part
            os.kill(os.getpid(), signal.SIGKILL)

    def hold(self, x: torch.Tensor) -> object:
        return threading.Lock()


with torch.random.fork_rng():
    torch.manual_seed(4)
    _NET = Net()


def net() -> Net:
    return copy.deepcopy(_NET)


def batch(rows: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def words(rows: int = 7) -> torch.Tensor:
    return torch.arange(rows) * 3 % 10


@pytest.fixture(scope="module")
def replicas() -> Iterator[DataParallel]:
    """Two processes, for all tests that don't end them: to start them takes seconds."""
    model = DataParallel(net(), ["cpu", "cpu"], workers="processes")
    model.eval()(batch())
    yield model
    model._replicas = None
    gc.collect()


@pytest.fixture
def model(replicas: DataParallel) -> DataParallel:
    """The same with the parameters that it had."""
    replicas.load_state_dict(_NET.state_dict())
    replicas.zero_grad()
    replicas.requires_grad_(True).eval()
    return replicas


def test_outputs_and_gradients_are_the_modules(model: DataParallel) -> None:
    module, expected = model.module, net().eval()
    for rows in (7, 2, 1, 0, 40):
        x, y = batch(rows).requires_grad_(), batch(rows).requires_grad_()
        output, other = model(x * 2, words(rows)), expected(y * 2, words(rows))
        torch.testing.assert_close(output, other, **TOLERANCE)
        output.square().sum().backward()
        other.square().sum().backward()
        assert_same([x.grad, *gradients_of(module)], [y.grad, *gradients_of(expected)])
    assert module.embed.weight.grad.is_sparse
    assert module.unused.weight.grad is None


def test_training_is_that_of_the_module(model: DataParallel) -> None:
    expected = net().eval()
    dense = [
        [p for name, p in m.named_parameters() if "embed" not in name]
        for m in (model.module, expected)
    ]
    optimizers = [torch.optim.SGD(of, lr=0.1, momentum=0.9) for of in dense]
    for rows in (5, 6, 9):
        for of, optimizer in zip((model, expected), optimizers, strict=True):
            optimizer.zero_grad()
            of(batch(rows)).square().mean().backward()
            optimizer.step()
    assert_same(model.module.parameters(), expected.parameters())


def test_any_method_and_any_nesting(model: DataParallel) -> None:
    expected = net()
    found = model.pair(batch(), name="first")
    assert_same([found["first"][0]], [expected.first(batch())])
    assert found["first"][1] == [4, 3]
    model(batch())  # what a replica assigns is lost
    assert model.pair(batch(), name="first")["calls"] == model.module.calls


def test_changes_are_noticed(model: DataParallel) -> None:
    def assign_data(m: Net) -> None:
        m.first.weight.data = m.first.weight.data * 2

    def write(m: Net) -> None:
        with torch.no_grad():
            m.first.weight.add_(1)
            m.first.bias.data.add_(1)

    def set_scale(m: Net) -> None:
        m.scale = 3.0

    def freeze(m: Net) -> None:
        m.first.requires_grad_(False)

    def hang_hook(m: Net) -> None:
        m.second.register_forward_hook(lambda _, __, output: output + 1)

    def replace(m: Net) -> None:
        m.second = nn.Linear(4, 3).double()
        with torch.no_grad():
            m.second.weight.fill_(0.5)
            m.second.bias.zero_()

    expected = net().eval()
    for change in (assign_data, write, set_scale, freeze, hang_hook, replace):
        for one in (model.module, expected):
            one.zero_grad()
            change(one)
        output, other = model(batch()), expected(batch())
        torch.testing.assert_close(output, other, **TOLERANCE)
        output.sum().backward()
        other.sum().backward()
        assert_same_gradients(model.module, expected)
    model.module.scale = 1.0
    model.module.second = net().second


def test_buffers_are_those_of_the_first_replica(model: DataParallel) -> None:
    module = model.module
    for rows in (6, 8):
        model.train()(batch(rows))
        first = F.relu(module.first(batch(rows)[: rows // 2]))
        assert_same([module.norm.running_mean], [first.mean(0)])
        model.eval()
        assert_same([model(batch())], [module(batch())])
    module.norm.running_mean.zero_()
    assert_same([model(batch())], [module(batch())])


def test_a_mean_is_that_of_all_replicas(model: DataParallel) -> None:
    expected, y = net().eval(), torch.arange(7) % 3
    loss, other = model.loss(batch(), y), expected.loss(batch(), y)
    assert loss.ndim == 0
    assert_same([loss], [other])
    loss.backward()
    other.backward()
    assert_same_gradients(model.module, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_a_mean_over_fewer_parts_than_processes(count: int) -> None:
    module, expected = net().eval(), net().eval()
    model = DataParallel(module, ["cpu"] * 3, workers="processes")
    for of in (model, expected):
        of.loss(batch(count), torch.arange(count)).backward()
    assert_same_gradients(module, expected)


class HasCodes(nn.Linear):
    """Has parameters that can't have a gradient."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.codes = nn.Parameter(torch.tensor([3, -4], dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.codes, nn.Parameter)
        return super().forward(x) * self.mask + self.codes


def test_parameters_that_are_not_of_floating_point() -> None:
    module = HasCodes().double()
    expected, x = copy.deepcopy(module), batch(5)
    replicas = DataParallel(module, ["cpu", "cpu"], workers="processes")
    for one in (replicas, expected):
        one(x).sum().backward()
    assert_same_gradients(module, expected)


class Keeps(nn.Module):
    """Tensors in other places than parameters and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        self.constant = torch.full((1000,), 2.0)
        self.register_buffer("mask", None)

    def forward(self, x: nn.utils.rnn.PackedSequence) -> collections.deque:
        self.mask = torch.ones(3)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(x)
        return collections.deque([self.layer(padded).sum(0), self.constant[:1] + lengths[:1]])


def test_nothing_is_overwritten_by_what_comes_later() -> None:
    """What travels lies where the next message will lie."""
    module = Keeps()
    sequences = [batch(rows) for rows in (5, 2, 5, 4)]
    packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    model = DataParallel(module, ["cpu", "cpu"], workers="processes")
    calls = [model(packed) for _ in range(3)]
    sum(output.sum() for output, _ in calls).backward()
    assert [constant.tolist() for _, constant in calls] == [[7, 7]] * 3
    found = gradients_of(module)
    module.zero_grad()
    for sequence in sequences * 3:
        module.layer(F.pad(sequence, (0, 0, 0, 5 - len(sequence)))).sum().backward()
    assert_same(found, gradients_of(module))
    assert module.mask is None


def test_who_saves_one_parameter_does_not_save_all() -> None:
    module = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 2))
    DataParallel(module, ["cpu", "cpu"], workers="processes")(torch.ones(4, 500))
    file = io.BytesIO()
    torch.save(module[1].state_dict(), file)
    assert len(file.getvalue()) < 10_000


def test_modes_are_the_callers(model: DataParallel) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        *modes, pids = model.modes(batch())
        assert modes == [False, torch.float16, torch.float32]
        assert pids[0] == os.getpid() != pids[1]
        assert not model(batch()).requires_grad
    torch.set_default_dtype(torch.float64)
    try:
        assert model.modes(batch())[:3] == (True, False, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_several_forwards_before_their_backwards(model: DataParallel) -> None:
    expected = net().eval()
    for of in (model, expected):
        first, second = of(batch(5)).square().sum(), of(batch(6)).square().sum()
        second.backward()
        first.backward(retain_graph=True)
        first.backward()
        if of is model:
            with pytest.raises(RuntimeError, match="retain_graph=True"):
                first.backward()
    assert_same_gradients(model.module, expected)


def test_failures_are_the_callers_own(model: DataParallel) -> None:
    with pytest.raises(ArithmeticError, match="4 rows") as caught:
        model.fail(batch())
    replica, other = caught.value.__notes__
    assert replica == "(raised in replica 0 on cpu)"
    assert "3 rows" in other
    in_its_process = other.partition("In its process:")[2]
    assert "in fail" in in_its_process
    assert_same([model(batch())], [net().eval()(batch())])  # and it goes on


def test_what_cannot_be_sent_is_said(model: DataParallel) -> None:
    with pytest.raises(TypeError, match="has returned can't be sent"):
        model.hold(batch())
    with pytest.raises(TypeError, match="argument can't be sent"):
        model(batch(), threading.Lock())
    assert_same([model(batch())], [net().eval()(batch())])
    module = net()
    module.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"Net can't be sent .* workers='threads'"):
        DataParallel(module, ["cpu", "cpu"], workers="processes")(batch())


def test_a_process_that_dies_is_named_and_replaced() -> None:
    before = psutil.Process().children()
    model = DataParallel(net().eval(), ["cpu", "cpu"], workers="processes")
    loss = model(batch()).sum()
    with pytest.raises(ReplicaLost, match=r"replica 1 \(pid \d+\) has ended, with exit code -9"):
        model.die(batch())
    assert psutil.Process().children() == before
    with pytest.raises(ReplicaLost, match="have ended"):
        loss.backward()
    assert_same([model(batch())], [net().eval()(batch())])


def test_copies_start_their_own() -> None:
    model = DataParallel(net().eval(), ["cpu", "cpu"], workers="processes")
    model(batch())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same([other(batch())], [model(batch())])
        del other


_graphs: list[weakref.ref[torch.Tensor]] = []


class CountsGraphs(nn.Linear):
    """Its second output is how many earlier ones its process keeps for their backwards."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        num_alive = sum(kept() is not None for kept in _graphs)
        leaf = x.clone().requires_grad_()  # which the graph keeps itself
        _graphs.append(weakref.ref(leaf))
        return super().forward(leaf), num_alive


def test_calls_nobody_will_differentiate_are_dropped() -> None:
    model = DataParallel(
        CountsGraphs(batch().shape[1], 1).double(), ["cpu"] * 3, workers="processes"
    )
    assert model(batch(3))[1] == 0
    gc.collect()
    output, nums_alive = model(batch(2))  # with two rows the third has nothing to do
    assert nums_alive == 0
    for _ in range(2):
        again, nums_alive = model(batch(3))
        assert nums_alive == [1, 1, 0]
        del again
        gc.collect()
    del output
    gc.collect()
    assert model(batch(3))[1] == 0


class Asks(nn.Module):
    """Says what its process was started with."""

    def forward(self, x: torch.Tensor) -> tuple:
        return os.getpid(), os.environ.get("LOCKSTEP_TEST"), os.getcwd(), torch.initial_seed()


def test_each_process_is_a_child_with_what_the_first_call_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = DataParallel(Asks(), ["cpu"] * 4, workers="processes")
    monkeypatch.setenv("LOCKSTEP_TEST", "set")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    pids, variable, folder, seeds = model(torch.ones(4))
    assert len(set(pids)) == 4
    assert set(pids[1:]) <= {child.pid for child in psutil.Process().children()}
    assert (variable, folder, seeds) == ("set", os.getcwd(), [7, 8, 9, 10])


def test_memory_of_a_model_that_is_gone_is_free() -> None:
    before = _num_shared()
    model = DataParallel(net().eval(), ["cpu", "cpu"], workers="processes")
    model(batch()).sum().backward()
    gone = weakref.ref(model.module.first.weight)
    assert _num_shared() > before
    del model
    gc.collect()
    assert gone() is None
    assert _num_shared() == before


def _num_shared() -> int:
    """How many pieces of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:lockstep")


def test_a_call_that_autograd_refuses_leaves_no_answers() -> None:
    model = DataParallel(net().eval(), ["cpu", "cpu"], workers="processes")
    x = batch() * 2
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda factor: model(x) * factor)(torch.ones(2).double())
    for scale in (3, 4):
        assert_same([model(batch() * scale)], [net().eval()(batch() * scale)])


@pytest.mark.long
def test_backwards_in_several_threads() -> None:
    layers = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 64))
    model = DataParallel(layers, ["cpu"] * 3, workers="processes")
    parameters, x = [*layers.parameters()], torch.randn(64, 64)
    outcomes: list[bool] = []

    def differentiate(scale: int) -> None:
        expected = torch.autograd.grad(layers(x * scale).square().sum(), parameters)
        for _ in range(60):
            got = torch.autograd.grad(model(x * scale).square().sum(), parameters)
            norms = [
                (one - other).norm() / other.norm()
                for one, other in zip(got, expected, strict=True)
            ]
            outcomes.append(max(norms) < 1e-4)

    threads = [threading.Thread(target=differentiate, args=(scale,)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 180
