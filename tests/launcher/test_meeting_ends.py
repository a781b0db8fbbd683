"""What ends a rank while its host still waits for others is told at once, on every host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import psutil
import pytest

from tests.launcher.bench import Bench, free_port, until

pytestmark = pytest.mark.forks


def start_some(bench: Bench, hosts: list[int]) -> list[subprocess.Popen[str]]:
    """Start some hosts of four, of 2 ranks each."""
    meeting = ["--nnodes", 4, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-timeout", 60]
    common = [*meeting, "-n", 2, bench.script("print('ran')")]
    return [bench.start("run", "--node-rank", host, *common) for host in hosts]


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks of a launcher that has a guardian too."""
    launcher = psutil.Process(run.pid)
    assert until(lambda: len(launcher.children()) == 3)
    return sorted(launcher.children(), key=lambda child: child.pid)[:2]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
@pytest.mark.parametrize("host", [0, 1])
def test_rank_killed_before_all_hosts_have_met_ends_all(
    bench: Bench, host: int, number: int
) -> None:
    runs = start_some(bench, [0, 1, 2])
    ranks = [ranks_of(run) for run in runs]
    time.sleep(1)  # all three have come by then, or soon
    ranks[host][1].send_signal(number)
    began = time.monotonic()
    told = [run.communicate(timeout=30)[1] for run in runs]
    assert time.monotonic() - began < 10
    assert runs[host].returncode == 128 + number
    said = f"host {host} ({socket.gethostname()}) has lost its rank 1 before all hosts had met: "
    said += f"it was ended by {signal.Signals(number).name}"
    assert all(said in err for err in told), told


def test_rank_killed_before_there_is_a_host_to_meet_ends_its_launcher(bench: Bench) -> None:
    (run,) = start_some(bench, [1])
    time.sleep(0.5)
    os.kill(ranks_of(run)[0].pid, signal.SIGKILL)
    _, err = run.communicate(timeout=10)
    assert run.returncode == 128 + signal.SIGKILL
    assert "this host" in err
    assert "has lost its rank 0 before all hosts had met: it was ended by SIGKILL" in err
