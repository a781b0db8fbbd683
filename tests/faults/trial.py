"""A run in real processes, its faults, and all that can be seen of it when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.faults.injection import variables_of
from tests.faults.plan import Fault, Run

ROOT = Path(__file__).parents[2]
MARK = "LOCKSTEP_FAULTS"
_RESTARTS, _GRACE_SECONDS = 3, 5
_SETTLE_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_RESTART = re.compile(
    r"restart (\d+): rank (\d+) of \d+ failed in step (\d+) \((.*)\); "
    r"(?:all go on from step (\d+)|the program begins anew)"
)


class Restart(NamedTuple):
    """What the launcher says of a restart."""

    rank: int
    step: int
    reason: str
    onwards: int | None  # the step that all go on from


class Seen(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    restarts: list[Restart]
    ended: float  # by time.monotonic()
    hung: bool


class Trial:
    """A folder for a run, in which its commands are started; to be entered."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.run, self._options = run, options
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-faults-")
        self.folder = Path(self._folder.name)
        (self.folder / "tmp").mkdir()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._folder.cleanup()

    def start(self, variables: Mapping[str, str], restarts: int = _RESTARTS) -> Any:
        """Start the command."""
        options = json.dumps({"run": self.run, **self._options})
        words = [
            "run",
            "-n",
            self.run.size,
            "--restarts",
            restarts,
            "--grace",
            _GRACE_SECONDS,
            "--full-traceback",
        ]
        words += ["-m", "tests.faults.program", self.folder, options]
        temporary = str(self.folder / "tmp")
        own = {MARK: self._mark, "TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
        with open(self.folder / "output", "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "lockstep", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, **own, **variables},
            )

    def end_of(self, process: subprocess.Popen[bytes], seconds: float) -> Seen:
        """Wait until the command has ended; end it by force if that takes longer.

        The seconds are those of a machine with a core for each process that computes.
        """
        left, told = seconds, ""
        while process.poll() is None and left > 0:
            began = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
            left -= (time.monotonic() - began) / crowding()
        hung = process.poll() is None
        if hung:
            told = f"\n--- it was ended by force; {self._last_step()}"
            for each in self._processes():
                with contextlib.suppress(psutil.Error):
                    each.send_signal(signal.SIGKILL)
            process.wait()
        ended = time.monotonic()
        output = (self.folder / "output").read_text(errors="replace") + told
        found = [
            Restart(int(rank), int(step), reason, int(onwards) if onwards else None)
            for _, rank, step, reason, onwards in _RESTART.findall(output)
        ]
        return Seen(process.returncode, output, found, ended, hung)

    def _last_step(self) -> str:
        if not (ends := self.steps()):
            return "no step had ended"
        last = max(ends, key=lambda each: each.seconds)
        ago = time.monotonic() - last.seconds
        return f"the last step to end was {last.step} on rank {last.rank}, {ago:.1f} s before"

    def command(self, fault: Fault | None, seconds: float) -> Seen:
        """Start the command, and wait for its end."""
        variables = {} if fault is None else variables_of(fault)
        return self.end_of(self.start(variables), seconds)

    def results(self) -> list[dict[str, Any]]:
        """What the ranks have written at the program's end; fewer if they haven't come there."""
        files = [self.folder / f"rank-{rank}.json" for rank in range(self.run.size)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def fault_seconds(self) -> float | None:
        """When the fault happened, by time.monotonic()."""
        path = self.folder / "fault"
        return float(path.read_text() or "nan") if path.exists() else None

    def steps(self) -> list[StepEnd]:
        """The ends of steps, as ranks have noted them."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = (line.split() for line in lines)
        return [StepEnd(*map(int, row[:3]), float(row[3])) for row in rows]

    def left_behind(self, before: set[str]) -> list[str]:
        """What is there of the run that isn't its checkpoints: processes, shared memory, files."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (found := self._left(before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self, before: set[str]) -> list[str]:
        found = [f"process {each.pid}" for each in self._processes()]
        found += [f"/dev/shm/{name}" for name in shared_memory() - before if _is_nobodys(name)]
        # Where processes are killed, Python's multiprocessing and torch's loader leave theirs.
        temporary = (path.name for path in (self.folder / "tmp").iterdir())
        found += [f"TMPDIR/{name}" for name in temporary if name.startswith("lockstep")]
        run = self.folder / "run"
        for path in [*run.iterdir()] if run.is_dir() else []:
            if not re.fullmatch(r"\d+|best|\.lock", path.name):
                found.append(f"path/{path.name}")
        return found

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get(MARK) == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


class StepEnd(NamedTuple):
    """When a step ended on a rank."""

    restarts: int
    rank: int
    step: int
    seconds: float  # by time.monotonic()


def crowding() -> float:
    """How many processes compute on each core; 1 if it is less than one."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def shared_memory() -> set[str]:
    """The names in /dev/shm, without semaphores: those of other programs' processes come and go."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.mp-")}


def _is_nobodys(name: str) -> bool:
    """Whether no process maps or has open that shared memory: those of other runs do."""
    path = f"/dev/shm/{name}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(path == file.path for file in process.open_files()):
                return False
            if any(path in map.path for map in process.memory_maps()):
                return False
    return os.path.exists(path)


_expected: dict[tuple[Run, str], Any] = {}
_computing = threading.Lock()


def undisturbed(run: Run, seconds: float, **options: Any) -> Any:
    """The digests of a run to which nothing happens; each is computed once.

    Neither workers nor checkpoints make a difference.

    Raises:
        RuntimeError: If it doesn't end well.
    """
    run = run._replace(num_workers=0, has_path=False)
    key = run, json.dumps(options)
    with _computing:
        if key not in _expected:
            with Trial(run, **options) as trial:
                seen = trial.command(None, seconds)
                if seen.code or seen.restarts:
                    raise RuntimeError(f"{run} without a fault failed:\n{seen.output}")
                _expected[key] = [result["bits"] for result in trial.results()]
    return _expected[key]
