"""Run the command in processes that cannot outlive their test, and see whether any tried to."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until

MARK = "LOCKSTEP_TEST"


def free_port() -> int:
    """A port that is free, and isn't one of those that the kernel gives out meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def up_to_thrice(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat ``test`` if it fails, twice at most.

    It is for tests in which ranks have some seconds to do something before they are killed: a
    machine may stand still for longer.
    """

    @functools.wraps(test)
    def repeated(bench: Bench, **options: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                return test(bench, **options)
            bench.close()
        return test(bench, **options)

    return repeated


def _marked(mark: str) -> list[psutil.Process]:
    """The processes, other than this one, that were started with ``mark`` in the environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARK) == mark
            ):
                found.append(process)
    return found


def lines_of(output: str, rank: int) -> list[str]:
    """What ``rank`` wrote, without its label."""
    label = f"[rank {rank}] "
    return [line[len(label) :] for line in output.splitlines() if line.startswith(label)]


class Bench:
    """Where scripts are written and run."""

    def __init__(self, directory: Path, mark: str) -> None:
        self.directory = directory
        self._mark = mark
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *arguments: object, **options: object) -> subprocess.Popen[str]:
        """Start ``lockstep arguments...``; its output is kept in pipes."""
        return self.start_python("-m", "lockstep", *arguments, **options)

    def start_python(self, *arguments: object, **options: object) -> subprocess.Popen[str]:
        """Start ``python arguments...``, likewise."""
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            **{  # type: ignore[call-overload]
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "cwd": self.directory,
                **options,
            },
        )
        self._started.append(process)
        return process

    def run(
        self, *arguments: object, seconds: float = 100.0, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run ``lockstep arguments...`` to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """What is running of all that was started here."""
        return _marked(self._mark)

    def close(self) -> list[str]:
        """End what is left; tell what it was."""
        until(lambda: not self.processes(), 30.0)
        left = self.processes()
        told = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                told.append(f"{process.pid} {process.cmdline()}")
                process.send_signal(signal.SIGKILL)
        for started in self._started:
            started.wait(60)
            for pipe in (started.stdout, started.stderr):
                if pipe is not None:
                    pipe.close()
        return told
