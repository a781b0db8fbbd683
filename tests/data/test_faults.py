"""Errors in a loader say of which samples they are, and what ended a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import lockstep
from lockstep.data import faults
from lockstep.data.batches import LocalBatch, Reader
from tests.ranks import run_ranks

BAD = 13


class DamagedImage(Exception):
    """The program's own."""


class Images(Dataset[Any]):
    """One of them can't be read."""

    def __init__(self, act: Any = None, *, draws: bool = False) -> None:
        self.act, self.draws = act, draws

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            if self.act is not None:
                self.act()
            raise DamagedImage("not a JPEG")
        return torch.rand(()) if self.draws else index


class InOne(Images):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Stream(IterableDataset[int]):
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 99, step):
            if number == 13 * step:
                raise self.error or DamagedImage("not a JPEG")
            yield number


def refuse(samples: list[int]) -> Any:
    if BAD in samples:
        raise DamagedImage("sizes differ")
    return torch.tensor(samples)


def text_of(error: pytest.ExceptionInfo[BaseException]) -> str:
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("draws", [False, True])
def test_the_sample_that_cannot_be_read_is_named(num_workers: int, draws: bool) -> None:
    loader = lockstep.DataLoader(Images(draws=draws), 4, num_workers=num_workers)
    with pytest.raises(DamagedImage, match="not a JPEG") as error:
        list(loader)
    assert "in reading sample 13, at position 13 of the epoch, on rank 0." in text_of(error)


def end_early(*_: object) -> None:
    next(iter([]))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_sample_or_batch_that_raises_stop_iteration_ends_no_epoch(num_workers: int) -> None:
    """As a loop over the loader would take it for its end."""
    loaders = [
        (
            lockstep.DataLoader(Images(end_early), 4, num_workers=num_workers),
            "in reading sample 13",
        ),
        (
            lockstep.DataLoader(range(8), 4, num_workers=num_workers, collate_fn=end_early),
            "samples 0, 1, 2, 3",
        ),
        (
            lockstep.DataLoader(Stream(), 4, num_workers=num_workers, collate_fn=end_early),
            "in collating 4 samples",
        ),
    ]
    for loader, where in loaders:
        with pytest.raises(RuntimeError, match="StopIteration") as error:
            list(loader)
        assert where in text_of(error)


def raise_several() -> None:
    raise ExceptionGroup("two images", [ValueError("a"), ValueError("b")])


@pytest.mark.long
def test_a_group_of_exceptions_of_a_worker_is_told_whole() -> None:
    with pytest.raises(RuntimeError, match="two images") as error:
        list(lockstep.DataLoader(Images(raise_several), 4, num_workers=1))
    assert "in reading sample 13" in text_of(error)


def test_an_index_is_told_from_a_position() -> None:
    class Two(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return {0: 0, 1: 1}[index]

    batches = [[0], [1, "x"]]
    loader: Any = lockstep.DataLoader(Two([0, 1, 2]), batch_sampler=batches)
    with pytest.raises(KeyError) as error:
        list(loader)
    assert "sample 'x', at position 2 of the epoch" in text_of(error)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_samples_that_are_read_or_collated_at_once_are_named(num_workers: int) -> None:
    for dataset, collate in ((InOne(), None), (list(range(32)), refuse)):
        loader: Any = lockstep.DataLoader(
            dataset,
            4,
            num_workers=num_workers,
            collate_fn=collate,  # type: ignore[arg-type]
        )
        with pytest.raises(DamagedImage) as error:
            list(loader)
        assert "reading or collating samples 12, 13, 14, 15, at positions 12 to 15" in text_of(
            error
        )


def test_an_index_that_tensors_have_not_is_named() -> None:
    loader: Any = lockstep.DataLoader(TensorDataset(torch.zeros(4)), batch_sampler=[[0, 1], [2, 9]])
    with pytest.raises(IndexError) as error:
        list(loader)
    assert "samples 2, 9, at positions 2 to 3" in text_of(error)


def test_the_rank_is_named() -> None:
    def body(rank: int, group: Any) -> str:
        loader = lockstep.DataLoader(Images(), 8, shuffle=True, seed=3, process_group=group)
        try:
            for _ in loader:
                pass
        except DamagedImage as error:
            return "\n".join(error.__notes__)
        return ""

    words = run_ranks(2, body)
    assert sum(map(bool, words)) == 1
    for rank, told in enumerate(words):
        assert not told or ("sample 13, at position" in told and f"on rank {rank}." in told)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_how_far_a_stream_was_is_told(num_workers: int) -> None:
    loader = lockstep.DataLoader(Stream(), 4, num_workers=num_workers)
    with pytest.raises((DamagedImage, RuntimeError)) as error:
        list(loader)
    assert f"after 13 samples of shard 1 of {max(1, num_workers)} of the dataset" in text_of(error)


class NoNote(Exception):
    def add_note(self, _: str) -> None:
        raise AttributeError


class Ignores(Exception):
    def add_note(self, _: str) -> None:
        pass


class Closed(NoNote):
    def __setattr__(self, *_: object) -> None:
        raise AttributeError


class OfText(Exception):
    __notes__ = "none"  # type: ignore[assignment]


class Slotted(Exception):
    __slots__ = ("__notes__",)


class Fixed(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        return ["none"]


class Raising(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise RuntimeError("no notes")


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Leaving(Exception):
    def __init__(self, *args: object) -> None:
        if args:
            sys.exit(5)


def local() -> BaseException:
    class Local(Exception):  # which can't be pickled
        pass

    return Local("here")


REFUSING = [NoNote, Ignores, Closed, OfText, Slotted, Fixed, Raising, Unreadable]
LEAVING = [SystemExit(3), SystemExit(), KeyboardInterrupt(), GeneratorExit(), BaseException("b")]


def raises(error: BaseException) -> Any:
    def act() -> None:
        raise error

    return act


def text_of_failure(loader: Any) -> str:
    """What is shown of the error, which holds no worker any more."""
    try:
        list(loader)
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""


def name(value: object) -> str:
    return type(value).__name__


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("kind", REFUSING)
def test_the_sample_is_named_with_an_error_that_refuses_notes(kind: type[Exception]) -> None:
    """Its class stays, as long as Python can show it at all."""
    expected = RuntimeError if kind is Raising and sys.version_info < (3, 13) else kind
    with pytest.raises(expected) as error:
        list(lockstep.DataLoader(Images(raises(kind("bad"))), 4))
    assert shown(error.value).count("in reading sample 13, at position 13") == 1
    faults.add_note(error.value, "more")
    faults.add_note(error.value, "more")
    assert shown(error.value).count("more\n") == 1
    assert shown(error.value).count("in reading sample 13, at position 13") == 1


@pytest.mark.parametrize("left", LEAVING, ids=name)
def test_the_sample_is_named_that_ends_the_program(
    left: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    for dataset, where in ((Images(raises(left)), "in reading sample 13"), (Stream(left), "after")):
        with pytest.raises(type(left)) as error:
            list(lockstep.DataLoader(dataset, 4))
        assert error.value is left  # so that Ctrl-C, say, is one
        assert where in text_of(error)
        assert (where in caplog.text) == isinstance(left, SystemExit)  # which shows no notes


@pytest.mark.long
def test_the_sample_is_named_that_ends_a_worker() -> None:
    """And nothing is waited for that can't be pickled."""
    for error in (*LEAVING, *(kind("bad") for kind in REFUSING), Leaving(), local()):
        told = text_of_failure(
            lockstep.DataLoader(Images(raises(error)), 4, num_workers=1, timeout=60)
        )
        assert "in reading sample 13, at position 13" in told
        assert type(error).__name__ in told
    for error in LEAVING:
        told = text_of_failure(lockstep.DataLoader(Stream(error), 4, num_workers=1, timeout=60))
        assert "in reading, after 13 samples" in told


def test_a_worker_that_is_to_end_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch waits for what it reads, and may have ended it by a signal already."""
    monkeypatch.setattr(faults, "get_worker_info", SimpleNamespace)
    dataset = Images(raises(KeyboardInterrupt()))
    reader = Reader(dataset, list, 0, makes_batches=False)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        reader[LocalBatch([BAD], 0, 0)]
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        reader[LocalBatch([1], 0, 0)]
    assert len(reader[LocalBatch([1], 1, 0)]) == 1  # of the next epoch: a persistent one goes on


@pytest.mark.long
def test_a_batch_that_cannot_be_pickled_is_not_waited_for() -> None:
    loader = lockstep.DataLoader(
        range(8), 4, num_workers=1, collate_fn=lambda _: local(), timeout=60
    )
    assert "Worker 0 couldn't hand over a batch" in text_of_failure(loader)


# torch raises the error wherever the program is when a worker ends.
SCRIPT = """
import os, sys, time
import lockstep
from tests.data.test_faults import Images

def end():
    time.sleep(1)  # so that the batch is waited for
    if int(sys.argv[1]) < 0:
        os._exit(7)
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(60)

try:
    list(lockstep.DataLoader(Images(end), 4, num_workers=1))
except Exception as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", ()), sep="\\n")
"""


def test_a_worker_that_leaves_with_exit_code_0_is_named() -> None:
    ended, other = SimpleNamespace(exitcode=0), SimpleNamespace(exitcode=None)
    assert [*faults._how_ended([other, ended], None)] == [
        "Worker 1 ended with the exit code 0: it called os._exit(0), say, or was interrupted by "
        "SIGINT between two batches."
    ]
    killed = SimpleNamespace(exitcode=-signal.SIGSEGV)
    assert [*faults._how_ended([ended, killed], None)] == ["Worker 1 was ended by SIGSEGV."]


@pytest.mark.forks
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
        pytest.param(signal.SIGSEGV, marks=pytest.mark.long),
        pytest.param(signal.SIGBUS, marks=pytest.mark.long),
        pytest.param(-1, marks=pytest.mark.long),
    ],
)
def test_what_ended_a_worker_is_named(number: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(int(number))],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    text = done.stdout
    assert text, done.stderr
    if number < 0:
        assert "Worker 0 ended with the exit code 7" in text
        return
    assert f"Worker 0 was ended by {signal.Signals(number).name}." in text
    assert ("when memory is out" in text) == (number == signal.SIGKILL)
    assert ("/dev/shm" in text and "are free now" in text) == (number == signal.SIGBUS)


def test_what_the_kernel_counts_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cause is stated only if its count rose."""
    kills = faults._Kills
    for before, now, words in (
        ((1, 5), (2, 6), "has killed 1 of the processes of this control group"),
        ((None, 5), (None, 7), "has killed 2 of the processes of this host"),
        ((1, 5), (1, 5), "though it has counted none since"),
        ((None, None), (None, None), "most often, from the kernel when memory is out:"),
    ):
        monkeypatch.setattr(faults, "_count_kills", lambda now=now: kills(*now))
        assert words in faults._who_kills(kills(*before))
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert faults._number_in(tmp_path / "memory.events") == 2
