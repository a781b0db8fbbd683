"""What replicas in processes have to know of each other, and of what their caller does."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ReplicaLost, SharedMemoryFull
from lockstep.nn.replicas import DataParallel, channel
from lockstep.nn.replicas.channel import Channel

pytestmark = [pytest.mark.keeps_descriptors, pytest.mark.forks]
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
TWO = ["cpu", "cpu"]


class WithLoss(nn.Module):
    """A classifier of words that returns its loss."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, **options)
        self.layer = nn.Linear(4, 3)
        self.double()

    def losses(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(self.embed(words)), words % 3, reduction="none")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return lockstep.mean(self.losses(words))

    def two_means(self, words: torch.Tensor) -> torch.Tensor:
        losses = self.losses(words)
        return lockstep.mean(losses) + lockstep.mean(losses[:1])

    def fail_alone(self, words: torch.Tensor) -> torch.Tensor:
        if len(words) == 3:  # the second replica's part
            raise ArithmeticError("no loss")
        return self(words)


def words(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(8, (count,), generator=torch.Generator().manual_seed(seed))


def assert_same(mine: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **TOLERANCE)
        torch.testing.assert_close(p.grad, q.grad, **TOLERANCE)


def in_processes(module: nn.Module) -> DataParallel:
    return DataParallel(module, TWO, workers="processes")


def test_a_mean_over_micro_batches() -> None:
    """Those of each step are of different sizes; the gradients are those of all at once."""
    module = WithLoss()
    expected = copy.deepcopy(module)
    parallel = lockstep.parallelize(module)
    model = in_processes(parallel)
    for step, sizes in enumerate([(2, 5, 9), (7, 3), (4,)]):
        module.zero_grad()
        expected.zero_grad()
        parts = [words(size, 10 * step + number) for number, size in enumerate(sizes)]
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            with contextlib.nullcontext() if last else lockstep.accumulate(parallel):
                model(part).backward()
        expected(torch.cat(parts)).backward()
        assert_same(module, expected)


def test_micro_batches_in_ranks() -> None:
    """Each rank's replicas first, and then the ranks."""
    rows = [[words(5, 1), words(2, 2)], [words(12, 3), words(4, 4)]]  # each rank's micro-batches
    start = WithLoss()
    expected = copy.deepcopy(start)
    expected(torch.cat([part for own in rows for part in own])).backward()

    def body(world: lockstep.World) -> None:
        module = copy.deepcopy(start)
        parallel = lockstep.parallelize(module)
        replicated = in_processes(parallel)
        for _ in range(2):
            module.zero_grad()
            for number, own in enumerate(rows[world.rank]):
                with contextlib.nullcontext() if number else lockstep.accumulate(parallel):
                    replicated(own).backward()
            assert_same(module, expected)

    lockstep.launch(body, 2, ranks="threads")


def test_what_the_caller_raises_is_raised_in_the_replica() -> None:
    parallel = lockstep.parallelize(WithLoss())
    model = in_processes(parallel)
    with lockstep.accumulate(parallel):
        loss = model.two_means(words(7)).mean()
        with pytest.raises(ValueError, match="two means, over 7 and over 2 samples") as caught:
            loss.backward()
    where, also = caught.value.__notes__
    assert where == "(raised in replica 0 on cpu)"
    assert also.startswith("Replica 1 on cpu failed as well:")
    assert "two means, over 7 and over 2 samples" in also
    assert "in count_micro_batch" not in also


class WaitsInBackward(torch.autograd.Function):
    """Its backward says that it has begun, and waits until so many others have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, folder: Path, count: int) -> torch.Tensor:
        ctx.folder, ctx.count = folder, count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (ctx.folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 20
        while len(list(ctx.folder.iterdir())) < ctx.count:
            assert time.monotonic() < deadline, "no other backward has begun"
            time.sleep(0.01)
        return gradient, None, None


def test_backwards_of_means_run_at_the_same_time(tmp_path: Path) -> None:
    """Although each of them asks the caller something."""

    class Waits(WithLoss):
        def losses(self, words: torch.Tensor) -> torch.Tensor:
            return WaitsInBackward.apply(super().losses(words), tmp_path, 2)

    in_processes(Waits())(words(6)).backward()


@pytest.mark.parametrize(
    ("first_sleeps", "takes_itself"), [(True, False), (False, False), (False, True)]
)
def test_an_interruption_does_not_wait_for_replicas(first_sleeps: bool, takes_itself: bool) -> None:
    """The first replica is interrupted, or has returned and waits for the other.

    The system may give the signal to another thread than the one that waits.
    """
    caller = os.getpid()

    class Sleeps(nn.Linear):
        def forward(self, seconds: torch.Tensor) -> torch.Tensor:
            if os.getpid() == caller and seconds.any():
                interrupt = signal.raise_signal if takes_itself else partial(os.kill, caller)
                threading.Timer(0.3, interrupt, [signal.SIGINT]).start()
            time.sleep(float(seconds[0, 0]))
            return super().forward(seconds)

    before = psutil.Process().children()
    model = in_processes(Sleeps(1, 1))
    model(torch.zeros(4, 1))
    (other,) = set(psutil.Process().children()) - set(before)
    with pytest.raises(KeyboardInterrupt):
        model(torch.tensor([[600.0 if first_sleeps else 0.0], [1.0], [600.0], [1.0]]))
    assert not other.is_running()
    assert model(torch.zeros(4, 1)).shape == (4, 1)


class AlarmRings(Exception):
    """An error that a handler of signals raises."""


@contextlib.contextmanager
def ringing() -> Iterator[None]:
    """Raise AlarmRings in this thread, in half a second."""

    def ring(*_: object) -> None:
        raise AlarmRings

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_nor_does_an_error_of_a_signal_handler() -> None:
    caller = os.getpid()

    class Sleeps(nn.Linear):
        def forward(self, seconds: torch.Tensor) -> torch.Tensor:
            if os.getpid() != caller:
                time.sleep(float(seconds[0, 0]))
            return super().forward(seconds)

    model = in_processes(Sleeps(1, 1))
    model(torch.zeros(4, 1))
    began = time.monotonic()
    with pytest.raises(AlarmRings), ringing():
        model(torch.full((4, 1), 20.0))
    assert time.monotonic() - began < 15
    assert model(torch.zeros(4, 1)).shape == (4, 1)


def test_a_replica_that_fails_is_not_waited_for() -> None:
    model = in_processes(WithLoss())
    with pytest.raises(ArithmeticError, match="no loss"):
        model.fail_alone(words(7))
    assert model(words(7)).ndim == 0


@pytest.mark.parametrize("option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_whose_rows_are_looked_up_together(option: dict) -> None:
    module = WithLoss(**option)
    expected = copy.deepcopy(module)
    model = in_processes(module)
    for seed in range(3):
        module.zero_grad()
        expected.zero_grad()
        loss, other = model(words(11, seed)), expected(words(11, seed))
        torch.testing.assert_close(loss, other, **TOLERANCE)
        loss.backward()
        other.backward()
        assert_same(module, expected)


def test_rows_are_normalised_once() -> None:
    rows = torch.randperm(2000).repeat(2)
    table = nn.Embedding(2000, 64, max_norm=1.0)
    model = in_processes(table)
    for _ in range(10):
        nn.init.normal_(table.weight)
        expected = copy.deepcopy(table)
        with torch.no_grad():
            assert torch.equal(model(rows), expected(rows))
        assert torch.equal(table.weight, expected.weight)


def test_tensors_of_other_devices_go_by_handle() -> None:
    """On meta, which has handles as accelerators have, and nothing to compute."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("meta")
    model = DataParallel(module, ["meta", "meta"], workers="processes")
    for rows in (6, 7):
        x = torch.ones(rows, 4, device="meta", requires_grad=True)
        out = model(x)
        assert (out.shape, out.device.type) == ((rows, 3), "meta")
        module.zero_grad()
        out.sum().backward()
        for tensor in (x, *module.parameters()):
            assert (tensor.grad.shape, tensor.grad.device.type) == (tensor.shape, "meta")


def test_copies_are_fresh_after_a_call_that_failed() -> None:
    module = nn.Linear(2, 2, bias=False)
    model = in_processes(module)
    model._devices[1] = torch.device("cpu:0")  # counts as another device than that of the module
    x = torch.ones(4, 2)
    model(x)
    nn.init.constant_(module.weight, 5.0)
    with pytest.raises(TypeError, match="can't be sent"):
        model(x, threading.Lock())
    assert model(x).eq(10).all()


class KillsItsProcess:
    """It can be pickled, and unpickling it is the end."""

    def __reduce__(self) -> tuple:
        return _die, ()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_buffers_and_other_tensors_arrive_both() -> None:
    """They come in two messages, for which there is one memory."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ones", torch.ones(1000))
            self.twos = torch.full((1000,), 2.0)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.ones.sum(), x * self.twos.sum()

    ones, twos = in_processes(Holds())(torch.ones(2))
    assert (ones.tolist(), twos.tolist()) == ([1000, 1000], [2000, 2000])


def test_a_process_that_dies_when_it_takes_the_module() -> None:
    module = WithLoss()
    model = in_processes(module)
    model(words(4))
    module.poison = KillsItsProcess()
    with pytest.raises(ReplicaLost, match="exit code -9"):
        model(words(4))
    del module.poison
    torch.testing.assert_close(model(words(4)), module(words(4)), **TOLERANCE)


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_processes_that_were_ended_are_not_kept_by_their_last_error(is_interrupted: bool) -> None:
    """Its traceback has an input whose graph has them: no garbage collector sees that circle."""
    caller = os.getpid()

    class Sleeps(nn.Linear):
        def forward(self, x: torch.Tensor, seconds: float = 0.0) -> torch.Tensor:
            if seconds and os.getpid() == caller:
                raise KeyboardInterrupt
            time.sleep(seconds)
            return super().forward(x)

    model = in_processes(Sleeps(1, 1))
    x = model(torch.ones(4, 1))
    kept = weakref.ref(model._replicas._processes)
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            model(x, 600.0)
    else:
        model.module.poison = KillsItsProcess()
        with pytest.raises(ReplicaLost):
            model(x)
    del x, model
    deadline = time.monotonic() + 10
    while kept() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the thread of the other replica takes a moment to hear of it
        gc.collect()


def test_an_eof_error_of_the_module_is_one_of_the_module() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() == 0:
                raise EOFError("nothing to read")
            return x

    model = in_processes(Reads())
    with pytest.raises(EOFError, match="nothing to read"):
        model(torch.zeros(2))
    assert model(torch.ones(2)).tolist() == [1, 1]


def test_parameters_that_are_given_other_memory_in_a_call() -> None:
    """As RNNs do on GPUs, to have theirs in one piece."""

    class Moves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.clone()
            return super().forward(x)

    module = Moves(2, 2, bias=False)
    model = in_processes(module)
    for value in (1.0, 5.0):
        nn.init.constant_(module.weight, value)
        assert model(torch.ones(4, 2)).eq(2 * value).all()


def test_gradients_are_not_shared_with_what_is_forked() -> None:
    module = WithLoss()
    in_processes(module)(words(6)).backward()
    before = [parameter.grad.clone() for parameter in module.parameters()]
    if not (pid := os.fork()):
        for parameter in module.parameters():
            parameter.grad.zero_()
        os._exit(0)
    os.waitpid(pid, 0)
    for parameter, gradient in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_gradients_are_tensors_of_their_own() -> None:
    """Not views of one: that would be saved with each, and be written to with each."""
    module = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 1))
    output = in_processes(module)(torch.ones(4, 500)).sum()
    large, _, small, _ = torch.autograd.grad(output, list(module.parameters()))
    file = io.BytesIO()
    torch.save(small, file)
    assert file.tell() < 20_000
    factor = torch.ones_like(small, requires_grad=True)
    product = (small * factor).sum()
    large.zero_()
    product.backward()
    assert torch.equal(factor.grad, small)


class InParts(nn.Module):
    """Uses its table several times, within reentrant checkpoints, whose gradients come apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def looked_up(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * F.embedding(words, self.table, sparse=True)

    def multiplied(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.table)

    def forward(self, words: torch.Tensor, order: str) -> torch.Tensor:
        x = torch.ones(len(words), 8, dtype=torch.float64, requires_grad=True)
        for kind in order:
            use = {"d": self.multiplied, "s": self.looked_up}[kind]
            x = checkpoint(use, x, words, use_reentrant=True)
        return x


def test_gradients_that_come_in_parts() -> None:
    """Dense ones, sparse ones, and both."""
    module = InParts()
    expected = copy.deepcopy(module)
    model = in_processes(module)
    for order in ("dd", "sd", "ds", "ss", "dsds"):
        module.zero_grad()
        expected.zero_grad()
        model(words(6), order).square().sum().backward()
        expected(words(6), order).square().sum().backward()
        torch.testing.assert_close(
            module.table.grad.to_dense(), expected.table.grad.to_dense(), **TOLERANCE
        )


def test_a_first_call_in_inference_mode() -> None:
    """The parameters are moved then, and are to be trained all the same."""
    module = WithLoss()
    model = in_processes(module)
    with torch.inference_mode():
        model(words(4))
    assert not any(parameter.is_inference() for parameter in module.parameters())
    module(words(4)).backward()


def test_memory_that_cannot_be_mapped_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender would go on to use what this end doesn't have."""
    mine, theirs = socket.socketpair()
    sender, receiver = Channel(mine), Channel(theirs)
    sender.send(torch.ones(3))

    def full(descriptor: int) -> torch.Tensor:
        os.close(descriptor)
        raise SharedMemoryFull("no room")

    monkeypatch.setattr(channel, "map_segment", full)
    with pytest.raises(SharedMemoryFull):
        receiver.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        sender.send(torch.ones(3))
    sender.close()
