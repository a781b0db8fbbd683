"""Text that others wrote, on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from lockstep.errors import BadLaunch, CheckpointNotFound
from lockstep.launcher import job_of
from lockstep.printable import printable, printable_lines, shown

EVIL = "a\n[rank 0] b\x1b[2J"


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert printable(EVIL) == "a\\n[rank 0] b\\x1b[2J"
    assert printable_lines("one\x1b[2J\n\x1b[31mtwo\x1b[0m") == "one\\x1b[2J\ntwo"
    assert shown(Path("/x") / EVIL) == "/x/a\\n[rank 0] b\\x1b[2J"


def test_a_path_is_one_line_of_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second one could be taken for another message."""
    with pytest.raises(CheckpointNotFound) as missing:
        lockstep.load(tmp_path / EVIL)
    with pytest.raises(BadLaunch) as launched:
        job_of([str(tmp_path / EVIL)], nprocs="2")
    for message in (str(missing.value), str(launched.value)):
        assert "\n" not in message
        assert "\\n[rank 0]" in message
