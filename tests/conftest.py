"""What every test must leave behind: nothing. And what differs in ``make test-long``.

``make test`` runs all tests but those with the mark ``long``. Of those with the mark
``shortened`` it does a part, and of tests with examples by Hypothesis a fifth of the examples. With
``--long``, as in ``make test-long``, the tests of these three kinds run, and all of them; those
with the mark ``thorough`` run with ``--thorough`` alone, as in ``make test-thorough``.

Tests with the mark ``forks`` fork in place of new interpreters (see tests/interpreters.py), unless
there is ``--true-starts``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import hypothesis
import psutil
import pytest
import torch

from tests.counts import LONG, SHORT
from tests.interpreters import end_server, forked

# How long an example takes is a matter of what else the machine does.
hypothesis.settings.register_profile("long", deadline=None, max_examples=LONG)
hypothesis.settings.register_profile("short", deadline=None, max_examples=SHORT)
hypothesis.settings.load_profile("short")

# A shell has programs in the background ignore SIGINT, and nohup has them ignore SIGHUP. Programs
# inherit that from those that start them, but not a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Where it is set, print() writes a line's end apart from the line, and the lines of two programs
# that share a pipe become one.
os.environ.pop("PYTHONUNBUFFERED", None)

# Tests run beside each other, on all cores.
torch.set_num_threads(1)

# torch sets the second when an optimizer's first step loads its compiler.
_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Run the tests of make test-long.")
    parser.addoption("--thorough", action="store_true", help="Run those of make test-thorough.")
    parser.addoption("--true-starts", action="store_true", help="Fork no interpreters.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("long") or config.getoption("thorough"):
        hypothesis.settings.load_profile("long")


# How many modules there were when they were last left to no collection, and how many more matter.
_left = {"modules": 0}
_MANY_MODULES = 50


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Leave torch's modules and the tests themselves to no collection of garbage.

    One takes half a second with these million objects, and there are hundreds: each test that finds
    something left behind collects, and tests of what is freed do.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _leave_modules_to_no_collection()
        gc.enable()


def _leave_modules_to_no_collection() -> None:
    gc.collect()
    gc.freeze()
    _left["modules"] = len(sys.modules)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the others of ``make test``, ``test-long`` and ``test-thorough`` run."""
    wanted = _is_longer if config.getoption("long") else _is_not_long
    wanted = _is_thorough if config.getoption("thorough") else wanted
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = filter(wanted, items)


def _is_thorough(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is not None


def _is_not_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is None and not _is_thorough(item)


def _is_longer(item: pytest.Item) -> bool:
    if _is_thorough(item):
        return False
    has_examples = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    is_shortened = item.get_closest_marker("shortened") is not None
    return has_examples or is_shortened or not _is_not_long(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Fork interpreters in place of starting them, where a test says that it may be."""
    is_marked = item.get_closest_marker("forks") is not None
    starts = item.get_closest_marker("true_start") or item.config.getoption("--true-starts")
    with forked() if is_marked and not starts else contextlib.nullcontext():
        result = yield
    # The first step of an optimizer loads torch's compiler, which has as many objects again.
    if len(sys.modules) >= _left["modules"] + _MANY_MODULES:
        _leave_modules_to_no_collection()
    return result


def pytest_unconfigure() -> None:
    end_server()


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _children() -> set[psutil.Process]:
    # psutil looks at all processes of the machine, which takes longer than most tests do.
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return set(psutil.Process().children(recursive=True))
    found, pids = set(), _children_of(os.getpid())
    while pids:
        pid = pids.pop()
        with contextlib.suppress(psutil.Error):
            found.add(psutil.Process(pid))
        pids += _children_of(pid)
    return found


def _children_of(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _descriptors() -> set[tuple[str, str]]:
    """Open files, sockets and pipes, each with what it is."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # the one that lists them is gone again
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def _shared_memory() -> set[str]:
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ()
    # Semaphores aren't ours: multiprocessing has them, and `import joblib` (scikit-learn) makes and
    # removes some. When their processes were killed, a resource tracker removes them; until then
    # those of other runs have no owner.
    return {name for name in names if not name.startswith("sem.")}


def _is_gone_or_others(name: str) -> bool:
    """Whether that shared memory isn't there, or a process has it that isn't this or below it."""
    ours = {os.getpid(), *(child.pid for child in _children())}
    path = f"/dev/shm/{name}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in ours and (
                any(path == file.path for file in process.open_files())
                or any(path in map.path for map in process.memory_maps())
            ):
                return True
    return not os.path.exists(path)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


def _settle(now: Callable[[], set], before: set, seconds: float) -> set:
    """What there is more than before, once things that are just ending have had time to."""
    deadline = time.monotonic() + seconds
    while more := now() - before:
        gc.collect()  # an exception's traceback may hold a rank's process group
        if not (more := now() - before) or time.monotonic() > deadline:
            break
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
    # Shared memory may be that of tests beside this one, for which not to wait long.
    seconds = {"shared memory": 2.0}
    more = {
        kind: _settle(look, before[kind], seconds.get(kind, 20.0)) for kind, look in watched.items()
    }
    more["shared memory"] = {name for name in more["shared memory"] if not _is_gone_or_others(name)}
    leaks = [f"{kind} {left}" for kind, left in more.items() if left]
    if changed := set(_environment().items()) ^ set(environment.items()):
        leaks.append(f"environment {changed}")
    assert not leaks, f"left behind: {'; '.join(leaks)}"


@pytest.fixture(autouse=True)
def no_wrapper_in_forward() -> None:
    """Undo what torch's wrapper leaves behind that has run in several threads at once.

    It then seems to be in its forward for ever, and torch.compile cuts all graphs for it.
    """
    torch.nn.parallel.DistributedDataParallel._active_ddp_module = None


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Let every test draw the same numbers, whichever ran before it."""
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # for devices that aren't there torch.manual_seed() keeps a call, and its stack as text
        torch.default_generator.manual_seed(0)
