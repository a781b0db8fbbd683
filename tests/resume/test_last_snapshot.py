"""The checkpoint that a launcher makes of the ranks' snapshots is the one that ranks save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import Manifest, show
from lockstep.launcher import SnapshotMemory, WrittenOut, newest_step
from lockstep.resume.last_snapshot import write_out
from lockstep.tree import decode
from tests.resume.attempts import Attempts

long = pytest.mark.long
SAVES = {"snapshot_every": 1, "save_every": 1, "keep": 20}


def memories(attempts: Attempts) -> list[SnapshotMemory]:
    return [SnapshotMemory(pair) for pair in attempts.descriptors]


def ended_at_5(attempts: Attempts, **options: Any) -> int:
    """Have the run ended in step 5; return which snapshot all ranks have."""
    options = {"path": True, "width": 300, "steps": {"snapshot_every": 1}, **options}
    assert any(attempts.run("SIGKILL:5:1:forward", **options).codes)
    step = newest_step(memories(attempts))
    assert step in (4, 5)
    return step


def contents(folder: Path, size: int) -> dict[str, Any]:
    """All that is in a checkpoint, but for random states."""
    manifest = Manifest(folder)
    found: dict[str, Any] = {}
    for name, thing in manifest.facts["things"].items():
        found[name] = thing["kind"], decode(thing["tree"], lambda key: manifest.read(key).tolist())
        pairs = manifest.facts["divided"].get(name, {})
        found[name] += (
            {
                (index, key): decode(tree, lambda key: manifest.read(key).tolist())
                for index in pairs
                for key, tree in pairs[index]
            },
        )
    assert manifest.facts["ranks"] == len(manifest.facts["random"]) == size
    return found


@pytest.mark.parametrize(
    ("kind", "size", "other"),
    [
        ("sharded-adam", 2, 3),
        pytest.param("plain", 2, 1, marks=long),
        pytest.param("sharded", 3, 2, marks=long),
        pytest.param("adam", 3, 1, marks=long),
    ],
)
def test_checkpoint_has_what_ranks_save_and_goes_on_at_another_number_of_ranks(
    tmp_path: Path, kind: str, size: int, other: int
) -> None:
    options = {"kind": kind, "path": True, "width": 300}
    folders = [tmp_path / "by-ranks", tmp_path / "by-launcher"]
    for folder in folders:
        folder.mkdir()
    with Attempts(folders[0], size, has_memory=False) as attempts:
        assert not any(attempts.run(**options, steps=SAVES).codes)
    with Attempts(folders[1], size) as attempts:
        step = ended_at_5(attempts, kind=kind)
        path = folders[1] / "run"
        assert write_out(memories(attempts)) == WrittenOut(step, str(path), is_new=True)
        assert write_out(memories(attempts)) == WrittenOut(step, str(path))
    by_ranks, by_launcher = folders[0] / "run" / f"{step:06}", path / "000001"
    show(str(by_launcher))  # verifies every byte
    expected, found = contents(by_ranks, size), contents(by_launcher, size)
    assert found == expected
    for later in range(step + 1, 11):
        shutil.rmtree(by_ranks.with_name(f"{later:06}"))
    results = []
    for folder in folders:
        with Attempts(folder, other) as attempts:
            ended = attempts.run(**options)
            assert not any(ended.codes), ended
            results.append(attempts.results())
    assert results[0] == results[1]
    assert results[0][0]["seen"][0][0] == step


def test_an_older_snapshot_is_written_if_the_newest_is_damaged(tmp_path: Path) -> None:
    with Attempts(tmp_path, 2) as attempts:
        step = ended_at_5(attempts)
        memory = memories(attempts)[1]
        slot, _ = memory.of_step(step)
        memory.view(slot)[700] ^= 4
        memory.close()
        assert write_out(memories(attempts)).step == step - 1
        for memory in memories(attempts):
            for slot in memory.headers():
                memory.discard(slot)
        assert write_out(memories(attempts)) == WrittenOut()


def test_without_a_path_there_is_nowhere_to_write(tmp_path: Path) -> None:
    with Attempts(tmp_path, 2) as attempts:
        step = ended_at_5(attempts, path=False)
        assert write_out(memories(attempts)) == WrittenOut(step)


def test_random_states_are_those_with_which_the_step_begins(tmp_path: Path) -> None:
    with Attempts(tmp_path, 2) as attempts:
        ended_at_5(attempts)
        before = torch.get_rng_state()
        written = write_out(memories(attempts))
    manifest = Manifest(Path(written.path) / "000001")
    states = [decode(each, manifest.read)["torch"] for each in manifest.facts["random"]]
    assert not torch.equal(states[0], states[1])
    torch.set_rng_state(before)
