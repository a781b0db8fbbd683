"""The device of each rank, and the backend for it, on machines that torch.accelerator describes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import BackendUnavailable
from lockstep.world import Placement, Starter, backend_of, choose_backend, device_of_sums, devices
from lockstep.world.devices import carried_device, one_kind, usable_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let torch have so many devices of a kind."""
    kind, number = request.param
    device = torch.device(kind) if kind is not None else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


def place(rank: int, world_size: int, *, per_task: bool = False) -> Placement:
    return Placement(
        Starter.LOCKSTEP, rank, world_size, rank, world_size, one_device_per_task=per_task
    )


def device_of(rank: int, size: int, wanted: str | None = None, *, per_task: bool = False) -> str:
    asked = None if wanted is None else torch.device(wanted)
    return str(usable_device(place(rank, size, per_task=per_task), (rank, size), asked))


@pytest.mark.parametrize(
    ("machine", "rank", "size", "wanted", "found"),
    [
        ((None, 0), 1, 2, None, "cpu"),
        (("cuda", 4), 1, 2, None, "cuda:1"),
        (("xpu", 2), 1, 2, None, "xpu:1"),
        (("xpu", 2), 1, 2, "xpu", "xpu:1"),  # not the first for all
        (("xpu", 2), 1, 2, "xpu:0", "xpu:0"),
        (("xpu", 1), 1, 2, "xpu", "xpu:0"),  # who asks for it gets one that ranks share
        (("xpu", 2), 1, 2, "cpu", "cpu"),
        (("mps", 1), 0, 1, None, "mps:0"),
        (("mps", 1), 0, 2, None, "cpu"),  # which has one device, and no backend
        (("mps", 1), 0, 1, "mps", "mps:0"),
    ],
    indirect=["machine"],
)
def test_devices(machine: None, rank: int, size: int, wanted: str | None, found: str) -> None:
    assert device_of(rank, size, wanted) == found


@pytest.mark.parametrize("machine", [("cuda", 1)], indirect=True)
def test_a_rank_that_sees_its_own_device_alone_gets_it(machine: None) -> None:
    assert device_of(1, 2, per_task=True) == "cuda:0"


@pytest.mark.parametrize(
    ("machine", "wanted", "says"),
    [
        ((None, 0), "cuda:0", "torch can use no accelerator here"),
        (("cuda", 1), "cuda:1", "torch can use 1 cuda device here"),
        (("xpu", 2), "cuda:0", "torch can use 2 xpu devices here"),
        (("mps", 1), "mps", "no backend of torch.distributed carries tensors of mps"),
    ],
    indirect=["machine"],
)
def test_what_is_not_there_is_refused(machine: None, wanted: str, says: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"init.*{wanted}.* was asked for, but {says}"):
        device_of(0, 2, wanted)


@pytest.mark.parametrize("machine", [("cuda", 2)], indirect=True)
def test_too_few_devices_are_told_once_on_each_host(
    machine: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        assert [device_of(rank, 3) for rank in range(3)] == ["cpu"] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Ranks compute on the CPU: this host has 2 cuda devices for 3 ranks. Start 2 of them"
    )


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(torch.device("cpu")) == "shm"
    assert choose_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert choose_backend(torch.device("xpu", 1)) == "cpu:gloo,xpu:xccl"
    # torch names Gloo for MPS, whose tensors it doesn't carry.
    assert (backend_of("mps"), choose_backend(torch.device("mps"))) == (None, "shm")
    # As a package does that brings an accelerator.
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "hpu", "hccl")
    monkeypatch.setitem(dist.Backend.backend_capability, "hccl", ["hpu"])
    assert backend_of("hpu") == "hccl"


@pytest.mark.parametrize(
    ("device", "backend", "says"),
    [
        ("cpu", "nccl", "'nccl' carries tensors of cuda .* device is cpu.*backend='shm'"),
        ("cuda:1", "shm", "'shm' carries tensors of cpu .* device is cuda:1.*cpu:gloo,cuda:nccl"),
        ("xpu:0", "gloo", "'gloo' carries tensors of cpu and cuda .* device is xpu:0"),
    ],
)
def test_a_backend_that_does_not_carry_the_tensors_of_a_device_is_refused(
    device: str, backend: str, says: str
) -> None:
    with pytest.raises(BackendUnavailable, match=says):
        carried_device(torch.device(device), backend, is_chosen=False)


def test_a_device_is_chosen_for_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert carried_device(cuda, "gloo", is_chosen=True) == cuda
    assert carried_device(cuda, None, is_chosen=True) == cuda
    assert not caplog.records
    assert carried_device(cuda, "shm", is_chosen=True) == cpu
    assert "the backend 'shm' carries no tensors of cuda" in caplog.text


def test_sums_are_on_a_device_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*_: object, device: str, **__: object) -> torch.Tensor:
        if device == "mps":
            raise TypeError("the MPS framework doesn't support float64")
        return torch.zeros(1)

    monkeypatch.setattr(torch, "ones", ones)
    found = {kind: device_of_sums(torch.device(kind)).type for kind in ("mps", "xpu", "cuda")}
    devices._has_float64.cache_clear()
    assert found == {"mps": "cpu", "xpu": "xpu", "cuda": "cuda"}


def test_ranks_take_one_kind_of_device() -> None:
    assert one_kind(["cuda", "cuda"], [True, True]) == "cuda"
    assert one_kind(["cpu", "cuda"], [True, True]) is None
    with pytest.raises(
        BackendUnavailable, match="cpu on rank 0 and cuda on rank 1, which share no"
    ):
        one_kind(["cpu", "cuda", "cuda"], [False, True, True])


ASK = """
import os, lockstep
try:
    lockstep.init(**OPTIONS if os.environ["RANK"] == "1" else {})
except lockstep.LockstepError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:5"}, "init(device='cuda:5') was asked for, but torch can use "),
        pytest.param(
            {"device": "cpu", "backend": "nccl"},
            "The backend 'nccl' carries tensors of cuda ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_device_that_one_rank_lacks_is_told_on_all(
    tmp_path: Path, options: dict[str, str], says: str
) -> None:
    script = tmp_path / "ask.py"
    script.write_text(ASK.replace("OPTIONS", repr(options)))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    refusal = f"On rank 1: {says}"
    assert {line.split("] ")[0] for line in told.splitlines() if refusal in line} == {
        "[rank 0",
        "[rank 1",
    }
