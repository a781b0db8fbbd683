"""Whether CONTRIBUTING tells of what is there."""

from __future__ import annotations

import ast
import re

from tests.source import (
    CONTRIBUTING,
    SOURCE,
)


def test_one_backward_is_told_in_functions_that_are_there() -> None:
    """One in each line, by the class that defines it, and by its file where that is another one."""
    text = CONTRIBUTING.read_text()
    (told,) = re.findall(r"^## One backward\n(.*?)^## ", text, flags=re.M | re.S)
    assert len(told.splitlines()) <= 60
    rows = re.findall(r"^(\d+)\. `((?:\w+\.)?\w+)\(\)`(?: \(([\w/.]+)\))?: ", told, flags=re.M)
    assert [int(number) for number, *_ in rows] == [
        *range(1, 1 + len(re.findall(r"^\d", told, flags=re.M)))
    ]
    file = ""
    for _, name, named_file in rows:
        file = named_file or file
        tree = ast.parse((SOURCE / file).read_text())
        for part in name.split("."):
            tree = next(each for each in tree.body if getattr(each, "name", "") == part)
        assert isinstance(tree, ast.FunctionDef), name


def test_the_words_of_the_glossary_are_few() -> None:
    (words,) = re.findall(r"^## Words\n\n(.*?)\n\n## ", CONTRIBUTING.read_text(), flags=re.M | re.S)
    assert len(words.splitlines()) <= 20
    for name in re.findall(r"\(`(\w+/\w+\.py)`\)", words):
        assert (SOURCE / name).is_file()
