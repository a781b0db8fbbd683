"""Importing torch makes lockstep's backends, whoever imports it first."""

from __future__ import annotations

import subprocess
import sys

import pytest


def in_new_interpreter(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("module", ["torch", "lockstep.comm.network"])
def test_backends_are_there_after_the_first_import_of(module: str) -> None:
    program = f"import {module}; from torch.distributed import Backend; print(Backend.backend_list)"
    assert "'shm', 'threads'" in in_new_interpreter(program)


def test_what_torch_imports_imports_no_torch() -> None:
    """It may be imported in the middle of torch's import, by a module that imports torch."""
    program = "import lockstep.comm.backends, sys; print('torch' in sys.modules)"
    assert in_new_interpreter(program) == "False"
