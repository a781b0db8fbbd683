"""Hosts of which not all need to be there: ``lockstep run --nnodes MIN:MAX``."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from lockstep.deadline import Deadline
from lockstep.errors import BadLaunch, LaunchError
from lockstep.launcher import job_of
from lockstep.launcher.failures import Ended
from lockstep.launcher.job import Meeting
from lockstep.launcher.membership import Candidate, Membership, chosen
from tests.launcher.bench import Bench, free_port, lines_of
from tests.waiting import until, until_line

pytestmark = pytest.mark.forks


@pytest.mark.parametrize(
    ("candidates", "is_over", "expected"),
    [
        ([Candidate(0, was_there=True)], True, None),  # too few
        ([Candidate(0, was_there=True), Candidate(1)], False, None),  # more may come
        ([Candidate(0, was_there=True), Candidate(1)], True, [0, 1]),
        ([Candidate(each) for each in range(4)], False, [0, 1, 2]),  # as many as there may be
        # Those that are expected are waited for.
        ([Candidate(0), Candidate(1, was_there=True, has_come=False), Candidate(2)], True, None),
        # They come first, then a host that is back, and a new one waits.
        (
            [
                Candidate(0, was_there=True),
                Candidate(2, was_there=True),
                Candidate(3),
                Candidate(4, is_back=True),
            ],
            True,
            [0, 2, 4],
        ),
    ],
)
def test_who_takes_part(
    candidates: list[Candidate], is_over: bool, expected: list[int] | None
) -> None:
    assert chosen(candidates, 2, 3, is_last_call_over=is_over) == expected


class Launchers:
    """Some launchers of one run, at one store, as threads."""

    def __init__(self, last_call: int = 30, seconds: float = 20.0) -> None:
        self._store, self._seconds = dist.HashStore(), seconds
        self._meeting = Meeting(3, None, "127.0.0.1", 1, "run", 20, 60, 2, last_call)
        self._threads: list[threading.Thread] = []
        self.ended: list[BaseException] = []

    def _store_of(self, attempt: int) -> dist.Store:
        return dist.PrefixStore(f"attempt {attempt}", self._store)

    def one(self) -> Membership:
        is_keeper = not self._store.check(["ticket/0"])
        found = Membership(self._store, self._store_of, self._meeting, is_keeper)
        found.come(1)
        return found

    def meet(self, attempt: int, *launchers: Membership) -> list[threading.Thread]:
        def act(launcher: Membership) -> None:
            try:
                launcher.meet(attempt, Deadline(self._seconds), None)
            except (Ended, LaunchError) as error:
                self.ended.append(error)

        threads = [threading.Thread(target=act, args=(each,)) for each in launchers]
        for thread in threads:
            thread.start()
        self._threads += threads
        return threads

    def next_attempt(self, number: int) -> None:
        self._store.set("attempt", str(number))

    def close(self) -> None:
        self._store.set("over", "3")
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def launchers(**options: float) -> Iterator[Launchers]:
    found = Launchers(**options)  # type: ignore[arg-type]
    try:
        yield found
    finally:
        found.close()


def all_over(threads: list[threading.Thread]) -> Callable[[], bool]:
    return lambda: not any(thread.is_alive() for thread in threads)


def test_hosts_meet_without_the_last_call_if_all_have_come() -> None:
    with launchers() as run:
        every = [run.one() for _ in range(3)]
        assert until(all_over(run.meet(0, *every)), 20)
        assert [each.members for each in every] == [[0, 1, 2]] * 3


def test_surplus_host_waits_and_takes_the_place_of_one_that_is_lost() -> None:
    with launchers(last_call=0) as run:
        first = [run.one() for _ in range(2)]
        assert until(all_over(run.meet(0, *first)), 20)
        late = run.one()
        waiting = run.meet(0, late)
        called = threading.Event()
        first[0].when_more_come(called.set)
        assert called.wait(20)
        first[0].close()
        assert waiting[0].is_alive()
        first[0].lose(1)  # it doesn't come to the next meeting
        run.next_attempt(1)
        assert until(all_over(run.meet(1, first[0]) + waiting), 20)
        assert first[0].members == late.members == [0, late.ticket]


def test_host_that_has_waited_hears_that_the_run_is_over() -> None:
    with launchers(last_call=0) as run:
        first = [run.one() for _ in range(2)]
        assert until(all_over(run.meet(0, *first)), 20)
        waiting = run.meet(0, run.one())
        first[0].tell_over(7)
        assert until(all_over(waiting), 20)
        (ended,) = run.ended
        assert isinstance(ended, Ended)
        assert ended.outcome.exit_status == 7
        assert "hasn't needed this host" in str(ended.outcome.message)


def test_too_few_hosts_are_not_waited_for_for_ever() -> None:
    with launchers(seconds=0.3) as run:
        assert until(all_over(run.meet(0, run.one())), 20)
        (error,) = run.ended
        assert "2 to 3 hosts are needed, and 1 met at 127.0.0.1:1 within" in str(error)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nnodes": "4:2", "restarts": "1"}, "as in '--nnodes 2:4'"),
        ({"nnodes": "2:4"}, "Give --restarts N as well"),
        ({"nnodes": "0:4", "restarts": "1"}, "The number of hosts is 0"),
        ({"nnodes": "2:4", "restarts": "1"}, "needs --rdzv-endpoint"),
        ({"nnodes": "2", "last_call": "3"}, "--last-call is for --nnodes MIN:MAX"),
        ({"last_call": "3"}, "--last-call are for runs on several hosts"),
    ],
)
def test_ranges_of_hosts_that_make_no_sense(options: dict[str, str], told: str) -> None:
    with pytest.raises(BadLaunch) as caught:
        job_of([__file__], nprocs="1", **options)  # type: ignore[arg-type]
    assert told in str(caught.value)


# What comes out depends on each sample of each step, and on the order of steps, in whole numbers.
SUMS = """
    import os, time
    from pathlib import Path
    import torch
    import lockstep

    world = lockstep.init()
    total = torch.zeros(1, dtype=torch.int64)
    loader = lockstep.DataLoader(torch.arange(60), 12)
    steps = lockstep.steps(loader, "run", epochs=120, save_every=50, total=total)
    print(f"{world.world_size} ranks", flush=True)
    if world.world_size == 3:
        Path("grown").touch()
    for x in steps:
        total.mul_(3).add_(lockstep.reduce(int(x.sum()), "sum")).remainder_(1_000_003)
        if world.world_size == 3 or not os.path.exists("grown"):  # else no host is to come
            time.sleep(0.2)
    print("total", int(total), flush=True)
    """


def total() -> int:
    """What one process comes to."""
    found = 0
    for _ in range(120):
        for first in range(0, 60, 12):
            found = (3 * found + sum(range(first, first + 12))) % 1_000_003
    return found


@pytest.mark.long
def test_host_that_comes_later_takes_part_and_one_that_is_lost_is_not_waited_for(
    bench: Bench,
) -> None:
    """From the step's end on, with the same batches."""
    script, address = bench.script(SUMS), f"127.0.0.1:{free_port()}"

    def start(host: int) -> subprocess.Popen[str]:
        words = ["run", "-n", 1, "--nnodes", "2:3", "--last-call", 0, "--restarts", 2]
        words += ["--rdzv-endpoint", address, "--node-rank", host]
        return bench.start(*words, script)

    runs = [start(host) for host in range(2)]
    for run in runs:
        until_line("2 ranks", run)
    runs.append(start(2))
    for run in runs:
        until_line("3 ranks", run)
    runs[1].kill()
    runs[1].communicate()
    for number, run in ((0, runs[0]), (1, runs[2])):
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert lines_of(out, number) == ["2 ranks", f"total {total()}"]
        assert "(host 1 is lost); the others go on from the newest checkpoint." in err
        assert ("more hosts have come" in err) == (number == 0)
