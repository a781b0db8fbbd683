"""To continue a log, whoever wrote what it has, takes at most twice its size, on the disk too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from lockstep.observe import logger
from tests.memory import FIXED_BYTES, peak_of

KINDS: dict[str, Callable[[int], str]] = {
    "a row of many lines": lambda n: "step," + '"a\n",' * n + "b\n",
    "a heading of many columns": lambda n: "step," + "ab," * n + "b\n",
    "a line without end": lambda n: "x" * n,
    "a text without end": lambda n: '"' + "x\n" * n,
    "a wide heading, and short rows": lambda n: "step," + "a," * 9000 + "b\n" + "1\n" * n,
    "a long row": lambda n: "step,loss\n" + "1," * n + "\n",
    "wide characters": lambda n: "step," + "\U0001f600" * n + "\n",
    "rows": lambda n: "step,loss\n" + "1,0.5\n" * n,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [20_000, pytest.param(400_000, marks=pytest.mark.long)])
def test_a_log_is_continued_in_twice_its_size(
    kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "_logger", logger._Logger())
    path = tmp_path / "log.csv"
    path.write_text(KINDS[kind](number))
    size = path.stat().st_size

    def continue_it() -> None:
        lockstep.log_to(path, lines=False)
        lockstep.log({"new": 1.0}, step=20)
        lockstep.log_to(lines=False)

    peak = peak_of(continue_it)
    assert peak < 2 * size + FIXED_BYTES, (peak, size)
    assert path.stat().st_size < 2 * size + 100_000


def test_rows_of_several_lines_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may have a newline in it."""
    monkeypatch.setattr(logger, "_logger", logger._Logger())
    path = tmp_path / "log.csv"
    for step, name in enumerate(("a\nb", "c")):
        lockstep.log_to(path, lines=False)
        lockstep.log({name: 0.5}, step=step)
        lockstep.log_to(lines=False)
    assert path.read_bytes().decode() == 'step,"a\nb",c\r\n0,0.5,\r\n1,,0.5\r\n'
