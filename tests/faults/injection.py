"""Faults in a rank: what the environment variable FAULT says happens once, at its place."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.launcher import SnapshotMemory
from lockstep.world import restarts_of
from tests.faults.plan import KINDS, SLOW_SECONDS, Fault

_MEMORY_LEFT = 64 << 20
_FILE_BYTES = 1000
_FOR_EVER_MICROSECONDS = 1_000_000_000


def variables_of(fault: Fault) -> dict[str, str]:
    """The environment variables that tell ranks of a fault."""
    return {"FAULT": ":".join(map(str, fault))}


class Injection:
    """The fault of this run, if it is this rank's.

    It happens once: a file in ``folder`` says that, and when.

    Attributes:
        step: The number of the step that runs, or is being read.
        poison: What a layer or a sample is multiplied by.
    """

    def __init__(self, folder: Path) -> None:
        self.step, self.poison = 0, 1.0
        self._folder = folder
        self._fault: Fault | None = None
        if told := os.environ.get("FAULT"):
            kind, rank, step, phase = told.split(":")
            if rank == os.environ["RANK"]:
                self._fault = Fault(kind, int(rank), int(step), phase)

    def at(self, phase: str, *, of_code: bool | None = None) -> None:
        """Let the fault happen, if it is that of this phase of this step.

        Args:
            phase: Where the program is.
            of_code: Whether that is its own code; None if nothing else stands for this phase.
        """
        fault = self._fault
        if fault is None or fault.phase != phase or self.step < fault.step:
            return
        if phase != "save" and self.step > fault.step:  # which a thread does a little later
            return
        if of_code not in (None, KINDS[fault.kind].is_of_code):
            return
        try:
            with open(self._folder / "fault", "x") as file:
                file.write(str(time.monotonic()))
        except FileExistsError:
            return
        if fault.kind in ("nan", "inf"):
            self.poison = float(fault.kind)
        elif fault.kind in _ACTIONS:
            _ACTIONS[fault.kind]()
        else:
            os.kill(os.getpid(), getattr(signal, fault.kind))

    def make_room(self) -> None:
        """Let there be room on the disk again."""
        if self._fault is not None and self._fault.kind == "full disk":
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def _raise() -> None:
    raise RuntimeError("planned")


def _use_up_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_LEFT
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    taken = []
    while True:
        taken.append(torch.ones(1 << 20))


def _read_null() -> None:
    ctypes.string_at(0)


def _loop() -> None:
    while True:
        pass


def _wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).usleep(_FOR_EVER_MICROSECONDS)


def _fill_the_disk() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, hard))


def _kill_a_worker() -> None:
    worker = multiprocessing.active_children()[0]
    os.kill(worker.pid or 0, signal.SIGKILL)


def _corrupt_a_snapshot() -> None:
    memory = SnapshotMemory.inherited(restarts_of(os.environ)[1])
    assert memory is not None
    headers = memory.headers()
    slot = max(headers, key=lambda each: headers[each].step)
    at = random.Random(os.environ["FAULT"]).randrange(headers[slot].num_bytes)
    memory.view(slot)[at] ^= 1 << at % 8
    os.kill(os.getpid(), signal.SIGKILL)


_ACTIONS: dict[str, Callable[[], object]] = {
    "exception": _raise,
    "memory": _use_up_memory,
    "SIGSEGV": _read_null,
    "exit 0": lambda: os._exit(0),
    "loop": _loop,
    "lock": _wait_for_a_lock,
    "interpreter": _hold_the_interpreter,
    "slow": lambda: time.sleep(SLOW_SECONDS),
    "SIGTERM to group": lambda: os.killpg(0, signal.SIGTERM),
    "SIGTERM to launcher": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "launcher killed": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "worker killed": _kill_a_worker,
    "full disk": _fill_the_disk,
    "corrupted": _corrupt_a_snapshot,
}
