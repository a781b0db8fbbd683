"""Where as many ranks fail as often as they may, fewer go on: ``lockstep run -n MIN:MAX``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.errors import BadLaunch
from lockstep.launcher import Job, job_of
from lockstep.launcher.attempts import Attempts
from lockstep.launcher.restarts import DONT_START_AGAIN, Incident, Reaction, Record
from lockstep.launcher.zygote import Attempt, NoRoom
from tests.launcher.bench import Bench, lines_of

pytestmark = pytest.mark.forks

# What comes out depends on each sample of each step, and on the order of steps, in whole numbers.
SUMS = """
    import sys
    import torch
    import lockstep

    world = lockstep.init()
    path, least = sys.argv[1], int(sys.argv[2])
    total = torch.zeros(1, dtype=torch.int64)
    loader = lockstep.DataLoader(torch.arange(60), 12)
    path = None if path == "none" else path
    steps = lockstep.steps(loader, path, epochs=2, snapshot_every=1, total=total)
    print(f"{world.world_size} ranks from {steps.step}", flush=True)
    for x in steps:
        if steps.step == 7 and world.rank >= least:
            raise MemoryError(f"there are {world.world_size} ranks")
        total.mul_(3).add_(lockstep.reduce(int(x.sum()), "sum")).remainder_(1_000_003)
    print("total", int(total), flush=True)
    """


def total() -> int:
    """What one process comes to."""
    found = 0
    for _ in range(2):
        for first in range(0, 60, 12):
            found = (3 * found + sum(range(first, first + 12))) % 1_000_003
    return found


@pytest.mark.long
def test_fewer_ranks_go_on_from_the_step_with_the_same_batches(bench: Bench) -> None:
    done = bench.run("run", "-n", "1:3", "--restarts", 1, bench.script(SUMS), "run", 1)
    assert done.returncode == 0, done.stderr
    begun = ["3 ranks from 0", "3 ranks from 7", "2 ranks from 7", "2 ranks from 7"]
    assert lines_of(done.stdout, 0) == [*begun, "1 ranks from 7", f"total {total()}"]
    told = [line for line in done.stderr.splitlines() if line.startswith("restart ")]
    assert [line.endswith("and one fewer go on.") for line in told] == [False, True, False, True]
    assert "2 ranks go on: all go on from step 7, of which there is a checkpoint." in done.stderr
    assert "1 rank goes on: " in done.stderr


@pytest.mark.long
def test_without_a_folder_fewer_ranks_begin_anew(bench: Bench) -> None:
    done = bench.run("run", "-n", "2:3", "--restarts", 1, bench.script(SUMS), "none", 2)
    assert done.returncode == 0, done.stderr
    begun = ["3 ranks from 0", "3 ranks from 7", "2 ranks from 0"]
    assert lines_of(done.stdout, 0) == [*begun, f"total {total()}"]
    assert "the program begins anew, as steps() has no path" in done.stderr


@pytest.mark.long
def test_no_fewer_go_on_than_the_fewest(bench: Bench) -> None:
    done = bench.run("run", "-n", "2:3", "--restarts", 1, bench.script(SUMS), "run", 0)
    assert done.returncode == DONT_START_AGAIN
    assert [line[:7] for line in lines_of(done.stdout, 0)] == ["3 ranks"] * 2 + ["2 ranks"] * 2
    assert "The ranks aren't started again: it failed alike" in done.stderr


def test_verdict_is_fewer_as_long_as_there_is_one_to_spare() -> None:
    record = Record(1, num_spare=1)
    incident = Incident("MemoryError", 7, None, is_of_start=False)
    reactions = [record.judge(incident) for _ in range(4)]
    again = Reaction.RESTART
    assert reactions == [again, Reaction.FEWER, again, Reaction.SAME_FAILURE]


def test_program_that_never_begins_does_not_go_on_with_fewer() -> None:
    start = Incident("ModuleNotFoundError", 0, None, is_of_start=True)
    assert Record(1, num_spare=3).judge(start) is Reaction.NEVER_BEGAN


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nprocs": "4:2", "restarts": "1"}, "as in '-n 2:4'"),
        ({"nprocs": "2:4"}, "Give --restarts N as well"),
        ({"nprocs": "2:", "restarts": "1"}, "The number of ranks is , but a whole number"),
        ({"nprocs": "0:2", "restarts": "1"}, "The number of ranks is 0"),
        ({"nprocs": "1:2:3", "restarts": "1"}, "The number of ranks is 2:3"),
        ({"nprocs": "1:2", "restarts": "1", "nnodes": "2"}, "-n 1:2 is for runs on one host"),
        ({"nprocs": "1:3", "restarts": "1", "stdin": "1"}, "--stdin is 1"),
    ],
)
def test_ranges_that_make_no_sense(options: dict[str, str], told: str) -> None:
    with pytest.raises(BadLaunch) as caught:
        job_of([__file__], **options)  # type: ignore[arg-type]
    assert told in str(caught.value)


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, 4), (1, 2), (3, 3), (8, 4)])
def test_no_more_ranks_are_started_than_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, expected: int
) -> None:
    monkeypatch.setattr("lockstep.launcher.job._num_gpus", lambda: num_gpus)
    job = job_of([__file__], nprocs="2:4", restarts="1")
    assert (job.num_ranks, job.num_spare_ranks) == (expected, expected - 2)


@pytest.mark.parametrize("num_asked", [4, 3], ids=["asked for now", "asked for before"])
def test_as_many_ranks_are_started_as_there_is_room_for(num_asked: int) -> None:
    """An attempt that is forked ahead has as many ranks as the one before."""
    said: list[str] = []
    attempts = Attempts.__new__(Attempts)
    errors = [NoRoom("Rank 2 can't be started.", 4), NoRoom("Rank 2 can't be started.", 3)]

    def take(num_ranks: int, *_: object) -> Attempt:
        if errors:
            raise errors.pop(0)
        return Attempt([None] * num_ranks, None)  # type: ignore[list-item, arg-type]

    attempts.__dict__ |= {
        "_job": Job(b"", num_asked, 1),
        "_record": Record(1, num_asked - 1),
        "_descriptors": (),
        "_zygote": SimpleNamespace(take=take),
        "_signals": SimpleNamespace(is_pending=lambda: False),
        "_ended_by": 0,
        "_say": said.append,
    }
    attempt = attempts._take()
    assert attempt is not None
    assert len(attempt.ranks) == 2
    assert attempts._job.num_ranks == 2
    assert sum("One rank fewer is started." in words for words in said) == num_asked - 2
