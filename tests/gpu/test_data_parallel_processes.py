"""``DataParallel(workers="processes")`` on GPUs. Skipped where there is none; one is enough."""

from __future__ import annotations

import copy
import gc
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import ReplicaLost
from lockstep.nn.replicas import DataParallel
from tests.gpu.test_data_parallel import (
    GPU,
    MIXED,
    TWICE,
    cuda_has_begun,  # noqa: F401 - a fixture
    pytestmark,  # noqa: F401 - as there
)

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
DEVICES = pytest.mark.parametrize(
    "devices", [TWICE, ["cuda:0"] * 3, MIXED, ["cuda:0", "cpu"]], ids=str
)


class Net(nn.Module):
    """Buffers, a sparse table, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=1.0)
        self.last = nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x + self.embed(words)))))

    def loss(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(self(x, words), words % 3, reduction="none")
        return lockstep.mean(losses)

    def weight(self, x: torch.Tensor) -> torch.Tensor:
        return self.last.weight

    def where(self, x: torch.Tensor) -> tuple:
        return str(x.device), str(self.last.weight.device), os.getpid()

    def die(self, x: torch.Tensor) -> None:
        if len(x) == 3:  # the second replica's part
            os.kill(os.getpid(), signal.SIGKILL)


def net(device: torch.device | str) -> Net:
    torch.manual_seed(5)
    return Net().to(device)


def samples(device: torch.device | str, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    words = torch.randint(0, 10, (rows,), generator=generator)
    return x.to(device), words.to(device)


def assert_same_gradients(mine: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert p.grad.is_sparse == q.grad.is_sparse
        assert p.grad.device == p.device
        torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), **TOLERANCE)


@DEVICES
def test_courses_are_those_of_the_module_alone(devices: list[str]) -> None:
    """Also parameters that change between calls, for replicas that have copies of them."""
    module, expected = net(devices[0]).eval(), net(devices[0]).eval()
    model = DataParallel(module, devices, workers="processes")
    for step in range(4):
        losses = []
        for called in (model, expected):
            x, words = samples(devices[0], 7 + step)
            x.requires_grad_()
            loss = called.loss(x, words)
            loss.backward()
            losses += [loss, x.grad]
        torch.testing.assert_close(losses[:2], losses[2:], **TOLERANCE)
        assert_same_gradients(module, expected)
        for of in (module, expected):
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter.sub_(0.1 * parameter.grad.to_dense())
                    parameter.grad = None


@DEVICES
def test_replicas_are_where_they_are_to_be(devices: list[str]) -> None:
    model = DataParallel(net(devices[0]), devices, workers="processes")
    *where, pids = model.where(samples(devices[0])[0])
    expected = devices[0] if len(set(devices)) == 1 else devices  # what all say is told once
    assert where == [expected, expected]
    assert pids[0] == os.getpid()
    assert len(set(pids)) == len(devices)


@DEVICES
def test_statistics_of_the_first_replica_stay(devices: list[str]) -> None:
    module = net(devices[0])
    model = DataParallel(module, devices, workers="processes")
    for rows in (6, 9):
        x, words = samples(devices[0], rows)
        model(x, words)
        own = slice(-(-rows // len(devices)))
        first = module.first(x[own] + module.embed(words[own]))
        torch.testing.assert_close(module.norm.running_mean, first.mean(0), **TOLERANCE)


def test_parameters_stay_where_they_are() -> None:
    module = net(GPU)
    before = [parameter.data_ptr() for parameter in module.parameters()]
    model = DataParallel(module, TWICE, workers="processes")
    model(*samples(GPU)).sum().backward()
    assert [parameter.data_ptr() for parameter in module.parameters()] == before


def test_a_parameter_is_returned() -> None:
    """Memory that came from another process can't be sent on: it is copied before."""
    module = net(GPU)
    out = DataParallel(module, TWICE, workers="processes").weight(samples(GPU)[0])
    assert torch.equal(out, torch.cat([module.last.weight] * 2))
    out.sum().backward()
    assert module.last.weight.grad.eq(2).all()


def test_memory_is_not_left_behind() -> None:
    model = DataParallel(net(GPU), TWICE, workers="processes")
    x, words = samples(GPU, 1000)

    def step() -> int:
        model.zero_grad()
        model.loss(x, words).backward()
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated()

    for _ in range(5):
        step()
    before = step()
    assert max(step() for _ in range(20)) <= before


def test_memory_of_a_model_that_is_gone_is_free() -> None:
    def train() -> None:
        model = DataParallel(nn.Linear(1000, 1000, device=GPU), TWICE, workers="processes")
        model(torch.ones(4, 1000, device=GPU)).sum().backward()

    def allocated() -> int:
        gc.collect()
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated()

    train()
    before = allocated()
    for _ in range(3):
        train()
    assert allocated() <= before


@DEVICES
def test_micro_batches(devices: list[str]) -> None:
    module, expected = net(devices[0]).eval(), net(devices[0]).eval()
    parallel = lockstep.parallelize(module)
    model = DataParallel(parallel, devices, workers="processes")
    parts = [samples(devices[0], rows) for rows in (3, 8)]
    with lockstep.accumulate(parallel):
        model.loss(*parts[0]).backward()
    model.loss(*parts[1]).backward()
    expected.loss(*(torch.cat(both) for both in zip(*parts, strict=True))).backward()
    assert_same_gradients(module, expected)


@DEVICES
@pytest.mark.parametrize("option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_whose_rows_are_looked_up_together(devices: list[str], option: dict) -> None:
    torch.manual_seed(5)
    module = nn.Embedding(10, 4, **option).double().to(devices[0])
    expected = copy.deepcopy(module)
    model = DataParallel(module, devices, workers="processes")
    for rows in (7, 12):
        module.zero_grad()
        expected.zero_grad()
        _, words = samples(devices[0], rows)
        out, other = model(words), expected(words)
        torch.testing.assert_close(out, other, **TOLERANCE)
        out.square().sum().backward()
        other.square().sum().backward()
        assert_same_gradients(module, expected)
        torch.testing.assert_close(module.weight, expected.weight, **TOLERANCE)


def test_a_tensor_that_is_no_parameter_and_one_whose_memory_moves() -> None:
    class Moves(nn.LSTM):
        def __init__(self) -> None:
            super().__init__(4, 4, batch_first=True)
            self.constant = torch.full((1000,), 2.0, device=GPU)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.flatten_parameters()
            return super().forward(x)[0] * self.constant.mean()

    module = Moves().to(GPU)
    model = DataParallel(module, TWICE, workers="processes")
    x = torch.ones(6, 3, 4, device=GPU)
    for value in (0.1, 0.5):
        for parameter in module.parameters():
            nn.init.constant_(parameter, value)
        torch.testing.assert_close(model(x), module(x))


def test_a_process_that_dies_is_named() -> None:
    model = DataParallel(net(GPU).eval(), TWICE, workers="processes")
    with pytest.raises(ReplicaLost, match=r"replica 1 \(pid \d+\) has ended, with exit code -9"):
        model.die(samples(GPU)[0])
    expected = copy.deepcopy(model.module)
    torch.testing.assert_close(model(*samples(GPU)), expected(*samples(GPU)), **TOLERANCE)
