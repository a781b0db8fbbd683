"""Damaged checkpoints are refused; whatever ends a save, the last checkpoint stays."""

from __future__ import annotations

import copy
import errno
import fcntl
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.checkpoint import folder as folder_module
from lockstep.checkpoint import place as place_module
from lockstep.checkpoint import show
from lockstep.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    SaveFailed,
)
from lockstep.folders import Folder
from tests.checkpoint.crafted import body_of, facts_of, put_body, put_facts
from tests.checkpoint.training import same, states_of, trained
from tests.counts import num_examples
from tests.fuzzing import watched
from tests.nn.models import Digits
from tests.optim.optimizers import OPTIMIZERS
from tests.ranks import make_group, run_ranks
from tests.waiting import until

PROGRAM = """
import sys, torch, lockstep
torch.manual_seed(0)
steps, is_async = sys.argv[2].split(",")
value = torch.zeros(1_000_000)
for step in range(1, int(steps)):
    value.fill_(step)
    lockstep.save(sys.argv[1], async_=is_async == "async", value=value, step=step)
    print(step, flush=True)
"""


def things() -> dict[str, Any]:
    model, optimizer = trained(None, Digits, OPTIMIZERS["AdamW"], steps=1)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.shortened
def test_damage_is_refused_and_the_file_named(tmp_path) -> None:
    """Truncated files, and flipped bits anywhere in them."""

    def save(rank: int, group: dist.ProcessGroup) -> Path:
        model, optimizer = trained(group, Digits, OPTIMIZERS["AdamW"], sharded=True)
        return lockstep.save(tmp_path, process_group=group, model=model, optimizer=optimizer, n=3)

    path, objects, chance = run_ranks(2, save)[0], things(), random.Random(0)
    before = copy.deepcopy(states_of(*objects.values()))
    files = sorted(path.iterdir())
    assert [file.name for file in files] == ["manifest.json", "rank-0.bin", "rank-1.bin"]
    for number in range(num_examples(200, 40)):
        file = files[number % 3]
        data = bytearray(file.read_bytes())
        if number % 4 == 0:
            file.write_bytes(data[: chance.randrange(len(data))])
        else:
            place = chance.randrange(len(data))
            file.write_bytes(
                data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
            )
        with pytest.raises(CheckpointDamaged) as caught:
            load_all(tmp_path, objects, 1 + number % 2)
        # Random states are each rank's own, and so is what another rank needs of a file.
        assert file.name in str(caught.value)
        file.write_bytes(data)
    assert same(states_of(*objects.values()), before)
    load_all(tmp_path, objects, 1)
    for file in files:
        file.rename(tmp_path / "away")
        with pytest.raises(CheckpointDamaged, match=file.name):
            lockstep.load(tmp_path, n=0)
        (tmp_path / "away").rename(file)


def load_all(folder: Path, objects: dict[str, Any], size: int) -> None:
    """Load on ranks that share what was read; ``objects`` are the things of one rank."""
    if size == 1:
        lockstep.load(folder, n=0, **objects)
        # The random states of the ranks that aren't there any more.
        return

    def load(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = trained(group, Digits, OPTIMIZERS["AdamW"], sharded=True, steps=0)
        lockstep.load(folder, process_group=group, model=model, optimizer=optimizer, n=0)

    run_ranks(size, load)


@pytest.mark.forks
@pytest.mark.shortened
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_save_that_is_killed_leaves_a_whole_checkpoint(tmp_path, how) -> None:
    chance = random.Random(0)
    for number in range(num_examples(25, 1)):
        folder = tmp_path / str(number)
        command = [sys.executable, "-c", PROGRAM, str(folder), f"10000,{how}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            last = [int(process.stdout.readline()) for _ in range(2 + number % 2)][-1]
            time.sleep(chance.random() * 0.05)
            process.send_signal(signal.SIGKILL)
            last = max([last, *map(int, process.stdout.read().split())])
        value = torch.zeros(1_000_000)
        step = lockstep.load(folder, value=value, step=0)["step"]
        assert step in ((last, last + 1) if how == "sync" else (last - 1, last, last + 1))
        assert torch.equal(value, torch.full_like(value, step))
        # What the killed one has left is in nobody's way.
        lockstep.save(folder, keep=1, step=0)
        assert until(lambda folder=folder: len([*folder.iterdir()]) == 2)  # with the lock
        assert sorted(path.name for path in folder.iterdir())[0] == ".lock"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch, is_async) -> None:
    flush, full = place_module.flush, [False]

    def may_be_full(file: Any) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        value = torch.ones(100_000)
        save = functools.partial(lockstep.save, tmp_path, process_group=group)
        save(value=value)
        group.barrier().wait()
        full[0] = True
        group.barrier().wait()
        if is_async:
            save(value=value * 2, async_=True)
        with pytest.raises(SaveFailed, match="No space left"):
            save(value=value * 2)
        group.barrier().wait()
        full[0] = False
        group.barrier().wait()
        found = lockstep.load(tmp_path, process_group=group, value=None)["value"]
        assert torch.equal(found, value)
        save(value=value)

    monkeypatch.setattr(place_module, "flush", may_be_full)
    run_ranks(2, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "000001", "000002"]


def test_an_error_of_one_rank_is_raised_on_all_and_names_it(tmp_path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        value = object() if rank == 1 else 3
        with pytest.raises(TypeError if rank == 1 else CheckpointError) as caught:
            lockstep.save(tmp_path, process_group=group, value=[value])
        assert "'value.0' is a object" in str(caught.value)
        if rank == 1:
            assert caught.value.__notes__ == ["(rank 1 of 2)"]
        else:
            assert "Rank 1" in str(caught.value)
        with pytest.raises(CheckpointMismatch, match=r"'things.value.tree.1': 0 on rank 0, and 1"):
            lockstep.save(tmp_path, process_group=group, value=[0, rank])
        with pytest.raises(CheckpointMismatch, match="'things'"):
            lockstep.save(tmp_path, process_group=group, **{f"name{rank}": 0})
        with pytest.raises(CheckpointMismatch, match=r"'tensors.value.1.0': 3 on"):
            lockstep.save(tmp_path, process_group=group, value=torch.zeros(3 + rank))
        lockstep.save(tmp_path, process_group=group, value=torch.zeros(3))
        target = torch.ones(3 + rank)
        with pytest.raises(CheckpointMismatch, match=r"\[3\] in the checkpoint .* \[4\]"):
            lockstep.load(tmp_path, process_group=group, value=target)
        assert torch.equal(target, torch.ones(3 + rank))

    run_ranks(2, body)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changed(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    lockstep.save(tmp_path, model=model, optimizer=optimizer, step=1)
    number = torch.zeros(())
    for other, words in [
        (
            nn.Sequential(nn.Linear(3, 5)),
            "model.1.bias.*in the checkpoint and not in the model",
        ),
        (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4)), r"'model.0.(weight|bias)'.*\[5"),
        (nn.Sequential(nn.Linear(3, 4).double(), nn.BatchNorm1d(4)), "'model.0.* is torch.float32"),
        (nn.Sequential(*model, nn.Linear(4, 1)), "model.2.bias.*is in the model and not in the ch"),
    ]:
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointMismatch, match=words):
            lockstep.load(tmp_path, model=other, step=0)
        assert same(dict(other.state_dict()), dict(before))
    wide = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    its = torch.optim.SGD(wide.parameters(), lr=2.0)
    with pytest.raises(CheckpointMismatch, match=r"parameter 0 has shape \[4, 3\] .*\[5, 3\] here"):
        lockstep.load(tmp_path, optimizer=its)
    assert its.param_groups[0]["lr"] == 2.0
    with pytest.raises(CheckpointMismatch, match=r"was saved with \[4\] parameters"):
        lockstep.load(tmp_path, optimizer=torch.optim.SGD(model[0].parameters(), lr=1.0))
    with pytest.raises(CheckpointMismatch, match=r"no 'scheduler'.*'model', 'optimizer', 'step'"):
        lockstep.load(tmp_path, scheduler=None)
    with pytest.raises(CheckpointMismatch, match="'step' was saved as a value"):
        lockstep.load(tmp_path, step=number)
    found = lockstep.load(tmp_path, model=None)["model"]
    assert same(found, dict(model.state_dict()))
    bigger = nn.Sequential(*model, nn.Linear(4, 1))
    lockstep.load(tmp_path, strict=False, model=bigger)


def test_what_is_no_checkpoint_is_refused(tmp_path) -> None:
    for path, words in [(tmp_path / "none", "is not there"), (tmp_path, "no checkpoint in")]:
        with pytest.raises(CheckpointNotFound, match=words):
            lockstep.load(path, step=0)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointNotFound, match="is a file"):
        lockstep.load(file, step=0)
    with pytest.raises(SaveFailed, match="file"):
        lockstep.save(file, step=0)
    with pytest.raises(ValueError, match="keep is 0"):
        lockstep.save(tmp_path / "a", keep=0, step=0)
    path = lockstep.save(tmp_path / "a", step=0)
    with pytest.raises(CheckpointNotFound, match="000007"):
        lockstep.load(tmp_path / "a" / "000007", step=0)
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data.replace(b"checkpoint 1 ", b"checkpoint 2 "))
    with pytest.raises(CheckpointDamaged, match=r"has format 2, and this version.*up to 1"):
        lockstep.load(tmp_path / "a", step=0)


def test_a_folder_may_have_a_number_for_its_name(tmp_path) -> None:
    for name in ("123456", "20261123", "000000123"):
        lockstep.save(tmp_path / name, step=1)
        lockstep.save(tmp_path / name, step=2)
        assert lockstep.load(tmp_path / name, step=0) == {"step": 2}
        assert lockstep.load(tmp_path / name / "000001", step=0) == {"step": 1}


def test_only_checkpoints_are_removed(tmp_path) -> None:
    """Folders of the user's own, with numbers and other names that look like ours."""
    kept = ["000001", "000002", "0000003", "1234567", ".tmp-mine"]
    for name in kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("mine")
    (tmp_path / "000004").write_text("mine")
    for step in range(3):
        path = lockstep.save(tmp_path, keep=1, step=step)
    assert path.name == "1234570"
    assert all((tmp_path / name / "data").read_text() == "mine" for name in kept)
    assert (tmp_path / "000004").read_text() == "mine"
    assert lockstep.load(tmp_path, step=0) == {"step": 2}


def test_paths_that_make_no_sense_are_refused(tmp_path) -> None:
    for step in range(3):
        path = lockstep.save(tmp_path / "run", step=step)
    with pytest.raises(CheckpointNotFound, match=r"000001 is not there. .*run has 000002, 000003"):
        lockstep.load(tmp_path / "run" / "000001", step=0)
    with pytest.raises(SaveFailed, match=r"000003 is a checkpoint.*around it: .*run\."):
        lockstep.save(path, step=4)
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "rank-0.bin"]
    with pytest.raises(ValueError, match="path is empty"):
        lockstep.save("", step=4)
    with pytest.raises(TypeError, match="'layer' is a type, which is neither saved nor sent"):
        lockstep.save(tmp_path / "run", layer=nn.Linear)


@pytest.mark.parametrize("method", [(Path, "is_dir"), (Folder, "read")])
def test_a_checkpoint_that_may_not_be_read_is_named(tmp_path, monkeypatch, method) -> None:
    lockstep.save(tmp_path, step=1)

    def denied(*args: object) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(args[0]))

    monkeypatch.setattr(*method, denied)
    with pytest.raises(CheckpointError, match=r"can't be read.*Permission denied"):
        lockstep.load(tmp_path, step=0)


def test_a_checkpoint_that_is_removed_is_read_to_its_end(tmp_path, monkeypatch) -> None:
    path = lockstep.save(tmp_path, tensor=torch.ones(3))
    manifest = folder_module.Manifest(path)
    monkeypatch.setattr(folder_module, "_MAX_OPEN", 0)  # as of a very large number of ranks
    by_name = folder_module.Manifest(path)
    (path / "rank-0.bin").unlink()
    assert torch.equal(manifest.read("tensor"), torch.ones(3))
    with pytest.raises(CheckpointDamaged, match=r"rank-0\.bin is missing"):
        by_name.read("tensor")


def test_an_optimizer_of_another_class_is_refused(tmp_path) -> None:
    model = nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(adam, 1.0, 10)
    lockstep.save(tmp_path, optimizer=adam, scheduler=scheduler)
    for other in (
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        torch.optim.RMSprop(model.parameters(), lr=0.5),
    ):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointMismatch, match=r"another class of optimizers.*betas"):
            lockstep.load(tmp_path, optimizer=other)
        assert same(other.state_dict(), before)
    # Of the same options, or of options that its torch didn't have yet.
    lockstep.load(tmp_path, optimizer=torch.optim.Adam(model.parameters(), lr=0.5))
    del adam.param_groups[0]["decoupled_weight_decay"]
    lockstep.save(tmp_path, optimizer=adam)
    lockstep.load(tmp_path, optimizer=torch.optim.AdamW(model.parameters(), lr=0.5))


def test_nothing_is_changed_if_one_thing_refuses_its_state(tmp_path) -> None:
    """Not on the ranks either whose things take theirs."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        things = {"model": model, "optimizer": optimizer, "a": scheduler}
        loader = lockstep.DataLoader(list(range(10)), batch_size=2, process_group=group)
        lockstep.save(tmp_path, process_group=group, **things, loader=loader)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model.weight.zero_()
        other = lockstep.DataLoader(
            list(range(10 + rank if rank else 10)), batch_size=2, process_group=group
        )
        torch.manual_seed(rank)
        with pytest.raises(ValueError if rank else CheckpointError, match="This state is of a"):
            lockstep.load(tmp_path, process_group=group, **things, loader=other)
        assert scheduler.last_epoch == 1
        assert not model.weight.any()
        if rank == 0:
            lockstep.load(tmp_path, process_group=None, **things)
            assert scheduler.last_epoch == 0

    run_ranks(2, body)


class Halves:
    """Takes the first half of a state, and refuses the second if it is too large."""

    def __init__(self, first: int, second: int, limit: int) -> None:
        self.first, self.second, self.limit = first, second, limit

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]
        if state["second"] > self.limit:
            raise ValueError(f"{state['second']} is too large")
        self.second = state["second"]


def test_a_thing_that_refuses_its_state_halfway_is_restored_too(tmp_path) -> None:
    lockstep.save(tmp_path, a=Halves(1, 2, 9), b=Halves(3, 4, 9), c=Halves(5, 6, 9))
    things = {"a": Halves(0, 0, 9), "b": Halves(0, 0, 3), "c": Halves(0, 0, 9)}
    with pytest.raises(ValueError, match="4 is too large"):
        lockstep.load(tmp_path, **things)
    assert [thing.state_dict() for thing in things.values()] == [{"first": 0, "second": 0}] * 3


def test_a_thing_that_cannot_be_restored_is_named_and_the_others_are(tmp_path) -> None:
    lockstep.save(tmp_path, a=Halves(1, 2, 9), b=Halves(3, 4, 9), c=Halves(5, 6, 9))
    things = {"a": Halves(0, 8, 3), "b": Halves(0, 0, 9), "c": Halves(0, 0, 3)}
    with pytest.raises(ValueError, match="6 is too large") as refused:
        lockstep.load(tmp_path, **things)
    told = "\n".join(refused.value.__notes__)
    assert "'a' couldn't be restored: ValueError('8 is too large'). Make it anew." in told
    assert things["b"].state_dict() == things["c"].state_dict() == {"first": 0, "second": 0}


def test_a_manifest_that_means_harm_is_refused(tmp_path) -> None:
    path = lockstep.save(tmp_path, value=torch.zeros(100), words=["a"])
    facts = facts_of(path)

    entry = facts["tensors"]["value"]
    for changed in [
        {"tensors": facts["tensors"] | {"value": [["float32", [10**15], [0]], entry[1]]}},
        {"tensors": facts["tensors"] | {"value": [["float32", [100], [1]], entry[1]]}},
        {"tensors": facts["tensors"] | {"value": [["load", [100], [0]], entry[1]]}},
        {"tensors": facts["tensors"] | {"value": [entry[0], [[0, 100, -1, 0, 1]]]}},
        {"tensors": facts["tensors"] | {"value": [entry[0], [[0, 100, 0, -64, 1]]]}},
        {"tensors": facts["tensors"] | {"value": [entry[0], [[0, 100, "../x", 0, 1]]]}},
        {"things": facts["things"] | {"words": {"kind": "value", "tree": {"eval": "1"}}}},
        {"things": facts["things"] | {"words": {"kind": "value", "tree": {"tensor": "no"}}}},
        {"things": 3},
        {"random": []},
        {"ranks": "\x1b[2J"},
        {"saved": None},
        # Two tensors in the same bytes: a small file would take any memory.
        {"tensors": facts["tensors"] | {"other": entry}},
    ]:
        put_facts(path, facts | changed)
        with pytest.raises(CheckpointDamaged, match="can't be understood"):
            lockstep.load(tmp_path, value=None, words=None)


@pytest.mark.parametrize("end", [b"", b"]}}"])
def test_an_open_string_takes_one_look(tmp_path, end: bytes) -> None:
    """Another look at each of its quotes would take an hour."""
    path = lockstep.save(tmp_path, words=["a"])
    put_body(path, b'{"things":{"words":["' + b'\\"' * 1_000_000 + end)
    with watched(4_000_000), pytest.raises(CheckpointDamaged, match="can't be understood"):
        lockstep.load(tmp_path, words=None)


@pytest.mark.parametrize("left", [b"[", b'{"dict":{"a":', b'{"tuple":['])
def test_what_is_nested_too_deeply_takes_no_look_at_all_of_it(tmp_path, left: bytes) -> None:
    path = lockstep.save(tmp_path, words=["a"])
    right = left[::-1].translate(bytes.maketrans(b"[{", b"]}"), b'":adeilptuc')
    body = b'{"things":{"words":["value",' + left * 300_000 + right * 300_000 + b"]}}"
    put_body(path, body)
    with (
        watched(len(body)),
        pytest.raises(CheckpointDamaged, match=r"what begins at byte .* is nested too deeply"),
    ):
        lockstep.load(tmp_path, words=None)


def test_a_thing_of_a_manifest_that_is_no_json_is_damage(tmp_path) -> None:
    """What isn't read isn't looked at, so it shows where it is asked for."""
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    path = lockstep.save(tmp_path, optimizer=optimizer, step=[3])
    body = body_of(path)
    for before, after, things in (
        (b'"shapes": [[', b'"shapes": [0.5[', {"optimizer": optimizer}),
        (b"[3]}", b"[3[3]]}", {"step": None}),
    ):
        assert before in body
        put_body(path, body.replace(before, after))
        with pytest.raises(CheckpointDamaged, match="can't be understood"):
            lockstep.load(tmp_path, random_state=False, **things)
    with pytest.raises(CheckpointDamaged, match="can't be understood"):
        show(str(path))


def test_an_optimizer_that_is_sharded_among_others_is_refused(tmp_path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        # Two halves of the ranks, each with an optimizer that it shares out among itself.
        half = make_group("threads", stores[rank // 2], rank % 2, 2, 20)
        _, optimizer = trained(half, Digits, OPTIMIZERS["AdamW"], sharded=True)
        with pytest.raises(SaveFailed, match=r"each element of 'optimizer.state.*once"):
            lockstep.save(tmp_path, process_group=group, optimizer=optimizer)
        half.shutdown()

    stores = [dist.HashStore(), dist.HashStore()]
    run_ranks(4, body)


def test_a_process_forked_while_a_save_runs_keeps_no_lock(tmp_path) -> None:
    """As a loader's worker is, at the beginning of an epoch, while a thread writes."""
    ours, theirs = os.pipe()
    fsync = os.fsync
    children = []

    def fork_before(descriptor: int) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                os.read(ours, 1)
                os._exit(0)
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fork_before)
        lockstep.save(tmp_path, step=1)
    try:
        lockstep.save(tmp_path, step=2)
    finally:
        os.write(theirs, b".")
        os.waitpid(children[0], 0)
        os.close(ours)
        os.close(theirs)


def test_two_runs_that_save_to_one_folder_are_told(tmp_path) -> None:
    lockstep.save(tmp_path, step=1)
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SaveFailed, match=rf"process {os.getpid()} on .* holds .*\.lock"):
            lockstep.save(tmp_path, step=2)
    assert lockstep.load(tmp_path, step=0) == {"step": 1}


@pytest.mark.forks
def test_a_background_save_that_fails_ends_the_program_with_an_error(tmp_path) -> None:
    program = PROGRAM.replace("    print", "    shutil.rmtree(sys.argv[1])\n    print")
    program = "import shutil" + program
    command = [sys.executable, "-c", program, str(tmp_path / "a"), "2,async"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "the last checkpoint was not saved" in done.stderr
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "b"), "2,async"]
    subprocess.run(command, check=True)
    assert lockstep.load(tmp_path / "b", step=0) == {"step": 1}
