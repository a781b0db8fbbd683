"""What every test must leave behind: nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

# torch sets the second when an optimizer's first step loads its compiler.
_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


def _settle(now: callable, before: set, seconds: float = 2.0) -> set:
    """What there is more than before, once things that are just ending have had time to."""
    deadline = time.monotonic() + seconds
    while (more := now() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return more


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a process or an environment variable."""
    threads, children, environment = _threads(), _children(), _environment()
    yield
    leaks = [
        f"{kind} {more}"
        for kind, more in (
            ("threads", _settle(_threads, threads)),
            ("processes", _settle(_children, children)),
        )
        if more
    ]
    if changed := set(_environment().items()) ^ set(environment.items()):
        leaks.append(f"environment {changed}")
    assert not leaks, f"left behind: {'; '.join(leaks)}"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Let every test draw the same numbers, whichever ran before it."""
    torch.manual_seed(0)
