"""What ranks on one host see of each other's deaths, stops and mistakes, counted.

    python -m benchmarks.faults [--trials 200] [--seed 0] [--only kill]

Each trial starts two to four ranks as processes, joined by the process group "shm", which make
random collectives and check every value. Then something happens to one of them, at a random
time, and what the others get, how soon, and what is left, is compared with what it should be.
Exits with 1 if any trial went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import re
import select
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.collectives_at_random import random_step
from lockstep.comm.backends import register_backends
from lockstep.errors import CollectiveFailed

# Within this many seconds a survivor must have been told.
TOLD_SECONDS = 1.0
# The group's timeout where a rank is stopped for longer than that, and where none is.
SHORT_TIMEOUT_SECONDS = 1.0
LONG_TIMEOUT_SECONDS = 20.0
# A rank that hasn't ended by then hangs; one that has been told, or has left, ends much sooner.
HANG_SECONDS = 15.0
END_SECONDS = 2.0


class Scenario(NamedTuple):
    """What happens to a rank, and how the others must end.

    Attributes:
        expected: The error that survivors must get, or "" if all must end well.
        timeout_seconds: The group's timeout, without patience.
        steps: How many steps the ranks take; None for as many as they can.
        signals: What the victim gets, each some seconds after the one before.
        last_signal: What it gets when all others have said how they ended.
    """

    expected: str
    timeout_seconds: float = LONG_TIMEOUT_SECONDS
    steps: int | None = None
    signals: tuple[tuple[float, signal.Signals], ...] = ()
    last_signal: signal.Signals | None = None


SCENARIOS = {
    "kill": Scenario("PeerLost", signals=((0.0, signal.SIGKILL),)),
    "stop": Scenario(
        "CollectiveTimeout",
        SHORT_TIMEOUT_SECONDS,
        signals=((0.0, signal.SIGSTOP),),
        last_signal=signal.SIGCONT,
    ),
    "pause": Scenario(
        "", steps=40, signals=((0.0, signal.SIGSTOP), (0.3, signal.SIGCONT))
    ),
    "mismatch": Scenario("CollectiveMismatch", steps=5),
    "leave": Scenario("PeerLost", steps=5),
    "kill all": Scenario("PeerLost", signals=((0.0, signal.SIGKILL),)),
}  # fmt: skip


@dataclass
class Outcome:
    """How a trial went.

    Attributes:
        latencies: Seconds from what happened to each survivor's error.
        problems: What should not have been.
    """

    latencies: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


# On the ranks.


def mismatched_call(rank: int, is_odd: bool, rng: random.Random) -> str:
    """Call something that one rank calls differently; return what both sides called."""
    kind = rng.choice(["operation", "shape", "dtype", "reduce op", "root", "one fewer"])
    late = rng.randrange(dist.get_world_size())
    delay = rng.choice([0.0, 0.0, 0.3, 1.5])
    if rank == late:
        time.sleep(delay)
    tensor = torch.ones(rng.choice([4, 5000, 600_000]))
    match kind:
        case "operation" | "one fewer" if is_odd:
            dist.barrier()
        case "shape" if is_odd:
            dist.all_reduce(tensor[:-1])
        case "dtype" if is_odd:
            dist.all_reduce(tensor.double())
        case "reduce op" if is_odd:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        case "root":
            dist.broadcast(tensor, src=int(is_odd))
        case _:
            dist.all_reduce(tensor)
    return kind


def take_part(rank: int, seed: int, name: str, victim: int) -> None:
    """Make random collectives until something goes wrong, or the scenario's steps are through."""
    scenario, rng = SCENARIOS[name], random.Random(seed)
    step = 0
    while scenario.steps is None or step < scenario.steps:
        random_step(step, rng)
        step += 1
    if name == "mismatch":
        mismatched_call(rank, rank == victim, rng)
    if name == "leave" and rank != victim:
        random_step(step, rng)
        dist.all_reduce(torch.ones(3))


def be_rank(trial: Trial, rank: int, folder: str, out: int) -> None:
    """One rank's whole life, of which it reports to ``out``."""
    name, seed = trial.name, trial.seed

    def report(**what: object) -> None:
        os.write(out, json.dumps({"rank": rank, **what}).encode() + b"\n")

    torch.set_num_threads(1)
    before = resources()
    dist.init_process_group(
        "shm",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=trial.size,
        timeout=timedelta(seconds=trial.timeout_seconds),
    )
    report(event="ready")
    try:
        take_part(rank, seed, name, trial.victim)
    except CollectiveFailed as error:
        report(
            event="error",
            kind=type(error).__name__,
            ranks=list(getattr(error, "ranks", ())),
            operation=getattr(error, "operation", ""),
            text=str(error),
            at=time.monotonic(),
        )
    else:
        report(event="well", at=time.monotonic())
    # Who was told first may be gone before the others are told; it must not be blamed for it.
    ending = random.Random(seed + rank).choice(["vanish", "destroy", "linger"])
    if ending == "vanish" and name not in ("mismatch", "leave", "pause"):
        return
    if ending == "linger":
        time.sleep(0.2)
    dist.destroy_process_group()
    # A thread that nobody waits for may be just ending.
    deadline = time.monotonic() + HANG_SECONDS
    while (now := resources()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()  # an error's traceback has the tensors that it was raised over
    report(event="end", before=before, after=now)


def resources() -> dict[str, int]:
    """How many descriptors and threads this process has."""
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


# In the process that starts them.


class Trial:
    """Ranks, started, and what they report.

    Args:
        name: Which of the scenarios.
        seed: What everything random is drawn from.
        patience: By how much the others may take longer, on a machine that has more to do.
    """

    def __init__(self, name: str, seed: int, patience: float = 1.0) -> None:
        self.name = name
        self.scenario = SCENARIOS[name]
        self.seed = seed
        self.patience = patience
        self.timeout_seconds = self.scenario.timeout_seconds * patience
        self.rng = random.Random(seed)
        self.size = self.rng.randint(2, 4)
        self.victim = self.rng.randrange(self.size)
        self.reports: list[dict] = []

    def run(self) -> Outcome:
        outcome = Outcome()
        shared = shared_memory()
        with tempfile.TemporaryDirectory() as folder:
            pids, inbox = self._start(folder)
            try:
                self._until(inbox, lambda: self._count("ready") == self.size)
                happened = self._make_happen(pids)
                if self.scenario.last_signal is not None:
                    self._until(inbox, lambda: self._count("error") == self.size - 1)
                    os.kill(pids[self.victim], self.scenario.last_signal)
                self._until(inbox, lambda: False)
            finally:
                os.close(inbox)
                hanging = self._clean_up(pids)
            left = set(os.listdir(folder)) - {"store"}
        left |= {name for name in shared_memory() - shared if "lockstep" in name}
        # Twice, as other groups of this machine come and go while this looks.
        if nobodys := sockets_of_nobody():
            time.sleep(0.2)
            left |= nobodys & sockets_of_nobody()
        if left:
            outcome.problems.append(f"left behind: {sorted(left)}")
        outcome.problems += [f"rank {rank} hangs" for rank in hanging]
        self._judge(outcome, happened)
        return outcome

    def _start(self, folder: str) -> tuple[list[int], int]:
        inbox, out = os.pipe()
        pids = []
        for rank in range(self.size):
            pid = os.fork()
            if pid == 0:
                os.close(inbox)
                code = 1
                try:
                    be_rank(self, rank, folder, out)
                    code = 0
                except BaseException:
                    what = {"rank": rank, "event": "failed", "text": traceback.format_exc()}
                    os.write(out, json.dumps(what).encode() + b"\n")
                finally:
                    os._exit(code)
            pids.append(pid)
        os.close(out)
        return pids, inbox

    def _until(self, inbox: int, is_enough: Callable[[], bool]) -> None:
        """Read reports until that is so, all ranks have ended, or they hang."""
        deadline, buffer = time.monotonic() + HANG_SECONDS * self.patience, b""
        while not is_enough() and (left := deadline - time.monotonic()) > 0:
            if not select.select([inbox], [], [], left)[0]:
                return
            if not (chunk := os.read(inbox, 65536)):
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            self.reports += map(json.loads, lines)

    def _make_happen(self, pids: list[int]) -> float:
        happened = time.monotonic()
        if not self.scenario.signals:
            return happened
        time.sleep(self.rng.choice([0.01, 0.1, 0.3]) * self.rng.random())
        victims = pids if self.name == "kill all" else [pids[self.victim]]
        happened = time.monotonic()
        for delay, number in self.scenario.signals:
            time.sleep(delay)
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return happened

    def _clean_up(self, pids: list[int]) -> list[int]:
        """Wait for the ranks, and end those that hang; return which these are."""
        hanging, deadline = [], time.monotonic() + END_SECONDS * self.patience
        for rank, pid in enumerate(pids):
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    hanging.append(rank)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(0.005)
        return hanging

    def _count(self, event: str) -> int:
        return sum(report["event"] == event for report in self.reports)

    def _judge(self, outcome: Outcome, happened: float) -> None:
        if self._count("ready") < self.size:
            outcome.problems.append("not all ranks joined")
        for report in self.reports:
            match report["event"]:
                case "failed":
                    outcome.problems.append(f"rank {report['rank']}: {report['text']}")
                case "end" if report["before"] != report["after"]:
                    outcome.problems.append(
                        f"rank {report['rank']} had {report['before']}, has {report['after']}"
                    )
                case "error":
                    self._judge_error(outcome, report, happened)
        ended = self._count("error") + self._count("well") + self._count("failed")
        dead = {"kill": 1, "kill all": self.size}.get(self.name, 0)
        if ended < self.size - dead and not outcome.problems:
            outcome.problems.append("not all survivors said how they ended")
        everyone_well = {"pause": self.size, "leave": 1}.get(self.name, 0)
        if self._count("well") != everyone_well:
            outcome.problems.append(f"{self._count('well')} ranks ended as if nothing had happened")

    def _judge_error(self, outcome: Outcome, report: dict, happened: float) -> None:
        is_victim = report["rank"] == self.victim and self.name != "mismatch"
        seconds = report["at"] - happened
        if not is_victim and self.name in ("kill", "stop"):
            outcome.latencies.append(seconds)
        allowed = TOLD_SECONDS * self.patience
        wrong = report["kind"] != self.scenario.expected
        if self.name == "stop":
            allowed += self.timeout_seconds
            # The one that was stopped finds the others waiting no more, or gone.
            wrong = wrong and not (is_victim and report["kind"] == "PeerLost")
        if self.name in ("kill", "leave"):
            wrong = wrong or report["ranks"] != [self.victim]
        if self.name == "stop" and not is_victim:
            # Who waits for the victim elsewhere hasn't come either.
            wrong = wrong or self.victim not in report["ranks"]
        if self.name == "mismatch":
            # Each is told its own call and another one, in full.
            sides = re.findall(r"[Rr]ank \d called \w+\(", report["text"])
            wrong = wrong or len(sides) < 2
        is_late = seconds > allowed and not is_victim and self.name in ("kill", "stop")
        if wrong or is_late or not report["operation"]:
            outcome.problems.append(f"rank {self.victim} was it, after {seconds:.2f} s: {report}")


def shared_memory() -> set[str]:
    """The files in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def sockets_of_nobody() -> set[str]:
    """The names of lockstep's sockets that are there although no other process has them."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {f"socket:[{words[6]}]": words[7] for words in lines if len(words) > 7}
    names = {inode: name for inode, name in names.items() if name.startswith("@lockstep-")}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if names else ():
        if descriptor.parts[2] != str(os.getpid()):
            with contextlib.suppress(OSError):
                names.pop(os.readlink(descriptor), None)
    return set(names.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200, help="of each scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times the seconds that all may take"
    )
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    args = parser.parse_args()
    register_backends()
    table = Table(title=f"{args.trials} trials each, 2 to 4 ranks, group 'shm'")
    for column in ("what happens", "trials", "wrong", "errors", "median ms", "worst ms"):
        table.add_column(column, justify="left" if column == "what happens" else "right")
    problems = []
    for name in args.only or SCENARIOS:
        wrong, latencies, errors = 0, [], 0
        for number in range(args.trials):
            trial = Trial(name, args.seed + number, args.patience)
            outcome = trial.run()
            wrong += bool(outcome.problems)
            errors += trial._count("error")
            latencies += outcome.latencies
            problems += [f"{name}, seed {trial.seed}: {what}" for what in outcome.problems]
        times = [statistics.median(latencies), max(latencies)] if latencies else []
        figures = [f"{1000 * seconds:.1f}" for seconds in times] or ["", ""]
        table.add_row(name, str(args.trials), str(wrong), str(errors), *figures)
    Console(width=100).print(table)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
