"""Comments "shown by test_x" in the source name tests that exist, and have mutations."""

from __future__ import annotations

import ast
from pathlib import Path

import lockstep
from tests.mutations import MUTATIONS, mutated, named_tests
from tests.shown_by import places_of

SOURCE = Path(lockstep.__file__).parent


def test_each_comment_has_a_mutation_and_each_mutation_a_comment() -> None:
    """``make test-shown`` makes them."""
    assert set(named_tests(SOURCE)) == {(one.path, one.test) for one in MUTATIONS}


def test_each_mutation_is_of_the_source_as_it_is() -> None:
    for mutation in MUTATIONS:
        ast.parse(mutated((SOURCE / mutation.path).read_text(), mutation))


def test_each_named_test_exists() -> None:
    assert [one.test for one in MUTATIONS if not places_of(one.test)] == []
