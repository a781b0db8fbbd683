"""What tests of observers have in common."""

from __future__ import annotations

import pytest

import lockstep
from lockstep.observe import logger


@pytest.fixture
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has logged nothing yet."""
    monkeypatch.setattr(logger, "_logger", logger._Logger())
    lockstep.log_to(lines=False)
