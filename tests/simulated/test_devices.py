"""Devices that are not there, or not where others expect them: refused on every rank alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import cuda

pytestmark = pytest.mark.forks

# Each rank joins the others, makes a model parallel, and trains it; it prints what it is told.
PROGRAM = """
import json, os, sys
import torch, lockstep
from torch import nn

rank = int(os.environ["RANK"])
plan = json.loads(sys.argv[1])[rank]
os.environ.update(plan.get("environ", {}))
if "has_none" in plan:  # as a host of its own
    lockstep.world.devices.accelerator = lambda: None
try:
    if "group" in plan:
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group(plan["group"])
    world = lockstep.init(**plan.get("init", {}))
    told = str(world.device)
    if "model" in plan:
        places = [place or world.device for place in plan["model"]]
        model = nn.Sequential(*(nn.Linear(4, 4).to(place) for place in places))
        lockstep.parallelize(model)
        x = torch.ones(2, 4)
        for place, part in zip(places, model):
            x = part(x.to(place))
        x.sum().backward()
        told = "trained"
except Exception as error:
    told = f"{type(error).__name__}: {error}"
print("TOLD", json.dumps([rank, told]), flush=True)
"""


def told(tmp_path: Path, *plans: dict[str, Any]) -> list[str]:
    """What each rank is told; all plans are that of the first one, if there is one."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script)]
    plan = json.dumps(plans if len(plans) == 2 else plans * 2)
    run = subprocess.run([*command, plan], capture_output=True, text=True, timeout=60)
    found = [line.partition("TOLD ")[2] for line in run.stdout.splitlines() if "TOLD " in line]
    assert len(found) == 2, run.stdout + run.stderr
    return [text for _, text in sorted(map(json.loads, found))]


HAS = f"torch can use {cuda.NUM_DEVICES} cuda devices"
BOTH_WAYS = "backend='cpu:gloo,cuda:nccl'"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"init": {"device": "cuda:7"}}, ["'cuda:7'", HAS, "Leave"]),
        ({"init": {"device": "xpu"}}, ["'xpu'", HAS, "Leave"]),
        ({"init": {"device": "cpu", "backend": "nccl"}}, ["'nccl'", "of cuda", "device is cpu"]),
        ({"init": {"device": "cuda", "backend": "shm"}}, ["'shm'", "of cpu", BOTH_WAYS]),
        ({"init": {"device": "cuda", "backend": "cpu:gloo"}}, ["'cpu:gloo'", BOTH_WAYS]),
        ({"group": "nccl", "init": {"device": "cpu"}}, ["tensors of cuda", "device is cpu"]),
        ({"group": "nccl", "init": {"device": "cuda:9"}}, ["'cuda:9'", HAS]),
    ],
)
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_device_that_a_rank_cannot_have_is_refused_on_all(
    tmp_path: Path, plan: dict[str, Any], words: list[str], is_everywhere: bool
) -> None:
    init = {name: value for name, value in plan["init"].items() if name != "device"}
    other = plan if is_everywhere else {**plan, "init": init}
    for text in told(tmp_path, other, plan):
        assert text.startswith("BackendUnavailable: On rank "), text
        assert all(word in text for word in words), text


def test_what_is_chosen_is_what_the_backend_carries(tmp_path: Path) -> None:
    assert told(tmp_path, {"init": {"backend": "shm"}}) == ["cpu", "cpu"]
    assert told(tmp_path, {"init": {"backend": "nccl"}}) == ["cuda:0", "cuda:1"]
    assert told(tmp_path, {"group": "gloo"}) == ["cuda:0", "cuda:1"]


NOPE = {"environ": {"NCCL_SOCKET_IFNAME": "=nope"}}


@pytest.mark.parametrize("init", [{}, {"backend": "cpu:gloo,cuda:nccl"}])
def test_interfaces_that_nccl_does_not_have_are_refused_on_all(
    tmp_path: Path, init: dict[str, Any]
) -> None:
    for text in told(tmp_path, {"init": init}, {"init": init, **NOPE}):
        assert text.startswith("BackendUnavailable: On rank 1: NCCL_SOCKET_IFNAME==nope"), text


@pytest.mark.parametrize("init", [{"device": "cpu"}, {"backend": "shm"}, {"backend": "gloo"}])
def test_interfaces_of_nccl_do_not_matter_where_it_is_not_used(
    tmp_path: Path, init: dict[str, Any]
) -> None:
    devices = ["cuda:0", "cuda:1"] if init == {"backend": "gloo"} else ["cpu", "cpu"]
    assert told(tmp_path, {"init": init, **NOPE}) == devices


@pytest.mark.parametrize("order", [1, -1])
def test_interfaces_of_nccl_do_not_matter_where_a_rank_has_no_device(
    tmp_path: Path, order: int
) -> None:
    """All take the CPU, also the rank that has one, and no interface of this name."""
    assert told(tmp_path, *[NOPE, {"has_none": True}][::order]) == ["cpu", "cpu"]


HERE, CPU = None, "cpu"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"model": ["cuda:2"]}, ["'0.weight' is on cuda:2", "model.to('cuda:1')"]),
        ({"model": ["cuda:0", CPU]}, ["'0.weight' is on cuda:0", "model.to('cuda:1')"]),
        (
            {"init": {"backend": "nccl"}, "model": [CPU]},
            ["'0.weight' is on cpu", "no tensors of cpu", "model.to('cuda:1')"],
        ),
        (
            {"init": {"backend": "nccl"}, "model": [HERE, CPU]},
            ["'1.weight' is on cpu", "no tensors of cpu", "model.to('cuda:1')"],
        ),
        (
            {"init": {"device": "cpu"}, "model": ["cuda:1"]},
            ["'0.weight' is on cuda:1", "no tensors of cuda", "model.to('cpu')"],
        ),
        ({"init": {"backend": "shm"}, "model": ["cuda:1", CPU]}, ["no tensors of cuda"]),
    ],
)
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_model_where_it_cannot_be_kept_in_step_is_refused_on_all(
    tmp_path: Path, plan: dict[str, Any], words: list[str], is_everywhere: bool
) -> None:
    right = {**plan, "model": [HERE] * len(plan["model"])}
    first, second = told(tmp_path, plan if is_everywhere else right, plan)
    is_fine = is_everywhere and plan["model"][0] == "cuda:0"  # that of the first rank
    assert first.startswith(
        "ModelError: " if is_everywhere and not is_fine else "ModelMismatch: Rank 1 can't go on"
    ), first
    assert second.startswith("ModelError: "), second
    assert all(word in second for word in words), second


def test_models_on_devices_of_different_kinds_are_told_apart(tmp_path: Path) -> None:
    for text in told(tmp_path, {"model": [HERE]}, {"model": [CPU]}):
        assert text.startswith("ModelMismatch: '0.weight' is a parameter (4, 4) float32 on rank 1")
        assert "a parameter (4, 4) float32 on cuda on rank 0" in text


@pytest.mark.parametrize("places", [[HERE], [HERE, CPU], [CPU], [CPU, HERE, CPU]])
def test_a_model_may_be_on_all_devices_whose_tensors_are_carried(
    tmp_path: Path, places: list[str | None]
) -> None:
    assert told(tmp_path, {"model": places}) == ["trained", "trained"]
