"""Ranks whose store falls silent, before each kind of request that they make to it.

It is kept by a process that is stopped, whose kernel still acknowledges what is sent, or it is on a
host whose cable is pulled. Two ranks train, save and end; the second one halts before a request,
has the store fall silent, and goes on. A kind of request is what is asked for (``check``) and the
key without its numbers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launcher.bench import free_port
from tests.network import Hosts, hosts_of_a_network

# Twenty trials that wait for up to a minute each, two at a time.
pytestmark = [
    pytest.mark.forks, pytest.mark.long, pytest.mark.network, pytest.mark.timeout(1800)
]  # fmt: skip

# How often a run is repeated in which a kind of request was not made.
NUM_RUNS, NOT_REACHED = 4, "not reached"
NUM_AT_ONCE = 2  # trials, which mostly wait
TIMEOUT_SECONDS = 8
# An error comes after at most this: two requests may have to be given up, and notes be waited for.
END_SECONDS = 45

KEEP = """
import sys, time
from lockstep.launcher.endpoint import _open_store
import socket
store = _open_store(socket.create_server((sys.argv[1], int(sys.argv[2]))))
print("open", flush=True)
time.sleep(1000)
"""
TRAIN = r"""
import os, re, subprocess, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import lockstep

def watch(store_class, request):
    original = getattr(store_class, request)
    def call(self, keys, *rest, **named):
        key = keys if isinstance(keys, str) else keys[0]
        kind = f"{request} " + re.sub(r"\d+|[0-9a-f]{8,}", "#", key)
        if kind not in seen:
            seen.add(kind)
            print("reaches", kind, flush=True)
            if kind == os.environ.get("SILENT_BEFORE"):
                subprocess.run(os.environ["SILENCE"].split(), check=True)
                print("silent", time.time(), flush=True)
        return original(self, keys, *rest, **named)
    setattr(store_class, request, call)

seen = set()
if os.environ["RANK"] == "1":
    for store_class in (dist.PrefixStore, dist.TCPStore):
        for request in ("set", "get", "check", "add", "wait", "compare_set", "multi_get"):
            watch(store_class, request)
timeout = timedelta(seconds=float(sys.argv[1]))
lockstep.init(timeout=timeout)
model = lockstep.parallelize(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    lockstep.save(sys.argv[2], model=model, optimizer=optimizer, async_=True)
dist.new_group([0, 1], timeout=timeout)  # torch gives it half an hour, not that of init()
print("trained", flush=True)
"""


class Run(NamedTuple):
    """Two ranks and the process that keeps their store."""

    keeper: subprocess.Popen[str]
    ranks: list[subprocess.Popen[str]]


@contextmanager
def run(folder: Path, hosts: Hosts | None, **variables: str) -> Iterator[Run]:
    """Start them: the second rank on the second host, if there are ``hosts``."""
    address = "127.0.0.1" if hosts is None else hosts.address(0)
    port = str(free_port())

    def start(host: int, *words: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*(hosts.on(host) if hosts else []), sys.executable, "-c", *words],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    keeper = start(0, KEEP, address, port)
    started = [keeper]
    try:
        assert keeper.stdout is not None
        assert "open" in keeper.stdout.readline()
        common = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "SILENCE": variables.pop("SILENCE", "").replace("KEEPER", str(keeper.pid)),
            **variables,
        }
        for rank in range(2):
            arguments = str(TIMEOUT_SECONDS), str(folder)
            started.append(start(rank, TRAIN, *arguments, RANK=str(rank), **common))
        yield Run(keeper, started[1:])
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()


def kinds_of_requests(folder: Path, hosts: Hosts | None) -> list[str]:
    """What the second rank asks the store for, if all goes well."""
    with run(folder, hosts) as (_, ranks):
        outputs = [rank.communicate(timeout=100) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        return re.findall("^reaches (.*)$", outputs[1][0], re.MULTILINE)


def check_end(folder: Path, hosts: Hosts | None, kind: str, silence: str) -> str:
    """Return what went wrong, if anything did: no end in time, or an error that names nothing.

    Some requests are made in some runs only, as whether a rank waits for long is a matter of time.
    """
    found = ""
    for number in range(NUM_RUNS):
        found = _check_end(folder / str(number), hosts, kind, silence)
        if not found.startswith(NOT_REACHED):
            break
    return found


def _check_end(folder: Path, hosts: Hosts | None, kind: str, silence: str) -> str:
    folder.mkdir(parents=True)
    with run(folder, hosts, SILENT_BEFORE=kind, SILENCE=silence) as (_, ranks):
        out, err = "", ""
        try:
            out, err = ranks[1].communicate(timeout=4 * END_SECONDS)
            ended = time.time()
            ranks[0].communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return "no end"
    silent = re.search("^silent (.*)$", out, re.MULTILINE)
    if silent is None:
        return f"{NOT_REACHED}: {out} {err}"
    if (seconds := ended - float(silent[1])) > END_SECONDS:
        return f"{seconds:.0f} s"
    errors = re.findall(r"^(?:\[rank\d\]: )?lockstep\.errors\.\w+: (.*)$", err, re.MULTILINE)
    if ranks[1].returncode and not (errors and re.search(r"store|[Rr]anks? \[?0", errors[-1])):
        return f"says {err}"
    return ""


def test_store_whose_keeper_is_stopped_keeps_no_rank_waiting(tmp_path: Path) -> None:
    kinds = kinds_of_requests(tmp_path / "well", None)
    assert len(kinds) > 10

    def try_out(kind: str) -> str:
        return check_end(tmp_path / str(kinds.index(kind)), None, kind, "kill -STOP KEEPER")

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        found = dict(zip(kinds, pool.map(try_out, kinds), strict=True))
    assert not {kind: what for kind, what in found.items() if what}


def test_store_behind_a_cut_link_keeps_no_rank_waiting(tmp_path: Path) -> None:
    with hosts_of_a_network(2) as hosts:
        kinds = kinds_of_requests(tmp_path / "well", hosts)
    assert len(kinds) > 10

    def try_out(kind: str) -> str:
        with hosts_of_a_network(2) as hosts:
            cut = f"ip -n {hosts.switch} link set port1 down"
            return check_end(tmp_path / str(kinds.index(kind)), hosts, kind, cut)

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        found = dict(zip(kinds, pool.map(try_out, kinds), strict=True))
    assert not {kind: what for kind, what in found.items() if what}
