"""The documentation: every block of Python in it runs, on one rank and on two."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lockstep
from lockstep import cli, errors

pytestmark = pytest.mark.forks

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {path.stem: path.read_text() for path in sorted(DOCS.glob("*.md"))}
PROGRAMS = {
    name: "\n".join(blocks)
    for name, text in PAGES.items()
    if (blocks := re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S))
}
ONE_RANK = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "2"]


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("start", "restarts") else pytest.param(n, marks=pytest.mark.long)
        for n in PROGRAMS
    ],
)
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(ONE_RANK, id="one rank", marks=pytest.mark.long),
        pytest.param(TWO_RANKS, id="two ranks"),
    ],
)
def test_blocks_run(tmp_path: Path, name: str, start: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    restarts = name == "restarts" and start is TWO_RANKS
    options = ["--restarts", "3"] if restarts else []
    done = subprocess.run(
        [*start, *options, "program.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert ("restart 1: rank 1 of 2 failed in step 25" in done.stderr) == restarts


def test_the_program_in_shards_ends_alike_on_any_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS["same_bits"])
    told = []
    for options in (["-n", "1"], ["-n", "3"], ["-n", "3", "--ranks", "threads"]):
        command = [sys.executable, "-m", "lockstep", "run", *options, "program.py"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told.append({line.split()[-1] for line in done.stdout.splitlines()})  # without labels
    assert told == [told[0]] * 3
    assert len(told[0]) == 1


# What resume takes of checkpoint, and no program.
CHECKPOINT_NAMES_OF_RESUME = {
    *("LiveThings", "Manifest", "OfRank", "Ranks", "Snapshot", "SnapshotPlan", "background_of"),
    *("kind_of", "merged", "open_newest", "save_snapshots", "tensor_names", "unwrapped"),
}


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"auto\w+:: lockstep\.(\w+)$", PAGES["api"], flags=re.M))
    assert listed == set(lockstep.__all__) - {"checkpoint"}
    listed = set(re.findall(r"auto\w+:: lockstep\.checkpoint\.(\w+)$", PAGES["api"], flags=re.M))
    in_words, inner = {"export", "load", "save", "show"}, CHECKPOINT_NAMES_OF_RESUME
    assert listed | in_words | inner == set(lockstep.checkpoint.__all__)


def test_every_error_is_explained() -> None:
    text = (Path(lockstep.__file__).parent / "errors.md").read_text()
    listed = set(re.findall(r"^## (\w+)$", text, flags=re.M))
    # Those that are only bases of others are never raised.
    bases = {name for name in errors.__all__ if getattr(errors, name).__subclasses__()}
    assert listed == set(errors.__all__) - bases


def test_what_the_pages_name_is_there() -> None:
    modules = {"integrations", "resume"}
    for name, text in PAGES.items():
        for word in re.findall(r"lockstep\.(\w+)", text):
            assert word in {*lockstep.__all__, *modules}, f"{name}: lockstep.{word}"


def test_the_options_in_the_pages_are_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named: dict[str, set[str]] = {}
    for text in PAGES.values():
        for command, words in re.findall(r"^lockstep (\w+) ([^#\n]*)", text, flags=re.M):
            ours = re.split(r" \w+\.py", words)[0]  # what follows is the script's
            named.setdefault(command, set()).update(re.findall(r"(?<!\S)--?[a-z][\w-]*", ours))
    assert {"run", "report", "show", "export"} <= named.keys()
    for command, options in named.items():
        monkeypatch.setattr(sys, "argv", ["lockstep", command, "--help"])
        with pytest.raises(SystemExit):
            cli.main()
        told = capsys.readouterr().out
        assert all(re.search(rf"(?<!\S){option}\b", told) for option in options), command


def test_pages_link_to_pages_that_are_there() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\{doc\}`([\w-]+)`", text):
            assert target in PAGES, f"{name} links to {target}"
    (listed,) = [set(re.findall(r"^([\w-]+)$", PAGES["index"], flags=re.M))]
    assert listed == set(PAGES) - {"index"}


def test_what_people_search_for_is_in_the_pages() -> None:
    """``make docs`` asks the search for them."""
    (searched,) = re.findall(r'_SEARCHED = """\n(.*?)"""', (DOCS / "conf.py").read_text(), re.S)
    wanted = set(searched.split())
    assert len(wanted) > 40
    words = set(re.findall(r"\w+", " ".join(PAGES.values()).lower()))
    assert {word for word in wanted if word.lower() not in words} == set()


def test_errors_tell_of_their_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = errors.PeerLost("gone", [1], "all_reduce")
    error.add_note("first")
    error.add_note("second")
    help_of = "('lockstep help PeerLost' tells more.)"
    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert each.__notes__ == ["first", "second", help_of]
        assert str(each) == "gone"
    refused = errors.BadLaunch("no")
    assert not hasattr(refused, "__notes__")
    refused.add_note("first")
    refused.add_note("second")
    assert refused.__notes__ == ["first", "second"]
    monkeypatch.setattr(sys, "argv", ["lockstep", "help", "PeerLost"])
    cli.main()
    assert "is mostly the consequence of another error" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(sys, "argv", ["lockstep", "help", "PeerLots"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Did you mean PeerLost?" in capsys.readouterr().err


# What the examples of docstrings take as given.
SCRIPT = """
import contextlib
import time
import types
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
import lockstep

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 8, stride=8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)
        )
    def forward(self, x, scale=1.0):
        return self.layers(x) * scale

def train(*arguments): ...
def evaluate(model): ...
def accuracy(model): return 0.5

world = lockstep.init()
x, more_x = torch.rand(2, 6, 3, 32, 32, generator=torch.Generator())
y = more_y = torch.arange(6) % 3
dataset, batch_size = TensorDataset(x, y), 2
batch, batches, loader, micro_batches, num_steps = x, [(x, y)] * 2, [(x, y)] * 2, [(x, y)] * 2, 2
criterion = F.cross_entropy
correct, samples, loss_of_batch, epoch = 3, 6, 0.25, 1
model = Net()
{make_parallel}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = criterion(model(x), y)
replicas = lockstep.replicate(Net(), ["cpu", "cpu"])
parts = lockstep.scatter(x, ["cpu", "cpu"])
wandb = types.SimpleNamespace(log=lambda values, step: None)
"""
# These act on a model that is parallel already; the others make it so, or don't need it.
OF_PARALLEL_MODELS = {
    "Blame",
    "ReplicaDifference",
    "accumulate",
    "all_gather",
    "check_replicas",
    "guard",
    "join",
    "mean",
    "no_sync",
    "shards",
    "steps",
}


def _example(thing: object) -> str:
    text = inspect.getdoc(thing) or ""
    found = re.findall(r"::\n\n((?:(?:    .*)?\n)+)", text + "\n\n")
    assert found, f"{thing} has no example"
    return "".join(map(textwrap.dedent, found))


def _run_as_a_rank(world: lockstep.World, source: str) -> None:
    exec(compile(source, "example.py", "exec"), {"__name__": "example"})


@pytest.mark.parametrize(
    "name", sorted(set(lockstep.__all__) - {"checkpoint", "errors", *errors.__all__})
)
def test_the_examples_of_docstrings_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parallel = "lockstep.parallelize(model)" if name in OF_PARALLEL_MODELS else ""
    source = SCRIPT.format(make_parallel=make_parallel)
    if name == "load":  # what was saved before
        source += _example(lockstep.save)
    source += _example(getattr(lockstep, name))
    if name == "log_to":  # nowhere again, for the tests after this one
        source += "lockstep.log_to()"
    monkeypatch.chdir(tmp_path)
    if name == "launch":  # its function has to be that of a file
        (tmp_path / "program.py").write_text(source)
        done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        lockstep.launch(_run_as_a_rank, 2, args=(source,), ranks="threads", output="plain")
