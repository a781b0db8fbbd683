"""Several hosts, here all on one: each gives the command, and they find each other."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launcher.bench import Bench, free_port, lines_of
from tests.waiting import until

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
    say: tuple[object, ...] = (),
    **options: object,
) -> list[subprocess.Popen[str]]:
    endpoint = f"127.0.0.1:{free_port()}"
    script = bench.script(text)
    common = ["--nnodes", len(ranks), "--rdzv-endpoint", endpoint, "--rdzv-timeout", 60, *say]
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
@pytest.mark.long
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


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.long)])
def test_interruption_of_one_host_is_one_of_all(bench: Bench, host: int) -> None:
    text = "print('ready', flush=True); import time; time.sleep(1000)"
    runs = start_hosts(bench, text, ranks=(1, 1))
    for run in runs:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
    runs[host].send_signal(signal.SIGINT)
    told = []
    for run in runs:
        _, err = run.communicate(timeout=60)
        assert run.returncode == 130, err
        told.append(err)
    assert "lockstep: ended by SIGINT; no rank" in told[host]
    assert f"lockstep: ended by SIGINT at host {host} ({socket.gethostname()})" in told[1 - host]
    assert bench.processes() == []


@pytest.mark.parametrize(
    ("host", "ranks"),
    [
        (1, (1, 1)),
        pytest.param(0, (1, 1, 1), marks=pytest.mark.long),
        pytest.param(1, (1, 1, 1), marks=pytest.mark.long),
    ],
)
def test_killed_launcher_of_one_host_ends_all(
    bench: Bench, tmp_path: Path, host: int, ranks: tuple[int, ...]
) -> None:
    """Soon, though no rank communicates, and a host may be silent for a minute."""
    text = "print('ready', flush=True); import time; time.sleep(1000)"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary)}
    runs = start_hosts(bench, text, ranks=ranks, env=environ)
    for run in runs:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
    runs.pop(host).kill()
    began = time.monotonic()
    how = "the connection of its launcher" if host else "the store that it keeps"
    for run in runs:
        _, err = run.communicate(timeout=60)
        assert run.returncode == 1
        assert f"host {host} ({socket.gethostname()}) is lost: {how} has ended" in err
        assert "frame #" not in err, "torch's stores log with stacks of C++ by default"
    assert time.monotonic() - began < 5
    assert until(lambda: not bench.processes())
    assert list(temporary.iterdir()) == []


@pytest.mark.long
def test_second_ctrl_c_at_one_host_ends_the_ranks_of_all_at_once(bench: Bench) -> None:
    text = """
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('ready', flush=True)
    time.sleep(1000)
    """
    runs = start_hosts(bench, text, ranks=(1, 1))
    for run in runs:
        assert run.stdout is not None
        assert "ready" in run.stdout.readline()
    runs[1].send_signal(signal.SIGINT)
    assert runs[0].stderr is not None
    assert "still running after SIGINT: rank 0" in runs[0].stderr.readline()
    runs[1].send_signal(signal.SIGINT)
    began = time.monotonic()
    for run in runs:
        run.communicate(timeout=60)
        assert run.returncode == 130
    assert time.monotonic() - began < 10


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
        (["--node-rank", 1, "--restarts", 3], "on 2 hosts with --restarts 3, but those who meet"),
        (["--node-rank", 1, "--rdzv-id", "other"], "run 'other' on 2 hosts, but those who meet"),
        pytest.param(
            ["--node-rank", 1, "--nnodes", 3],
            "run 'lockstep' on 3 hosts, but those who meet",
            marks=pytest.mark.long,
        ),
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


LAST_RANK_GOES_ON = """
    import os, time
    print("ready", flush=True)
    if os.environ["RANK"] == "1":
        time.sleep(SECONDS)
    """
ALL_GO_ON = """
    import time
    print("ready", flush=True)
    time.sleep(SECONDS)
    """


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP]
)
@pytest.mark.parametrize("is_done", [True, pytest.param(False, marks=pytest.mark.long)])
def test_host_that_vanishes_is_not_waited_for_and_named(
    bench: Bench, number: signal.Signals, is_done: bool
) -> None:
    text = (LAST_RANK_GOES_ON if is_done else ALL_GO_ON).replace("SECONDS", "1000")
    runs = start_hosts(bench, text, ranks=(1, 1), say=("--host-timeout", 2))
    assert runs[1].stdout is not None
    assert "ready" in runs[1].stdout.readline()
    runs[1].send_signal(number)
    _, err = runs[0].communicate(timeout=60)
    assert runs[0].returncode == 1, err
    assert f"lockstep: host 1 ({socket.gethostname()}) is lost" in err
    assert "Traceback" not in err
    runs[1].kill()
    assert until(lambda: not bench.processes())


@pytest.mark.long
def test_host_that_lives_is_waited_for(bench: Bench) -> None:
    text = LAST_RANK_GOES_ON.replace("SECONDS", "6")
    for run in start_hosts(bench, text, ranks=(1, 1), say=("--host-timeout", 2)):
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0, err


def test_hosts_without_numbers_get_all_of_them(bench: Bench) -> None:
    runs = start_hosts(bench, "print('ran')", ranks=(1, 1, 1), numbered=False)
    out = "".join(run.communicate(timeout=100)[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(out.splitlines()) == [f"[rank {rank}] ran" for rank in range(3)]


@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_end_of_a_launcher_while_hosts_meet_is_told_to_those_that_wait(
    bench: Bench, host: int, number: signal.Signals
) -> None:
    """The third host hasn't come yet, and isn't waited for any longer."""
    port = free_port()
    options = ["--nnodes", 3, "--rdzv-endpoint", f"127.0.0.1:{port}", bench.script("print('ran')")]
    runs = [bench.start("run", "--node-rank", each, *options) for each in range(2)]
    store = dist.PrefixStore("lockstep", store_at(port))
    for each in range(2):
        store.wait([f"size/{each}"])
    time.sleep(0.5)  # host 0 looks at those that have come
    runs[host].send_signal(number)
    began = time.monotonic()
    _, err = runs[1 - host].communicate(timeout=60)
    assert time.monotonic() - began < 5
    name = f"host {host} ({socket.gethostname()})"
    if number == signal.SIGINT:
        assert runs[1 - host].returncode == 130
        assert f"lockstep: ended by SIGINT at {name}; no rank is left running." in err
        assert runs[host].wait(60) == 130
    else:
        why = f"{name} had come" if host else "the host that keeps the store there has given up"
        assert runs[1 - host].returncode == 2
        assert why in err
    assert "Traceback" not in err
    assert until(lambda: not bench.processes())


def store_at(port: int) -> dist.Store:
    assert until(lambda: is_open(port))
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


@pytest.mark.long
def test_meeting_at_a_store_whose_host_is_stopped_has_an_end(bench: Bench) -> None:
    port = free_port()
    common = ["--nnodes", 3, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    options = [*common, "--rdzv-timeout", 5, bench.script("print('ran')")]
    runs = [bench.start("run", "--node-rank", each, *options) for each in range(2)]
    dist.PrefixStore("lockstep", store_at(port)).wait(["size/0", "size/1"])
    runs[0].send_signal(signal.SIGSTOP)
    _, err = runs[1].communicate(timeout=30)
    assert runs[1].returncode == 2
    assert "of the store there, there was no answer within" in err
    assert "Traceback" not in err
    runs[0].kill()


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


NOT_OURS = "203.0.113.9"  # an address that is given to no host


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.long)])
def test_mistyped_address_is_told_in_time_with_the_right_ones(bench: Bench, host: int) -> None:
    options = ["--nnodes", 2, "--node-rank", host, "--rdzv-endpoint", f"{NOT_OURS}:{free_port()}"]
    script = bench.script("print('ran')")
    done = bench.run("run", *options, "--rdzv-timeout", 1, script, seconds=50)
    assert done.returncode == 2
    assert f"The addresses of this host, {socket.gethostname()}, are " in done.stderr
    assert "127.0.0.1 (lo)" in done.stderr
    assert "Traceback" not in done.stderr


IN_SHARDS = """
    import hashlib
    import torch
    import torch.nn.functional as F
    import lockstep

    world = lockstep.init()
    lockstep.seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(208, 20), torch.arange(208) % 3)
    net = torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Dropout(0.2),
        torch.nn.Linear(30, 3),
    )
    model = lockstep.parallelize(net)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in lockstep.DataLoader(data, 32, shuffle=True, seed=0, shards=8):
        for x, y in lockstep.shards(model, batch):
            lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
    world.print(hashlib.sha256(state).hexdigest())
    """


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 1, 1)])
def test_hosts_that_are_launched_end_with_the_bits_of_one_rank(
    bench: Bench, ranks: tuple[int, ...]
) -> None:
    out, err = bench.start("run", "-n", 1, bench.script(IN_SHARDS)).communicate(timeout=120)
    alone = lines_of(out, 0)
    assert len(alone) == 1, err
    hosts = start_hosts(bench, IN_SHARDS, ranks=ranks)
    ends = [host.communicate(timeout=120) for host in hosts]
    assert [host.returncode for host in hosts] == [0] * len(ranks), ends
    assert lines_of(ends[0][0], 0) == alone
