"""Programs whose ranks are forks of a process that has imported torch."""

import subprocess
import sys
import textwrap
from pathlib import Path

# Forks the ranks after torch is imported: that takes longer than most of what is tested.
_PRELUDE = """
import contextlib, gc, os, resource, signal, sys, threading, time, warnings
from datetime import timedelta
import torch, torch.distributed as dist
from lockstep.comm.backends import register_backends
from lockstep.errors import *
torch.set_num_threads(1)
register_backends()

def join(rank, size=2, name="store", seconds=20):
    dist.init_process_group("shm", init_method=f"file://{folder}/{name}", rank=rank,
                            world_size=size, timeout=timedelta(seconds=seconds))
    return dist.group.WORLD

def total(numel=3):
    tensor = torch.ones(numel)
    dist.all_reduce(tensor)
    return tensor[-1].item()

def raised(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")

folder = sys.argv[1]
rank = 0
for other in range(1, int(sys.argv[2])):
    if os.fork() == 0:
        rank = other
        break
"""
_POSTLUDE = """
if rank == 0:
    for _ in range(int(sys.argv[2]) - 1):
        _, status = os.wait()
        assert status in (0, signal.SIGKILL), status
"""


def run(folder: Path, body: str, size: int = 2, prefix: tuple[str, ...] = ()) -> None:
    """Run ``body`` on each rank, which all must end well without a word on stderr."""
    program = _PRELUDE + textwrap.dedent(body) + _POSTLUDE
    arguments = [sys.executable, "-c", program, str(folder), str(size)]
    done = subprocess.run([*prefix, *arguments], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
