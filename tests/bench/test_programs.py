"""The programs of ``benchmarks``: what they import is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "__init__")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of other packages
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_is_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
