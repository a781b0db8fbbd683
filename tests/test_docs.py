"""The documentation: every block of Python in it runs, on one rank and on two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep import cli, errors

pytestmark = pytest.mark.forks

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {path.stem: path.read_text() for path in sorted(DOCS.glob("*.md"))}
PROGRAMS = {
    name: "\n".join(blocks)
    for name, text in PAGES.items()
    if (blocks := re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S))
}
ONE_RANK = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "2"]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(ONE_RANK, id="one rank", marks=pytest.mark.long),
        pytest.param(TWO_RANKS, id="two ranks"),
    ],
)
def test_blocks_run(tmp_path: Path, name: str, start: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    done = subprocess.run([*start, "program.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"auto\w+:: lockstep\.(\w+)$", PAGES["api"], flags=re.M))
    assert listed == set(lockstep.__all__)


def test_every_error_is_explained() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGES["errors"], flags=re.M))
    # Those that are only bases of others are never raised.
    bases = {name for name in errors.__all__ if getattr(errors, name).__subclasses__()}
    assert listed == set(errors.__all__) - bases


def test_what_the_pages_name_is_there() -> None:
    for name, text in PAGES.items():
        for word in re.findall(r"lockstep\.(\w+)", text):
            assert word in lockstep.__all__ or word in MODULES, f"{name}: lockstep.{word}"
        for command, options in re.findall(r"lockstep (\w+)((?: --?[\w-]+)*)", text):
            if command in COMMANDS:
                given = COMMANDS[command]
                assert all(option in given for option in options.split()), f"{name}: {options}"


MODULES = {"checkpoint", "errors", "integrations"}
COMMANDS = {
    "run": cli._RUN + "-n -m --check --trace --trace-steps --full-traceback --log-dir --nnodes",
    "report": "",
    "doctor": "",
    "explain": "",
    "show": "",
    "export": "",
}


def test_pages_link_to_pages_that_are_there() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\{doc\}`([\w-]+)`", text):
            assert target in PAGES, f"{name} links to {target}"
    (listed,) = [set(re.findall(r"^([\w-]+)$", PAGES["index"], flags=re.M))]
    assert listed == set(PAGES) - {"index"}
