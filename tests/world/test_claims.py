"""Each rank is one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.errors import ContradictoryInit, RendezvousFailed
from lockstep.world import Placement, Starter, rendezvous
from lockstep.world.rendezvous import _claimant, _process, claim, meet
from tests.launcher.bench import free_port
from tests.world.stores import close_after_their_stores

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
    return _claimant(_process(os.getppid()))


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_second_process_of_a_rank_is_refused(
    tmp_path: Path, in_a_file: bool, of_another: str
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1) if in_a_file else dist.HashStore()
    store.set(KEY, of_another)
    said = (
        rf"Rank 0 of 2 was claimed by two processes: process {os.getppid()} on {HERE}, which came "
        rf"first, and process {os.getpid()} on {HERE}"
    )
    with pytest.raises(ContradictoryInit, match=said):
        claim(store, FIRST, SOON)
    assert store.get(KEY).decode() == of_another
    claim(store, Placement(Starter.TORCHRUN, 1, 2, 1, 2), SOON)


@pytest.mark.parametrize(
    "before",
    [
        _claimant(_process(os.getpid())),  # an init() before
        _claimant(f"{os.getppid()}-1"),  # has ended, and another process has its id
        _claimant(f"{2**22 + 1}-1"),  # has ended
        _claimant("rubbish"),
    ],
    ids=["itself", "another with its id", "one that has ended", "none"],
)
def test_a_rank_that_comes_again_is_welcome(before: str) -> None:
    store = dist.HashStore()
    store.set(KEY, before)
    claim(store, FIRST, SOON)
    assert store.get(KEY).decode() == _claimant(_process(os.getpid()))


def test_a_process_of_another_host_has_the_rank_unless_a_launcher_holds_the_store() -> None:
    store = dist.HashStore()
    store.set(KEY, "elsewhere/a kernel/12-1")
    with pytest.raises(ContradictoryInit, match="process 12 on elsewhere, which came first, and"):
        claim(store, FIRST, SOON)
    claim(store, replace(FIRST, agent_hosts_store=True), SOON)  # ranks may move at a restart
    assert store.get(KEY).decode() == _claimant(_process(os.getpid()))


def test_hosts_of_one_name_are_different_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes have the same id and start time too, as a container's first ones may."""
    store = dist.HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "this_kernel", lambda namespace: f"another {namespace}")
        claim(store, FIRST, SOON)
    said = (
        rf"process {os.getpid()} on {HERE} \(another host or container of this name\), which came"
    )
    with pytest.raises(ContradictoryInit, match=said):
        claim(store, FIRST, SOON)
    # In the launcher's file, which outlives a restart, it may be a container that has ended.
    claim(store, replace(FIRST, store_path="/proc/1/fd/3"), SOON)
    assert store.get(KEY).decode() == _claimant(_process(os.getpid()))


def test_a_second_rank_0_is_refused_where_ranks_meet_by_name() -> None:
    """As under srun and mpiexec, without a port."""
    place = Placement(Starter.OPEN_MPI, 0, 2, 0, 2, job_id=uuid.uuid4().hex)
    name = rendezvous._name_of(str(place.job_id))
    open_one = f"import os; os.memfd_create(f'{name}-{{os.getpid()}}'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", open_one], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()
        files = set(os.listdir("/proc/self/fd"))
        with pytest.raises(ContradictoryInit, match=f"process {first.pid} on {HERE}, which came"):
            meet(place, SOON)
        assert set(os.listdir("/proc/self/fd")) == files  # no rank takes its file for the store
        first.communicate(b"\n")
    meet(place, SOON)
    close_after_their_stores({name: rendezvous._open_files.pop(name)})


def test_a_second_rank_0_does_not_blame_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stands for both of them."""
    monkeypatch.setattr(rendezvous, "_held_open", {})
    monkeypatch.setattr(rendezvous, "_open_files", {})
    place = Placement(Starter.TORCHRUN, 0, 2, 0, 2, master=("127.0.0.1", free_port()))
    meet(place, SOON)
    rendezvous._held_open, held = {}, rendezvous._held_open
    with pytest.raises(ContradictoryInit, match=f"process {os.getpid()} on {HERE}, which"):
        meet(place, SOON)
    held.clear()
    close_after_their_stores(rendezvous._open_files)


def test_a_store_that_is_gone_fails_the_rendezvous() -> None:
    class Gone(dist.HashStore):
        def compare_set(self, *_: object) -> bytes:
            raise dist.DistNetworkError("failed to recv, got 0 bytes")

    with pytest.raises(RendezvousFailed, match="rank 0 lost the store where the ranks meet: fail"):
        claim(Gone(), FIRST, SOON)
