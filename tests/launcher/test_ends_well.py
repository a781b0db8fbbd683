"""Runs that a signal ends wherever they are go on from there, with the bits of one that isn't."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.launcher import START_AGAIN, WrittenOut
from lockstep.launcher.last_snapshot import write_out
from lockstep.launcher.restarts import DONT_START_AGAIN
from tests.launcher.bench import Bench, lines_of

pytestmark = pytest.mark.forks

# Waits where PAUSE says, which attempts are in: before the loop, in an evaluation after a step. At
# the end it prints a digest of all that it has.
TRAINS = """
    import hashlib, os, sys, time
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import lockstep
    kind, numbers = sys.argv[1], [*map(int, sys.argv[2:])]
    num_workers, every = numbers[0], dict(snapshot_every=numbers[1], save_every=numbers[2])
    world = lockstep.init()
    paused = os.environ.get("PAUSE", "").split(",")
    restarts = os.environ.get("LOCKSTEP_RESTARTS", "0")

    def pause(where):
        if f"{where}:{restarts}" in paused:
            print("pausing", flush=True)
            for _ in range(int(os.environ.get("SECONDS", 1000))):
                time.sleep(1)

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Dropout(0.2), nn.Linear(40, 2))
    lockstep.parallelize(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "sharded":
        lockstep.shard_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    noise = torch.zeros(2)  # differs between the ranks
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, 0].gt(0).long())
    loader = lockstep.DataLoader(data, 12, shuffle=True, seed=2, num_workers=num_workers)
    things = dict(model=model, optimizer=optimizer, scheduler=scheduler, noise=noise)
    steps = lockstep.steps(loader, "run", epochs=3, **every, **things)
    pause("before")
    print("from", steps.step, flush=True)
    for x, y in steps:
        noise += torch.randn(2)
        lockstep.mean(nn.functional.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        pause(f"evaluation:{steps.step}")
    found = [*model.state_dict().values()]
    state = optimizer.state_dict()["state"]
    found += [value for each in state.values() for value in each.values()]
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in found)).hexdigest()
    own = hashlib.sha256(noise.numpy().tobytes()).hexdigest()
    print("bits", digest[:16], own[:16], scheduler.get_last_lr(), flush=True)
    """
RESTARTS = ("--restarts", "3")


class Training:
    """A run of it, which is given time and again."""

    def __init__(self, bench: Bench, *arguments: object) -> None:
        self._bench, self._arguments = bench, arguments
        self._script = bench.script(TRAINS)

    def start(
        self, *options: str, ranks: int = 2, pause: str = "", **more: Any
    ) -> subprocess.Popen[str]:
        environment = {**os.environ, "PAUSE": pause, **more}
        words = ["run", "-n", ranks, *options, self._script, *self._arguments]
        return self._bench.start(*words, env=environment)

    def paused(self, *options: str, ranks: int = 2, **how: Any) -> subprocess.Popen[str]:
        """The run, when all ranks wait."""
        run = self.start(*options, ranks=ranks, **how)
        assert run.stdout is not None
        left = ranks
        while left:
            line = run.stdout.readline()
            assert line, run.communicate()
            left -= "pausing" in line
        return run

    def bits(self, *options: str, ranks: int = 2) -> tuple[list[str], int]:
        """What each rank has at the end, and the step from which the run went on."""
        run = self.start(*options, ranks=ranks)
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        lines = [lines_of(out, rank) for rank in range(ranks)]
        return [each[-1] for each in lines], int(lines[0][0].removeprefix("from "))

    def undisturbed(self, ranks: int = 2) -> list[str]:
        found, step = self.bits(ranks=ranks)
        assert step == 0
        remove(self._bench.directory / "run")
        return found


def remove(folder: Path) -> None:
    for checkpoint in folder.iterdir():
        if checkpoint.is_dir():
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()


def ended(run: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    run.send_signal(number)
    _, err = run.communicate(timeout=100)
    assert run.returncode == START_AGAIN, err
    return err


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("sharded", 2),
        pytest.param("plain", 2, marks=pytest.mark.thorough),
        pytest.param("sharded", 3, marks=pytest.mark.thorough),
        ("plain", 3),
    ],
)
def test_launcher_writes_the_last_snapshot_when_the_grace_ends_in_an_evaluation(
    bench: Bench, kind: str, ranks: int
) -> None:
    training = Training(bench, kind, 0, 2, 100)
    expected = training.undisturbed(ranks)
    run = training.paused(*RESTARTS, "--grace", "1", ranks=ranks, pause="evaluation:7:0")
    err = ended(run)
    (step,) = re.findall(r"The state after (\d+) steps was written in .*/run\. Give the same", err)
    assert step in ("5", "6", "7")
    found, first = training.bits(ranks=ranks)
    assert (found, first) == (expected, int(step))


@pytest.mark.parametrize(
    ("kind", "ranks", "number", "options"),
    [
        ("sharded", 2, signal.SIGTERM, RESTARTS),
        pytest.param("plain", 3, signal.SIGUSR1, (), marks=pytest.mark.long),
        pytest.param("plain", 2, signal.SIGINT, (), marks=pytest.mark.long),
        pytest.param("sharded", 3, signal.SIGINT, RESTARTS, marks=pytest.mark.long),
        pytest.param("plain", 2, signal.SIGHUP, RESTARTS, marks=pytest.mark.long),
        pytest.param("plain", 2, signal.SIGUSR2, ("--stop-signal", "usr2"), marks=pytest.mark.long),
    ],
)
def test_ranks_with_loader_workers_finish_the_step_and_save(
    bench: Bench, kind: str, ranks: int, number: signal.Signals, options: tuple[str, ...]
) -> None:
    training = Training(bench, kind, 1, 2, 3)
    expected = training.undisturbed(ranks)
    run = training.paused(*options, ranks=ranks, pause="evaluation:7:0", SECONDS="2")
    err = ended(run, number)
    assert "asked to stop by" in err
    assert "saved. Give the same command again to go on from there." in err
    found, step = training.bits(ranks=ranks)
    assert found == expected
    assert 8 <= step <= 9  # in each third step ranks ask each other


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, RESTARTS),
        pytest.param(
            signal.SIGUSR1, (*RESTARTS, "--stop-signal", "SIGUSR1"), marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.long
def test_signal_before_the_loop_after_a_restart_loses_nothing(
    bench: Bench, number: signal.Signals, options: tuple[str, ...]
) -> None:
    training = Training(bench, "plain", 0, 1, 100)
    expected = training.undisturbed()
    run = training.paused(*options, pause="evaluation:7:0,before:1")
    os.kill(rank_of(bench, run.pid), signal.SIGKILL)
    assert run.stdout is not None
    for _ in range(2):
        while "pausing" not in run.stdout.readline():
            pass
    err = ended(run, number)
    assert "The state after 7 steps was written" in err
    assert training.bits() == (expected, 7)


def rank_of(bench: Bench, launcher: int) -> int:
    """A rank that has begun: it leads a group, and isn't the guardian."""
    pids = (each.pid for each in bench.processes())
    return next(p for p in pids if os.getpgid(p) == p != launcher and os.getsid(p) != p)


def test_second_ctrl_c_waits_for_nothing(bench: Bench) -> None:
    run = Training(bench, "plain", 0, 1, 100).paused(*RESTARTS, pause="evaluation:7:0")
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    while "still running after SIGINT" not in run.stderr.readline():
        pass
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 128 + signal.SIGINT
    assert "The state after" not in err
    assert not [*(bench.directory / "run").glob("0*")]


KEEPS_A_SIGNAL = """
    import signal, sys, time
    import lockstep
    lockstep.init()
    print("ready", flush=True)
    time.sleep(1.5)
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    while not asked:
        time.sleep(0.01)
    sys.exit(75)
    """


def test_signal_that_no_rank_expects_yet_is_kept_for_those_that_are_started_again(
    bench: Bench,
) -> None:
    run = bench.start("run", "-n", 2, *RESTARTS, bench.script(KEEPS_A_SIGNAL))
    assert run.stdout is not None
    for _ in range(2):
        assert "ready" in run.stdout.readline()
    ended(run, signal.SIGUSR1)


@pytest.mark.long
def test_checkpoint_of_the_launcher_that_cant_be_written_is_told(bench: Bench) -> None:
    training = Training(bench, "plain", 0, 1, 100)
    run = training.paused(*RESTARTS, "--grace", "0", pause="evaluation:7:0")
    shutil.rmtree(bench.directory / "run")
    (bench.directory / "run").write_text("no folder")
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 128 + signal.SIGTERM
    assert "the last snapshot wasn't written as a checkpoint: The checkpoint was not saved" in err


def written_by(
    text: str, monkeypatch: pytest.MonkeyPatch, number: int = 0, seconds: float = 60
) -> WrittenOut:
    """What comes of a writer with this script, which gets SIGTERM; the launcher another."""

    def take_signals() -> list[int]:
        for child in psutil.Process().children():
            if os.getsid(child.pid) == child.pid:
                child.terminate()
        return [number]

    command = ["env", sys.executable, "-S", "-c", f"import subprocess, time; {text}"]
    monkeypatch.setattr("lockstep.launcher.last_snapshot.command_of", lambda *_: command)
    return write_out([], take_signals, seconds)


def test_writer_of_the_last_snapshot_is_not_ended_by_a_schedulers_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert written_by("time.sleep(1); print('{\"step\": 3}')", monkeypatch).step == 3


def test_writing_the_last_snapshot_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where something is left that holds the pipes open."""
    text = "time.sleep(60)"
    assert written_by(text, monkeypatch, signal.SIGINT).error == "Ctrl-C came"
    assert "longer than 0.3 s" in written_by(text, monkeypatch, seconds=0.3).error
    monkeypatch.setattr("lockstep.launcher.last_snapshot._KILL_SECONDS", 0.3)
    holding, begun = f"subprocess.Popen(['sleep', '4']); {text}", time.monotonic()
    assert "longer than 0.5 s" in written_by(holding, monkeypatch, seconds=0.5).error
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("value", ["SIGTERM", "SIGKILL", "12", ""])
def test_stop_signals_that_make_no_sense(bench: Bench, value: str) -> None:
    done = bench.run("run", "--stop-signal", value, bench.script("print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--stop-signal is {value}, but SIGUSR1 or SIGUSR2 is needed" in done.stderr


@pytest.mark.long
def test_run_that_is_given_up_leaves_its_last_snapshot_as_a_checkpoint(bench: Bench) -> None:
    """It fails at the same step until the program is mended, and then goes on from there."""
    script = bench.script(
        """
        import os
        import torch
        from torch.utils.data import TensorDataset
        import lockstep

        world = lockstep.init()
        model = lockstep.parallelize(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        loader = lockstep.DataLoader(TensorDataset(x), 8)
        things = {"model": model, "optimizer": optimizer}
        steps = lockstep.steps(loader, "run", epochs=2, save_every=100, **things)
        for (x,) in steps:
            if steps.step == 7 and world.rank == 1 and not os.path.exists("is-mended"):
                raise ValueError("refused")
            world.print("step", steps.step)
            lockstep.mean(model(x).square()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    done = bench.run("run", "-n", 2, "--restarts", 1, script)
    assert done.returncode == DONT_START_AGAIN
    assert "ValueError: refused" in done.stderr
    (step,) = re.findall(r"after (\d+) steps was written in \S+run\. Mend the cause", done.stderr)
    (bench.directory / "is-mended").touch()
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout, 0)[0] == f"step {step}"
