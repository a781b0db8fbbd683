"""Comments "shown by test_x" in the source name tests that exist. make test-shown tries them."""

from __future__ import annotations

from pathlib import Path

import lockstep
from tests.mutations import named_tests
from tests.shown_by import places_of


def test_each_named_test_exists() -> None:
    named = named_tests(Path(lockstep.__file__).parent)
    assert named
    assert [test for _, test in named if not places_of(test)] == []
