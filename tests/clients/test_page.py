"""The programs on the documentation's page about trainers, on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
# Those marked "py" need a trainer; tests/test_docs.py runs the others.
PROGRAMS = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```py\n(.*?)^```", PAGE, re.M | re.S))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr


def test_all_programs_are_found() -> None:
    assert len(PROGRAMS) == PAGE.count("```py\n") == 5
