"""Replicas in processes, on the caller's side: starting, calling and ending the processes."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.comm import Deadline, shut_down
from lockstep.errors import ReplicaLost
from lockstep.grad import DeferredParameter
from lockstep.nn.replicas.channel import (
    Channel,
    Error,
    Packed,
    Request,
    SharedMemory,
    SharedTensor,
    shared_like,
)
from lockstep.nn.replicas.group import Replica, num_replicas, this_replica
from lockstep.nn.replicas.local_replica import Arguments, Ends, Gradients
from lockstep.nn.replicas.module_copy import (
    ModuleSnapshot,
    ModuleState,
    linked_embeddings_in,
    version_of,
)
from lockstep.nn.replicas.nested import tensors_in
from lockstep.nn.replicas.worker_main import GRACE_SECONDS, POLL_SECONDS, Call
from lockstep.nn.replicas.worker_threads import Modes, raise_first
from lockstep.world import allocator_environment

# How long processes may take to start, even if the timeout is shorter.
_START_SECONDS = 120.0
# How long to wait for the exit code of a process that has closed its end.
_PATIENCE_SECONDS = 2.0
_MOST_BYTES = 1 << 16  # of the message with the process ids
_MAIN = """\
import json, sys
sys.path[:], *arguments = json.loads(sys.argv.pop())
from lockstep.nn.replicas.worker_main import main
main(*arguments)
"""
# From <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_adopting = threading.Lock()
_NOTHING = ModuleSnapshot(ModuleState([], [], [], []))


def _start_processes(devices: Sequence[torch.device]) -> list[WorkerProcess]:
    """Start a process for each of ``devices`` but the first.

    They are forks of one new interpreter, so that torch, which takes seconds, is imported once.
    """
    num_threads = max(1, torch.get_num_threads() // len(devices))
    with ExitStack() as after, ExitStack() as after_errors:
        mine, theirs = zip(*(socket.socketpair() for _ in devices), strict=True)
        connection, *connections = map(after_errors.enter_context, mine)
        numbers = [after.enter_context(own).fileno() for own in theirs]
        seed, names, path = torch.initial_seed(), [*map(str, devices)], [*map(str, sys.path)]
        arguments = json.dumps([path, num_threads, os.getpid(), numbers, seed, names])
        interpreter = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, arguments],
            stdin=subprocess.DEVNULL,
            env={**allocator_environment(), **os.environ, "OMP_NUM_THREADS": str(num_threads)},
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C is for the caller
        )
        after.close()
        after_errors.callback(interpreter.wait)
        after_errors.callback(interpreter.kill)
        connection.settimeout(_START_SECONDS)
        with _reporting_loss(1, interpreter, _START_SECONDS):
            if not (pids := connection.recv(_MOST_BYTES)):
                raise EOFError
            with adopting_orphans():
                shut_down(connection)  # upon which the interpreter exits
                interpreter.wait(_START_SECONDS)
        after_errors.pop_all()
    connection.close()
    started = enumerate(zip(json.loads(pids), connections, strict=True), start=1)
    return [WorkerProcess(i, devices, *pair) for i, pair in started]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose parent exits meanwhile."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    with _adopting:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@contextmanager
def _reporting_loss(
    index: int, process: subprocess.Popen[bytes] | WorkerProcess, timeout: float
) -> Iterator[None]:
    """Raise ReplicaLost, with the exit code, for errors of the connection to a replica."""
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


class WorkerProcess:
    """One replica's process, a child of this process, and its state as the caller knows it."""

    def __init__(
        self, index: int, devices: Sequence[torch.device], pid: int, connection: socket.socket
    ) -> None:
        self.index, self.device, self.pid = index, devices[index], pid
        self.returncode: int | None = None
        # The versions of its buffers, and of its parameters unless they are in shared memory.
        self.versions: list[object] = []
        self.live: set[int] = set()  # the numbers of calls that may have a further backward
        self.gradients: list[torch.Tensor] = []  # the memory for those of parameters
        self.is_asked = False  # whether it owes the answer to a request
        self._is_home = self.device == devices[0]
        self.connection = connection
        self.channel = Channel(connection, [devices[0], self.device])
        self._waiting = threading.Lock()

    def versions_of(self, state: ModuleState) -> list[object]:
        """Return the versions that the process has after it has received ``state``."""
        return [*state.versions, *map(version_of, () if self._is_home else state.parameters)]

    def wait(self, timeout: float) -> None:
        """Wait for the process to exit; raise TimeoutExpired after ``timeout`` seconds."""
        deadline = Deadline(timeout)
        with self._waiting:
            while self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # the program itself has waited for it
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                elif deadline.left():
                    time.sleep(POLL_SECONDS)
                else:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)

    def kill(self) -> None:
        """Send the process SIGKILL."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _end(workers: Sequence[WorkerProcess], owner: int) -> None:
    """Close the connections, upon which processes exit; kill those that don't exit in time."""
    if owner != os.getpid():
        return  # this is a fork of the process that started them
    for worker in workers:
        worker.channel.close()
    for worker in workers:
        try:
            worker.wait(2 * GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait(_START_SECONDS)


class ReplicaProcesses:
    """The processes of all replicas but the first, on ``devices[1:]``.

    They are not forks of the caller, and end with this object or with the program. Parameters on
    the CPU are moved to shared memory, or copied there if a sharded optimizer has their memory.
    """

    def __init__(self, devices: Sequence[torch.device], timeout: float) -> None:
        self.devices = devices
        self._timeout = timeout
        self._numbers = itertools.count()
        self._snapshot = _NOTHING
        # Parameters that aren't in shared memory themselves, and their copies there.
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lost: BaseException | None = None
        self._is_ended = False
        self.workers = _start_processes(devices)
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end, self.workers, self._pid)

    @property
    def is_alive(self) -> bool:
        """Whether the processes are running, and are children of this process."""
        return not self._is_ended and self._pid == os.getpid()

    def check_alive(self) -> None:
        """Raise ReplicaLost unless :attr:`is_alive`."""
        if not self.is_alive:
            raise ReplicaLost(
                "The processes of the replicas that ran this have ended, or are those of the "
                "process that this one was forked from. Call the model again."
            )

    def update(self, module: nn.Module, state: ModuleState) -> None:
        """Send the module if anything but the values of its tensors has changed.

        Parameters stay where a sharded optimizer keeps them, and are copied from there.
        """
        if self._snapshot.is_current(state):
            self._copy_parameters()
            return
        parameters = state.parameters
        gradients = [shared_like(parameters) for _ in self.workers]
        places: Sequence[SharedMemory | SharedTensor]
        is_on_cpu = self.devices[0].type == "cpu"
        places = shared_like(parameters) if is_on_cpu else [*map(SharedMemory, parameters)]
        known = dict(zip(map(id, parameters), places, strict=True))
        try:
            requests = [Request("take", (module, own)) for own in gradients]
            messages = [Packed(request, known) for request in requests]
        except Exception as error:  # pickling may raise anything
            raise TypeError(
                f"{type(module).__name__} can't be sent to other processes: {error}. Use "
                "workers='threads', or leave out what can't be pickled."
            ) from error
        self._snapshot, self._copied = _NOTHING, []  # until all processes have it
        linked = linked_embeddings_in(state.parts)  # written by replicas, too
        for parameter, place in zip(parameters, places, strict=True):
            if not isinstance(place, SharedTensor):
                continue
            if isinstance(parameter, DeferredParameter) and id(parameter) not in linked:
                self._copied.append((parameter, place.here))
            else:
                parameter.data = place.here.copy_(parameter.detach())
        self._copy_parameters()
        for worker, own, message in zip(self.workers, gradients, messages, strict=True):
            worker.gradients = [place.here for place in own]
            self.send(worker, message, max(self._timeout, _START_SECONDS))
        errors: list[BaseException | None] = [None]
        for worker in self.workers:
            worker.versions = worker.versions_of(state)
            try:
                self.receive(worker)
                errors.append(None)
            except Exception as error:
                if self._is_ended:
                    raise
                errors.append(error)
        raise_first(errors, self.devices)
        self._snapshot = ModuleSnapshot(state)

    def _copy_parameters(self) -> None:
        # All of them: torch counts no writes to parameter.data.
        for parameter, copy in self._copied:
            copy.copy_(parameter.detach())

    def call(
        self, state: ModuleState, method: str, arguments: Sequence[Arguments], returns_buffers: bool
    ) -> list[RemoteCall]:
        """Start a call of ``method`` in one process for each of ``arguments``."""
        number, count, modes = next(self._numbers), 1 + len(arguments), Modes.here()
        num_buffers = len(state.buffers)
        calls, messages = [], []
        for worker, own in zip(self.workers, arguments, strict=False):
            versions = worker.versions_of(state)
            pairs = enumerate(zip(worker.versions, versions, strict=True))
            changed = [i for i, (before, now) in pairs if before != now]
            call = Call(
                number=number,
                replica=Replica(worker.index, count, num_replicas(), True, sums=None),
                method=method,
                arguments=own,
                modes=modes,
                training=[part.training for part in state.parts],
                trained=[parameter.requires_grad for parameter in state.parameters],
                parameters=[i - num_buffers for i in changed if i >= num_buffers],
                buffers={i: state.buffers[i] for i in changed if i < num_buffers},
                live=worker.live.copy(),
                returns_buffers=returns_buffers,
            )
            calls.append(RemoteCall(self, worker, call))
            try:
                messages.append((worker, versions, Packed(Request("call", (call,)))))
            except Exception as error:  # pickling may raise anything
                raise TypeError(
                    f"An argument can't be sent to other processes: {error}."
                ) from error
        for worker, versions, message in messages:
            self.send(worker, message)
            worker.versions = versions
        return calls

    def send(self, worker: WorkerProcess, message: Packed, timeout: float | None = None) -> None:
        """Send a process a message; sending and each answer may take ``timeout`` seconds."""
        self.check_alive()
        timeout = timeout or self._timeout
        worker.connection.settimeout(timeout)
        with _reporting_loss(worker.index, worker, timeout):
            worker.is_asked = True
            worker.channel.send(message)

    def receive(self, worker: WorkerProcess) -> Any:
        """Run a process's requests, in the thread that represents it; return its answer.

        If the process is lost, or the program interrupted, all processes are killed. An exception
        that the replica raised is raised here.
        """
        try:
            with _reporting_loss(worker.index, worker, worker.connection.gettimeout() or 0.0):
                while isinstance(answer := worker.channel.receive(), Request):
                    worker.channel.answer(partial(answer.function, *answer.arguments))
        except BaseException as lost:
            # Only the first loss counts: later ones come from kill(), perhaps after in_use().
            if not self._is_ended:
                self._lost = lost
                self.kill()
                replica = this_replica()
                if replica is not None and replica.sums is not None:
                    replica.sums.error = lost
            raise
        worker.is_asked = False
        if isinstance(answer, Error):
            worker.versions = [None] * len(worker.versions)  # it may not have taken what was sent
            raise answer.exception()
        return answer

    def check(self, first_error: BaseException | None) -> None:
        """Raise the error of a lost process, with a note on ``first_error`` of replica 0."""
        if self._lost is not None:
            if first_error is not None and first_error is not self._lost:
                self._lost.add_note(f"Replica 0 failed as well: {first_error!r}")
            raise self._lost

    def kill(self) -> None:
        """Kill all processes."""
        self._is_ended = True
        for worker in self.workers:
            worker.kill()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around a call or a backward: kill all processes if one owes an answer at its end."""
        try:
            yield
        finally:
            # Its traceback may refer to a tensor whose graph refers to this object, a cycle that
            # Python's garbage collector can't see.
            self._lost = None
            # The first replica may append to the module's containers: not a change to send.
            self._snapshot.ignore_lengths()
            # The next call would receive the answer to this one.
            if self._is_ended or any(worker.is_asked for worker in self.workers):
                self.kill()
                self._end()


class RemoteCall:
    """The call of a replica in another process, with the interface of a ReplicaCall."""

    def __init__(self, processes: ReplicaProcesses, worker: WorkerProcess, call: Call) -> None:
        self.device = worker.device
        self.worker = worker
        self.inputs = [x for x in tensors_in(call.arguments) if x.requires_grad]
        self.results: Any = None
        self.buffers: Gradients = []  # the floating-point buffers, if buffers are averaged
        self._processes, self._number = processes, call.number
        self._gradients: tuple[Gradients, Gradients] = ([], [])
        if call.modes.grad:
            worker.live.add(call.number)
            weakref.finalize(self, worker.live.discard, call.number).atexit = False

    def forward(self) -> None:
        """Receive the results."""
        self.results, self.buffers = self._processes.receive(self.worker)

    def start_backward(self, d_outputs: Gradients, *, keep_graph: bool) -> Ends:
        """Request the backward of the process."""
        own = [None if gradient is None else gradient.detach() for gradient in d_outputs]
        request = Request("backward", (self._number, own, keep_graph))
        self._processes.send(self.worker, Packed(request))
        return ()

    def receive_gradients(self) -> None:
        """Wait for the end of the backward of the process."""
        taken, others, of_inputs = self._processes.receive(self.worker)
        memory = enumerate(self.worker.gradients)
        self._gradients = [own if i in taken else others.get(i) for i, own in memory], of_inputs

    def take_gradients(self) -> tuple[Gradients, Gradients]:
        """Return the gradients of the parameters, in shared memory, and of the inputs."""
        gradients, self._gradients = self._gradients, ([], [])
        return gradients

    def free_graph(self) -> None:
        """Do nothing: the process frees its graph after its backward."""
