"""Several hosts, here all on one: each gives the command, and they find each other."""

from __future__ import annotations

import signal
import socket
import subprocess
import time

import pytest

from tests.launcher.bench import Bench, lines_of, until

ALL_REDUCE = """
    import os, sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK"]
    print([os.environ[name] for name in names], total.item(), flush=True)
    """


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert isinstance(port, int)
        return port


def start_hosts(
    bench: Bench, text: str, *, ranks: tuple[int, ...], numbered: bool = True
) -> list[subprocess.Popen[str]]:
    endpoint = f"127.0.0.1:{free_port()}"
    script = bench.script(text)
    common = ["--nnodes", len(ranks), "--rdzv-endpoint", endpoint, "--rdzv-timeout", 60]
    return [
        bench.start(
            "run",
            *common,
            *(["--node-rank", host] if numbered else []),
            "-n",
            number,
            script,
        )
        for host, number in enumerate(ranks)
    ]


def test_hosts_number_their_ranks_one_after_the_other(bench: Bench) -> None:
    first, second = start_hosts(bench, ALL_REDUCE, ranks=(1, 2))
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert lines_of(out, 0) == ["['0', '0', '1', '3', '0'] 6.0"]
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert lines_of(out, 1) == ["['1', '0', '2', '3', '1'] 6.0"]
    assert lines_of(out, 2) == ["['2', '1', '2', '3', '1'] 6.0"]


def test_hosts_may_leave_their_numbers_to_each_other(bench: Bench) -> None:
    runs = start_hosts(bench, ALL_REDUCE, ranks=(1, 1), numbered=False)
    answers = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], answers
    out = "".join(out for out, _ in answers)
    assert lines_of(out, 0) == ["['0', '0', '1', '2', '0'] 3.0"]
    assert lines_of(out, 1) == ["['1', '0', '1', '2', '1'] 3.0"]


@pytest.mark.parametrize("host", [0, 1])
def test_failure_on_one_host_ends_all_and_is_told_on_all(bench: Bench, host: int) -> None:
    text = f"""
    import os, subprocess, time
    if os.environ["RANK"] == "{host}":
        raise ValueError("here it failed")
    subprocess.Popen(["sleep", "1000"])
    time.sleep(1000)
    """
    for run in start_hosts(bench, text, ranks=(1, 1)):
        _, err = run.communicate(timeout=60)
        assert run.returncode == 1, err
        assert f"lockstep: rank {host} of 2 failed first: exit code 1" in err
        assert "ValueError: here it failed" in err
    assert bench.processes() == []


def test_ended_launcher_of_one_host_ends_all(bench: Bench) -> None:
    text = "print('ready', flush=True); import time; time.sleep(1000)"
    runs = start_hosts(bench, text, ranks=(1, 1))
    for run in runs:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
    runs[1].send_signal(signal.SIGINT)
    assert runs[1].wait(15) == 130
    assert runs[0].wait(15) != 0
    assert runs[0].stderr is not None
    assert "the launcher of host 1 was ended" in runs[0].stderr.read()
    assert bench.processes() == []


def test_killed_launcher_of_one_host_ends_all(bench: Bench) -> None:
    text = "print('ready', flush=True); import time; time.sleep(1000)"
    runs = start_hosts(bench, text, ranks=(1, 1))
    for run in runs:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
    runs[0].kill()
    assert until(lambda: not bench.processes(), 15)
    assert runs[1].wait(1) != 0
    assert runs[1].stderr is not None
    assert "the host that keeps the store" in runs[1].stderr.read()


def test_waiting_for_other_hosts_can_be_interrupted(bench: Bench) -> None:
    script = bench.script("print('ran')")
    port = free_port()
    run = bench.start(
        "run", "--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", f"127.0.0.1:{port}", script
    )

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    assert until(listens, 20)
    asked_at = time.monotonic()
    run.send_signal(signal.SIGINT)
    assert run.wait(5) == 130
    assert time.monotonic() - asked_at < 2


def test_host_that_waits_in_vain_says_where(bench: Bench) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    script = bench.script("print('ran')")
    options = ["--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", endpoint, "--rdzv-timeout", 1]
    done = bench.run("run", *options, script, seconds=30)
    assert done.returncode == 2
    assert endpoint in done.stderr
    assert "1 seconds" in done.stderr
    assert "Traceback" not in done.stderr
