"""A run that is ended and begun again has the bits of one that wasn't."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launcher import START_AGAIN, SnapshotMemory, newest_step
from lockstep.resume import snapshots
from tests.resume.attempts import Attempts, Ended, undisturbed
from tests.resume.program import NUM_STEPS

Results = list[dict[str, Any]]
EVERY_STEP = {"snapshot_every": 1}
long = pytest.mark.long


def bits(results: Results) -> list[Any]:
    return [result["bits"] for result in results]


def steps_of(results: Results) -> list[int]:
    return [step for step, *_ in results[0]["seen"]]


def check(ended: Ended, code: int = 0) -> None:
    assert set(ended.codes) == {code}, ended


def check_failed(ended: Ended) -> None:
    assert any(ended.codes), ended


@pytest.mark.parametrize(
    ("kind", "backend", "size"),
    [
        ("sharded", "gloo", 2),
        pytest.param("plain", "shm", 2, marks=long),
        pytest.param("sharded", "shm", 3, marks=long),
        pytest.param("adam", "gloo", 2, marks=long),
        # Gloo's sums of four depend on where an element is among the others.
        pytest.param("plain", "gloo", 4, marks=long),
        pytest.param("adam", "shm", 1, marks=long),
    ],
)
def test_ranks_that_fail_go_on_from_the_last_snapshot(
    tmp_path: Path, kind: str, backend: str, size: int
) -> None:
    options: dict[str, Any] = {"kind": kind, "backend": backend}
    expected = undisturbed(tmp_path / "whole", size, **options)
    options["steps"] = EVERY_STEP
    last = size - 1
    with Attempts(tmp_path, size) as attempts:
        for fault in ("SIGKILL:0:0:end", f"SIGKILL:4:{last}:update", "raise:8:0:forward"):
            ended = attempts.run(fault, **options)
            check_failed(ended)
            assert "isn't reproducible" not in "".join(ended.errors)
        ended = attempts.run(**options)
        check(ended)
        assert "isn't reproducible" not in "".join(ended.errors)
        found = attempts.results()
    assert bits(found) == bits(expected)
    first = steps_of(found)[0]
    assert first in (7, 8)  # the other ranks may have been killed while they took a snapshot
    assert found[0]["seen"] == expected[0]["seen"][first:]
    assert found[0]["restarts"] == 3


@pytest.mark.parametrize("options", [{"workers": 2}, {"numbers": NUM_STEPS}, {"thread_bytes": 0}])
def test_a_run_goes_on_with_workers_with_numbers_and_with_snapshots_by_a_thread(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = undisturbed(tmp_path / "whole", 2, **options)
    options = {**options, "steps": EVERY_STEP}
    with Attempts(tmp_path, 2) as attempts:
        check_failed(attempts.run("SIGKILL:3:0:forward", **options))
        check_failed(attempts.run("SIGKILL:6:1:update", **options))
        check(attempts.run(**options))
        found = attempts.results()
    assert bits(found) == bits(expected)
    assert steps_of(found)[0] in (5, 6)


@pytest.mark.parametrize(
    "step",
    [pytest.param(n, marks=[] if n in (0, 4, NUM_STEPS - 1) else long) for n in range(NUM_STEPS)],
)
def test_a_run_that_ends_at_any_step_has_the_same_bits(tmp_path: Path, step: int) -> None:
    """Alone, as that is quick; the last batch is short, and the last step that of an epoch."""
    expected = undisturbed(tmp_path / "whole", 1)
    with Attempts(tmp_path, 1) as attempts:
        check_failed(attempts.run(f"raise:{step}:0:update", steps=EVERY_STEP))
        check(attempts.run(steps=EVERY_STEP))
        assert bits(attempts.results()) == bits(expected)
        assert steps_of(attempts.results())[0] == step


@pytest.mark.parametrize(
    ("kind", "has_memory"),
    [
        ("sharded", True),
        ("plain", False),
        pytest.param("plain", True, marks=long),
        pytest.param("sharded", False, marks=long),
    ],
)
def test_a_signal_ends_the_step_on_all_ranks_and_the_run_goes_on(
    tmp_path: Path, kind: str, has_memory: bool
) -> None:
    expected = undisturbed(tmp_path / "whole", 2, kind=kind)
    options = {"kind": kind, "path": True}
    with Attempts(tmp_path, 2, has_memory=has_memory) as attempts:
        for fault in ("SIGTERM:2:1:forward", "SIGINT:4:0:end", "SIGUSR1:7:1:update"):
            ended = attempts.run(fault, **options)
            check(ended, START_AGAIN)
            assert "asked to stop" in ended.errors[0]
            assert not ended.errors[1]
        check(attempts.run(**options))
        found = attempts.results()
    assert bits(found) == bits(expected)
    assert len(steps_of(found)) <= 2


def test_without_a_path_a_signal_leaves_the_state_in_memory(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "whole", 2)
    with Attempts(tmp_path, 2) as attempts:
        ended = attempts.run("SIGTERM:2:1:forward")
        check(ended, START_AGAIN)
        assert "The state is in memory, which ends with the launcher" in ended.errors[0]
        check(attempts.run())
        assert bits(attempts.results()) == bits(expected)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=long), "sharded"])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    options = {"kind": kind, "path": True, "steps": {"save_every": 2}}
    with Attempts(tmp_path, 2) as attempts:
        check_failed(attempts.run("SIGKILL:5:1:forward", **options))
    with Attempts(tmp_path, 3) as attempts:
        check(attempts.run(**options))
        assert steps_of(attempts.results()) in ([4, 5, 6, 7, 8, 9], [2, 3, 4, 5, 6, 7, 8, 9])
    with Attempts(tmp_path, 1) as attempts:
        check(attempts.run(**options))
        assert steps_of(attempts.results()) == []


def test_a_snapshot_with_another_byte_is_not_used_and_an_older_one_is(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "whole", 2)
    with Attempts(tmp_path, 2) as attempts:
        check_failed(attempts.run("SIGKILL:5:1:forward", steps=EVERY_STEP))
        memories = [SnapshotMemory(pair) for pair in attempts.descriptors]
        step = newest_step(memories)
        assert step is not None
        slot, _ = memories[1].of_step(step)
        damage(memories[1], slot)
        ended = attempts.run(steps=EVERY_STEP)
        check(ended)
        assert f"The snapshot after step {step} isn't as rank 1 wrote it" in ended.errors[1]
        found = attempts.results()
    assert bits(found) == bits(expected)
    assert steps_of(found)[0] == step - 1


def test_without_a_whole_snapshot_the_checkpoint_is_used(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "whole", 2)
    options = {"path": True, "steps": {"snapshot_every": 1, "save_every": 3}}
    with Attempts(tmp_path, 2) as attempts:
        check_failed(attempts.run("SIGKILL:8:1:forward", **options))
        memory = SnapshotMemory(attempts.descriptors[0])
        for slot in memory.headers():
            damage(memory, slot)
        check(attempts.run(**options))
        found = attempts.results()
    assert bits(found) == bits(expected)
    assert steps_of(found)[0] in (3, 6)  # before the second is saved, the first is complete


def damage(memory: SnapshotMemory, slot: int) -> None:
    memory.view(slot)[700] ^= 4
    memory.close()


@pytest.mark.parametrize("change", ["count", "data", "buffer", "none"])
def test_a_snapshot_that_changes_while_it_is_copied_is_discarded(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(snapshots, "_THREAD_BYTES", 0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    descriptors = SnapshotMemory.create(0)
    things = {"model": model, "optimizer": optimizer}
    found = snapshots.Snapshots(SnapshotMemory(descriptors), things, b"k" * 32, 0, "")
    for step in range(1, 3):
        with torch.no_grad():
            model[0].weight += 1
        found.take(step, {}, None)
        if change == "count" and step == 2:
            torch.nn.init.zeros_(model[0].weight)
        if change == "data" and step == 2:
            model[0].weight.data.mul_(0.99)
        if change == "buffer":
            model(torch.ones(3, 40))
        found.join()
    is_torn = change in ("count", "data")
    assert found.is_torn == is_torn
    assert sorted(found.usable()) == ([1] if is_torn else [1, 2])
    found.close()
    for each in descriptors:
        os.close(each)


def test_snapshots_of_another_program_are_not_used(tmp_path: Path) -> None:
    with Attempts(tmp_path, 1) as attempts:
        check_failed(attempts.run("raise:5:0:forward", steps=EVERY_STEP))
        check(attempts.run(steps={"snapshot_every": 2}))  # another argument
        assert steps_of(attempts.results())[0] == 0


@pytest.mark.parametrize("thread_bytes", [0, pytest.param(10_000_000, marks=long)])
def test_a_program_that_is_not_reproducible_is_told_so_once(
    tmp_path: Path, thread_bytes: int
) -> None:
    options = {"thread_bytes": thread_bytes, "steps": {"snapshot_every": 3}}
    for unsteady in (False, True):
        (folder := tmp_path / str(unsteady)).mkdir()
        with Attempts(folder, 2) as attempts:
            check_failed(attempts.run("raise:6:1:forward", unsteady=unsteady, **options))
            ended = attempts.run(unsteady=unsteady, **options)
            check(ended)
        # The last snapshot is that after step 4, and step 5 came to its end.
        assert attempts.results()[0]["seen"][0][0] == 4
        for errors in ended.errors:
            found = "step 4 has given 'model.0.weight' other values than before" in errors
            assert found == unsteady
            assert errors.count("isn't reproducible") == unsteady
