"""Starts a program's ranks again and again, with memory for snapshots that outlives them.

Ranks are forks of a process that has imported torch, and what a first optimizer imports, already.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from contextlib import ExitStack
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.launcher import START_AGAIN, SnapshotMemory
from lockstep.world import Placement, Starter, rank_environment, restart_environment
from tests.resume import program

_SECONDS = 120
_context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the process whose forks ranks are, lest the first test be the one that has left it."""
    _context.set_forkserver_preload(["tests.resume.program", "torch._dynamo"])
    resource_tracker.ensure_running()
    forkserver.ensure_running()


class Ended(NamedTuple):
    """How the ranks of an attempt ended."""

    codes: list[int]
    errors: list[str]


class Attempts:
    """The memory of a run on ``size`` ranks, and its attempts; to be entered."""

    def __init__(self, folder: Path, size: int, *, has_memory: bool = True) -> None:
        self.folder, self.size, self.count = folder, size, 0
        self.descriptors = [SnapshotMemory.create(rank) for rank in range(size * has_memory)]

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self.descriptors:
            for descriptor in pair:
                os.close(descriptor)

    def run(self, fault: str = "", *, size: int | None = None, **options: Any) -> Ended:
        """Start the ranks, and wait for them; when one ends badly, the others are killed."""
        size = size or self.size
        with ExitStack() as stack:
            store = stack.enter_context(tempfile.NamedTemporaryFile()).name
            outputs = [stack.enter_context(tempfile.NamedTemporaryFile()) for _ in range(size)]
            ranks = [
                _context.Process(
                    target=_run,
                    args=(
                        self._environment(rank, size, store) | {"FAULT": fault},
                        [f"/proc/{os.getpid()}/fd/{n}" for n in self._memory_of(rank)],
                        outputs[rank].name,
                        (str(self.folder), options),
                    ),
                )
                for rank in range(size)
            ]
            for rank in ranks:
                rank.start()
            codes = _codes(ranks)
            errors = [Path(output.name).read_text() for output in outputs]
        self.count += 1
        return Ended(codes, errors)

    def _memory_of(self, rank: int) -> tuple[int, ...]:
        return self.descriptors[rank] if rank < len(self.descriptors) else ()

    def _environment(self, rank: int, size: int, store: str) -> dict[str, str]:
        place = Placement(
            Starter.LOCKSTEP,
            rank,
            size,
            rank,
            size,
            master=("127.0.0.1", 1),
            job_id=f"{self.folder.name}-{self.count}-{id(self)}",
            store_path=store,
        )
        return rank_environment(place, num_threads=1) | restart_environment(self.count, ())

    def results(self, size: int | None = None) -> list[dict[str, Any]]:
        """What the ranks have written at the program's end."""
        files = [self.folder / f"rank-{rank}.json" for rank in range(size or self.size)]
        return [json.loads(file.read_text()) for file in files]


def _codes(ranks: list[ForkServerProcess]) -> list[int]:
    """Wait for the ranks, and return their exit codes; when one fails, the others are killed."""
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        ended = connection.wait([*waiting], _SECONDS)
        for sentinel in ended:
            waiting.pop(sentinel).join()  # type: ignore[call-overload]
        if not ended or any(rank.exitcode not in (None, 0, START_AGAIN) for rank in ranks):
            for rank in waiting.values():
                rank.kill()
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.close()
    return [code for code in codes if code is not None]


def _run(
    environment: dict[str, str], memory: list[str], output: str, arguments: tuple[str, Any]
) -> None:
    """Be a rank, whose own processes are its forks."""
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    descriptors = [os.open(path, os.O_RDWR) for path in memory]
    os.environ.update(environment)
    os.environ.update(restart_environment(int(environment["LOCKSTEP_RESTARTS"]), descriptors))
    os.dup2(os.open(output, os.O_WRONLY), 2)
    sys.argv = ["program.py", *map(str, arguments)]
    try:
        program.main(Path(arguments[0]), arguments[1])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def undisturbed(folder: Path, size: int, **options: Any) -> list[dict[str, Any]]:
    """Results of a run that nothing ends, without memory for snapshots."""
    folder.mkdir(exist_ok=True)
    with Attempts(folder, size, has_memory=False) as attempts:
        ended = attempts.run(**options)
        assert ended.codes == [0] * size, ended.errors
        return attempts.results()
