"""What every test must leave behind: nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import hypothesis
import psutil
import pytest
import torch

# How long an example takes is a matter of what else the machine does.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# torch sets the second when an optimizer's first step loads its compiler.
_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _descriptors() -> set[tuple[str, str]]:
    """Open files, sockets and pipes, each with what it is."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # the one that lists them is gone again
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


def _settle(now: Callable[[], set], before: set, seconds: float = 2.0) -> set:
    """What there is more than before, once things that are just ending have had time to."""
    deadline = time.monotonic() + seconds
    while (more := now() - before) and time.monotonic() < deadline:
        gc.collect()  # an exception's traceback may hold a rank's process group
        time.sleep(0.02)
    return more


_WATCHED = {
    "threads": _threads,
    "processes": _children,
    "descriptors": _descriptors,
    "shared memory": _shared_memory,
}


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, process, descriptor, memory or variable."""
    watched = dict(_WATCHED)
    if request.node.get_closest_marker("keeps_descriptors"):
        del watched["descriptors"]
    before = {kind: look() for kind, look in watched.items()}
    environment = _environment()
    yield
    leaks = [
        f"{kind} {more}" for kind, look in watched.items() if (more := _settle(look, before[kind]))
    ]
    if changed := set(_environment().items()) ^ set(environment.items()):
        leaks.append(f"environment {changed}")
    assert not leaks, f"left behind: {'; '.join(leaks)}"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Let every test draw the same numbers, whichever ran before it."""
    torch.manual_seed(0)
