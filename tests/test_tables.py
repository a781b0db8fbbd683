"""Tables on terminals of any width: no word of a heading is broken, and no number."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.tables import FittedTable


def shown(table: FittedTable, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(table)
    return file.getvalue()


@pytest.mark.parametrize("has_rule", [True, False])
@given(
    columns=st.lists(st.sampled_from(["rank", "collectives", "same batch, ms", "at"]), min_size=2),
    numbers=st.lists(st.integers(0, 10**8), min_size=1, max_size=3),
    width=st.integers(30, 120),
)
def test_no_word_and_no_number_is_broken(
    columns: list[str], numbers: list[int], width: int, has_rule: bool
) -> None:
    rows = [[f"{number:,}"] * len(columns) for number in numbers]
    told = shown(FittedTable(columns, rows, has_rule=has_rule), width)
    assert max(map(len, told.splitlines())) <= width
    words = told.split()
    for number in numbers:
        assert words.count(f"{number:,}") >= len(columns) * numbers.count(number)
    for word in itertools.chain.from_iterable(heading.split() for heading in columns):
        assert word in words


def test_what_fits_is_one_table_without_wrapped_lines() -> None:
    table = FittedTable(["rank", "whole step"], [["0", "1.00"]], "Title")
    assert [line.rstrip() for line in shown(table, 80).splitlines() if line.strip()] == [
        "Title",
        " rank whole step",
        " ───────────────",
        " 0          1.00",
    ]


def test_texts_are_wrapped() -> None:
    path = "/home/somebody/with/a/very/long/path/to/a/program/train.py:8, in <module>"
    table = FittedTable(["rank", "at"], [["0", path]], texts=(0, 1), has_rule=False)
    told = shown(table, 40)
    assert max(map(len, told.splitlines())) <= 40
    assert re.sub(r"\s", "", told).endswith(re.sub(r"\s", "", path))
    assert shown(table, 100).splitlines()[1].rstrip() == f"0     {path}"


def test_a_cell_may_look_like_markup() -> None:
    assert "[bold]" in shown(FittedTable(["a", "b"], [["[bold]", "1"]]), 40)
