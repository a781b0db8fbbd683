"""What is shown of a rank's exception: the user's own lines, and last what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lockstep.errors import RankFailed
from lockstep.launcher import launch
from lockstep.world import World
from tests.launcher.bench import Bench

pytestmark = pytest.mark.forks

TRAIN = """
    import torch
    import lockstep

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, x):
            return self.layer(x)  # the user's line

    world = lockstep.init()
    model = lockstep.parallelize(Net())
    {step}
    """
FORWARD = "model(torch.ones(2, 3 if world.rank == 0 else 5)).sum().backward()"
UNEVEN = """
    for _ in range(2 + world.rank):
        model(torch.ones(2, 3)).sum().backward()  # the user's line
    """
FOLDED = re.compile(r"  \[\d+ frames? of lockstep, torch and Python; --full-traceback shows them\]")


def test_users_lines_are_shown_and_the_last_is_what_went_wrong(bench: Bench) -> None:
    script = bench.script(TRAIN.format(step=FORWARD))
    done = bench.run("run", "-n", 2, "--log-dir", "logs", script)
    assert done.returncode == 1
    first, *lines = done.stderr.splitlines()
    assert first.startswith("lockstep: rank 1 of 2 failed first: exit code 1.")
    # torch 2.15 begins with the operation's name.
    error = lines[-1]
    assert re.match("RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied", error)
    assert sum("script.py" in line for line in lines) == 2
    assert sum("the user's line" in line for line in lines) == 1
    assert sum(bool(FOLDED.fullmatch(line)) for line in lines) == 2
    for package in ("/torch/", "/lockstep/"):
        assert package not in done.stderr
    # The other rank lost this one. It is named, and its traceback is in its log.
    assert done.stderr.count("Traceback") == 1
    logged = (bench.directory / "logs" / "rank-0.log").read_text()
    assert "PeerLost: Rank 1 is gone" in logged
    assert f"It ended with an exception: {error}" in logged
    assert "good order" not in logged


@pytest.mark.parametrize("name", ["no_sync", "join"])
def test_what_torchs_wrapper_has_is_pointed_out_for_models_in_place(
    name: str, bench: Bench
) -> None:
    script = bench.script(TRAIN.format(step=f"model.{name}()"))
    done = bench.run("run", "-n", 2, script)
    assert f"AttributeError: 'Net' object has no attribute '{name}'" in done.stderr
    assert f"write 'with lockstep.{name}(model):'" in done.stderr.splitlines()[-1]


def test_full_traceback_shows_all_frames(bench: Bench) -> None:
    script = bench.script(TRAIN.format(step=FORWARD))
    done = bench.run("run", "-n", 2, "--full-traceback", script)
    assert "/torch/nn/modules/linear.py" in done.stderr
    assert "[" not in done.stderr.replace("[rank", "")
    assert re.match("RuntimeError: (addmm: )?mat1 and mat2", done.stderr.splitlines()[-1])


def test_loops_of_different_lengths_are_told_of_join(bench: Bench) -> None:
    done = bench.run("run", "-n", 2, bench.script(TRAIN.format(step=UNEVEN)))
    assert done.stderr.count("Traceback") == 1
    assert "the user's line" in done.stderr
    assert "with lockstep.join(model):" in done.stderr
    assert "as with lockstep.DataLoader" in done.stderr


def test_one_chain_without_what_only_lockstep_and_torch_raised(bench: Bench) -> None:
    """Over Gloo an error of ours is the consequence of one of torch's."""
    script = bench.script(
        """
        import sys
        import torch
        import lockstep
        world = lockstep.init(backend="gloo")
        model = lockstep.parallelize(torch.nn.Linear(3, 4))
        try:
            if world.rank == 1:
                sys.exit(0)
            model(torch.ones(2, 3)).sum().backward()
        except RuntimeError as error:
            raise ValueError("training has ended") from error
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 1
    assert done.stderr.count("direct cause of") == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: training has ended"
    full = bench.run("run", "-n", 2, "--full-traceback", script)
    assert full.stderr.count("direct cause of") > 1


def test_another_failure_that_is_no_consequence_is_named(bench: Bench) -> None:
    script = bench.script(
        """
        import os
        raise KeyError("column " + os.environ["RANK"])
        """
    )
    done = bench.run("run", "-n", 2, script)
    (culprit,) = re.findall(r"rank (\d) of 2 failed first", done.stderr)
    other = 1 - int(culprit)
    if f"failed rank {other}" in done.stderr:  # unless it was ended before it came so far
        assert f"\nRank {other}: KeyError: 'column {other}'\n" in done.stderr
    assert done.stderr.endswith(f"KeyError: 'column {culprit}'\n")
    assert done.stderr.count("Traceback") == 1


def test_an_interruption_that_nobody_asked_for_is_told_with_its_traceback(bench: Bench) -> None:
    bench.script("raise KeyboardInterrupt('by the program')")
    done = bench.run("run", "-n", 1, "script.py")
    assert done.returncode == 130
    assert "KeyboardInterrupt: by the program" in done.stderr


def test_a_hook_of_the_programs_own_is_called(bench: Bench) -> None:
    script = bench.script(
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("my hook:", error, file=sys.stderr)
        raise ValueError("bad")
        """
    )
    done = bench.run("run", "-n", 1, script)
    assert "[rank 0] my hook: bad\n" in done.stderr


def test_launch_shows_the_failure_alone_and_keeps_the_whole_traceback(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(world: World) -> None:
        import torch

        import lockstep

        model = lockstep.parallelize(torch.nn.Linear(3, 4))
        model(torch.ones(2, 3 if world.rank == 0 else 5)).sum().backward()

    with pytest.raises(RankFailed) as caught:
        launch(body)
    assert caught.value.rank == 1
    assert "linear.py" in (caught.value.traceback or "")
    assert "linear.py" not in str(caught.value)
    assert "in body\n" in str(caught.value)
    assert "the error's attribute traceback has them" in str(caught.value)
    assert "PeerLost" not in str(caught.value)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err


def test_escapes_of_an_error_reach_no_terminal(bench: Bench) -> None:
    script = bench.script(
        r"""
        import sys
        print("bar 1\rbar 2", file=sys.stderr)
        raise ValueError("\x1b]0;owned\a\x1b[31mred\x1b[0m [/nope] \ud800")
        """
    )
    done = bench.run("run", "-n", 1, script)
    assert done.returncode == 1
    said = done.stderr.partition("lockstep: ")[2]
    assert r"ValueError: \x1b]0;owned\x07red [/nope] \ud800" in said
    assert "\x1b" not in said
    assert "\a" not in said


LOOKUP = """
    import torch
    import lockstep

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.{kind}(1200, 4)

        def forward(self, indices):
            return self.words(indices)

    world = lockstep.init()
    model = lockstep.parallelize(Net())
    model(torch.tensor([[1, 1199 + world.rank, 3]])).sum().backward()
    """


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_an_index_out_of_range_is_told_with_the_table_on_all_ranks(kind: str, bench: Bench) -> None:
    done = bench.run("run", "-n", 2, "--log-dir", "logs", bench.script(LOOKUP.format(kind=kind)))
    note = (
        f"It was a lookup in 'words', an {kind}, whose table has 1,200 rows: 1 of 3 indices aren't "
        "from 0 to 1199, and the first of these is 1200."
    )
    assert done.stderr.splitlines()[-1] == note
    assert note in (bench.directory / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("table", "indices"),
    [
        (torch.nn.Embedding(3, 2), [[0, -1]]),
        (torch.nn.EmbeddingBag(3, 2), [[0, 3]]),
        (torch.nn.Embedding(3, 2, max_norm=1.0), [[0, 7]]),
    ],
)
def test_a_lookup_in_a_model_that_is_an_embedding(table: torch.nn.Module, indices: Any) -> None:
    def body(world: World) -> None:
        table(torch.tensor(indices))

    with pytest.raises(RankFailed, match=r"lookup in Embedding.*\(3, 2.* 1 of 2 indices"):
        launch(body, 1, ranks="threads")


class Proxy:
    """As a module that torch's tensors without memory are looked up in, it can't be examined."""

    @property
    def __class__(self) -> Any:
        raise ValueError("a proxy")

    def use(self) -> None:
        raise RuntimeError("the user's own error")


def test_an_error_is_told_though_its_frames_cannot_be_examined() -> None:
    with pytest.raises(RankFailed, match="the user's own error"):
        launch(lambda world: Proxy().use(), 1, ranks="threads")
