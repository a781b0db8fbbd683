"""A limit on the size of files, ulimit -f, holds for what processes share in memory too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launcher.bench import Bench

# The file of the store may grow by so many bytes from there on.
LIMIT = """
    import os, resource
    from pathlib import Path

    def size():
        files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
        (found,) = {path.stat().st_size for path in files if "lockstep-store" in os.readlink(path)}
        return found

    def limit(more):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size() + more, -1))
    """
INIT = """
    import lockstep, torch
    from lockstep.errors import RendezvousFailed

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
    try:
        lockstep.init()
    except RendezvousFailed as error:
        assert "is full" in str(error) and "files of 1000 bytes" in str(error), error
        raise SystemExit("no room") from None
    """
GROUPS = """
    import lockstep, torch.distributed as dist

    lockstep.init()
    dist.barrier()
    limit(4000)
    for _ in range(100):
        dist.new_group(backend="gloo")
    """
TRAIN = """
    import lockstep, torch, torch.distributed as dist

    world = lockstep.init(backend="gloo")
    model = lockstep.parallelize(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    limit(4000)
    for step in range(600):
        model(torch.full((1, 2), 1.0 + world.rank)).sum().backward()
        optimizer.step()
    room = resource.getrlimit(resource.RLIMIT_FSIZE)[0] - size()
    print("room is left" if room > 0 else "it is full")
    """


def run(bench: Bench, script: str) -> subprocess.CompletedProcess[str]:
    path = bench.script(LIMIT + script)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_limit_that_leaves_no_room_for_the_launcher_is_named(bench: Bench) -> None:
    path = bench.script("print('ran')")
    command = f"ulimit -f 8; exec {sys.executable} -m lockstep run -n 2 {path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "(ulimit -f)? It is to be 20 KiB or more." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param(INIT, "no room", marks=pytest.mark.long),
        (GROUPS, "The store where the ranks meet is full: File too large"),
    ],
)
def test_a_store_without_room_is_named_and_ends(bench: Bench, script: str, said: str) -> None:
    done = run(bench, script)
    assert done.returncode == 1
    assert said in done.stderr
    assert "failed first" in done.stderr
    assert "Fatal Python error" not in done.stdout + done.stderr


@pytest.mark.long
def test_a_full_store_is_dropped(bench: Bench) -> None:
    """Or torch would read its last entry, which is there in part, for ever, if only to free it."""
    script = bench.script(
        """
        import os, resource
        from datetime import timedelta
        from lockstep.errors import RendezvousFailed
        from lockstep.memory_files import memory_file
        from lockstep.world import rendezvous

        path = f"/proc/{os.getpid()}/fd/{memory_file('lockstep-store')}"
        store = rendezvous._file_store(rendezvous._open_file(path), timedelta(seconds=1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
        try:
            store.set("key", "x" * 1000)
        except RuntimeError as error:
            try:
                rendezvous.drop_full_stores(error)
            except RendezvousFailed as named:
                assert "(ulimit -f)" in str(named), named
        assert not store.check(["key"])
        print("dropped")
        """
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "dropped\n"), done.stderr


@pytest.mark.long
def test_training_leaves_room_in_the_store(bench: Bench) -> None:
    """What ranks tell each other of each 64th step is left out beyond half of the limit."""
    done = run(bench, TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("room is left") == 2
