"""Ranks of these tests are forks of one process."""

from __future__ import annotations

import pytest

from tests.resume.attempts import start_server


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    start_server()
