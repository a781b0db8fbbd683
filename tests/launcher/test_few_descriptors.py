"""A run needs the descriptors that it opens and no more, and says which limit is too low."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launcher.bench import Bench, free_port, lines_of

TRAIN = """
    import lockstep, torch
    import torch.distributed as dist

    world = lockstep.init()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert world.rank < {num_well}, "this rank fails"
    print(total.tolist())
    """


def start_with(limit: int, bench: Bench, *options: object) -> subprocess.Popen[str]:
    # Of the descriptors that the tests have, none is the launcher's.
    command = (
        f"ulimit -n {limit}; exec {sys.executable} -m lockstep run {' '.join(map(str, options))}"
    )
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=bench.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("limit", [pytest.param(10, marks=pytest.mark.long), 15])
def test_limit_that_is_too_low_is_named_at_once(bench: Bench, limit: int) -> None:
    bench.script("print('ran')")
    run = start_with(limit, bench, "-n", 2, "script.py")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (2, "")
    assert "(ulimit -n)" in err
    assert "Too many open files" in err
    assert "Traceback" not in err


@pytest.mark.long
def test_a_run_needs_no_more_descriptors_than_it_opens(bench: Bench) -> None:
    """With 17 it is refused, where the launcher has inherited one."""
    bench.script(TRAIN.format(num_well=1))
    run = start_with(18, bench, "-n", 2, "script.py")
    out, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert lines_of(out, 0) == ["[2.0, 2.0]"]
    assert err.startswith("lockstep: rank 1 of 2 failed first: exit code 1."), err
    assert "AssertionError: this rank fails" in err


@pytest.mark.long
@pytest.mark.parametrize("limit", [16, 24, 30, 34, 36, 38])
def test_hosts_meet_or_name_the_limit(bench: Bench, limit: int) -> None:
    """Ranks that host 0 has no descriptors for, on whatever host, would wait for the timeout."""
    bench.script(TRAIN.format(num_well=9))
    common = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-timeout", 10]
    first = start_with(limit, bench, *common, "--node-rank", 0, "-n", 1, "script.py")
    second = bench.start("run", *common, "--node-rank", 1, "-n", 4, "script.py")
    out, err = first.communicate(timeout=60)
    second.communicate(timeout=60)
    if first.returncode:
        assert limit < 38
        assert f"raise the limit on open files, which is {limit} (ulimit -n)" in err
        assert second.returncode
    else:
        assert limit > 24
        assert lines_of(out, 0) == ["[5.0, 5.0]"]
        assert second.returncode == 0
