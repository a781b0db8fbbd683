"""Comments "shown by test_x" in the source name tests that exist. make test-shown tries them."""

from __future__ import annotations

import pytest

from tests.mutations import Mutation, mutated, named_tests
from tests.shown_by import MUTATIONS, SOURCE, places_of


def test_each_named_test_exists() -> None:
    named = named_tests(SOURCE)
    assert named
    assert [test for _, test in named if not places_of(test)] == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.path}-{one.test}")
def test_mutations_are_of_the_source_as_it_is(mutation: Mutation) -> None:
    path = SOURCE / mutation.path
    compile(mutated(path.read_text(), mutation), mutation.path, "exec")
