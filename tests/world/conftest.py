"""What tests share that join groups in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lockstep.world import rendezvous
from tests.world.stores import close_after_their_stores


@pytest.fixture(scope="module")
def what_torch_opens_for_good() -> None:
    """With a process's first store, torch opens a pipe that it never closes."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been started yet; and nothing is left when the test is over."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("lockstep.world.world._of_process.world", None)
    files: dict[str, int] = {}
    monkeypatch.setattr(rendezvous, "_held_open", {})
    monkeypatch.setattr(rendezvous, "_open_files", files)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.setattr("lockstep.world.world._of_process.world", None)
    rendezvous._held_open.clear()
    close_after_their_stores(files)
