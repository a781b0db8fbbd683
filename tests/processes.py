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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.backends import register_backends
from tests.interpreters import forked

TIMEOUT_SECONDS = 60
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
                target=_serve, args=(theirs, self._stacks(index)), daemon=True
            )
            with forked():
                process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def _stacks(self, index: int) -> str:
        return os.path.join(self._folder.name, f"stacks-{index}")

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
        answers: dict[int, tuple[bool, Any]] = {}
        first: RankFailed | None = None
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(answers) < size:
            waiting = {line: rank for rank, line in enumerate(lines) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                first = first or RankFailed(self._dump(sorted(waiting.values())))
                break
            for line in ready:
                rank = waiting[line]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(line.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(5)
                    answers[rank] = False, f"exit code {self._processes[rank].exitcode}"
                is_well, result = answers[rank]
                if not is_well and first is None:
                    first = RankFailed(f"on rank {rank} of {size}, over {backend}:\n{result}")
        if first is not None:
            # What a failure leaves behind is nothing for the next task to meet.
            self._stop()
            self._start()
            raise first
        return [answers[rank][1] for rank in range(size)]

    def _dump(self, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
        text = f"ranks {ranks} did not end within {TIMEOUT_SECONDS} s"
        for rank in ranks:
            with open(self._stacks(rank)) as stacks:
                text += f"\n--- rank {rank}\n{stacks.read()}"
        return text

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
