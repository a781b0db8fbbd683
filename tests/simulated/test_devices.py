"""Devices that are not there, or not where others expect them: refused on every rank alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulated.control import BACKEND, KIND, NUM_DEVICES

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
        torch.accelerator.set_device_index(rank)
        torch.distributed.init_process_group(plan["group"])
    world = lockstep.init(**plan.get("init", {}))
    told = str(world.device)
    if "delay" in plan:  # not by the environment, which forks of tests have read already
        from tests.simulated.control import set_delay
        set_delay(plan["delay"])
    if "makes" in plan:
        told = str(torch.ones(1, device=plan["makes"]).device)
    if "model" in plan:
        places = [place or world.device for place in plan["model"]]
        model = nn.Sequential(*(nn.Linear(4, 4).to(place) for place in places))
        lockstep.parallelize(model)
        for step in range(3):
            model.zero_grad()
            x = torch.full((2, 4), rank + 1.0)
            for part in model:
                x = part(x.to(part.weight.device))
            if step == plan.get("moves"):
                model.to("cpu")
            x.sum().backward()
        told = "trained"
        if "moves" in plan:
            grad = model[0].weight.grad
            told = "none" if grad is None else f"{grad.device} {grad.mean():.1f}"
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
    assert "No backend of type" not in run.stderr  # torch's word at the end of a group
    return [text for _, text in sorted(map(json.loads, found))]


HAS = f"torch can use {NUM_DEVICES} {KIND} devices"
# A backend that doesn't carry their tensors.
UNFIT = "shm" if KIND == "cuda" else "gloo"
# What ranks compute on over Gloo.
OVER_GLOO = [f"{KIND}:0", f"{KIND}:1"] if KIND == "cuda" else ["cpu", "cpu"]
BOTH_WAYS = f"backend='cpu:gloo,{KIND}:{BACKEND}'"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"init": {"device": f"{KIND}:7"}}, [f"'{KIND}:7'", HAS, "Leave"]),
        ({"init": {"device": "xpu"}}, ["'xpu'", HAS, "Leave"]),
        (
            {"init": {"device": "cpu", "backend": BACKEND}},
            [repr(BACKEND), f"of {KIND}", "device is cpu"],
        ),
        ({"init": {"device": KIND, "backend": "shm"}}, ["'shm'", "of cpu", BOTH_WAYS]),
        ({"init": {"device": KIND, "backend": "cpu:gloo"}}, ["'cpu:gloo'", BOTH_WAYS]),
        (
            {"init": {"device": KIND, "backend": f"cpu:gloo,{KIND}:{UNFIT}"}},
            [f"'cpu:gloo,{KIND}:{UNFIT}' carries tensors of cpu between", BOTH_WAYS],
        ),
        ({"group": BACKEND, "init": {"device": "cpu"}}, [f"tensors of {KIND}", "device is cpu"]),
        ({"group": BACKEND, "init": {"device": f"{KIND}:9"}}, [f"'{KIND}:9'", HAS]),
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
    assert told(tmp_path, {"init": {"backend": BACKEND}}) == [f"{KIND}:0", f"{KIND}:1"]
    assert told(tmp_path, {"group": BACKEND}) == [f"{KIND}:0", f"{KIND}:1"]
    assert told(tmp_path, {"group": f"cpu:gloo,{KIND}:shm"}) == ["cpu", "cpu"]
    assert told(tmp_path, {"group": "gloo"}) == OVER_GLOO


NOPE = {"environ": {"NCCL_SOCKET_IFNAME": "=nope"}}


@pytest.mark.skipif(KIND != "cuda", reason="NCCL is for GPUs")
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
    devices = OVER_GLOO if init == {"backend": "gloo"} else ["cpu", "cpu"]
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
        ({"model": [f"{KIND}:2"]}, [f"'0.weight' is on {KIND}:2", f"model.to('{KIND}:1')"]),
        ({"model": [f"{KIND}:0", CPU]}, [f"'0.weight' is on {KIND}:0", f"model.to('{KIND}:1')"]),
        (
            {"init": {"backend": BACKEND}, "model": [CPU]},
            ["'0.weight' is on cpu", "no tensors of cpu", f"model.to('{KIND}:1')"],
        ),
        (
            {"init": {"backend": BACKEND}, "model": [HERE, CPU]},
            ["'1.weight' is on cpu", "no tensors of cpu", f"model.to('{KIND}:1')"],
        ),
        (
            {"init": {"device": "cpu"}, "model": [f"{KIND}:1"]},
            [f"'0.weight' is on {KIND}:1", f"no tensors of {KIND}", "model.to('cpu')"],
        ),
        ({"init": {"backend": "shm"}, "model": [f"{KIND}:1", CPU]}, [f"no tensors of {KIND}"]),
    ],
)
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_model_where_it_cannot_be_kept_in_step_is_refused_on_all(
    tmp_path: Path, plan: dict[str, Any], words: list[str], is_everywhere: bool
) -> None:
    right = {**plan, "model": [HERE] * len(plan["model"])}
    first, second = told(tmp_path, plan if is_everywhere else right, plan)
    is_fine = is_everywhere and plan["model"][0] == f"{KIND}:0"  # that of the first rank
    assert first.startswith(
        "ModelError: " if is_everywhere and not is_fine else "ModelMismatch: Rank 1 can't go on"
    ), first
    assert second.startswith("ModelError: "), second
    assert all(word in second for word in words), second


def test_models_on_devices_of_different_kinds_are_told_apart(tmp_path: Path) -> None:
    for text in told(tmp_path, {"model": [HERE]}, {"model": [CPU]}):
        assert text.startswith("ModelMismatch: '0.weight' is a parameter (4, 4) float32 on rank 1")
        assert f"a parameter (4, 4) float32 on {KIND} on rank 0" in text


@pytest.mark.parametrize("backend", [None, f"cpu:shm,{KIND}:{BACKEND}"])
@pytest.mark.parametrize("places", [[HERE], [HERE, CPU], [CPU], [CPU, HERE, CPU]])
def test_a_model_may_be_on_all_devices_whose_tensors_are_carried(
    tmp_path: Path, places: list[str | None], backend: str | None
) -> None:
    init = {} if backend is None else {"backend": backend}
    assert told(tmp_path, {"init": init, "model": places}) == ["trained", "trained"]


def test_ranks_share_a_device_if_a_backend_can(tmp_path: Path) -> None:
    """Theirs refuses that, and Gloo takes its place where it carries their tensors."""
    for text in told(tmp_path, {"init": {"device": f"{KIND}:0"}, "model": [HERE]}):
        if KIND == "cuda":
            assert text == "trained"
        else:
            assert text.startswith(f"BackendUnavailable: cpu:gloo,{KIND}:{BACKEND} can't be used")
            assert "Duplicate" in text
            assert f"Gloo carries no tensors of {KIND}" in text


def test_more_ranks_than_devices_are_told_why_they_compute_on_the_cpu(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import lockstep; print('on', lockstep.init().device)")
    number = NUM_DEVICES + 1
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(number), str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout.count("on cpu") == number, run.stdout + run.stderr
    reason = f"this host has {NUM_DEVICES} {KIND} devices for {number} ranks"
    assert run.stderr.count(reason) == 1, run.stderr


def test_the_device_that_is_asked_for_is_the_current_one(tmp_path: Path) -> None:
    for group in ({}, {"group": f"cpu:gloo,{KIND}:{BACKEND}"}):
        for indices in ((1, 0), (2, 0)):
            plans = [{"init": {"device": f"{KIND}:{index}"}, "makes": KIND} for index in indices]
            expected = [f"{KIND}:{index}" for index in indices]
            assert told(tmp_path, *({**plan, **group} for plan in plans)) == expected


# Not "lazy": rank 0's host may wait for a collective of devices while rank 1's waits for one of
# hosts, and a device that runs nothing unless its host waits would never take part.
DELAY = "0,5"


@pytest.mark.parametrize("moves", [0, 2])
def test_a_model_that_is_moved_before_a_backward_has_its_means_there(
    tmp_path: Path, moves: int
) -> None:
    if moves and KIND != "cuda":
        pytest.skip("torch puts other parameters in place of those moved")
    plan = {"model": [HERE], "moves": moves, "delay": DELAY}
    assert told(tmp_path, plan) == ["cpu 3.0"] * 2


@pytest.mark.skipif(KIND == "cuda", reason="torch moves parameters, and puts no others in place")
def test_a_model_whose_moved_parameters_are_others_has_the_gradients_of_one_process(
    tmp_path: Path,
) -> None:
    """The backward adds to the former ones, and the next one to those that it has now."""
    assert told(tmp_path, {"model": [HERE], "moves": 2, "delay": DELAY}) == ["none"] * 2
    assert told(tmp_path, {"model": [HERE], "moves": 1, "delay": DELAY}) == ["cpu 3.0"] * 2
