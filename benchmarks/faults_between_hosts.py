"""What every host tells of a fault on one of them, and how soon, in each phase of a run.

    python -m benchmarks.faults_between_hosts [--fault "link cut"] [--phase training]

Two hosts (network namespaces, so it needs root) run two ranks each. They come to a phase, then the
fault happens on the second host, or to the launcher of the first, which keeps the store. Exits with
1 if a host doesn't end in time, or tells another cause.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.network import Hosts, hosts_of_a_network

# How long a host may be silent, hosts may take to meet, and ranks may keep each other waiting.
HOST_SECONDS, MEETING_SECONDS, RANK_SECONDS = 5, 10, 6
# What all that follows takes at most: ranks are ended, and hosts wait for each other.
END_SECONDS = 8
SOON_SECONDS = 5  # for what the kernel tells
READY_SECONDS = 120  # until a phase is reached, on a machine that has more to do
VICTIM = 3  # the last rank of the second host

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
import lockstep

phase, folder = sys.argv[1], Path(sys.argv[2])
RANK, is_second = int(os.environ["RANK"]), os.environ["GROUP_RANK"] == "1"

def reach():
    print("ready", flush=True)

def until_fault():
    while not (folder / "go").exists():
        time.sleep(0.02)

signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
world = lockstep.init(timeout=timedelta(seconds=RANK_SECONDS))
total = torch.ones(100_000)
if phase == "first collective":
    reach()
    if RANK == VICTIM:
        until_fault()
dist.all_reduce(total)
if phase == "saving":
    model = lockstep.parallelize(torch.nn.Linear(300, 300))
if phase == "loading":  # each epoch begins with an agreement
    loader = lockstep.DataLoader(torch.arange(8), 4, shuffle=True)
step = 0
while phase in ("training", "saving", "loading"):
    step += 1
    if phase == "saving":
        lockstep.save(folder / "run", model=model, step=step, async_=step % 2 == 0)
    elif phase == "loading":
        for _ in loader:
            pass
    else:
        dist.all_reduce(total)
        time.sleep(0.01)
    if step == 3:
        reach()
if phase == "ending":
    reach()
    if is_second:
        until_fault()
        time.sleep(3)
"""


class Run:
    """The launchers of a run, and what can happen to them."""

    def __init__(self, hosts: Hosts, folder: Path, phase: str) -> None:
        self.hosts, self.phase = hosts, phase
        self._folder, self._script = folder, folder / "program.py"
        names = ("RANK_SECONDS", "VICTIM")
        text = PROGRAM
        for name in names:
            text = text.replace(name, str(globals()[name]))
        self._script.write_text(text)
        self.launchers = [self._start(host) for host in range(2)]

    def _start(self, host: int) -> subprocess.Popen[str]:
        # In the meeting, a third host is waited for.
        num_hosts = 3 if self.phase == "meeting" else 2
        return self.hosts.start(
            host,
            [sys.executable, "-m", "lockstep", "run", "-n", "2",
             "--nnodes", str(num_hosts), "--node-rank", str(host),
             "--rdzv-endpoint", f"{self.hosts.address(0)}:29500",
             "--rdzv-timeout", str(MEETING_SECONDS), "--host-timeout", str(HOST_SECONDS),
             str(self._script), self.phase, str(self._folder)],
            may_fork=host < 2,  # the third comes after the fault
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def come_to_phase(self) -> None:
        """Wait until the ranks are there or, in the meeting, the first two hosts."""
        if self.phase == "meeting":
            end = time.monotonic() + READY_SECONDS
            while len(self._connections()) < 2 and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(1)
            return
        for launcher in self.launchers:
            assert launcher.stdout is not None
            for _ in range(2):
                line = launcher.stdout.readline()
                assert "ready" in line, launcher.communicate()
        time.sleep(0.3)

    def _connections(self) -> list[str]:
        """Those to the store: the first host's own, and the second one's."""
        listed = subprocess.run(
            [*self.hosts.on(0), "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        established = [line.split() for line in listed.splitlines() if line.split()[3] == "01"]
        return [words[1] for words in established if words[1].endswith(f":{29500:04X}")]

    def go_on(self) -> None:
        """After the fault, have a third host come, or the ranks that waited for it go on."""
        (self._folder / "go").touch()
        if self.phase == "meeting":
            self.launchers.append(self._start(2))

    def ranks(self, host: int) -> list[int]:
        """The processes of the ranks of ``host``, in order."""
        listed = Path(f"/proc/{self.launchers[host].pid}/task/{self.launchers[host].pid}/children")
        found = [int(pid) for pid in listed.read_text().split()]
        is_rank = [os.getpgid(pid) == pid and os.getsid(pid) != pid for pid in found]
        return sorted(pid for pid, is_one in zip(found, is_rank, strict=True) if is_one)

    def kill_host(self, host: int) -> None:
        """End all processes of ``host`` at once."""
        name = self.hosts.on(host)[3]
        listed = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        )
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Fault(NamedTuple):
    """What happens, and what each host has to tell.

    Attributes:
        happen: Has it happen.
        told: By host, what it has to tell, as a regular expression; "" of one that can't.
        seconds: At most until all hosts that can have ended.
        exit_status: Of those hosts.
    """

    happen: Callable[[Run], None]
    told: tuple[str, str]
    seconds: float
    exit_status: int = 1


def _lost(host: int) -> str:
    return rf"host {host} \(.*\) (is lost|had come)"


def _signal(host: int, number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.launchers[host].send_signal(number)


def _signal_rank(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: os.kill(run.ranks(1)[1], number)


SILENT_SECONDS = HOST_SECONDS + END_SECONDS
FAULTS = {
    "link cut": Fault(lambda run: run.hosts.cut(1), (_lost(1), _lost(0)), SILENT_SECONDS),
    "launcher killed": Fault(_signal(1, signal.SIGKILL), (_lost(1), ""), SOON_SECONDS),
    "rank killed": Fault(
        _signal_rank(signal.SIGKILL),
        (r"rank 3 of \d failed first: .*SIGKILL",) * 2,
        SOON_SECONDS,
        137,
    ),
    "rank leaves": Fault(
        _signal_rank(signal.SIGUSR2),
        (r"rank 3 of \d failed first: it ended with exit code 0 before",) * 2,
        SOON_SECONDS,
    ),
    "rank stopped": Fault(
        _signal_rank(signal.SIGSTOP),
        (
            r"(?s)rank 3 of \d failed first: it was stopped"
            r"|failed first.*\b[Rr]anks?( \[?[\d, ]*)? ?3\b",
        )
        * 2,
        RANK_SECONDS + END_SECONDS,
    ),
    "host killed": Fault(lambda run: run.kill_host(1), (_lost(1), ""), SOON_SECONDS),
    "store's keeper stopped": Fault(_signal(0, signal.SIGSTOP), ("", _lost(0)), SILENT_SECONDS),
    "Ctrl-C": Fault(_signal(0, signal.SIGINT), ("ended by SIGINT",) * 2, SOON_SECONDS, 130),
}
PHASES = ("meeting", "first collective", "loading", "training", "saving", "ending")


def expected(fault: str, phase: str) -> Fault:
    """What has to come of ``fault``; in some phases it is something else."""
    usual = FAULTS[fault]
    if fault == "rank leaves" and phase in (
        "meeting",
        "ending",
    ):  # before its program, and at its end
        return usual._replace(told=("", ""), seconds=usual.seconds + MEETING_SECONDS, exit_status=0)
    if phase == "meeting":
        silent = MEETING_SECONDS + END_SECONDS
        if fault in ("launcher killed", "host killed"):
            return usual._replace(exit_status=2)
        if fault == "link cut":  # the third host comes to the first, and both begin
            told = usual.told[0], r"couldn't meet at .*: of the store there, there was no answer"
            return usual._replace(told=told, seconds=silent, exit_status=-1)
        if fault == "store's keeper stopped":
            told = "", r"couldn't meet at .*: of the store there, there was no answer"
            return usual._replace(told=told, seconds=silent, exit_status=2)
        if fault == "rank killed":
            told = r"host 1 \(.*\) has lost its rank 1 before all hosts had met: .*SIGKILL"
            return usual._replace(told=(told, told), exit_status=-1)  # 2, as no run began, and 137
        if fault == "Ctrl-C":
            return usual._replace(told=("", "ended by SIGINT at host 0"))
        return usual._replace(seconds=usual.seconds + MEETING_SECONDS)  # seen once all have come
    if phase == "ending" and fault == "rank stopped":  # nobody waits for it: it may go on
        return usual._replace(told=("", ""), seconds=0, exit_status=0)
    return usual


@dataclass
class Result:
    """How a trial went.

    Attributes:
        seconds: By host, from the fault to its end.
        told: By host, the first line of what it told.
        problems: What should not have been.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    told: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def try_out(fault: str, phase: str) -> Result:
    """Have ``fault`` happen in ``phase``."""
    wanted = expected(fault, phase)
    with hosts_of_a_network(3) as hosts, tempfile.TemporaryDirectory() as folder:
        run = Run(hosts, Path(folder), phase)
        try:
            run.come_to_phase()
            wanted.happen(run)
            began = time.monotonic()
            run.go_on()
            if not wanted.seconds:
                time.sleep(4)
                os.kill(run.ranks(1)[1], signal.SIGCONT)
            return _watch(run, fault, wanted, began)
        finally:
            for host, launcher in enumerate(run.launchers):
                run.kill_host(host)
                launcher.kill()
                launcher.communicate()


def _watch(run: Run, fault: str, wanted: Fault, began: float) -> Result:
    result, waiting = Result(), dict(enumerate(run.launchers))
    is_stopped = fault == "store's keeper stopped"
    if is_stopped:
        del waiting[0]
    limit = wanted.seconds + READY_SECONDS
    while waiting and time.monotonic() < began + limit:
        for host, launcher in [*waiting.items()]:
            if launcher.poll() is not None:
                result.seconds[host] = time.monotonic() - began
                del waiting[host]
        if is_stopped and not waiting:
            is_stopped = False
            run.launchers[0].send_signal(signal.SIGCONT)
            waiting[0] = run.launchers[0]
        time.sleep(0.02)
    result.problems += [f"host {host} doesn't end" for host in waiting]
    for host, launcher in enumerate(run.launchers):
        if host not in waiting:
            _judge(result, wanted, host, launcher)
    return result


def _judge(result: Result, wanted: Fault, host: int, launcher: subprocess.Popen[str]) -> None:
    err = launcher.communicate()[1]
    words = re.findall(r"^lockstep: (.*)$", err, re.MULTILINE)
    result.told[host] = words[0] if words else ""
    pattern = wanted.told[host] if host < 2 else ""
    if pattern and not re.search(pattern, err):
        result.problems.append(f"host {host} tells {err[-2000:]!r}")
    if pattern and wanted.exit_status not in (-1, launcher.returncode):
        result.problems.append(f"host {host} ends with {launcher.returncode}: {err[-500:]!r}")
    if wanted.seconds and pattern and result.seconds[host] > wanted.seconds:
        result.problems.append(f"host {host} ends after {result.seconds[host]:.1f} s: {err!r}")
    if not wanted.exit_status and launcher.returncode:
        result.problems.append(f"host {host} ends with {launcher.returncode}: {err[-2000:]!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--phase", choices=PHASES, action="append")
    args = parser.parse_args()
    title = "seconds until hosts 0 and 1 have ended, the bound, and what host 0 (1) tells"
    table = Table("what happens", "phase", "seconds", "bound", "told", title=title)
    problems = []
    for fault in args.fault or FAULTS:
        for phase in args.phase or PHASES:
            result, wanted = try_out(fault, phase), expected(fault, phase)
            seconds = (f"{result.seconds[host]:.1f}" for host in range(2) if wanted.told[host])
            teller = 0 if wanted.told[0] else 1
            told = textwrap.shorten(result.told.get(teller, ""), 60).replace(
                f" ({socket.gethostname()})", ""
            )
            bound = f"{wanted.seconds:g}" if wanted.seconds else "goes on"
            table.add_row(fault, phase, ", ".join(seconds), bound, told)
            problems += [f"{fault}, {phase}: {what}" for what in result.problems]
            print(f"{fault}, {phase}: {result}", file=sys.stderr)
    Console(width=130).print(table)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
