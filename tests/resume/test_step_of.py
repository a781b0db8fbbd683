"""How many steps a checkpoint has, as far as that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from lockstep.resume.checkpoints import step_of
from tests.checkpoint.crafted import body_of, put_body


@pytest.mark.parametrize("step", ["1e999", "[3[3]]", '"3"[', "null"])
def test_a_step_that_can_not_be_read_is_that_of_no_checkpoint(tmp_path: Path, step: str) -> None:
    path = lockstep.save(tmp_path, steps={"step": 3}, other=1)
    assert step_of(tmp_path) == 3
    put_body(path, body_of(path).replace(b'"step": 3', b'"step": ' + step.encode()))
    assert step_of(tmp_path) == -1
