"""What the tests of clients have in common: a mark, an environment, and ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.forks import TIMEOUT_SECONDS, Forks

# Nothing is fetched, and nothing is told to anybody.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.timeout(4 * TIMEOUT_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _OFFLINE.items():
            patch.setitem(os.environ, name, value)
        yield


@pytest.fixture(scope="session")
def forks(offline: None) -> Iterator[Forks]:
    started = Forks()
    yield started
    started.close()
