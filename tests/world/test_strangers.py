"""What is told of ranks that have not met."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.world import told

SECONDS = 20
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_threads_that_step_at_once_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **MEETING}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(told, "_told_of_strangers", threading.Lock())
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sum().backward()
    optimizer = torch.optim.SGD([parameter])
    said, is_other_through = [], threading.Event()

    def say(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        if len(said) == 1:
            is_other_through.wait(SECONDS)  # it looks while this one tells
        return False

    def look(_: int) -> None:
        told.look_for_strangers(optimizer, [parameter])
        is_other_through.set()

    monkeypatch.setattr(told._log, "filters", [say])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(look, range(2)))
    assert len(said) == 1
    assert "without having met the others" in said[0]
