"""Training scripts for torch's DDP, of which the line that imports it is changed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.forks import Forks
from tests.clients.toy import assert_ranks_as_alone

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ["language.py", "images.py"]


def run_script(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    torch.set_default_dtype(torch.float32)


def results_in(folder: Path, size: int) -> list[Any]:
    results = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
    for result in results[1:]:  # the one that evaluates may be alone with that
        result["losses"] = results[0]["losses"]
    return results


@pytest.mark.parametrize("name", NAMES)
def test_a_script_gives_what_one_process_gives(forks: Forks, name: str, tmp_path: Path) -> None:
    forks.run(run_script, 1, name, "torch", str(tmp_path), "")
    (alone,) = results_in(tmp_path, 1)
    for wrapper, backend in (("torch", "gloo"), ("torch", "shm"), ("lockstep", "gloo")):
        forks.run(run_script, 2, name, wrapper, str(tmp_path), backend)
        assert_ranks_as_alone(results_in(tmp_path, 2), alone)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(SCRIPTS / name)]
    run = subprocess.run(
        [*command, "lockstep", str(tmp_path), "shm"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert_ranks_as_alone(results_in(tmp_path, 2), alone)
