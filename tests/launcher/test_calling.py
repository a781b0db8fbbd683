"""``launch(fn)``: a function on new ranks, from wherever it is called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import BadLaunch, LaunchError, RankFailed
from lockstep.launcher import launch
from lockstep.world import World
from tests.launcher.bench import Bench
from tests.waiting import until

pytestmark = pytest.mark.forks


def add_up(world: World, start: float) -> tuple[int, float]:
    total = torch.tensor(start + world.rank)
    dist.all_reduce(total)
    return world.rank, total.item()


@pytest.mark.true_start
def test_launch_returns_results_in_the_order_of_ranks(bench: Bench) -> None:
    assert launch(add_up, nprocs=3, args=(1.0,)) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_launch_returns_the_result_of_the_rank_and_not_of_its_fork(bench: Bench) -> None:
    def fork(world: World) -> str:
        if (pid := os.fork()) == 0:
            return "fork"
        os.waitpid(pid, 0)
        return "rank"

    assert launch(fork, nprocs=1) == ["rank"]


def test_launch_takes_closures_and_returns_big_tensors(bench: Bench) -> None:
    class Scale:  # known to this process only
        def __init__(self, factor: float) -> None:
            self.factor = factor

    scale = Scale(3.0)

    def fill(world: World) -> tuple[torch.Tensor, Scale]:
        return torch.full((1 << 22,), world.rank * scale.factor), Scale(world.rank)

    for rank, (tensor, made) in enumerate(launch(fill)):
        assert tensor.shape == (1 << 22,)
        assert (tensor == 3.0 * rank).all()
        assert type(made) is Scale
        assert made.factor == rank


def test_launch_from_two_threads_at_once(bench: Bench) -> None:
    results: dict[float, list[tuple[int, float]]] = {}

    def call(start: float) -> None:
        results[start] = launch(add_up, args=(start,))

    threads = [threading.Thread(target=call, args=(start,)) for start in (0.0, 10.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0.0: [(0, 1.0), (1, 1.0)], 10.0: [(0, 21.0), (1, 21.0)]}


def test_launch_copies_labelled_output(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def speak(world: World) -> None:
        print("out", world.rank)
        print("err", world.rank, file=sys.stderr)

    launch(speak, nprocs=1, log_dir=bench.directory / "logs")
    captured = capsys.readouterr()
    assert captured.out == "[rank 0] out 0\n"
    assert captured.err == "[rank 0] err 0\n"
    assert sorted((bench.directory / "logs" / "rank-0.log").read_text().splitlines()) == [
        "err 0",
        "out 0",
    ]


def test_launch_plain_lets_ranks_write_themselves(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(lambda world: print("hello"), nprocs=1, output="plain")
    assert capfd.readouterr().out == "hello\n"


def test_launch_raises_the_first_failure_with_its_traceback(bench: Bench) -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            raise KeyError("no such column")
        dist.barrier()

    with pytest.raises(RankFailed, match="rank 1 of 2 failed first") as caught:
        launch(body)
    assert caught.value.rank == 1
    assert caught.value.exit_code == 1
    assert caught.value.signal is None
    assert caught.value.traceback is not None
    assert caught.value.traceback.startswith("Traceback (most recent call last):\n")
    assert "in body\n" in caught.value.traceback
    assert caught.value.traceback.endswith("KeyError: 'no such column'\n")
    assert "lockstep/launcher" not in caught.value.traceback


def test_launch_names_the_signal_that_ended_a_rank(bench: Bench) -> None:
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        launch(lambda world: os.kill(os.getpid(), signal.SIGKILL), nprocs=1)
    assert (caught.value.signal, caught.value.exit_code) == ("SIGKILL", None)


@pytest.mark.parametrize("how", [os._exit, sys.exit], ids=["os._exit", "sys.exit"])
def test_launch_misses_a_result(bench: Bench, how: object) -> None:
    with pytest.raises(RankFailed, match="rank 0 of 1 failed first"):
        launch(lambda world: how(0), nprocs=1)  # type: ignore[operator]


def test_launch_says_which_result_cannot_be_pickled(bench: Bench) -> None:
    def make_lock(world: World) -> object:
        return threading.Lock()

    with pytest.raises(RankFailed, match=r"make_lock.* returned a lock that can't be pickled"):
        launch(make_lock, nprocs=1)


def _good(world: World) -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fn": "train"}, "given a str to call"),
        ({"fn": _good, "args": (threading.Lock(),)}, "can't be sent to other processes"),
        ({"fn": _good, "nprocs": 0}, "number of ranks is 0"),
        ({"fn": _good, "nprocs": "two"}, "number of ranks is two"),
        ({"fn": _good, "nprocs": 1.0}, "number of ranks is 1.0"),
        ({"fn": _good, "nprocs": True}, "number of ranks is True"),
        ({"fn": _good, "num_threads": -1}, "threads per rank is -1"),
        ({"fn": _good, "output": "loud"}, "output is 'loud'"),
        ({"fn": _good, "output": "plain", "log_dir": "logs"}, "log_dir"),
    ],
)
def test_launch_refuses(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(BadLaunch, match=said) as caught:
        launch(**arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_launch_names_a_log_dir_that_cannot_be_made(bench: Bench) -> None:
    with pytest.raises(LaunchError, match="file/logs"):
        launch(_good, log_dir=bench.script("", "file") / "logs")


def test_launch_from_a_script_pickles_what_is_in_main(bench: Bench) -> None:
    script = bench.script(
        """
        import lockstep.launcher

        OFFSET = 5

        def work(world):
            return world.rank + OFFSET

        print(lockstep.launcher.launch(work), lockstep.launcher.launch(lambda world: OFFSET, 1))
        """
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "[5, 6] [5]\n", done.stderr


@pytest.mark.long
def test_processes_that_a_rank_spawns_have_what_the_callers_main_has(bench: Bench) -> None:
    """As in a notebook, whose cells are ``__main__``."""
    script = bench.script(
        """
        import lockstep
        import torch

        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return index**2

        def collate(numbers):
            return torch.tensor(numbers) + 1

        def work(world):
            loader = torch.utils.data.DataLoader(
                Squares(), 2, num_workers=1, collate_fn=collate, multiprocessing_context="spawn"
            )
            return [batch.tolist() for batch in loader]

        if __name__ == "__main__":
            print(lockstep.launch(work, nprocs=1))
        """
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "[[[1, 2], [5, 10]]]\n", done.stderr


BUSY = """
    import os, subprocess, sys, time
    import lockstep.launcher

    def work(world):
        subprocess.Popen(["sleep", "1000"])
        print("ready", flush=True)
        time.sleep(1000)

    try:
        lockstep.launcher.launch(work)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """


@pytest.fixture
def caller(bench: Bench) -> subprocess.Popen[str]:
    """A script that has launched two ranks, each with a child."""
    process = bench.start_python(bench.script(BUSY))
    for _ in range(2):
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
    # The caller, the supervisor, its guardian, two ranks, two children.
    assert len(bench.processes()) == 7
    return process


def test_launch_that_is_interrupted_leaves_nothing(
    bench: Bench, caller: subprocess.Popen[str]
) -> None:
    caller.send_signal(signal.SIGINT)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "interrupted\n"
    assert caller.wait(60) == 0
    assert bench.processes() == []


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_ended_caller_leaves_nothing(
    bench: Bench, caller: subprocess.Popen[str], number: signal.Signals
) -> None:
    caller.send_signal(number)
    assert until(lambda: not bench.processes())


def test_killed_supervisor_is_an_error(bench: Bench) -> None:
    def kill_the_supervisor(world: World) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(LaunchError, match="-9"):
        launch(kill_the_supervisor)
    assert until(lambda: not bench.processes())


@pytest.mark.long
def test_launch_within_a_rank(bench: Bench) -> None:
    def outer(world: World) -> list[int]:
        tens = 10 * world.rank
        return launch(lambda inner: tens + inner.rank)

    assert launch(outer) == [[0, 1], [10, 11]]


def test_logs_are_not_written_through_links(bench: Bench) -> None:
    victim = bench.script("kept", "victim")
    (bench.directory / "logs").mkdir()
    (bench.directory / "logs" / "rank-1.log").symlink_to(victim)
    with pytest.raises(LaunchError, match=r"rank-1\.log: It is a link, to a file elsewhere"):
        launch(_good, log_dir=bench.directory / "logs")
    assert victim.read_text() == "kept"
