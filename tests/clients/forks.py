"""Ranks as forks of one process that has imported the clients already.

Importing them takes longer than what a test does with them, and what they keep in globals would
be found by the next test: so they are imported once, and each task has processes of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import collect, stacks_of

TIMEOUT_SECONDS = 600


class Forks:
    """Runs functions on new ranks, whose environment is that of torchrun's."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.clients.preloaded"])
        # Now, lest the first test be the one that has left them.
        resource_tracker.ensure_running()
        forkserver.ensure_running()
        with _store():  # whose library keeps a pipe
            pass

    def run(self, body: Callable[..., Any], size: int, *args: object, **kwargs: Any) -> list[Any]:
        """Call ``body(*args)`` on ``size`` ranks; return what they return, in rank order.

        Args:
            body: A function of a module.
            size: How many ranks. One is a process that nobody launched.
            args: What pickle takes.
            kwargs: The same.

        Raises:
            RankFailed: If a rank raised, died, or didn't end in time.
        """
        with _store() as port, tempfile.TemporaryDirectory() as folder:
            lines, processes = [], []
            for rank in range(size):
                ours, theirs = self._context.Pipe(duplex=False)
                environment = _environment(rank, size, port) if size > 1 else {}
                task = (body.__module__, body.__qualname__, args, kwargs)
                process = self._context.Process(
                    target=_serve, args=(theirs, task, environment, stacks_of(folder, rank))
                )
                process.start()
                theirs.close()
                lines.append(ours)
                processes.append(process)
            try:
                return collect(lines, processes, folder, TIMEOUT_SECONDS)
            finally:
                for line in lines:
                    line.close()
                for process in processes:
                    process.join(5)
                    process.kill()
                    process.join()
                    process.close()

    def close(self) -> None:
        """End the process that forks."""
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _store() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        del store


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _serve(line: Connection, task: Any, environment: dict[str, str], stacks: str) -> None:
    module, name, args, kwargs = task
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        # OpenMP's threads are this process's own, if their number is set before any is needed.
        torch.set_num_threads(1)
        os.environ.update(environment)
        torch.manual_seed(0)
        try:
            body = getattr(importlib.import_module(module), name)
            answer = (True, body(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        line.send_bytes(pickle.dumps(answer))
