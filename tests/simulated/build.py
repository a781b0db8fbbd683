"""Builds the simulated accelerator with g++, against the torch that is there.

The library lies in the cache of the user, under a hash of its source and of the torch it links.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "device").iterdir())
# The device type that it takes: CUDA's, or the one for those that torch doesn't know.
DISGUISES = {"cuda": ["-DSIMULATE_CUDA"], "sim": []}


class CannotBuild(Exception):
    """Why there is no simulated accelerator here."""


def library(disguise: str) -> Path:
    """Return the library, which is built unless it is there."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise CannotBuild(f"torch {torch.__version__} is built for real GPUs")
    compiler = shutil.which("g++")
    # Torch's own libraries are loaded before it, wherever they lie.
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {disguise}".encode())
    for source in SOURCES:
        key.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep"
    path = cache / f"simulated-{key.hexdigest()[:16]}.so"
    if not path.exists():
        if compiler is None:
            raise CannotBuild("there is no g++ to build the simulated accelerator")
        cache.mkdir(parents=True, exist_ok=True)
        _compile(compiler, disguise, path)
    return path


def _compile(compiler: str, disguise: str, path: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder, "_simulated.so")
        command = [
            *(compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-w"),
            *("-DTORCH_EXTENSION_NAME=_simulated", *DISGUISES[disguise]),
            *(f"-I{include}" for include in includes),
            f"-I{sysconfig.get_path('include')}",
            *(HERE / "device/module.cpp", "-o", built),
            f"-L{root / 'lib'}",
            *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line]
            raise CannotBuild(
                f"the simulated accelerator can't be built with torch {torch.__version__}: "
                + "\n".join(errors[:5] or run.stderr.splitlines()[:5])
            )
        os.replace(built, path)


def environment(disguise: str = "cuda", devices: int = 2, delay: str = "0,0") -> dict[str, str]:
    """Return variables with which every Python has the devices once it imports torch."""
    paths = [str(HERE / "site"), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "SIM_DISGUISE": disguise,
        "SIM_LIBRARY": str(library(disguise)),
        "SIM_DEVICES": str(devices),
        "SIM_DELAY": delay,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
