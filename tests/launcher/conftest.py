"""The bench on which the tests of this folder run the command."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.bench import MARK, Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench that fails its test if that leaves a process behind."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    bench = Bench(tmp_path, mark)
    yield bench
    left = bench.close()
    assert not left, f"left behind: {left}"
