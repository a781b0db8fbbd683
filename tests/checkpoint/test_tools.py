"""``lockstep show`` and ``lockstep export``, and torch's own loader over our checkpoints."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lockstep
from lockstep import cli
from lockstep.checkpoint import DcpReader
from lockstep.errors import CheckpointDamaged, CheckpointMismatch, MissingExtra


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", *map(str, words)])
    cli.main()


def test_show_prints_what_is_there_and_refuses_damage(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = lockstep.save(tmp_path, model=nn.Linear(3, 20_000), epoch=17)
    command(monkeypatch, "show", tmp_path)
    shown = capsys.readouterr().out
    for word in ("1 ranks", "epoch", "17", "model.weight", "[20000, 3]", "float32", "240,000"):
        assert word in shown
    file = path / "rank-0.bin"
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(SystemExit):
        command(monkeypatch, "show", tmp_path)
    assert "rank-0.bin isn't as it was written" in capsys.readouterr().err


class SafetensorError(Exception):
    """As that of safetensors, which isn't an OSError."""


def stand_in_for_safetensors(monkeypatch: pytest.MonkeyPatch, save_file: object) -> None:
    for name in ("safetensors", "safetensors.torch"):
        module = ModuleType(name)
        vars(module).update(save_file=save_file, SafetensorError=SafetensorError)
        monkeypatch.setitem(sys.modules, name, module)


def test_export_hands_the_tensors_to_safetensors(tmp_path, monkeypatch) -> None:
    model = nn.Linear(3, 2)
    lockstep.save(tmp_path, net=model, epoch=1)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(SystemExit):
        command(monkeypatch, "export", tmp_path, "file", "--thing", "net")
    with pytest.raises(MissingExtra, match="safetensors"):
        lockstep.checkpoint.export(str(tmp_path), "file")
    calls: list[tuple[dict[str, torch.Tensor], str]] = []
    stand_in_for_safetensors(monkeypatch, lambda *args, metadata: calls.append(args))
    command(monkeypatch, "export", tmp_path, "file", "--thing", "net")
    ((found, name),) = calls
    assert name == "file"
    assert found.keys() == {"weight", "bias"}
    assert torch.equal(found["weight"], model.weight)
    with pytest.raises(CheckpointMismatch, match="no 'model'"):
        lockstep.checkpoint.export(str(tmp_path), "file")
    with pytest.raises(CheckpointMismatch, match="no tensors"):
        lockstep.checkpoint.export(str(tmp_path), "file", "epoch")


@pytest.mark.parametrize("error", [SafetensorError, OSError])
def test_export_refuses_a_file_that_cannot_be_written(
    tmp_path, monkeypatch, capsys, error: type[Exception]
) -> None:
    path = lockstep.save(tmp_path, model=nn.Linear(3, 2))

    def save_file(found: object, to: str, metadata: object) -> None:
        raise error("No such file or directory (os error 2)")

    stand_in_for_safetensors(monkeypatch, save_file)
    with pytest.raises(SystemExit) as exit_:
        command(monkeypatch, "export", tmp_path, "/nowhere/x.safetensors")
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "/nowhere/x.safetensors can't be written: No such file or directory" in said
    assert f"room for 32 bytes. {path} is as it was" in said
    assert "Traceback" not in said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_reads_it(tmp_path) -> None:
    model, other = nn.Linear(30, 20), nn.Linear(30, 20)
    path = lockstep.save(tmp_path, model=model)
    dcp.load({"model": other.state_dict()}, storage_reader=DcpReader(tmp_path), no_dist=True)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
    (path / "rank-0.bin").write_bytes(b"")
    with pytest.raises(CheckpointDamaged):
        DcpReader(tmp_path)
