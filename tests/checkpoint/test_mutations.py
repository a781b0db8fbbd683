"""Mutated checkpoints are loaded as they are, or refused by name: see tests/fuzzing.py."""

from __future__ import annotations

import copy
import json
import random
import sys
import warnings
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

import lockstep
from lockstep import cli
from lockstep.checkpoint import DcpReader
from lockstep.errors import CheckpointError
from tests.checkpoint.training import same
from tests.counts import NUM_MUTATIONS, is_long
from tests.fuzzing import mutated, mutated_json, watched
from tests.ranks import run_ranks

VALUES = {
    "numbers": [1, -2.5, True, None, 3 + 4j, float("inf")],
    "texts": {"a": "x[/nope]", 3: b"bytes", (1, "b"): bytearray(b"array")},
    "kinds": [torch.float16, torch.device("cpu"), torch.Size([2]), {1, 2}, frozenset("ab")],
    "queues": (deque([1, 2], maxlen=3), deque(), OrderedDict(b=1)),
    "arrays": [np.arange(6.0).reshape(2, 3), np.float32(2), torch.arange(4).bool()],
}


class Scheduler(torch.optim.lr_scheduler.StepLR):
    """An object that itself refuses states, by errors of its own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        try:
            super().load_state_dict(state_dict)
        except Exception as error:
            raise CheckpointError("shown") from error


def things() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": Scheduler(optimizer, 2),
        "generator": torch.Generator(),
        "tensor": torch.zeros(20, 30).t(),
        "values": None,
    }


def saved(folder: Path) -> Path:
    """Save things of every kind on two ranks, the optimizer's state divided between them."""

    def save(rank: int, group: dist.ProcessGroup) -> Path:
        torch.manual_seed(0)
        found = things()
        model = lockstep.parallelize(found["model"], process_group=group)
        optimizer = lockstep.shard_optimizer(found["optimizer"])
        model(torch.ones(5, 4)).sum().backward()
        optimizer.step()
        found |= {"model": model, "optimizer": optimizer, "values": VALUES}
        return lockstep.save(folder, process_group=group, **found)

    return run_ranks(2, save)[0]


def resealed(head_and_body: bytes, body: bytes) -> bytes:
    """A manifest of this body whose digest is right, as someone who means harm writes it."""
    version = head_and_body.split(b" ", 3)[2]
    digest = blake2b(body, digest_size=32).hexdigest().encode()
    return b"lockstep checkpoint " + version + b" " + digest + b"\n" + body


def with_checksums(body: bytes, files: list[bytes]) -> bytes:
    """A manifest's body with the sizes and checksums that these files have."""
    facts = json.loads(body)
    facts["bytes"] = [*map(len, files)]
    for (dtype, *_), pieces in facts["tensors"].values():
        for piece in pieces:
            start, stop, file, offset, _ = piece
            size = -(-(stop - start) * getattr(torch, dtype).itemsize // 64) * 64
            piece[4] = zlib.crc32(files[file][offset : offset + size])
    return json.dumps(facts).encode()


def mutate_manifest(path: Path, chance: random.Random) -> None:
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    body = data.partition(b"\n")[2]
    if chance.random() < 0.1:
        manifest.write_bytes(mutated(data, chance))
    elif chance.random() < 0.2:
        manifest.write_bytes(resealed(data, mutated(body, chance)))
    else:
        manifest.write_bytes(resealed(data, mutated_json(body, chance)))


def mutate_pieces(path: Path, chance: random.Random) -> None:
    names = ["rank-0.bin", "rank-1.bin"]
    changed = chance.choice(names)
    (path / changed).write_bytes(mutated((path / changed).read_bytes(), chance))
    if chance.random() < 0.8:
        data = (path / "manifest.json").read_bytes()
        files = [(path / name).read_bytes() for name in names]
        body = with_checksums(data.partition(b"\n")[2], files)
        (path / "manifest.json").write_bytes(resealed(data, body))


def load(path: Path, chance: random.Random) -> None:
    found = things()
    before = states_of(found)
    random_state = chance.random() < 0.5
    try:
        lockstep.load(path, random_state=random_state, strict=chance.random() < 0.5, **found)
    except CheckpointError as error:
        # Only the class of an optimizer can tell what its state is to have.
        if "may be changed in part" not in str(error):
            assert same(states_of(found), before)
        raise


def states_of(found: dict[str, Any]) -> dict[str, Any]:
    states = {n: found[n].state_dict() for n in ("model", "optimizer", "scheduler")}
    return copy.deepcopy({**states, "tensor": found["tensor"], "g": found["generator"].get_state()})


def return_all(path: Path, chance: random.Random) -> None:
    lockstep.load(path, random_state=False, **dict.fromkeys(things()))


def show(path: Path, chance: random.Random) -> None:
    cli_of("show", path)


def cli_of(*words: object) -> None:
    sys.argv = ["lockstep", *map(str, words)]
    try:
        cli.main()
    except SystemExit as ended:
        raise CheckpointError("shown") from ended


def load_with_torch(path: Path, chance: random.Random) -> None:
    state = {"model": things()["model"].state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(state, storage_reader=DcpReader(path), no_dist=True)
        except CheckpointException as error:  # torch's own, of a key that is missing say
            raise CheckpointError("shown") from error


READERS = [load, return_all, show, load_with_torch]


@pytest.mark.shortened
@pytest.mark.parametrize("mutate", [mutate_manifest, mutate_pieces])
def test_mutated_checkpoints_are_loaded_or_refused(
    tmp_path: Path, mutate: Callable[[Path, random.Random], None], monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    path = saved(tmp_path)
    whole = {file: file.read_bytes() for file in path.iterdir()}
    num_refused = 0
    number = NUM_MUTATIONS if is_long() else 50
    for seed in range(number):
        chance = random.Random(seed)
        for file, data in whole.items():
            file.write_bytes(data)
        mutate(path, chance)
        reader = chance.choice(READERS)
        before = {file: file.read_bytes() for file in sorted(path.iterdir())}
        random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            with watched(sum(map(len, before.values()))):
                reader(path, chance)
        except CheckpointError as error:
            num_refused += 1
            told = str(error)
            assert str(tmp_path) in told or told == "shown", (seed, reader, told)
            assert not any(sign in told for sign in "\x1b\0\a"), (seed, reader)
            assert len(told) < 2000, (seed, reader)
        except BaseException as error:
            error.add_note(f"(seed {seed}, {reader.__name__})")
            raise
        finally:
            torch.set_rng_state(random_states[0])
            random.setstate(random_states[1])
            np.random.set_state(random_states[2])
        shown = capsys.readouterr()
        assert "\x1b" not in shown.out + shown.err, (seed, reader)
        assert "Traceback" not in shown.err
        assert {file: file.read_bytes() for file in sorted(path.iterdir())} == before
    assert number // 4 < num_refused < number
