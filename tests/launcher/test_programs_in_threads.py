"""``lockstep run --ranks threads``: a script on ranks that are threads, with processes' numbers."""

from __future__ import annotations

import re

import pytest

from tests.launcher.bench import Bench

pytestmark = pytest.mark.forks

# First values, order of samples and dropout are from the global generators.
TRAIN = """
    import hashlib, random

    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import lockstep

    world = lockstep.init()
    lockstep.seed(1)
    data = TensorDataset(torch.randn(40, 8), torch.arange(40) % 3)
    net = nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 3))
    model = lockstep.parallelize(net)
    drawn = [torch.rand(1).item()]
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in lockstep.DataLoader(data, batch_size=16, shuffle=True, shards=4):
        for x, y in lockstep.shards(model, batch):
            noise = random.random() + np.random.rand()
            losses = F.cross_entropy(model(x * noise), y, reduction="none")
            lockstep.mean(losses).backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        drawn += [torch.rand(world.rank + 1).sum().item(), random.random(), np.random.rand()]
        lockstep.reduce(world.rank, "sum")
        drawn += [torch.rand(1).item(), random.random(), np.random.rand()]
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    print(f"digest {digest.hexdigest()}", flush=True)
    print(f"drawn on {world.rank}: {drawn}", flush=True)
"""


def told(bench: Bench, *argv: object, **options: object) -> set[str]:
    """What the ranks have printed, each line once, without labels."""
    done = bench.run("run", *argv, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    lines = (re.sub(r"^\[?.*?(?=digest|drawn)", "", line) for line in done.stdout.splitlines())
    return {line for line in lines if line.startswith(("digest", "drawn"))}


def test_threads_have_the_numbers_of_processes(bench: Bench) -> None:
    script = bench.script(TRAIN)
    processes = told(bench, "-n", 3, script)
    assert len(processes) == 1 + 3
    assert told(bench, "--ranks", "threads", "-n", 3, script) == processes
    assert {line for line in told(bench, "-n", 1, script) if "digest" in line} < processes


def test_a_debugger_stops_one_rank_and_leaves_the_bits(bench: Bench) -> None:
    expected = {line for line in told(bench, "-n", 1, bench.script(TRAIN)) if "digest" in line}
    stop = "\n            if world.rank == 1 and len(drawn) == 1: breakpoint()"
    script = bench.script(TRAIN.replace("  # here", stop))
    commands = bench.script("p 'at', len(x)\nc\n" * 4, "commands")
    with commands.open() as file:
        done = bench.run("run", "--ranks", "threads", "-n", 3, script, stdin=file)
    assert done.returncode == 0, done.stderr
    assert "('at', 4)" in done.stdout
    assert expected == {line for line in done.stdout.splitlines() if line.startswith("digest")}


def test_each_rank_has_a_main_of_its_own(bench: Bench) -> None:
    script = bench.script("""
        import pickle, sys, time
        from dataclasses import dataclass
        from datetime import timedelta

        import lockstep

        @dataclass
        class Rank:
            number: "int"

        world = lockstep.init(timeout=timedelta(seconds=1))
        mine = Rank(world.rank)
        if world.rank == 0:
            time.sleep(2.5)  # nobody counts it: one rank runs at a time
        assert lockstep.reduce(world.rank, "sum") == 3
        assert pickle.loads(pickle.dumps(mine)) == mine
        main = sys.modules["__main__"]
        assert main.mine is mine and vars(main) is globals() and __name__ == "__main__"
        assert sys.argv[1:] == ["--epochs", "3"]
        print("digest of", mine.number)
    """)
    lines = told(bench, "--ranks", "threads", "-n", 3, script, "--epochs", 3)
    assert lines == {f"digest of {rank}" for rank in range(3)}


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise ZeroDivisionError('on purpose')", 1, "rank 1 of 2 failed first"),
        ("raise SystemExit(7)", 7, "rank 1"),
        ("raise SystemExit(0)", 1, "rank 0"),
    ],
)
def test_a_rank_that_fails_is_named(bench: Bench, body: str, code: int, words: str) -> None:
    script = bench.script(f"""
        import lockstep

        world = lockstep.init()
        if world.rank == 1:
            {body}
        lockstep.reduce(1, "sum")
    """)
    done = bench.run("run", "--ranks", "threads", "-n", 2, script)
    assert done.returncode == code
    assert words in done.stderr


def test_what_needs_processes_is_refused_by_name(bench: Bench) -> None:
    script = bench.script("")
    for option in ("--check 3", "--restarts 1", "--log-dir x", "--baseline", "--stdin 1"):
        done = bench.run("run", "--ranks", "threads", *option.split(), script)
        assert done.returncode == 2
        assert f"{option.split()[0]} is for ranks that are processes" in done.stderr
    done = bench.run("run", "--ranks", "fibres", script)
    assert "--ranks is 'fibres'" in done.stderr
    done = bench.run("run", "--ranks", "threads", "-m", "no_such_module")
    assert done.returncode == 2
    assert "There is no module named 'no_such_module'" in done.stderr
