"""Tests here need a simulated device."""

from __future__ import annotations

import os

import pytest
import torch

from tests.simulated.control import KIND, NUM_DEVICES

HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "SIM_LIBRARY" in os.environ:
        return
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.skip(reason="run by make test-simulated"))


@pytest.fixture(scope="session", autouse=True)
def devices_have_begun() -> None:
    """Before what a test must leave behind is looked at: their memory has descriptors."""
    for index in range(NUM_DEVICES):
        torch.ones(1, device=torch.device(KIND, index))
