"""``lockstep run --check`` names planted mistakes, and finds nothing where there is none."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

import lockstep
from lockstep.check import check as check_here
from tests.check import planted, programs, right

pytestmark = pytest.mark.forks

EXAMPLES = Path(__file__).parents[2] / "examples"

BODY = programs.BEGIN + programs.usual(
    ("net()", "net(nn.Tanh(), nn.Dropout(0.3))"),
)

# Whole runs in `make test`; a third of the others are in `make test-long`, and all others in
# `make test-thorough`.
SOON = {"the loss by the number of micro-batches"}
SOON_RIGHT = {"padded batches and a mean over tokens"}


class Said(NamedTuple):
    """What a check has said."""

    code: int
    told: str  # on one line
    errors: str


def check(path: Path) -> Said:
    """Check the program at ``path``, by a command."""
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--threads", "1"]
    run = subprocess.run(
        [*command, "--check", "4", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Said(run.returncode, " ".join(run.stdout.split()), run.stderr)


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Checks a program in this process, whose interpreters are forks."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, ranks: int = 2, *, float64: bool = False) -> Said:
        path = tmp_path / "train.py"
        path.write_text(text)
        options = {"nprocs": str(ranks), "threads": "1", "live": False}
        code = check_here("4", float64=float64, program=[str(path)], **options)
        output = capfd.readouterr()
        return Said(code, " ".join(output.out.split()), output.err)

    return run


def some(names: Iterable[str], soon: set[str]) -> list[object]:
    """All ``names``, of which those that aren't in ``soon`` are for longer tests."""
    marks = itertools.cycle([pytest.mark.long, pytest.mark.thorough, pytest.mark.thorough])
    return [pytest.param(name, marks=[] if name in soon else [next(marks)]) for name in names]


@pytest.mark.parametrize("name", some(planted.MISTAKES, SOON))
def test_a_cause_that_is_named_is_right(name: str, checked: Callable[..., Said]) -> None:
    text, mistake = planted.programs()[name]
    said = checked(text)
    assert said.code == mistake.code, said
    if mistake.words is None:
        assert "Likely cause:" not in said.told
    else:
        causes = re.findall(r"Likely cause: (.*?) What to do:", said.told)
        assert any(mistake.words in cause for cause in causes), said


@pytest.mark.long
def test_a_loss_between_a_ranks_own_samples_is_told_of_all_gather(
    checked: Callable[..., Said],
) -> None:
    hardest = "        given = model(x)\n        differ = y[:, None] != y[None]\n"
    hardest += "        hinge = F.relu(1 - torch.cdist(given, given)) * differ\n"
    hardest += "        loss = lockstep.mean(hinge.max(1).values)\n"
    said = checked(programs.BEGIN + programs.usual((programs.LOSS, hardest)))
    assert said.code == 1, said
    assert "what all modules are given and give is" in said.told
    assert "lockstep.all_gather(embeddings)" in said.told


@pytest.mark.parametrize("name", some(right.RIGHT, SOON_RIGHT))
def test_nothing_is_found_in_a_right_program(name: str, checked: Callable[..., Said]) -> None:
    said = checked(right.programs()[name])
    assert said.code == 0, said
    assert "All parameters and buffers are alike after each of" in said.told


def in_shards(loader: str, batch: str) -> str:
    """A program whose steps are in shards, with dropout in them."""
    return (
        programs.BEGIN
        + f"""\
lockstep.seed(0)
model = lockstep.parallelize(net(nn.Tanh(), nn.Dropout(0.3)))
optimizer = torch.optim.AdamW(model.parameters())
for batch in {loader}:
    for x, y in lockstep.shards(model, {batch}):
        lockstep.mean(losses_of(model(x), y)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )


@pytest.mark.parametrize(
    ("loader", "batch", "float64"),
    [
        ("loader_of(shards=4)", "batch", False),
        pytest.param("loader_of(shards=4)", "batch", True, marks=pytest.mark.long),
        pytest.param(
            "torch.utils.data.DataLoader(data, 21)", "batch, 4", False, marks=pytest.mark.long
        ),
    ],
)
def test_steps_in_shards_have_the_bits_of_one_process(
    loader: str, batch: str, float64: bool, checked: Callable[..., Said]
) -> None:
    said = checked(in_shards(loader, batch), ranks=3, float64=float64)
    assert said.code == 0, said
    assert "the same, bit by bit, after each of 4 steps, all of them in shards" in said.told
    assert "dropout is off" not in said.told


def test_a_difference_in_bits_alone_is_told_with_the_first_parameter_and_step(
    checked: Callable[..., Said],
) -> None:
    text = in_shards("loader_of(shards=4)", "batch").replace(
        "    optimizer.zero_grad()",
        "    model[3].bias.data.add_(1e-7 * world.world_size)\n    optimizer.zero_grad()",
    )
    said = checked(text)
    assert said.code == 1, said
    assert "Rank 0 and one process part in step 2, first in '3.bias': by " in said.told
    assert "steps in shards have the same bits on any number of ranks" in said.told
    assert "outside of the loop over lockstep.shards() depends on the number" in said.told


@pytest.mark.long
def test_three_ranks_are_alike_in_float64(checked: Callable[..., Said]) -> None:
    said = checked(BODY, ranks=3, float64=True)
    assert said.code == 0, said
    assert "All parameters and buffers are alike after each of 4 steps" in said.told
    assert "dropout is off in both runs" in said.told
    difference = float(re.findall(r"largest difference is ([\d.e+-]+),", said.told)[0])
    assert difference < 1e-12
    assert "divided unevenly" in said.told


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
def test_training_that_diverges_is_not_called_alike(checked: Callable[..., Said]) -> None:
    diverge = "[p.data.fill_(torch.nan) for p in model.parameters()]"
    said = checked(BODY.replace("optimizer.step()", "optimizer.step(); " + diverge))
    assert said.code == 1, said
    assert re.search("After step [12], ", said.told)
    assert "the training diverges by itself" in said.told


@pytest.mark.long
def test_steps_that_cannot_show_a_mean_of_means_are_named(checked: Callable[..., Said]) -> None:
    said = checked(
        BODY.replace("loader_of():", "loader_of(size=20):").replace(
            "lockstep.mean(losses_of(model(x), y))", "losses_of(model(x), y).mean()"
        )
    )
    assert said.code == 0, said
    assert "A mean of means shows only in a batch that is divided unevenly" in said.told


@pytest.mark.long
def test_checkpoints_of_real_runs_are_left_alone(
    tmp_path: Path, checked: Callable[..., Said]
) -> None:
    lockstep.save(tmp_path / "run", step=7)
    save = f"optimizer.step(); lockstep.save({str(tmp_path / 'run')!r}, keep=1, step=0)"
    said = checked(BODY.replace("optimizer.step()", save))
    assert said.code == 0, said
    assert "lockstep.save() writes nothing during a check" in said.told
    assert lockstep.load(tmp_path / "run", step=0) == {"step": 7}


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.true_start
def test_nothing_needs_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is none')")
    path = tmp_path / "train.py"
    path.write_text(
        BODY.replace("import numpy as np\n", "")
        + "\nlockstep.save('run', model=model)\nlockstep.load('run', model=model)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    code, told, errors = check(path)
    assert code == 0, (told, errors)
    assert "alike after each of 4 steps" in told
