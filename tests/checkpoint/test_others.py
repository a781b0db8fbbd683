"""What other users, runs and saves do to a folder of checkpoints meanwhile."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.checkpoint import loading, saving, show
from lockstep.checkpoint.place import Place
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, SaveFailed
from lockstep.folders import Folder
from tests.checkpoint.crafted import facts_of, put_facts
from tests.fuzzing import watched
from tests.ranks import run_ranks
from tests.waiting import until


def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("kept")
    return path


@pytest.mark.parametrize("name", [".lock", ".tmp-000001", ".tmp-000001/rank-0.bin"])
@pytest.mark.parametrize("is_hard", [False, True])
def test_a_save_writes_through_no_link(tmp_path, monkeypatch, name, is_hard) -> None:
    kept, run = victim(tmp_path), tmp_path / "run"
    run.mkdir()

    def put() -> None:
        if is_hard:
            (run / name).hardlink_to(kept)
        else:
            (run / name).symlink_to(kept)

    if "/" in name:  # another user is quick
        make, folder = Place.new_file, []

        def quick(self: Place, rank: int) -> Any:
            if not folder:
                folder.append(put())
            return make(self, rank)

        monkeypatch.setattr(Place, "new_file", quick)
    else:
        put()
    if name == ".tmp-000001":  # what a killed run may have left: the link is removed
        lockstep.save(run, step=1)
    else:
        with pytest.raises(SaveFailed, match=r"It is a |File exists"):
            lockstep.save(run, step=1)
    assert kept.read_text() == "kept"
    assert kept.stat().st_nlink in (1, 2)


def test_a_folder_of_another_user_keeps_nobody_from_saving(tmp_path, monkeypatch) -> None:
    (tmp_path / ".tmp-000001").mkdir()
    monkeypatch.setattr(Folder, "remove", lambda *_: None)  # which may not remove it
    assert lockstep.save(tmp_path, step=1).name == "000002"


@pytest.mark.parametrize("most_files", [20, 60])
def test_a_low_limit_of_open_files_is_no_damage(tmp_path, most_files) -> None:
    """A checkpoint of more ranks than files may be open is read one file after the other."""
    values = run_ranks(1, lambda *_: lockstep.save(tmp_path, value=torch.ones(3)))
    facts = facts_of(values[0])
    facts["bytes"] += [0] * 80
    facts["random"] *= 81
    for rank in range(1, 81):
        (values[0] / f"rank-{rank}.bin").touch()
    put_facts(values[0], facts)
    used, limits = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + most_files, limits[1]))
    try:
        found = lockstep.load(tmp_path, value=None)["value"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.equal(found, torch.ones(3))


def test_what_is_loaded_in_place_shares_no_memory_with_a_value(tmp_path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    buffer = optimizer.state[weight]["momentum_buffer"]
    lockstep.save(tmp_path, optimizer=optimizer, best=buffer, again=buffer)
    found = lockstep.load(tmp_path, optimizer=optimizer, best=None, again=None)
    optimizer.step()
    assert torch.equal(found["best"], torch.ones(3))
    found["best"].add_(1)  # plain values that were one are one, as torch.load() has it
    assert torch.equal(found["again"], torch.full((3,), 2.0))


def test_a_large_file_without_contents_is_refused_in_little_memory(tmp_path, capsys) -> None:
    path = lockstep.save(tmp_path, value=torch.ones(16))
    os.truncate(path / "rank-0.bin", 1 << 40)
    facts = facts_of(path)
    facts["tensors"]["value"] = [["uint8", [1 << 40], [0]], [[0, 1 << 40, 0, 0, 1]]]
    facts["bytes"] = [1 << 40]
    put_facts(path, facts)
    with pytest.raises(CheckpointDamaged, match="the pieces of 'value' don't fit"):
        show(str(path))


def test_arrays_and_options_of_numpy_are_shown_and_loaded(tmp_path, capsys) -> None:
    numpy = pytest.importorskip("numpy")
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=numpy.float32(0.1))
    path = lockstep.save(tmp_path, optimizer=optimizer, x=numpy.ones(3), y=numpy.float64(2))
    show(str(path))
    assert "'x'" in capsys.readouterr().out
    found = lockstep.load(tmp_path, optimizer=optimizer, x=None, y=None)
    assert found["x"].tolist() == [1, 1, 1]
    assert found["y"] == 2


def test_a_lock_that_is_another_programs_is_kept(tmp_path) -> None:
    (tmp_path / ".lock").write_text("poetry 1.8")
    with pytest.raises(SaveFailed, match="is a file of something else than lockstep"):
        lockstep.save(tmp_path, step=1)
    assert (tmp_path / ".lock").read_text() == "poetry 1.8"


def test_the_users_own_path_may_be_a_link(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    lockstep.save(tmp_path / "run", step=3)
    assert lockstep.load(tmp_path / "run", step=0) == {"step": 3}


@pytest.mark.parametrize("rank_without", [0, 1])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("what", ["removed", "renamed"])
def test_a_folder_that_goes_while_it_is_written_is_named_on_all_ranks(
    tmp_path, monkeypatch, rank_without, is_async, what
) -> None:
    make = Place.new_file

    def take_away(self: Place, rank: int) -> Any:
        file = make(self, rank)
        if rank == rank_without:
            if what == "removed":
                while (tmp_path / "run").exists():  # the other rank makes files meanwhile
                    shutil.rmtree(tmp_path / "run", ignore_errors=True)
            else:
                (tmp_path / "run").rename(tmp_path / "elsewhere")
        return file

    monkeypatch.setattr(Place, "new_file", take_away)

    def save(group: dist.ProcessGroup) -> None:
        value = torch.ones(100_000)
        lockstep.save(tmp_path / "run", process_group=group, async_=is_async, value=value)
        lockstep.load(tmp_path / "run", process_group=group, value=value)  # waits for the save

    def body(rank: int, group: dist.ProcessGroup) -> None:
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"removed or renamed|No such file|not written"):
            save(group)
        assert time.monotonic() - began < 20

    run_ranks(2, body)


def test_a_rank_that_cannot_write_is_told_though_it_leaves_no_file(tmp_path, monkeypatch) -> None:
    def denied(self: Place, rank: int) -> Any:
        if rank == 1:
            raise PermissionError(13, "Permission denied", f"rank-{rank}.bin")
        return make(self, rank)

    make = Place.new_file
    monkeypatch.setattr(Place, "new_file", denied)
    monkeypatch.setattr(Place, "put_failure", lambda *_: None)  # the disk is full, say

    def body(rank: int, group: dist.ProcessGroup) -> None:
        lockstep.save(tmp_path, process_group=group, async_=True, value=torch.ones(100_000))
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"Permission denied \(rank-1.bin\)"):
            lockstep.load(tmp_path, process_group=group, value=None)
        assert time.monotonic() - began < 20

    run_ranks(2, body)


@pytest.mark.parametrize("of_rank", [0, 1])
def test_the_folder_of_an_asynchronous_save_that_fails_goes_with_it(
    tmp_path, monkeypatch, of_rank
) -> None:
    """Without a later save; and not under a rank that is still writing to it."""
    make, there = Place.new_file, []

    def denied(self: Place, rank: int) -> Any:
        if rank == of_rank:
            raise PermissionError(13, "Permission denied", f"rank-{rank}.bin")
        time.sleep(0.5)
        there.append((tmp_path / ".tmp-000001").exists())
        return make(self, rank)

    monkeypatch.setattr(Place, "new_file", denied)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        lockstep.save(tmp_path, process_group=group, async_=True, value=torch.ones(100_000))
        assert until(lambda: there and not (tmp_path / ".tmp-000001").exists(), 8.0)
        group.barrier().wait()
        with pytest.raises(CheckpointError, match="Permission denied"):
            lockstep.load(tmp_path, process_group=group, value=None)

    run_ranks(2, body)
    assert there == [True]


def test_a_rank_that_writes_on_keeps_no_folder_of_a_save_that_failed(tmp_path, monkeypatch) -> None:
    make, go_on = Place.new_file, threading.Event()

    def stuck(self: Place, rank: int) -> Any:
        if rank == 0:
            raise PermissionError(13, "Permission denied", "rank-0.bin")
        assert go_on.wait(60)
        return make(self, rank)

    monkeypatch.setattr(Place, "new_file", stuck)
    monkeypatch.setattr(saving, "_TO_SAVE_SECONDS", 0.5)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        save = partial(lockstep.save, tmp_path, process_group=group, value=torch.ones(100_000))
        save(async_=True)
        with pytest.raises(CheckpointError, match="Permission denied"):
            lockstep.load(tmp_path, process_group=group, value=None)
        assert rank == 1 or not list(tmp_path.glob(".tmp-*"))
        group.barrier().wait()
        monkeypatch.setattr(Place, "new_file", make)
        go_on.set()
        save()  # what that rank couldn't write then is told no second time

    run_ranks(2, body)


def test_a_long_asynchronous_save_is_no_late_rank(tmp_path, monkeypatch) -> None:
    """Ranks that wait for another's save do so for longer than the timeout of their group."""
    make = Place.new_file

    def slow(self: Place, rank: int) -> Any:
        time.sleep(4.0 if rank == 0 else 0.0)
        return make(self, rank)

    monkeypatch.setattr(Place, "new_file", slow)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        lockstep.save(tmp_path, process_group=group, async_=True, step=5)
        assert lockstep.load(tmp_path, process_group=group, step=0) == {"step": 5}

    run_ranks(2, body, group_timeout_seconds=2.5)


def test_a_checkpoint_that_a_newer_one_replaces_is_no_damage(tmp_path, monkeypatch) -> None:
    """It is removed between being found and being opened, on one rank of two."""
    lockstep.save(tmp_path, keep=1, step=1)
    found, removed = loading.Manifest, []

    def late(folder: Path) -> Any:
        if len(removed) < 3 and threading.current_thread() is not threading.main_thread():
            removed.append(folder)
            lockstep.save(tmp_path, keep=1, step=1 + len(removed))
        return found(folder)

    monkeypatch.setattr(loading, "Manifest", late)
    run_ranks(2, lambda rank, group: lockstep.load(tmp_path, process_group=group, step=0))
    monkeypatch.setattr(loading, "Manifest", found)
    # What is really not there, or damaged, is named still.
    with pytest.raises(CheckpointNotFound, match="000001 is not there"):
        lockstep.load(tmp_path / "000001", step=0)
    (newest,) = (path for path in tmp_path.iterdir() if path.name.isdigit())
    (newest / "rank-0.bin").unlink()
    with pytest.raises(CheckpointDamaged, match=r"rank-0\.bin is missing"):
        lockstep.load(tmp_path, step=0)


def test_loads_beside_a_run_that_saves(tmp_path) -> None:
    value, is_over = torch.zeros(100_000), threading.Event()

    def save() -> None:
        for step in range(1, 200):
            lockstep.save(tmp_path, keep=1, value=torch.full_like(value, step), step=step)
            if is_over.is_set():
                return

    lockstep.save(tmp_path, keep=1, value=value, step=0)
    saver = threading.Thread(target=save)
    saver.start()
    try:
        for _ in range(30):
            found = lockstep.load(tmp_path, random_state=False, value=None, step=0)
            assert torch.equal(found["value"], torch.full_like(value, found["step"]))
    finally:
        is_over.set()
        saver.join()


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.bin"])
def test_a_pipe_or_device_among_the_files_is_refused(tmp_path, name) -> None:
    path = lockstep.save(tmp_path, step=1)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointDamaged, match=r"can't be read \(It is a pipe, not a file\)"):
        lockstep.load(tmp_path, step=0)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointDamaged, match=r"can't be read \(It is a device, not a file\)"):
        lockstep.load(tmp_path, step=0)


def test_names_in_a_checkpoint_do_not_reach_the_terminal_raw(tmp_path, capsys) -> None:
    value = {"x[/nope]": torch.ones(1), "[red]\x1b[2J": torch.ones(1), "\x1b]0;title\a": "\x1b"}
    path = lockstep.save(tmp_path / "a[/b]", value=value)
    facts = facts_of(path) | {"torch": "[bold]\x1b[2J[/]"}
    put_facts(path, facts)
    show(str(path))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\a" not in shown
    joined = "".join(shown.split())
    assert all(word in joined for word in ("value.x[/nope]", r"[red]\x1b[2J", "a[/b]", "[bold]"))


def test_a_manifest_with_a_hole_takes_no_memory(tmp_path) -> None:
    path = lockstep.save(tmp_path, step=1)
    with open(path / "manifest.json", "r+b") as file:
        size = len(file.read())
        file.truncate(1 << 40)
    with watched(size), pytest.raises(CheckpointDamaged, match="It has zeros"):
        lockstep.load(tmp_path, step=0)
