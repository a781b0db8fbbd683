"""Each rank is one process."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.errors import ContradictoryInit
from lockstep.world import Placement, Starter, rendezvous
from lockstep.world.rendezvous import _process, claim, meet
from tests.launcher.bench import free_port

HERE = socket.gethostname()
KEY = "lockstep/claim/0"
SOON = timedelta(seconds=5)
FIRST = Placement(Starter.TORCHRUN, 0, 2, 0, 2)


@pytest.fixture(autouse=True, scope="module")
def what_torch_opens_for_good() -> None:
    """With a process's first store, torch opens a pipe that it never closes."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def of_another() -> str:
    """The claim of a process that runs, which isn't this one."""
    return f"{HERE}/{_process(os.getppid())}"


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_second_process_of_a_rank_is_refused(
    tmp_path: Path, in_a_file: bool, of_another: str
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1) if in_a_file else dist.HashStore()
    store.set(KEY, of_another)
    said = rf"rank 0 of 2: process {os.getppid()}, which came first, and process {os.getpid()}"
    with pytest.raises(ContradictoryInit, match=said):
        claim(store, FIRST)
    assert store.get(KEY).decode() == of_another
    claim(store, Placement(Starter.TORCHRUN, 1, 2, 1, 2))


@pytest.mark.parametrize(
    "before",
    [
        f"{HERE}/{_process(os.getpid())}",  # an init() before
        f"{HERE}/{os.getppid()}-1",  # has ended, and another process has its id
        f"{HERE}/{2**22 + 1}-1",  # has ended
        f"elsewhere/{os.getppid()}-1",  # before a restart on this host, perhaps
    ],
    ids=["itself", "another with its id", "one that has ended", "one elsewhere"],
)
def test_a_rank_that_comes_again_is_welcome(before: str) -> None:
    store = dist.HashStore()
    store.set(KEY, before)
    claim(store, FIRST)
    assert store.get(KEY).decode() == f"{HERE}/{_process(os.getpid())}"


def test_a_second_rank_0_does_not_blame_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stands for both of them."""
    monkeypatch.setattr(rendezvous, "_held_open", {})
    monkeypatch.setattr(rendezvous, "_open_files", {})
    place = Placement(Starter.TORCHRUN, 0, 2, 0, 2, master=("127.0.0.1", free_port()))
    meet(place, SOON)
    rendezvous._held_open, held = {}, rendezvous._held_open
    with pytest.raises(ContradictoryInit, match=f"process {os.getpid()}, which came first"):
        meet(place, SOON)
    held.clear()
    for file in rendezvous._open_files.values():
        os.close(file)
