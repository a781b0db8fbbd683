"""Ranks that share the first GPU: over Gloo, as NCCL refuses that. Others have one each."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

import lockstep
from tests.gpu.accelerator import IS_CUDA


def launch_sharing(fn: Callable[..., Any], nprocs: int, args: Sequence[object] = ()) -> list[Any]:
    """As ``lockstep.launch()``, but ``world.device`` is the first GPU of CUDA on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((fn, args)))
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(nprocs)]
        run = subprocess.run(
            [*command, "-m", "tests.gpu.sharing", folder],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert run.returncode == 0, run.stderr
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(nprocs)]


def main(folder: Path) -> None:
    """Be a rank."""
    world = lockstep.init(device="cuda:0" if IS_CUDA else None)
    fn, args = pickle.loads((folder / "call").read_bytes())
    (folder / str(world.rank)).write_bytes(pickle.dumps(fn(world, *args)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
