"""Replicas in processes of which some fail, are lost, or are interrupted."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ReplicaLost, SharedMemoryFull
from lockstep.nn.replicas import DataParallel, channel
from lockstep.nn.replicas.group import this_replica
from lockstep.nn.replicas.worker_main import _wait_for_end

# Those of processes that are replaced are closed when garbage is collected.
pytestmark = [pytest.mark.keeps_descriptors, pytest.mark.forks]


class Mean(nn.Module):
    """The mean of what its weight makes of its input, after what is asked for has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.caller = os.getpid()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, *, happens: str = "") -> torch.Tensor:
        is_first = os.getpid() == self.caller
        if happens == "the other dies" and not is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        if happens == "the other's error can't be read" and not is_first:
            raise OnlyThere
        self.seen.append(len(x))
        return lockstep.mean(self.weight * x)

    def alone(self, x: torch.Tensor, *, happens: str = "") -> torch.Tensor:
        if happens == "the first is interrupted" and os.getpid() == self.caller:
            time.sleep(0.5)  # the other has answered by then
            raise KeyboardInterrupt
        return self.weight * x


class OnlyThere(Exception):
    """What can be made where it is raised, and not where it is read."""

    def __reduce__(self) -> tuple:
        return _made_there, (os.getpid(),)


def _made_there(pid: int) -> OnlyThere:
    if os.getpid() != pid:
        raise LookupError("made elsewhere")
    return OnlyThere()


def replicated(module: nn.Module | None = None) -> DataParallel:
    return DataParallel(module or Mean(), ["cpu", "cpu"], workers="processes")


def test_the_rest_of_a_sum_is_not_taken_for_the_sum() -> None:
    """A rank that has lost a replica repeats its step, and the others have heard of no other."""
    means: dict[int, list[float]] = {0: [], 1: []}

    def body(world: lockstep.World) -> None:
        model = replicated()
        for step in range(2):
            x = torch.full((4,), 10.0**step)
            if world.rank == 0 and step:
                with pytest.raises(ReplicaLost, match="exit code -9"):
                    model(x, happens="the other dies")
            means[world.rank].append(float(model(x).detach()))

    lockstep.launch(body, 2, ranks="threads")
    assert means == {0: [1.0, 10.0], 1: [1.0, 10.0]}


def test_a_call_before_the_module_was_changed_has_no_backward_any_more() -> None:
    module = Mean()
    model = replicated(module)
    earlier = model(torch.ones(4))
    module.more = nn.Parameter(torch.ones(()))
    assert float(model(torch.ones(4)).detach()) == 1
    with pytest.raises(ReplicaLost, match="The module has changed since this call"):
        earlier.backward()


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no room for messages of more than 150 KB of tensors from the caller."""
    memory = channel.shared_memory

    def refuse(num_bytes: int, device: torch.device) -> object:
        if num_bytes > 300_000:  # a message takes twice its size
            raise SharedMemoryFull("No room.")
        return memory(num_bytes, device)

    monkeypatch.setattr(channel, "shared_memory", refuse)


@pytest.mark.usefixtures("little_memory")
def test_an_argument_that_there_is_no_room_for() -> None:
    model = replicated()
    with pytest.raises(SharedMemoryFull, match="No room"):
        model(torch.ones(100_000))
    assert float(model(torch.ones(4)).detach()) == 1


@pytest.mark.usefixtures("little_memory")
def test_a_sum_that_there_is_no_room_for() -> None:
    """It is the replica's error, which would wait for it in vain."""
    module = nn.EmbeddingBag(50_000, 1, mode="sum", scale_grad_by_freq=True)
    model = replicated(module)
    with pytest.raises(SharedMemoryFull, match="No room") as caught:
        model(torch.zeros(4, 1, dtype=torch.long))
    assert "(raised in replica 1 on cpu)" in caught.value.__notes__


def test_an_interruption_when_all_others_have_answered() -> None:
    model = replicated()
    with pytest.raises(KeyboardInterrupt):
        model.alone(torch.ones(4), happens="the first is interrupted")
    assert model.alone(torch.ones(4)).tolist() == [1] * 4


_finished: list[float] = []
_may_end = threading.Event()


def finish_at_once(total: torch.Tensor) -> torch.Tensor:
    _finished.append(float(total))
    return total


def finish_late(total: torch.Tensor) -> torch.Tensor:
    """As if other ranks had not come yet, when Ctrl-C comes."""
    os.kill(os.getpid(), signal.SIGINT)
    if not _may_end.wait(20):
        _finished.append(float(total))
    return total


def finish_late_elsewhere(total: torch.Tensor) -> torch.Tensor:
    """The same, but not the thread that waits for the sum gets the signal."""
    signal.raise_signal(signal.SIGINT)
    if not _may_end.wait(20):
        _finished.append(float(total))
    return total


class Sums(nn.Module):
    """Adds up ones, in one replica before the other."""

    def __init__(self, finish: Callable, interruption: type[BaseException] | None) -> None:
        super().__init__()
        self.caller, self.finish = os.getpid(), finish
        self.interruption = interruption

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = os.getpid() == self.caller
        if is_first == (self.interruption is not None):
            time.sleep(0.5)
        if is_first and self.interruption is not None:
            raise self.interruption
        replica = this_replica()
        assert replica is not None
        return replica.add_up(torch.ones(()), self.finish)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_nothing_is_added_up_without_a_replica_that_is_interrupted(
    interruption: type[BaseException],
) -> None:
    """The other one has come, and what ranks would make of its part alone is not what all want."""
    _finished.clear()
    with pytest.raises(interruption):
        replicated(Sums(finish_at_once, interruption))(torch.ones(4))
    assert not _finished


@pytest.mark.parametrize("finish", [finish_late, finish_late_elsewhere])
def test_an_interruption_while_ranks_are_waited_for(finish: Callable) -> None:
    """The other replica came last, and the thread that listens to it makes the sum."""
    _finished.clear()
    _may_end.clear()
    with pytest.raises(KeyboardInterrupt):
        replicated(Sums(finish, None))(torch.ones(4))
    _may_end.set()
    assert not _finished


def test_an_error_that_cannot_be_read_is_one() -> None:
    model = replicated()
    with pytest.raises(LookupError, match="made elsewhere"):
        model(torch.ones(4), happens="the other's error can't be read")
    assert float(model(torch.ones(4)).detach()) == 1


def test_what_replicas_put_in_containers_is_no_news() -> None:
    """The module isn't sent again for it, which would end the graphs of the calls before."""
    model = replicated()
    first, second = model(torch.ones(4)), model(torch.ones(4))
    (first + second).backward()
    assert model.module.weight.grad == 2


class NotesGradients(nn.Linear):
    """Puts something in a container in its backward."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.noted: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: self.noted.append(float(gradient.sum())))
        return y


def test_nor_is_what_they_put_there_in_a_backward() -> None:
    model = replicated(NotesGradients())
    first, second = model(torch.ones(4, 1)), model(torch.ones(4, 1))
    first.sum().backward()
    model(torch.ones(4, 1))
    second.sum().backward()
    assert model.module.weight.grad == 8


def test_a_forked_child_has_no_part_in_its_parents_processes() -> None:
    model = replicated()
    loss = model(torch.ones(4))
    if not (pid := os.fork()):
        code = 0
        try:
            loss.backward()
        except ReplicaLost:
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    loss.backward()
    assert model.module.weight.grad == 1


class TrainsInside(nn.Module):
    """Looks at gradients of its own before it returns, as meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            self.layer(x).sum().backward()
        inner = self.layer.weight.grad
        assert inner is not None
        scale = inner.detach().clone()
        self.layer.zero_grad()
        return self.layer(x) * scale.sum()


def test_backwards_of_the_module_are_its_own() -> None:
    module = TrainsInside()
    x = torch.randn(4, 2, dtype=torch.float64)
    model = replicated(module)
    model(x).sum().backward()
    parts = [x[:2], x[2:]]
    expected = sum(part.sum() * part.sum(0) for part in parts)
    torch.testing.assert_close(module.layer.weight.grad, expected[None], rtol=1e-12, atol=1e-12)


class Stops(nn.Module):
    """Stops one replica, as SIGSTOP does, or keeps the first one busy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, *, stops: int = -1, where: str = "") -> torch.Tensor:
        replica = this_replica()
        assert replica is not None
        if replica.index == stops:
            if where == "before the mean":
                os.kill(os.getpid(), signal.SIGSTOP)
            if where == "busy":
                time.sleep(5.5)
            if where == "in its backward":
                x = x.clone().requires_grad_()
                x.register_hook(lambda _: os.kill(os.getpid(), signal.SIGSTOP))
        return lockstep.mean(self.weight * x)

    def pid(self, x: torch.Tensor, ballast: bytes = b"") -> int:
        return os.getpid()


def stopping() -> DataParallel:
    timeout = timedelta(seconds=4)  # more than the others take where much else is going on
    return DataParallel(Stops(), ["cpu"] * 3, workers="processes", timeout=timeout)


NAMED = r"replica {} \(pid {}\) has not answered within 4 s"


def test_a_replica_that_is_stopped_is_named_and_ended() -> None:
    """The others wait for it in the mean, and it is not they who are late."""
    model, x = stopping(), torch.ones(6)
    pids = model.pid(x)
    with pytest.raises(ReplicaLost, match=NAMED.format(2, pids[2])):
        model(x, stops=2, where="before the mean")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[2], 0)
    assert float(model(x).detach()) == 1


def test_a_replica_that_is_stopped_in_its_backward() -> None:
    model, x = stopping(), torch.ones(6)
    pids = model.pid(x)
    loss = model(x, stops=2, where="in its backward")
    with pytest.raises(ReplicaLost, match=NAMED.format(2, pids[2])):
        loss.backward()


@pytest.mark.long
def test_a_replica_that_is_stopped_and_does_not_read() -> None:
    model, x = stopping(), torch.ones(6)
    pids = model.pid(x)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(ReplicaLost, match=NAMED.format(1, pids[1])):
        model.pid(x, b"0" * 10_000_000)


@pytest.mark.long
def test_replicas_that_wait_for_a_sum_are_not_late() -> None:
    """The caller's own part takes longer than the timeout, and theirs is done."""
    assert float(stopping()(torch.ones(6), stops=0, where="busy").detach()) == 1


def test_a_callers_end_is_noticed_though_others_hold_its_connection_open() -> None:
    here, there = socket.socketpair()
    with here, there:
        waiting = threading.Thread(target=_wait_for_end, args=(here, os.getpid()))  # not a parent
        waiting.start()
        waiting.join(30)
        was_noticed = not waiting.is_alive()
        there.shutdown(socket.SHUT_RDWR)
        waiting.join()
    assert was_noticed
