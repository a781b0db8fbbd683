"""What tests of sharded optimizers are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.optim.late import Late


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Late]]:
    """Make updates arrive late; returns those of all ranks so far."""
    made: list[Late] = []

    def start(group: dist.ProcessGroup, memory: torch.Tensor) -> Late:
        made.append(Late(group, memory))
        return made[-1]

    monkeypatch.setattr("lockstep.optim.flat.start_all_gather_in_place", start)
    monkeypatch.setattr("lockstep.optim.arriving.has_compiled", lambda: False)
    yield made
    made.clear()  # they hold groups
