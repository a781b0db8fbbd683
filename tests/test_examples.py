"""The example programs run as their first lines say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.forks

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_RANK = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "2"]
THREE_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "3"]
START = pytest.mark.parametrize(
    ("start", "num_ranks"),
    [
        pytest.param(ONE_RANK, 1, id="python"),
        pytest.param(TWO_RANKS, 2, id="two ranks"),
        pytest.param(THREE_RANKS, 3, id="three ranks", marks=pytest.mark.long),
    ],
)


def output_of(start: list[str], program: str, *options: str) -> str:
    run = subprocess.run(
        [*start, str(EXAMPLES / program), *options], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


# An epoch takes seconds.
@pytest.mark.parametrize(
    ("start", "num_ranks"),
    [
        pytest.param(ONE_RANK, 1, id="python", marks=pytest.mark.long),
        pytest.param(TWO_RANKS, 2, id="two ranks"),
        pytest.param(THREE_RANKS, 3, id="three ranks", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_synchronous_sgd(start: list[str], num_ranks: int) -> None:
    output = output_of(start, "synchronous_sgd.py", "--epochs", "2")
    losses = [float(loss) for loss in re.findall(r"epoch \d+: mean loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[-1] < losses[0]


@START
def test_shared_embedding(start: list[str], num_ranks: int) -> None:
    output = output_of(start, "shared_embedding.py")
    megabytes = [float(size) for size in re.findall(r"([\d.]+) MB", output)]
    assert len(megabytes) == 2
    assert megabytes[1] < megabytes[0] / 100
    assert len(re.findall(r"step 0: loss .*, \d+ rows: ", output)) == num_ranks
    assert float(output.split()[-1]) < 1e-12


@START
def test_any_method(start: list[str], num_ranks: int) -> None:
    output = output_of(start, "any_method.py")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 100
    assert f"ranks: {num_ranks}; all of them hold the same parameters" in output


DEVICES = pytest.mark.parametrize(
    "devices",
    [
        pytest.param((), id="default"),
        pytest.param(("cpu",) * 3, id="three", marks=pytest.mark.long),
    ],
)


@DEVICES
def test_data_parallel_parts(devices: tuple[str, ...]) -> None:
    output = output_of(ONE_RANK, "data_parallel_parts.py", *devices)
    for line, name in zip(output.splitlines(), ("Sandwich", "Words"), strict=True):
        assert line.startswith(f"{name}: ")
        assert f" on {', '.join(devices or ('cpu', 'cpu'))}, " in line
        first, last, alone = map(float, re.findall(r"\d+\.\d{4}", line))
        assert last < first / 4
        assert last == pytest.approx(alone, rel=1e-3, abs=1e-4)


@DEVICES
def test_data_parallel_by_hand(devices: tuple[str, ...]) -> None:
    output = output_of(ONE_RANK, "data_parallel_by_hand.py", *devices)
    rows = [int(count) for count in re.findall(r"(\d+) rows on cpu", output)]
    assert len(rows) == len(devices or ("cpu", "cpu"))
    assert sum(rows) == 13
    differences = [float(number) for number in re.findall(r"gradients: (\S+)", output)]
    assert len(differences) == 2
    assert max(differences) < 1e-12


@pytest.mark.long
@START
def test_resumed_steps(start: list[str], num_ranks: int) -> None:
    expected = output_of(start, "resumed_steps.py")
    assert "0 restarts; parameters " in expected
    losses = [float(loss) for loss in re.findall(r"epoch \d+: mean loss ([\d.]+)", expected)]
    assert losses[-1] < losses[0] / 2
    if start is ONE_RANK:
        return
    found = output_of(
        [*start, "--restarts", "3"], "resumed_steps.py", "--kill-at", *map(str, (3, 40, 90))
    )
    assert "3 restarts; parameters " in found
    assert found.split()[-1] == expected.split()[-1]


def printed_by(output: str) -> list[str]:
    """What rank 0 has printed."""
    lines = [line.removeprefix("[rank 0] ") for line in output.splitlines()]
    return [line for line in lines if line and not line.startswith("[")]


def shown_in_docstring(program: str) -> list[str]:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / program).read_text())) or ""
    return [line.strip() for line in docstring.partition("prints::")[2].splitlines() if line]


def without_numbers(lines: list[str]) -> list[str]:
    """Another processor rounds in another way, and its best epoch may be another one."""
    return [re.sub(r"[\d.]+", "#", line).removesuffix(", the best so far") for line in lines]


def numbers_in(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


@pytest.mark.parametrize(
    ("program", "tolerance"),
    [
        # Its numbers are percentages, too.
        pytest.param("image_classifier.py", 25, id="image classifier", marks=pytest.mark.long),
        pytest.param("small_gpt.py", 0.5, id="GPT", marks=pytest.mark.long),
        pytest.param("recommender.py", 0.2, id="recommender", marks=pytest.mark.long),
    ],
)
def test_two_ranks_print_what_the_docstring_shows(program: str, tolerance: float) -> None:
    lines, shown = printed_by(output_of(TWO_RANKS, program)), shown_in_docstring(program)
    assert len(shown) >= 4
    assert without_numbers(lines) == without_numbers(shown)
    assert numbers_in(lines) == pytest.approx(numbers_in(shown), abs=tolerance)


@pytest.mark.long
def test_recommender_prints_the_same_on_one_rank() -> None:
    lines = printed_by(output_of(ONE_RANK, "recommender.py"))
    assert numbers_in(lines) == pytest.approx(
        numbers_in(printed_by(output_of(THREE_RANKS, "recommender.py"))), abs=2e-3
    )


@pytest.mark.long
def test_image_classifier_goes_on_where_it_was(tmp_path: Path) -> None:
    """Here at its end, of which only the test of the best state is left."""
    command = "image_classifier.py", "--folder", str(tmp_path / "run")
    first = printed_by(output_of(TWO_RANKS, *command))
    again = printed_by(output_of(TWO_RANKS, *command))
    assert [line.startswith("epoch") for line in first] == [True, True, True, False]
    assert again == first[-1:]


# Instead of SLURM's: two hosts that are one. SLURM's own doesn't take the cores from the job.
FAKE_SRUN = """#!/bin/bash
[ "$1" = --cpus-per-task=2 ] || exit 3
shift
"$@" & first=$!
"$@"; second=$?
wait $first && exit $second
"""
FAKE_SCONTROL = """#!/bin/bash
case $1 in show) echo localhost;; requeue) touch requeued;; esac
"""


@pytest.mark.long
def test_the_job_for_slurm_starts_two_hosts(tmp_path: Path) -> None:
    for name, text in ("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "RANKS_PER_NODE": "1",
    }
    command = ["bash", str(EXAMPLES / "slurm_job.sh")]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr
    assert len(re.findall("test accuracy", job.stdout)) == 1
    assert (tmp_path / f"run-{os.getpid()}" / "best").is_dir()
    assert not (tmp_path / "requeued").exists()
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 75\n")
    job = subprocess.run(command, env=environment, timeout=100)
    assert job.returncode == 75
    assert (tmp_path / "requeued").exists()


def test_jobs_that_are_queued_again_keep_their_output() -> None:
    """SLURM begins the file anew without that."""
    pages = [EXAMPLES / "slurm_job.sh", *(EXAMPLES.parent / "docs").glob("*.md")]
    texts = [text for page in pages if "#SBATCH --requeue" in (text := page.read_text())]
    assert len(texts) == 2
    assert all("--open-mode=append" in text for text in texts)


def test_examples_are_short_and_listed() -> None:
    programs = [path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")]
    assert len(programs) >= 11
    features = (EXAMPLES.parent / "docs" / "features.md").read_text()
    for path in programs:
        assert len(path.read_text().splitlines()) < 150, path.name
        assert f"`{path.name}`" in features, path.name


@pytest.mark.long
def test_same_bits() -> None:
    output = output_of(ONE_RANK, "same_bits.py")
    digests = re.findall(r"^on .*: +([0-9a-f]{64})$", output, re.MULTILINE)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    assert "4 ranks --kill-at 8: exit code 137" in output
