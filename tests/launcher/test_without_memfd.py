"""Systems without ``memfd_create``: older kernels, sandboxes, and Pythons built for such."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lockstep import memory_files
from lockstep.comm import Segment
from lockstep.errors import LaunchError, RendezvousFailed, SharedMemoryFull
from lockstep.launcher import launch
from lockstep.memory_files import files_in_memory, memory_file, name_of
from lockstep.run_status import RunStatus
from lockstep.world import Placement, Starter, rendezvous
from tests.launcher.bench import Bench
from tests.launcher.without_memfd import NUMBER, REFUSED, needs_seccomp
from tests.waiting import until

SHM = Path("/dev/shm")

PROGRAM = """
import os, time
import torch, torch.distributed as dist, lockstep
world = lockstep.init()
total = torch.ones(1) * (world.rank + 1)
dist.all_reduce(total)
print(f"{world.starter.name} {world.rank} {dist.get_backend()} {int(total)}", flush=True)
while os.path.exists("wait"):
    time.sleep(0.02)
"""
LIKE_OPEN_MPI = """
if os.environ.get("OMPI_COMM_WORLD_RANK") is None:
    for rank in range(2):
        if not os.fork():
            os.environ |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
                           "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                           "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": sys.argv[4]}
            os.execv(sys.executable, [sys.executable, sys.argv[3]])
    sys.exit(max(os.wait()[1] for _ in range(2)))
"""


@pytest.mark.long
@needs_seccomp
def test_a_full_folder_of_shared_memory_ends_no_run(bench: Bench) -> None:
    """What ranks tell of themselves would else be memory that isn't there."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    start = REFUSED + "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
    full = "mount -t tmpfs -o size=8k none /dev/shm && ! dd if=/dev/zero of=/dev/shm/x 2>/dev/null"
    words = ["-m", "lockstep", "run", "-n", "2", str(bench.script(PROGRAM))]
    done = subprocess.run(
        [
            *("unshare", "-m", "sh", "-c", f'{full}; exec "$@"', "sh"),
            *(sys.executable, "-c", start, str(NUMBER), str(errno.EPERM), *words),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" 3") == 2


@pytest.mark.long
@needs_seccomp
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_run_is_told_of_and_its_ranks_meet(bench: Bench, number: int) -> None:
    (bench.directory / "wait").touch()
    before = set(os.listdir(SHM))
    start = REFUSED + "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
    words = ["-m", "lockstep", "run", "-n", 2, bench.script(PROGRAM)]
    run = bench.start_python("-c", start, NUMBER, number, *words)
    assert until(lambda: f"process {run.pid}, for 0:" in bench.run("status", str(run.pid)).stdout)
    assert {name for name in os.listdir(SHM) if name.startswith("lockstep-")} <= before
    (bench.directory / "wait").unlink()
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert sorted(out.split("\n"))[1:] == [f"[rank {n}] LOCKSTEP {n} gloo 3" for n in range(2)]
    assert "doesn't let processes share memory" in err


@pytest.mark.long
@needs_seccomp
def test_ranks_that_something_else_started_meet(bench: Bench) -> None:
    run = bench.start_python(
        "-c", REFUSED + LIKE_OPEN_MPI, NUMBER, errno.EPERM, bench.script(PROGRAM), bench.directory
    )
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert sorted(out.split("\n"))[1:] == ["OPEN_MPI 0 gloo 3", "OPEN_MPI 1 gloo 3"]


def refuse(*_: object) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("has_shm", [True, False])
def test_a_file_of_this_user_alone_is_found_by_its_name(
    has_shm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    if not has_shm:
        monkeypatch.setattr(memory_files, "_FOLDER", str(tmp_path / "none"))
    with open(memory_file("some-name"), "r+b") as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        assert list(files_in_memory("some-na")) == [(os.getpid(), path)]
        assert name_of(path) == "some-name"
        found = os.fstat(file.fileno())
        assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
        assert not os.get_inheritable(file.fileno())
        file.write(b"there")
        file.flush()
        assert Path(path).read_bytes() == b"there"
    with open(tmp_path / "lockstep-12345678.some-name", "wb") as other:
        assert name_of(f"/proc/self/fd/{other.fileno()}") == ""  # one that a folder has
    run = RunStatus.create("train.py", 2)
    run.ranks[1].begin(1)
    assert run.facts["program"] == "train.py"
    assert [rank.read().rank for rank in run.ranks] == [0, 1]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EACCES])
def test_shared_memory_is_refused_by_name(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks then take Gloo: a file in a folder can be made shorter, and /dev/shm may be small."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(SharedMemoryFull, match=r"memfd_create.*'gloo'"):
        Segment.create(1 << 16)


def test_a_python_without_it_asks_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    segment, bytes_of_it = Segment.create(1 << 16)
    assert os.readlink(f"/proc/self/fd/{segment.descriptor}").startswith("/memfd:lockstep")
    assert not os.get_inheritable(segment.descriptor)
    del bytes_of_it
    segment.close()


def test_without_any_folder_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(memory_files, "_FOLDER", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/else")
    place = Placement(Starter.OPEN_MPI, 0, 2, 0, 2, job_id="none")
    with pytest.raises(RendezvousFailed, match=r"memfd_create.*/nowhere/else.*TMPDIR"):
        rendezvous.meet(place, timedelta(seconds=5))
    with pytest.raises(LaunchError, match=r"memfd_create.*TMPDIR"):
        launch(print, nprocs=1)
