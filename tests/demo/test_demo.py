"""The demo: what it proves, and that it would notice if it were not so."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep import demo as training
from lockstep.demo import ConvNet, Digits, State, largest_difference, train_exactly
from lockstep.world import Starter, World
from tests.ranks import run_ranks

pytestmark = pytest.mark.forks

CPU = torch.device("cpu")


def world_of(rank: int, world_size: int, group: dist.ProcessGroup | None) -> World:
    return World(rank, world_size, rank, world_size, CPU, group, Starter.PROCESS_GROUP)


ALONE = world_of(0, 1, None)


@pytest.fixture
def digits() -> Digits:
    """Noise in the shape of digits, of a number that no world size divides."""
    images, labels = torch.randn(397, 1, 28, 28), torch.randint(10, (397,))
    return Digits(images, labels, images[:31], labels[:31], "noise")


@pytest.fixture
def start() -> State:
    return ConvNet().state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_train_as_one_process_does(digits, start, world_size: int) -> None:
    alone = train_exactly(start, digits, ALONE, 1)
    assert largest_difference(alone, start) > 1e-3

    def body(rank: int, group: dist.ProcessGroup) -> State:
        return train_exactly(start, digits, world_of(rank, world_size, group), 1)

    for together in run_ranks(world_size, body):
        assert largest_difference(together, alone) < 1e-12


def test_one_sample_taken_twice_would_be_seen(digits, start, monkeypatch) -> None:
    alone = train_exactly(start, digits, ALONE, 1)
    whole = training.loader_of

    def wrong(digits: Digits, world: World, seed: int) -> lockstep.DataLoader[list[Tensor]]:
        images, labels = digits.train_images.clone(), digits.train_labels.clone()
        images[7], labels[7] = images[8], labels[8]
        return whole(digits._replace(train_images=images, train_labels=labels), world, seed)

    monkeypatch.setattr(training, "loader_of", wrong)

    def body(rank: int, group: dist.ProcessGroup) -> State:
        return train_exactly(start, digits, world_of(rank, 2, group), 1)

    for together in run_ranks(2, body):
        assert largest_difference(together, alone) > 1e-6


def test_a_last_batch_of_fewer_images_than_ranks_is_trained_on_too(digits, start) -> None:
    few = digits._replace(
        train_images=digits.train_images[:129], train_labels=digits.train_labels[:129]
    )
    alone = train_exactly(start, few, ALONE, 1)

    def body(rank: int, group: dist.ProcessGroup) -> State:
        return train_exactly(start, few, world_of(rank, 2, group), 1)

    for together in run_ranks(2, body):
        assert largest_difference(together, alone) < 1e-12


def test_a_difference_is_a_failure_of_the_command(monkeypatch, digits, start) -> None:
    wrong = {name: value + 1e-6 for name, value in start.items()}
    monkeypatch.setattr(training, "load", lambda _: digits)
    monkeypatch.setattr(training, "launch", lambda *_, **__: [(start, start)])
    monkeypatch.setattr(training, "train_exactly", lambda *_: wrong)
    assert not training.demo("2", "1", 1, "digits")
    monkeypatch.setattr(training, "train_exactly", lambda *_: start)
    assert training.demo("2", "1", 1, "digits")


def test_the_demo_trains_on_processes(monkeypatch, digits, capfd) -> None:
    monkeypatch.setattr(training, "load", lambda _: digits)
    assert training.demo("2", "1", 5, "digits")
    assert re.search(r"epoch +1 +loss [\d.]+ +accuracy +[\d.]+%", capfd.readouterr().out)


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", "demo", *options],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("nprocs", ["1", "3"])
def test_demo_command(nprocs: str) -> None:
    run = demo("--nprocs", nprocs, "--epochs", "2", "--seed", "5")
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"epoch +\d+ +loss [\d.]+ +accuracy +[\d.]+%", run.stdout)
    assert len(lines) == 2
    accuracies = [float(number) for number in re.findall(r"accuracy +([\d.]+)%", run.stdout)]
    assert accuracies[-1] > 50  # one guess in ten is right
    difference = re.search(r"parameters\s+is\s+([\d.e+-]+)\.\s", run.stdout)
    assert difference is not None, run.stdout
    assert float(difference[1]) < 1e-9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nprocs", "0"], "0"),
        (["--nprocs", "two"], "two"),
        (["--nprocs", "129"], "can't be split"),
        (["--epochs", "0"], "--epochs is 0"),
        (["--seed", "99999999999999999999"], "--seed is 9999"),
        (["--data", "no-such-folder"], "no such folder"),
        (["--data", "mnist"], "torch-lockstep[mnist]"),
    ],
)
def test_demo_refuses_in_a_sentence(options: list[str], says: str) -> None:
    if says == "torch-lockstep[mnist]":
        try:
            import torchvision  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("torchvision is installed, and would download MNIST")
    run = demo(*options)
    assert run.returncode != 0
    assert says in run.stderr
    assert "Traceback" not in run.stderr
