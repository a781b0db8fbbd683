"""Ranks of mpiexec or srun meet: on one host by their job's name, on several by MPI."""

from __future__ import annotations

import errno
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lockstep import errors
from lockstep.world import Placement, Starter, rendezvous
from lockstep.world.rendezvous import meet, roll_call

pytestmark = pytest.mark.usefixtures("what_torch_opens_for_good", "a_fresh_process")

SOON = timedelta(seconds=1)
LATER = timedelta(seconds=60)


# Ranks on one host, as threads.


def together(places: list[Placement], timeout: timedelta) -> list[object]:
    results: list[object] = [None] * len(places)
    # Whoever comes comes at once, however slowly threads begin.
    have_met = threading.Barrier(len(places), timeout=100)
    ranks = {place.rank for place in places}

    def run(index: int) -> None:
        try:
            store = meet(places[index], LATER if 0 in ranks else timeout)
            have_met.wait()
            results[index] = list(roll_call(store, places[index], timeout, f"I am {index}"))
            if places[index].rank:
                store.add("done", 1)
            else:  # the store is this rank's: it is gone when it leaves
                while store.add("done", 0) < places[index].world_size - 1:
                    time.sleep(0.01)
        except errors.LockstepError as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(places))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return results


def placements(world_size: int, job_id: str | None = None) -> list[Placement]:
    job_id = job_id or uuid.uuid4().hex
    return [
        Placement(Starter.OPEN_MPI, rank, world_size, rank, world_size, None, job_id)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("has_memfd", [True, False])
def test_ranks_of_one_job_meet_by_its_name(
    has_memfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_memfd:
        monkeypatch.setattr(os, "memfd_create", refuse)
    assert together(placements(3), LATER) == [["I am 0", "I am 1", "I am 2"]] * 3


def test_a_name_cannot_be_taken_before_the_ranks_come() -> None:
    places = placements(2)
    job = places[0].job_id
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0lockstep/{os.getuid()}/{job}")
        stranger.listen()
        assert together(places, LATER) == [["I am 0", "I am 1"]] * 2


def test_the_file_of_another_user_is_not_taken_for_a_store(monkeypatch) -> None:
    place = placements(2)[1]
    name = rendezvous._name_of(str(place.job_id))
    file = os.memfd_create(f"{name}-{os.getpid()}")
    try:
        assert rendezvous._file_of_rank_0(name) == f"/proc/{os.getpid()}/fd/{file}"
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert rendezvous._file_of_rank_0(name) is None
        with pytest.raises(errors.RendezvousFailed, match="did not find rank 0"):
            meet(place, SOON)
    finally:
        os.close(file)


def test_the_file_of_a_store_is_kept_open_once_though_several_threads_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened, both_open = tmp_path / "store", list[int](), threading.Barrier(2)
    path.touch()

    def open_both(*args: object) -> int:
        both_open.wait(20)
        opened.append(descriptor := original_open(*args))
        both_open.wait(20)
        return descriptor

    original_open = os.open
    monkeypatch.setattr(rendezvous, "_open_files", kept := dict[str, int]())
    monkeypatch.setattr(rendezvous.os, "open", open_both)
    threads = [threading.Thread(target=rendezvous._open_file, args=(str(path),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    monkeypatch.undo()
    assert len(opened) == 2
    os.close(kept[str(path)])


def test_two_jobs_do_not_meet() -> None:
    first, second = placements(2), placements(2)
    assert together(first + second, LATER) == [
        ["I am 0", "I am 1"], ["I am 0", "I am 1"], ["I am 2", "I am 3"], ["I am 2", "I am 3"]
    ]  # fmt: skip


def test_ranks_missing_from_a_job_are_named() -> None:
    outcomes = together(placements(4)[:2], SOON)
    assert all(isinstance(outcome, errors.RendezvousFailed) for outcome in outcomes)
    assert "did not see rank 2, 3" in str(outcomes[0])


def test_rank_0_missing_from_a_job_is_named() -> None:
    (outcome,) = together(placements(2)[1:], SOON)
    assert isinstance(outcome, errors.RendezvousFailed)
    assert "did not find rank 0" in str(outcome)


def test_mpi_on_several_hosts_without_an_address_says_what_to_set() -> None:
    place = Placement(Starter.OPEN_MPI, 0, 4, 0, 2, None, "job")
    with pytest.raises(errors.InitError, match=r"MASTER_ADDR|torch-lockstep\[mpi\]"):
        meet(place, SOON)


def test_ranks_of_mpi_on_several_hosts_meet_at_numeric_addresses(monkeypatch) -> None:
    told: queue.Queue[object] = queue.Queue()

    def bcast(value: object) -> object:
        if value is not None:
            told.put(value)
        return value or told.get(timeout=60)

    mpi4py = ModuleType("mpi4py")
    mpi4py.MPI = SimpleNamespace(COMM_WORLD=SimpleNamespace(bcast=bcast))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    monkeypatch.setattr(socket, "getfqdn", lambda: "1.0.0.127.in-addr.arpa")
    places = [Placement(Starter.MPICH, rank, 2, 0, 1) for rank in range(2)]
    stores = [meet(place, LATER) for place in places]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_mpi4py_without_a_library_of_mpi_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        raise RuntimeError("cannot load MPI library")

    mpi4py = ModuleType("mpi4py")
    mpi4py.__getattr__ = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    with pytest.raises(errors.InitError, match="MASTER_ADDR"):
        meet(Placement(Starter.MPICH, 0, 2, 0, 1), SOON)


ALL_REDUCE = r"""
import torch, torch.distributed as dist, lockstep
world = lockstep.init()
total = torch.ones(1) * (world.rank + 1)
dist.all_reduce(total)
print(f"{world.starter.name} {world.rank} {world.local_rank} {int(total)}\n", end="", flush=True)
"""

# MPICH gives its jobs no name; what the ranks share is the process that started them.
LIKE_MPICH = """
import os, sys
import lockstep
for rank in range(2):
    if not os.fork():
        os.environ |= {"PMI_RANK": str(rank), "PMI_SIZE": "2",
                       "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
        exec(sys.argv[1])
        sys.exit()
sys.exit(max(os.wait()[1] for _ in range(2)))
"""


@pytest.mark.forks
def test_ranks_of_mpich_meet_by_the_process_that_started_them() -> None:
    command = [sys.executable, "-c", LIKE_MPICH, ALL_REDUCE]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    for run in runs:
        output, _ = run.communicate(timeout=60)
        assert sorted(output.splitlines()) == ["MPICH 0 0 3", "MPICH 1 1 3"]
        assert run.returncode == 0


def mpiexecs() -> list[list[str]]:
    """The MPI launchers on this machine, with what they need to run here."""
    found = []
    for name in ("mpiexec.mpich", "mpiexec.openmpi"):
        if any(os.access(os.path.join(p, name), os.X_OK) for p in os.get_exec_path()):
            options = ["--oversubscribe"] if name == "mpiexec.openmpi" else []
            options += ["--allow-run-as-root"] if options and os.getuid() == 0 else []
            found.append([name, *options])
    return found


@pytest.mark.skipif(not mpiexecs(), reason="neither MPICH nor Open MPI is installed")
def test_mpiexec() -> None:
    for mpiexec in mpiexecs():
        run = subprocess.run(
            [*mpiexec, "-n", "2", sys.executable, "-c", ALL_REDUCE],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        starter = "MPICH" if "mpich" in mpiexec[0] else "OPEN_MPI"
        lines = sorted(run.stdout.split("\n"))
        assert lines[-2:] == [f"{starter} 0 0 3", f"{starter} 1 1 3"]
