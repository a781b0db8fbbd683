"""``lockstep doctor``: what it finds on this machine, and which traps it names."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from lockstep import cli
from lockstep.errors import LaunchError
from lockstep.observe import diagnosis as doctor
from lockstep.observe.machine import Gpu, Machine, look
from lockstep.world import Starter

pytestmark = pytest.mark.forks

GIB = 2**30
MACHINE = Machine(
    versions={"torch": "2.14.0+cpu"},
    requirement="torch<2.16,>=2.13",
    num_cores=8,
    num_host_cores=8,
    quota=None,
    room_bytes=64 * GIB,
    dev_shm_bytes=32 * GIB,
    num_files=1024,
    gpus=[],
    kind="cuda",
    has_gpu_driver=False,
    cuda=None,
    backends={"shm": "", "gloo": "", "nccl": "no", "mpi": "no"},
    shows_pages=True,
    starter=Starter.NOTHING,
    starter_error="",
    variables={},
    host="here",
    address="10.0.0.1",
)
TRIAL = doctor.TriedStart(1.0, {"4 KiB": 40.0})
TWO_GPUS = [Gpu("H200", 140 * GIB, []), Gpu("H200", 140 * GIB, [])]


def found(num_ranks: int = 2, **changes: Any) -> list[tuple[bool, str, str]]:
    machine = MACHINE._replace(**changes)
    choice = doctor.choice_of(machine, num_ranks)
    return [*doctor.findings(machine, choice, TRIAL)]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert found() == []
    with_gpus = {"gpus": TWO_GPUS, "has_gpu_driver": True, "cuda": "13.0"}
    assert found(**with_gpus) == []
    assert found(quota=8.0, num_files=None, dev_shm_bytes=None) == []


@pytest.mark.parametrize(
    ("changes", "is_wrong", "words"),
    [
        ({"starter_error": "RANK is 7, but"}, True, "init() would fail in this shell: RANK is 7"),
        (
            {"starter": Starter.TORCHRUN, "variables": {"RANK": "0", "WORLD_SIZE": "4"}},
            True,
            "RANK=0 and WORLD_SIZE=4 are set",
        ),
        ({"variables": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}, False, "'shm' before lockstep"),
        ({"has_gpu_driver": True}, True, "built without CUDA"),
        ({"has_gpu_driver": True, "cuda": "13.0"}, True, "built for CUDA 13.0, can't use them"),
        (
            {"has_gpu_driver": True, "cuda": "13.0", "variables": {"CUDA_VISIBLE_DEVICES": ""}},
            True,
            "CUDA_VISIBLE_DEVICES='' hides them",
        ),
        ({"gpus": TWO_GPUS, "num_ranks": 1}, False, "2 GPUs, and 1 ranks"),
        ({"gpus": TWO_GPUS, "num_ranks": 4}, False, "2 GPUs, and 4 ranks"),
        ({"gpus": [Gpu("A", 1, [1]), Gpu("A", 1, [])]}, False, "GPU 0 can't reach the memory of"),
        ({"gpus": TWO_GPUS, "variables": {"NCCL_P2P_DISABLE": "1"}}, False, "NCCL_P2P_DISABLE=1"),
        ({"num_ranks": 9}, False, "9 ranks share 8 cores"),
        ({"quota": 1.5}, True, "grants this process the time of 1.5 cores"),
        ({"num_host_cores": 64}, False, "8 of 64 cores"),
        ({"variables": {"MKL_NUM_THREADS": "7654"}}, True, "MKL_NUM_THREADS=7654"),
        ({"room_bytes": 300 * 2**20}, True, "300 MiB of memory are left"),
        ({"dev_shm_bytes": 64 * 2**20}, True, "/dev/shm has 64 MiB"),
        ({"num_files": 128}, True, "128 files open"),
        ({"shows_pages": False}, False, "pagemap can't be read"),
        ({"versions": {"torch": "2.16.1"}}, False, "tested with torch<2.16,>=2.13"),
        ({"versions": {"torch": "2.9.0a0+git1"}}, False, "this is torch 2.9.0"),
        ({"address": ""}, False, "here, has no address"),
    ],
)
def test_each_trap_is_named(changes: dict[str, Any], is_wrong: bool, words: str) -> None:
    [finding] = found(**changes)
    assert (finding.is_wrong, words in finding.what) == (is_wrong, True), finding
    assert finding.mend


def test_it_says_what_init_chooses() -> None:
    assert doctor.choice_of(MACHINE, 2)[2:4] == ("cpu", "shm")
    choice = doctor.choice_of(MACHINE._replace(backends={"shm": "no room"}), 2)
    assert (choice.backend, choice.reason) == ("gloo", "shm can't be used: no room")
    choice = doctor.choice_of(MACHINE._replace(gpus=TWO_GPUS), 2)
    assert (choice.device, choice.backend) == ("cuda", "cpu:gloo,cuda:nccl")
    choice = doctor.choice_of(MACHINE._replace(gpus=TWO_GPUS), 3)
    assert choice.reason.startswith("3 ranks would have to share 2 GPUs")


def test_ranks_that_do_not_meet_are_wrong(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LaunchError("Rank 1 failed.")

    monkeypatch.setattr(doctor, "launch", refuse)
    assert not doctor.doctor("2")
    assert "not meet: Rank 1 failed." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words", "code"),
    [
        ({}, "Nothing is wrong.", 0),
        ({"num_host_cores": 9}, "note This process may use 8 of 9 cores.", 0),
        ({"num_files": 9}, "wrong A process may have 9 files open", 1),
    ],
    ids=["nothing", "a note", "a wrong"],
)
def test_the_exit_code_is_1_if_something_is_wrong(
    changes: dict[str, Any],
    words: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "look", lambda _: MACHINE._replace(**changes))
    monkeypatch.setattr(doctor, "try_ranks", lambda _: TRIAL)
    monkeypatch.setattr(sys, "argv", ["lockstep", "doctor"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    assert words in " ".join(capsys.readouterr().out.split())


def test_this_machine_is_described_as_it_is() -> None:
    machine = look({**os.environ, "NCCL_DEBUG": "INFO", "RANK": "3", "WORLD_SIZE": "2"})
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.variables["NCCL_DEBUG"] == "INFO"
    assert "MASTER_ADDR" in machine.starter_error
    assert machine.backends["shm"] == machine.backends["gloo"] == ""
    assert machine.requirement.startswith("torch<")


def test_the_command_prints_what_is_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "doctor", "--json", "-n", "3"])
    with pytest.raises(SystemExit):
        cli.main()
    told = json.loads(capsys.readouterr().out)
    assert told["choice"]["num_ranks"] == 3
    assert told["trial"]["error"] == ""
    assert all(micros > 0 for micros in told["trial"]["micros"].values())
    doctor.doctor("2")
    assert "chooses cpu and shm" in " ".join(capsys.readouterr().out.split())
