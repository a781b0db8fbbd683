"""Each step of a save fails once, on each rank: all ranks raise the reason, and nothing is lost."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.checkpoint import place as place_module
from lockstep.errors import CheckpointError
from lockstep.folders import Folder
from tests.ranks import run_ranks
from tests.waiting import until

# What of a save touches the disk, but for names that are looked for.
STEPS = [(Folder, name) for name in ("make", "new_file", "open_lock", "rename", "sync", "names")]
STEPS += [(Folder, "read"), (place_module, "flush")]
REASON = os.strerror(errno.EDQUOT)


class Faults:
    """Lets one step of a save fail on one rank, by its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ranks: dict[threading.Thread, int] = {}
        self._failing, self._counts = (0, -1), [0, 0]
        self.failed = ""
        for holder, name in STEPS:
            monkeypatch.setattr(holder, name, self._with_fault(getattr(holder, name), name))
        start = threading.Thread.start

        def start_known(thread: threading.Thread) -> None:  # that saves in the background
            if (rank := self._ranks.get(threading.current_thread())) is not None:
                self._ranks[thread] = rank
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_known)

    def set(self, rank: int, number: int) -> None:
        """Let that step of that rank fail; all ranks have to begin anew."""
        self._failing, self._counts, self.failed = (rank, number), [0, 0], ""

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """What this thread does, and threads that it starts do, is that rank's."""
        self._ranks[threading.current_thread()] = rank
        try:
            yield
        finally:
            del self._ranks[threading.current_thread()]

    def _with_fault(self, act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def tried(*args: Any) -> Any:
            rank = self._ranks.get(threading.current_thread())
            if rank is not None:
                number, self._counts[rank] = self._counts[rank], self._counts[rank] + 1
                if self._failing == (rank, number):
                    self.failed = name
                    raise OSError(errno.EDQUOT, REASON)
            return act(*args)

        return tried


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("of_rank", [0, 1])
def test_each_step_of_a_save_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool, of_rank: int
) -> None:
    faults, tried = Faults(monkeypatch), set[str]()
    value = torch.ones(50_000)  # so many that each rank writes some

    def body(rank: int, group: dist.ProcessGroup) -> None:
        for number in itertools.count():
            path = tmp_path / str(number)
            save = partial(lockstep.save, path, process_group=group, keep=1)
            load = partial(lockstep.load, path, process_group=group, value=None)
            save(value=value)
            if rank == 0:
                faults.set(of_rank, number)
            group.barrier().wait()
            told, began = "", time.monotonic()
            try:
                with faults.of(rank):
                    save(async_=is_async, value=value * 2)
                load()
            except CheckpointError as error:
                told = str(error)
                assert REASON in told
            assert time.monotonic() - began < 20
            # Whole in any case; that older ones can't be removed is no reason to fail.
            assert torch.equal(load()["value"], value if told else value * 2)
            if told and rank == 0:
                assert not list(path.glob(".tmp-*"))
            if not faults.failed:
                assert number > (10 if of_rank == 0 else 3)
                return
            tried.add(faults.failed)
            save(value=value * 3)
            assert torch.equal(load()["value"], value * 3)

    run_ranks(2, body)
    # The last save may have left a thread at work, which removes the checkpoint before it.
    assert until(lambda: not list(tmp_path.glob("*/.tmp-*")))
    assert tried >= {"new_file", "rename", "flush"}
