"""torchrun starts ranks again, and SLURM jobs: steps() finds the same state, and the same bits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from lockstep.launcher import START_AGAIN
from tests.launcher.bench import Bench

pytestmark = pytest.mark.forks

TRAINS = """
    import os, signal, time
    from datetime import timedelta
    import torch
    from torch import nn
    import lockstep

    world = lockstep.init(timeout=timedelta(seconds=30))
    torch.manual_seed(3)
    model = lockstep.parallelize(nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.2), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = lockstep.steps(12, "run", save_every=1, keep=3, model=model, optimizer=optimizer)
    first = steps.step
    fault = os.environ.get("FAULT") if first == 0 else None
    for step in steps:
        lockstep.mean(model(torch.randn(4, 6)).square()).backward()
        if fault == "kill" and step == 6 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if fault == "wait" and step == 6:
            print("waiting", flush=True)
            time.sleep(2)
    numbers = [each.double().sum().item().hex() for each in model.parameters()]
    # In one write, as torchrun's ranks have one pipe, without a buffer.
    print(f"rank {world.rank} bits {numbers} from {first}\\n", end="", flush=True)
    """


def bits(out: str) -> tuple[list[str], set[int]]:
    """What ranks have at the end, and from which steps they went on."""
    lines = sorted(line for line in out.splitlines() if "bits" in line)
    parts = [line.rpartition(" from ") for line in lines]
    return [before for before, _, _ in parts], {int(step) for _, _, step in parts}


def torchrun(bench: Bench, fault: str = "") -> tuple[list[str], set[int]]:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", bench.script(TRAINS)]
    environment = {**os.environ, "FAULT": fault}
    run = bench.start_python("-m", "torch.distributed.run", *words, env=environment)
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    return bits(out)


@pytest.mark.long
def test_torchrun_starts_ranks_again_at_the_same_store(bench: Bench) -> None:
    expected, first = torchrun(bench)
    assert first == {0}
    shutil.rmtree(bench.directory / "run")
    found, first = torchrun(bench, "kill")
    assert found == expected
    assert first <= {5, 6}  # the last save may not have been complete


def job(bench: Bench, count: int, fault: str = "") -> list[subprocess.Popen[str]]:
    """A job of SLURM's with two tasks, which was requeued so often."""
    names = {"JOB_ID": 42, "STEP_ID": 0, "STEP_NUM_TASKS": 2, "STEP_TASKS_PER_NODE": "2",
             "STEP_NODELIST": "localhost", "NODEID": 0, "RESTART_COUNT": count}  # fmt: skip
    variables = {f"SLURM_{name}": str(value) for name, value in names.items()}
    script = bench.script(TRAINS)
    return [
        bench.start_python(
            script,
            env={
                **os.environ,
                **variables,
                "FAULT": fault,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
            },
        )
        for rank in range(2)
    ]


def test_job_that_slurm_has_requeued_goes_on(bench: Bench) -> None:
    outs = [rank.communicate(timeout=100)[0] for rank in job(bench, 0)]
    expected, first = bits("".join(outs))
    assert (len(expected), first) == (2, {0})
    shutil.rmtree(bench.directory / "run")
    ranks = job(bench, 0, "wait")
    for rank in ranks:
        assert rank.stdout is not None
        assert "waiting" in rank.stdout.readline()
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    for rank in ranks:
        _, err = rank.communicate(timeout=100)
        assert rank.returncode == START_AGAIN, err
    outs = [rank.communicate(timeout=100)[0] for rank in job(bench, 1)]
    assert bits("".join(outs)) == (expected, {7})
