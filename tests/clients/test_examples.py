"""The examples through trainers, and the notebook, print what they show."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.forks import Forks

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "2"]


@pytest.mark.parametrize("name", ["accelerate_classifier", "lightning_classifier"])
def test_two_ranks_print_what_the_docstring_shows(name: str) -> None:
    program = EXAMPLES / f"{name}.py"
    command = [*TWO_RANKS, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = ast.get_docstring(ast.parse(program.read_text())) or ""
    form = r"epoch (\d): validation loss ([\d.]+), accuracy ([\d.]+)%"
    found, expected = re.findall(form, done.stdout), re.findall(form, shown)
    assert [epoch for epoch, *_ in found] == [epoch for epoch, *_ in expected] == ["0", "1", "2"]
    losses = [[float(loss) for _, loss, _ in lines] for lines in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=0.25)


def test_the_notebook_shows_what_its_cells_give(forks: Forks) -> None:
    (outputs,) = forks.run(run_notebook, 1)
    shown, found = outputs
    assert found == shown
    assert ["True\n3\n"] in shown


def run_notebook() -> tuple[list[list[str]], list[list[str]]]:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(str(EXAMPLES / "notebook.ipynb"), as_version=4)
    shown = [*map(_outputs, notebook.cells)]
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    return shown, [*map(_outputs, notebook.cells)]


def _outputs(cell: dict[str, Any]) -> list[str]:
    """Their texts; numbers with a point are those of the processor."""
    texts = [each.get("text") or each["data"]["text/plain"] for each in cell.get("outputs", [])]
    return [re.sub(r"\d+\.\d+", "#", text) for text in texts]
