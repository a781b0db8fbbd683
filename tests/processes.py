"""Ranks as processes of their own, which take one task after another.

A task is a function of a test module. Every rank's end is judged: one that raises, dies or doesn't
come back fails the test, with the traceback of the first that failed, or the stacks of all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import register_backends
from tests.interpreters import forked

TIMEOUT_SECONDS = 240
_STACKS_SECONDS = 1.0


class RankFailed(Exception):
    """A rank's process raised, died or didn't come back."""


class Processes:
    """Processes that run functions with ``torch.distributed`` initialised.

    Args:
        most: How many there are at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        for index in range(self._most):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, stacks_of(self._folder.name, index)), daemon=True
            )
            with forked():
                process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def run(self, body: Callable[..., Any], backend: str, size: int, *args: object) -> list[Any]:
        """Call ``body(*args)`` on ``size`` ranks; return what they return, in rank order.

        Args:
            body: A function of a module, which is imported there.
            backend: For ``init_process_group``; ``""`` leaves that to ``body``.
            size: How many ranks.
            args: What pickle takes.

        Raises:
            RankFailed: If a rank raised, died, or didn't end in time.
        """
        self._count += 1
        path = os.path.join(self._folder.name, f"store-{self._count}")
        lines = self._lines[:size]
        for rank, line in enumerate(lines):
            task = (body.__module__, body.__qualname__, args)
            line.send((task, backend, path, rank, size))
        try:
            return collect(lines, self._processes, self._folder.name, TIMEOUT_SECONDS)
        except RankFailed:
            # What a failure leaves behind is nothing for the next task to meet.
            self._stop()
            self._start()
            raise

    def _stop(self, seconds: float = 0.0) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()

    def close(self) -> None:
        """End all processes."""
        self._stop(10)
        self._folder.cleanup()


def collect(
    lines: Sequence[Connection], processes: Sequence[Any], folder: str, seconds: float
) -> list[Any]:
    """Return what all ranks answer on their lines, in rank order.

    Args:
        lines: The ranks' ends of pipes; each gives whether the rank is well, and its result.
        processes: The ranks.
        folder: Where each writes its stacks at SIGUSR1.
        seconds: How long to wait for all.

    Raises:
        RankFailed: If a rank raised, died, or didn't end in time.
    """
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < len(lines):
        waiting = {line: rank for rank, line in enumerate(lines) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(_stacks(sorted(waiting.values()), processes, folder, seconds))
        for line in ready:
            rank = waiting[line]  # type: ignore[index]
            try:
                is_well, results[rank] = pickle.loads(line.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(5)
                is_well, results[rank] = False, f"exit code {processes[rank].exitcode}"
            if not is_well:
                raise RankFailed(f"on rank {rank} of {len(lines)}:\n{results[rank]}")
    return [results[rank] for rank in range(len(lines))]


def stacks_of(folder: str, rank: int) -> str:
    """The file for the stacks of a rank."""
    return os.path.join(folder, f"stacks-{rank}")


def _stacks(ranks: list[int], processes: Sequence[Any], folder: str, seconds: float) -> str:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    time.sleep(_STACKS_SECONDS)
    text = f"ranks {ranks} did not end within {seconds:g} s"
    for rank in ranks:
        with contextlib.suppress(FileNotFoundError), open(stacks_of(folder, rank)) as stacks:
            text += f"\n--- rank {rank}\n{stacks.read()}"
    return text


@contextlib.contextmanager
def processes(most: int) -> Iterator[Processes]:
    """Processes for the time of a ``with``."""
    started = Processes(most)
    try:
        yield started
    finally:
        started.close()


def _serve(line: Connection, stacks: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    register_backends()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                request = line.recv()
            except EOFError:
                return
            # Not send(), which would hand over descriptors of the tensors.
            line.send_bytes(pickle.dumps(_carry_out(*request)))


def _carry_out(
    task: tuple[str, str, tuple[Any, ...]], backend: str, path: str, rank: int, size: int
) -> tuple[bool, Any]:
    module, name, args = task
    torch.manual_seed(0)
    try:
        body = getattr(importlib.import_module(module), name)
        if not backend:
            return True, body(path, rank, size, *args)
        dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
        try:
            return True, body(*args)
        finally:
            dist.destroy_process_group()
    except BaseException:
        return False, traceback.format_exc()
    finally:
        # A group that a failure left behind would be found there by the next task.
        if dist.is_initialized():
            dist.destroy_process_group()
