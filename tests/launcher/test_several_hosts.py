"""Several hosts, here all on one: each gives the command, and they find each other."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.launcher import hosts
from lockstep.launcher.failures import Outcome
from lockstep.launcher.hosts import Host, _outcome_of_peer
from lockstep.launcher.job import Meeting
from tests.launcher.bench import Bench, free_port, lines_of, until

pytestmark = pytest.mark.forks

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


def start_hosts(
    bench: Bench,
    text: str,
    *,
    ranks: tuple[int, ...],
    numbered: bool = True,
    **options: object,
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
            **options,
        )
        for host, number in enumerate(ranks)
    ]


def start_host(bench: Bench, text: str, port: int, *options: object) -> subprocess.Popen[str]:
    endpoint = f"127.0.0.1:{port}"
    common = ["--nnodes", 2, "--rdzv-endpoint", endpoint, "--rdzv-timeout", 60, "-n", 1]
    return bench.start("run", *common, *options, bench.script(text))


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.true_start
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
    assert runs[1].wait(60) == 130
    assert runs[0].wait(60) != 0
    assert runs[0].stderr is not None
    assert "the launcher of host 1 was ended" in runs[0].stderr.read()
    assert bench.processes() == []


def test_killed_launcher_of_one_host_ends_all(bench: Bench, tmp_path: Path) -> None:
    text = "print('ready', flush=True); import time; time.sleep(1000)"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary)}
    runs = start_hosts(bench, text, ranks=(1, 1), env=environ)
    for run in runs:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
    runs[0].kill()
    assert until(lambda: not bench.processes())
    assert runs[1].wait(60) != 0
    assert runs[1].stderr is not None
    assert "the host that keeps the store" in runs[1].stderr.read()
    assert list(temporary.iterdir()) == []


@pytest.mark.keeps_descriptors  # with a process's first store, torch opens a pipe for good
def test_nothing_that_is_read_at_the_endpoint_is_executed(bench: Bench) -> None:
    """torch's own rendezvous of hosts without numbers unpickles this."""
    done = bench.directory / "executed"

    class Touch:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (done,)

    attack = base64.b64encode(pickle.dumps(Touch()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    store.set("torch.rendezvous.lockstep", attack)
    for key in ("run", "size/0", "size/1", "failed", "failure/0"):
        store.set(f"lockstep/{key}", attack)
    run = start_host(bench, "print('ran')", port)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (2, "")
    assert "each run a port of its own" in err
    assert "Traceback" not in err
    assert not done.exists()


def test_strangers_at_the_endpoint_keep_nobody_waiting(bench: Bench) -> None:
    port = free_port()
    first = start_host(bench, "print('ran')", port, "--node-rank", 0)
    strangers: list[socket.socket] = []

    def listens() -> bool:
        with contextlib.suppress(ConnectionError):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
        return bool(strangers)

    assert until(listens)
    for words in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
    second = start_host(bench, "print('ran')", port, "--node-rank", 1)
    for run in (first, second):
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--node-rank", 0], "can't listen at the rendezvous endpoint"),
        (["--node-rank", 1, "--rdzv-id", "other"], "run 'other' on 2 hosts, but those who meet"),
        (["--node-rank", 1, "--nnodes", 3], "run 'lockstep' on 3 hosts, but those who meet"),
    ],
)
def test_host_that_is_not_of_the_run_says_why(
    bench: Bench, options: list[object], says: str
) -> None:
    port = free_port()
    first = start_host(bench, "print('ran')", port, "--node-rank", 0)
    assert until(lambda: is_open(port))
    stranger = start_host(bench, "print('ran')", port, *options)
    _, err = stranger.communicate(timeout=60)
    assert stranger.returncode == 2
    assert says in err
    second = start_host(bench, "print('ran')", port, "--node-rank", 1)
    for run in (first, second):
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
    assert not is_open(port)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"exit_status": "x"}', "\udcff"])
def test_failure_of_another_host_that_cannot_be_read_is_a_failure(text: str) -> None:
    assert _outcome_of_peer(text).exit_status == 1


class DictStore(dict[str, Any]):
    """A TCPStore of one process."""

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return int(self[key])

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def host_of_the_store(store: DictStore, num_hosts: int) -> Host:
    host: Any = Host.__new__(Host)
    host._meeting = Meeting(num_hosts, 0, "x", 1, "lockstep", 60)
    host._number, host._num_hosts, host._store, host._held = 0, num_hosts, store, store
    host._num_answers = 0
    return host


def test_host_of_the_store_lets_others_read_the_failure_if_one_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "_SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "_LEAVE_SECONDS", 2.0)
    store = DictStore({"done/1": ""})  # and host 2 is gone
    host = host_of_the_store(store, 3)
    leaving = threading.Timer(0.5, store.add, ("left", 1))
    leaving.start()
    failure = Outcome(1, message="failed", rank=0)
    assert host.settle(failure, lambda: False) == failure
    assert store["left"] == 2
    leaving.join()


def test_a_launcher_that_was_ended_hides_no_rank_that_failed() -> None:
    """Its end has no time, and one may end it because the ranks of another host have failed."""
    ended = [143, 0.0, False, None, "the launcher of host 1 was ended."]
    failed = [7, time.time(), False, 4, "rank 4 of 6 failed first: exit code 7."]
    told = {f"failure/{host}": json.dumps(it).encode() for host, it in ((1, ended), (2, failed))}
    store = DictStore(told, **{"done/1": "", "done/2": "", "left": 2})
    outcome = host_of_the_store(store, 3).settle(Outcome(0), lambda: False)
    assert (outcome.rank, outcome.exit_status) == (4, 7)


def test_waiting_for_other_hosts_to_leave_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "_LEAVE_SECONDS", 20.0)
    began = time.monotonic()
    store = DictStore({"done/1": ""})
    host_of_the_store(store, 2).settle(Outcome(0), lambda: time.monotonic() > began + 0.5)
    assert time.monotonic() - began < 10.0


def test_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a host that the network has lost: no connection is closed."""
    monkeypatch.setattr(hosts, "_LOST_SECONDS", 0.5)
    ends = threading.Event()

    class SilentStore(DictStore):
        def check(self, keys: list[str]) -> bool:
            ends.wait(60)
            raise RuntimeError("the connection is closed")

    began = time.monotonic()
    outcome = host_of_the_store(SilentStore(left=1), 2).settle(Outcome(0), lambda: False)
    ends.set()
    assert outcome.exit_status == 1
    assert outcome.message == "the host that keeps the store, at x:1, is gone."
    assert time.monotonic() - began < 30


def impatient(directory: Path) -> dict[str, str]:
    """The environment of hosts that take another for lost after two seconds."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        "from lockstep.launcher import hosts\nhosts._LOST_SECONDS = 2.0\n"
    )
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


LAST_RANK_GOES_ON = """
    import os, time
    print("ready", flush=True)
    if os.environ["RANK"] == "1":
        time.sleep(SECONDS)
    """


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP]
)
def test_host_that_vanishes_is_not_waited_for_and_named(
    bench: Bench, tmp_path: Path, number: signal.Signals
) -> None:
    text = LAST_RANK_GOES_ON.replace("SECONDS", "1000")
    runs = start_hosts(bench, text, ranks=(1, 1), env=impatient(tmp_path / "site"))
    assert runs[1].stdout is not None
    assert "ready" in runs[1].stdout.readline()
    runs[1].send_signal(number)
    _, err = runs[0].communicate(timeout=60)
    assert runs[0].returncode == 1, err
    assert f"lockstep: host 1 ({socket.gethostname()}) is lost" in err
    assert "Traceback" not in err
    runs[1].kill()
    assert until(lambda: not bench.processes())


def test_host_that_lives_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    text = LAST_RANK_GOES_ON.replace("SECONDS", "6")
    for run in start_hosts(bench, text, ranks=(1, 1), env=impatient(tmp_path / "site")):
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0, err


def test_hosts_without_numbers_get_all_of_them(bench: Bench) -> None:
    runs = start_hosts(bench, "print('ran')", ranks=(1, 1, 1), numbered=False)
    out = "".join(run.communicate(timeout=100)[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(out.splitlines()) == [f"[rank {rank}] ran" for rank in range(3)]


def test_waiting_for_other_hosts_can_be_interrupted(bench: Bench) -> None:
    script = bench.script("print('ran')")
    port = free_port()
    run = bench.start(
        "run", "--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", f"127.0.0.1:{port}", script
    )
    assert until(lambda: is_open(port))
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130  # unasked, it would wait for 300 s


def test_host_that_waits_in_vain_says_where(bench: Bench) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    script = bench.script("print('ran')")
    options = ["--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", endpoint, "--rdzv-timeout", 1]
    done = bench.run("run", *options, script, seconds=100)
    assert done.returncode == 2
    assert endpoint in done.stderr
    assert "1 seconds" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def two_hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a cable: what to write before a command to run it there."""
    names = [f"lockstep-{os.getpid()}-{end}" for end in "ab"]
    cables = [f"ls{os.getpid() % 100_000}{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command 'ip'")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", cable)
            for interface in ("lo", cable):
                ip("-n", name, "link", "set", interface, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
    else:
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


INIT = """
    import torch, torch.distributed as dist, lockstep
    world = lockstep.init()
    total = torch.tensor(float(world.rank + 1))
    dist.all_reduce(total)
    print(world.local_rank, world.local_world_size, world.world_size, total.item(), flush=True)
    """


def start_on(hosts: list[list[str]], script: Path) -> list[subprocess.Popen[str]]:
    """Start two ranks of ``script`` on each of ``hosts``."""
    return [
        subprocess.Popen(
            [*there, sys.executable, "-m", "lockstep", "run", "--nnodes", "2", "-n", "2",
             "--node-rank", str(number), "--rdzv-endpoint", "10.77.0.1:29500", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, there in enumerate(hosts)
    ]  # fmt: skip


@pytest.mark.long
def test_two_hosts_of_a_network(bench: Bench, two_hosts: list[list[str]]) -> None:
    for number, run in enumerate(start_on(two_hosts, bench.script(INIT))):
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        for local_rank in range(2):
            assert lines_of(out, 2 * number + local_rank) == [f"{local_rank} 2 4 10.0"]


COUNT_BYTES = """
    from pathlib import Path
    import torch, torch.distributed as dist, lockstep

    def sent():
        cables = Path("/sys/class/net").glob("ls*/statistics/tx_bytes")
        return sum(int(path.read_text()) for path in cables)

    world = lockstep.init()
    gloo = dist.new_group(backend="gloo")
    size = 4 * 1024 * 1024
    for name, group in (("shm", dist.group.WORLD), ("gloo", gloo)):
        tensor = torch.full((size // 4,), world.rank + 1.0)
        dist.all_reduce(tensor, group=group)  # connections are made
        assert tensor.eq(10).all()
        dist.barrier(group)
        before = sent()
        for _ in range(5):
            dist.all_reduce(tensor, group=group)
        dist.barrier(group)
        if world.local_rank == 0:
            print(name, (sent() - before) / 5 / size, flush=True)
        dist.barrier(group)
    """


@pytest.mark.long
def test_a_host_sends_each_byte_once(bench: Bench, two_hosts: list[list[str]]) -> None:
    """Of four ranks on two hosts; with Gloo alone, more crosses the cable."""
    for number, run in enumerate(start_on(two_hosts, bench.script(COUNT_BYTES))):
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        shares = dict(line.split() for line in lines_of(out, 2 * number))
        # Headers and acknowledgements come on top of the bytes themselves.
        assert 1.0 < float(shares["shm"]) < 1.05, shares
        assert float(shares["gloo"]) > 1.2, shares
