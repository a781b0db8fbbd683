"""What surrounds the source does what it says: workflows, hooks before a commit, versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()


def test_workflows_make_targets_that_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, flags=re.MULTILINE))
    made = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for words in re.findall(r"\bmake ([^&}\n]*)", path.read_text()):
            made.update(word for word in words.split() if "=" not in word)
    assert {"check", "test", "docs", "stranger"} <= made <= targets


def test_a_commit_is_checked_as_make_check_does() -> None:
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"entry: (.*?), language", hooks) == commands


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version == project["version"]
