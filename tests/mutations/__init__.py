"""Mistakes in the source, each with the test that notices it; ``make test-shown`` makes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_SHOWN_BY = re.compile(r"[Ss]hown by[\s#]+(test_\w+)")


class Mutation(NamedTuple):
    """A change of the source that one test notices.

    Attributes:
        test: The name of the test, or the file of several.
        path: The file, below ``src/lockstep``.
        changes: Texts that are in the file once, each with what comes in its place.
        delay: Of the streams of simulated devices, on which the test runs then (``SIM_DELAY``).
    """

    test: str
    path: str
    changes: tuple[tuple[str, str], ...]
    delay: str = ""


def mutation(test: str, path: str, *texts: str, delay: str = "") -> Mutation:
    """Return a mutation of which ``texts`` are the changes, old and new in turn."""
    return Mutation(test, path, tuple(zip(texts[::2], texts[1::2], strict=True)), delay)


def named_tests(source: Path) -> list[tuple[str, str]]:
    """The file and the test of each comment in the source."""
    return [
        (str(path.relative_to(source)), test)
        for path in sorted(source.rglob("*.py"))
        for test in _SHOWN_BY.findall(path.read_text())
    ]


def mutated(text: str, mutation: Mutation) -> str:
    """Return the text of the file with the mutation.

    Raises:
        ValueError: If what it changes isn't there once.
    """
    for old, new in mutation.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mutation.path} has this {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return text
