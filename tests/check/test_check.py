"""``lockstep run --check`` names planted mistakes, and finds nothing where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.check.causes import Facts, Parting, finding, likely_cause
from lockstep.check.records import ALONE, ROUNDED, Backward, End, Records, Step
from tests.check.planted import BODY, MISTAKES, program
from tests.test_examples import EXAMPLES

pytestmark = pytest.mark.forks

# Whole runs in `make test`; the others are in `make test-long`.
SOON = {"a mean of means"}


def check(path: Path, *options: str, steps: int = 4, ranks: int = 2) -> tuple[int, str, str]:
    """The exit code of a check, what it said on one line, and what it wrote to stderr."""
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(ranks), "--threads", "1"]
    run = subprocess.run(
        [*command, "--check", str(steps), *options, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return run.returncode, " ".join(run.stdout.split()), run.stderr


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(m, marks=[] if m in SOON else [pytest.mark.long]) for m in MISTAKES],
)
def test_a_planted_mistake_is_named(mistake: str, tmp_path: Path) -> None:
    text, words = program(mistake)
    path = tmp_path / "train.py"
    path.write_text(text)
    code, told, errors = check(path)
    assert code == 1, (told, errors)
    assert "Likely cause:" in told
    assert words in told


def test_nothing_is_found_in_a_right_program(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BODY)
    code, told, errors = check(path, "--float64", ranks=3)
    assert code == 0, (told, errors)
    assert "All parameters and buffers are alike after each of 4 steps" in told
    assert "dropout is off in both runs" in told
    difference = float(re.findall(r"largest difference is ([\d.e+-]+),", told)[0])
    assert difference < 1e-12
    assert "divided unevenly" in told


DDP = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
dataset = TensorDataset(
    torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator)
)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 24 // dist.get_world_size(), sampler=sampler)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
"""

SHARDED = BODY.replace(
    "loader = ", "optimizer = lockstep.shard_optimizer(optimizer)\nloader = "
).replace(
    "        optimizer.step()",
    "        lockstep.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()",
)

AUTOCAST = BODY.replace(
    "        losses =", '        with torch.autocast("cpu", torch.bfloat16):\n            losses ='
)

ACCUMULATED = BODY.replace(
    """\
        loss = lockstep.mean(losses)
        loss.backward()
""",
    """\
        with lockstep.accumulate(model):
            lockstep.mean(losses).backward()
        losses = F.cross_entropy(model(2 * x), y, reduction="none")
        lockstep.mean(losses).backward()
""",
)

GAN = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

lockstep.init()
torch.manual_seed(0)
first, second = (lockstep.parallelize(nn.Linear(4, n)) for n in (4, 1))
one, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (first, second))
dataset = TensorDataset(torch.randn(40, 4), torch.randn(40, 4))
for real, noise in lockstep.DataLoader(dataset, batch_size=9):
    fake = first(noise)
    other.zero_grad()
    losses = second(fake.detach()) - second(real)
    lockstep.mean(losses).backward()
    other.step()
    one.zero_grad()
    lockstep.mean(-second(fake)).backward()
    one.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [DDP, SHARDED, AUTOCAST, ACCUMULATED, GAN],
    ids=["torch's DDP", "sharded optimizer", "autocast", "accumulate", "two optimizers"],
)
def test_nothing_is_found_in_other_right_programs(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    code, told, errors = check(path)
    assert code == 0, (told, errors)


@pytest.mark.long
@pytest.mark.parametrize("name", ["synchronous_sgd.py", "any_method.py"])
def test_nothing_is_found_in_the_examples(name: str) -> None:
    code, told, errors = check(EXAMPLES / name)
    assert code == 0, (told, errors)


def test_a_program_that_takes_no_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('nothing')\n")
    code, _, errors = check(path)
    assert code == 2
    assert "before it had taken an optimizer step" in errors


@pytest.mark.long
def test_training_that_diverges_is_not_called_alike(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    diverge = "[p.data.fill_(torch.nan) for p in model.parameters()]"
    path.write_text(BODY.replace("optimizer.step()", "optimizer.step(); " + diverge))
    code, told, errors = check(path)
    assert code == 1, (told, errors)
    assert re.search("After step [12], ", told)
    assert "the training diverges by itself" in told


@pytest.mark.long
def test_steps_that_cannot_show_a_mean_of_means_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        BODY.replace("batch_size=21", "batch_size=20").replace(
            "lockstep.mean(losses)", "losses.mean()"
        )
    )
    code, told, errors = check(path)
    assert code == 0, (told, errors)
    assert "A mean of means shows only in a batch that is divided unevenly" in told


@pytest.mark.long
def test_checkpoints_of_real_runs_are_left_alone(tmp_path: Path) -> None:
    lockstep.save(tmp_path / "run", step=7)
    path = tmp_path / "train.py"
    save = f"optimizer.step(); lockstep.save({str(tmp_path / 'run')!r}, keep=1, step=0)"
    path.write_text(BODY.replace("optimizer.step()", save))
    code, told, errors = check(path)
    assert code == 0, (told, errors)
    assert "lockstep.save() writes nothing during a check" in told
    assert lockstep.load(tmp_path / "run", step=0) == {"step": 7}


def test_a_program_that_fails_is_reported_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise ValueError('of the program')\n")
    code, told, errors = check(path)
    assert code == 1
    assert "of the program" in told + errors
    assert "Likely cause" not in told


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["-n", "1", "--check", "2"], "-n 2 or more"),
        (["-n", "2", "--check", "0"], "--check"),
        (["-n", "2", "--float64"], "--float64 is for --check"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], named: str) -> None:
    command = [sys.executable, "-m", "lockstep", "run", *options, str(EXAMPLES / "any_method.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert named in run.stderr


# The verdicts, as functions of facts.


def step(value: float = 1.0, **facts: object) -> Step:
    known: dict[str, object] = {
        "tensors": {"w": torch.tensor([value])},
        "gradients": {"w": torch.tensor([value])},
        "start": {},
        "trained": ["w"],
        "backwards": [Backward(0.0, 4, 1)],
        "options": {"lr": "0.1"},
        "changed": [],
        "batch_norms": [],
        "draws": False,
        "is_parallel": True,
        "eps": 1e-7,
    }
    return Step(**(known | facts))  # type: ignore[arg-type]


def cause(one: Step, other: Step, alone: Step | None = None, name: str = "w", **facts: int) -> str:
    """The cause of a difference between ranks or, if ``alone`` is given, from one process."""
    rank = 1 if alone is None else None
    known = {"pads": False, "repeated": 0, "num_rows": 8} | facts
    parting = Parting(name, 1.0, 0.0, rank)
    return likely_cause(Facts(parting, [one, other], alone or one, **known)).cause  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "is_even"),
    [
        ([[2, 2], [2, 2]], True),
        ([[3, 2], [1, 2]], False),
        ([[2, 3], [2, 1]], False),
    ],
    ids=["even", "uneven at first", "uneven at last"],
)
def test_samples_are_even_if_they_are_in_each_step(
    tmp_path: Path, counts: list[list[int]], is_even: bool
) -> None:
    runs = [Records(str(tmp_path), name) for name in ("rank-0", "rank-1", ALONE, ROUNDED)]
    for number, run in enumerate(runs):
        for index, count in enumerate(counts[number] if number < 2 else [4, 4], start=1):
            run.save(f"step-{index}", step(backwards=[Backward(0.0, count, number)]))
        run.save("end", End(2))
    found = finding(runs[:2], *runs[2:])
    assert (found.num_steps, found.cause, found.is_even) == (2, None, is_even)


def test_causes_of_differences_between_ranks() -> None:
    assert "other parameters" in cause(step(), step(trained=["w", "v"]))
    assert "lr is 0.1 and 0.3" in cause(step(), step(options={"lr": "0.3"}))
    assert "buffer" in cause(step(), step(), name="running_mean")
    assert "changed between two steps" in cause(step(), step(changed=["w"]))
    starts = [{"w": torch.tensor([value])} for value in (1.0, 2.0)]
    assert "different parameters" in cause(step(start=starts[0]), step(start=starts[1]))
    assert "isn't parallel" in cause(step(is_parallel=False), step(2.0, is_parallel=False))
    assert "each rank's own" in cause(step(), step(2.0))
    assert "left a step out" in cause(step(), step())


def test_causes_of_differences_from_one_process() -> None:
    assert "DistributedSampler" in cause(step(), step(), step(), pads=True)
    assert "3 of 8" in cause(step(), step(), step(), repeated=3)
    assert "number of ranks" in cause(step(), step(), step(options={"lr": "0.05"}))
    assert "BatchNorm" in cause(step(batch_norms=["1"]), step(), step())
    assert "random numbers" in cause(step(), step(draws=True), step())
    assert "2 times" in cause(step(2.0), step(2.0), step())
    assert "averaged twice" in cause(step(0.5), step(0.5), step())
    uneven = step(backwards=[Backward(0.0, 5, 1)])
    assert "mean of means" in cause(step(), uneven, step())
    assert "the gradients are the same" in cause(step(), step(), step())
    gradients = {"w": torch.tensor([1.0]), "v": torch.tensor([1.0])}
    others = {"w": torch.tensor([1.0]), "v": torch.tensor([3.0])}
    one = step(gradients=gradients)
    assert "depend on its other samples" in cause(one, one, step(gradients=others))


@pytest.mark.long
@pytest.mark.true_start
def test_nothing_needs_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is none')")
    path = tmp_path / "train.py"
    path.write_text(
        BODY + "\nlockstep.save('run', model=model)\nlockstep.load('run', model=model)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    code, told, errors = check(path)
    assert code == 0, (told, errors)
    assert "alike after each of 4 steps" in told
