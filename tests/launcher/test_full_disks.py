"""A full disk, or one that fills up, is told of once where a run is observed, which goes on."""

from __future__ import annotations

import errno
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launcher.without_memfd import NUMBER, REFUSED, needs_seccomp

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
    ),
]

FILL = """
import contextlib, itertools
with contextlib.suppress(OSError), open("full/filler", "wb", buffering=0) as filler:
    while True:
        filler.write(bytes(512))
with contextlib.suppress(OSError):
    for number in itertools.count():
        open(f"full/empty-{number}", "wb").close()
"""
# Two ranks train, log, print and take snapshots; from step 10 on the disk is full.
SCRIPT = """
import os, sys, time
import torch, lockstep

place = sys.argv[1]
world = lockstep.init()
if world.is_main and place.startswith("log_to "):
    lockstep.log_to(place.removeprefix("log_to "), lines=False)
torch.manual_seed(0)
model = lockstep.parallelize(torch.nn.Linear(500, 500))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in lockstep.steps(40, snapshot_every=3, model=model, optimizer=optimizer):
    if step == 10 and world.is_main:
        exec(open("fill.py").read())
    if step == 25 and world.rank == 1 and not os.path.exists("failed"):
        open("failed", "w").close()
        if place == "restart":
            sys.exit("rank 1 fails once")
    model(torch.ones(2, 500)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    lockstep.log({f"value {number}": float(step) for number in range(50)}, step=step)
    print("step", step, "x" * 300, flush=True)
print("trained", flush=True)
"""
FULL = "No space left on device"
# Options of lockstep run, what is said of each place, and how often.
PLACES: dict[str, tuple[Sequence[str], str, int]] = {
    "trace": (["--trace", "full/trace"], "'s trace can't be written to", 2),
    "logs": (["--log-dir", "full/logs"], "log", 2),
    "live display": (["--log-dir", "full/logs"], "log", 2),
    "log_to full/log.csv": ([], "log_to() can't write to", 1),
    "log_to full/log.jsonl": ([], "log_to() can't write to", 1),
    "log_to full/board": ([], "log_to() can't write to", 1),
    "streams": ([], "", 0),
    "restart": (["--restarts", "1", "--log-dir", "full/logs"], "log", 3),
}


def run(folder: Path, place: str, *, is_early: bool, inner: Sequence[str] = ()) -> tuple[int, str]:
    """Return the exit status of a run on such a disk, and what it wrote to stderr or a terminal."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "fill.py").write_text(FILL)
    (folder / "full").mkdir()
    options = PLACES[place][0] if place in PLACES else ["--restarts", "1"]
    words = ["-m", "lockstep", "run", "-n", "2", *options, "script.py", place]
    prepare = "mount -t tmpfs -o size=64k,nr_inodes=12 none full"
    prepare += ' && "$0" fill.py' * is_early
    to_files = ">full/out 2>full/err" if place == "streams" else ""
    command = ["unshare", "-m", "sh", "-c", f'{prepare} && exec "$@" {to_files}', sys.executable]
    ours, theirs = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                said.append(data)
        except OSError:  # nobody has the other end open any more
            pass

    reader = threading.Thread(target=read)
    reader.start()
    out = (folder / "out").open("w")
    try:
        done = subprocess.run(
            [*command, *(inner or [sys.executable]), *words],
            cwd=folder,
            stdout=theirs if place == "live display" else out,
            stderr=theirs,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"},
            check=False,
        )
    finally:
        out.close()
        os.close(theirs)
        reader.join()
        os.close(ours)
    return done.returncode, b"".join(said).decode()


@pytest.mark.parametrize(
    ("place", "is_early"),
    [
        (place, early)
        for place in PLACES
        for early in (True, False)
        if place != "streams" or not early
    ],
)
def test_a_full_disk_is_told_of_once_and_training_goes_on(
    place: str, is_early: bool, tmp_path: Path
) -> None:
    status, said = run(tmp_path, place, is_early=is_early)
    assert status == 0, said
    assert said.count("Traceback") == (place == "restart")
    _, words, number = PLACES[place]
    told = [line for line in said.splitlines() if FULL in line]
    if is_early and "full/logs" in PLACES[place][0]:
        number = 1 + (place == "restart")  # no rank has a file
    assert len(told) == number, said
    assert all(words in line for line in told)
    if place not in ("streams", "live display"):
        assert (tmp_path / "out").read_text().count("] trained") == 2


@needs_seccomp
def test_snapshots_end_where_there_is_no_room_and_training_goes_on(tmp_path: Path) -> None:
    """Without memfd_create they are files, here in a folder that holds less than one snapshot."""
    start = REFUSED + "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
    mount = 'mount -t tmpfs -o size=900k none /dev/shm && exec "$@"'
    inner = ["sh", "-c", mount, "sh", sys.executable, "-c", start, str(NUMBER), str(errno.ENOSYS)]
    status, said = run(tmp_path, "snapshots", is_early=True, inner=inner)
    assert status == 0, said
    assert said.count("No snapshots are taken any more") == 2
    assert (tmp_path / "out").read_text().count("] trained") == 2
