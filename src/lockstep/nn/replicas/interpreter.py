"""The start of replicas' processes, which are forks of one new interpreter.

It alone imports torch, which takes seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from lockstep.comm import Deadline, receive_message, send_message
from lockstep.errors import ReplicaLost
from lockstep.world import allocator_environment

# How long processes may take to start, whatever the timeout.
START_SECONDS = 120.0
# How long to wait for the exit code of a process that has closed its end.
_PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.005
_MAIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from lockstep.nn.replicas.worker_main import main
main(sys.argv[1:])
"""
_READY = b"\0"
_MOST_BYTES, _MOST_PROCESSES = 1 << 16, 250  # of a message
# From <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_adopting = threading.Lock()


def start_processes(
    num_threads: int, arguments: Sequence[Sequence[object]]
) -> list[tuple[int, socket.socket]]:
    """Start a process with ``num_threads`` intra-op threads for each of ``arguments``.

    Returns:
        The id of each process, and a connection to it.

    Raises:
        ReplicaLost: If the interpreter ends, or takes too long.
    """
    with ExitStack() as after, ExitStack() as after_errors:
        connection, its = map(after.enter_context, socket.socketpair())
        pairs = [socket.socketpair() for _ in arguments]
        for mine, theirs in pairs:
            after_errors.enter_context(mine)
            after.enter_context(theirs)
        path = json.dumps([*map(str, sys.path)])
        own = {"OMP_NUM_THREADS": str(num_threads)}
        interpreter = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, path]
            + [str(number) for number in (num_threads, its.fileno(), os.getpid())],
            stdin=subprocess.DEVNULL,
            env={**allocator_environment(), **os.environ, **own},
            pass_fds=[its.fileno()],
            start_new_session=True,  # Ctrl-C is for the caller
        )
        its.close()
        after_errors.callback(interpreter.wait)
        after_errors.callback(interpreter.kill)
        connection.settimeout(START_SECONDS)
        with reporting_loss(1, interpreter, START_SECONDS):
            if connection.recv(1) != _READY:
                raise EOFError
            with adopting_orphans():
                message = json.dumps(arguments).encode()
                send_message(connection, message, [theirs.fileno() for _, theirs in pairs])
                answer = connection.recv(_MOST_BYTES)
                interpreter.wait(START_SECONDS)
            if not answer:
                raise EOFError
        after_errors.pop_all()
    return list(zip(json.loads(answer), (mine for mine, _ in pairs), strict=True))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of descendants whose own parent ends meanwhile, as forked processes' does."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    with _adopting:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class ForkedProcess:
    """A child of this process that another one has forked, with the face of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float) -> None:
        """Wait for its end; raise TimeoutExpired if that takes longer."""
        deadline = Deadline(timeout)
        with self._lock:
            while self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # the program itself has waited for it
                    self.returncode = 0
                    return
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                elif deadline.left():
                    time.sleep(_POLL_SECONDS)
                else:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)

    def kill(self) -> None:
        """End it now."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@contextmanager
def reporting_loss(
    index: int, process: subprocess.Popen[bytes] | ForkedProcess, timeout: float
) -> Iterator[None]:
    """Raise ReplicaLost for errors of the connection to the process of a replica."""
    who = f"The process of replica {index} (pid {process.pid})"
    try:
        yield
    except TimeoutError as error:
        raise ReplicaLost(
            f"{who} has not answered within {timeout:g} s: it was stopped, hangs, or takes longer. "
            "It is ended now, and the next call starts new ones. If it needs more time, give "
            "DataParallel a longer timeout."
        ) from error
    except (EOFError, OSError) as error:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)
        raise ReplicaLost(
            f"{who} has ended, with exit code {process.returncode}. What it wrote may tell why; if "
            "it is -9, it was killed, perhaps for want of memory. The next call starts new ones."
        ) from error


# In the interpreter, and in the processes


def fork_processes(connection: socket.socket, caller: int) -> tuple[socket.socket, list[Any]]:
    """Fork the processes; return in each its connection to the caller, and its arguments."""
    with suppress(OSError):  # the caller has ended
        connection.sendall(_READY)
    message = b""
    descriptors: list[int] = []
    if wait_for(connection, select.POLLIN, caller):
        message, descriptors = receive_message(connection, _MOST_BYTES, _MOST_PROCESSES)
    parent, pids = os.getpid(), []
    for arguments in json.loads(message or b"[]"):
        descriptor = descriptors.pop(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are OpenBLAS's
            pid = os.fork()
        if not pid:
            for other in (*descriptors, connection.detach()):
                os.close(other)
            os.setsid()
            while os.getppid() == parent:  # until the caller is
                time.sleep(_POLL_SECONDS)
            return socket.socket(fileno=descriptor), arguments
        os.close(descriptor)
        pids.append(pid)
    with suppress(OSError):
        connection.sendall(json.dumps(pids).encode())
    os._exit(0)


def wait_for(connection: socket.socket, event: int, caller: int) -> bool:
    """Wait for an event of a connection; return False if the caller has ended instead."""
    poll = select.poll()
    poll.register(connection, event)
    # A child that the caller has forked may hold the other end.
    while not poll.poll(1000):
        if os.getppid() != caller:
            return False
    return True
