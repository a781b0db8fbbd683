"""New Python processes as forks of one that has imported torch.

An interpreter takes two seconds to import torch, and a run of the tests starts two hundred.
While a :class:`ForkServer` is installed, a process whose command is this interpreter with
``-m``, ``-c`` or a script is instead forked from the server, which has imported torch and
lockstep. Like a real one the process is the caller's child, and it has the environment (also in
/proc), the working directory, descriptors and session that were asked for. Replacing itself by
an interpreter, as ``lockstep run`` does, it goes on likewise.

What differs is that modules are imported already, and aren't freed in the end. That matters to
tests with the mark ``true_start``, as to one for each way of starting; and ``pytest --true-starts``
forks none.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import importlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

# The server's environment begins with this variable, and a fork writes its own over it, for those
# who read /proc/PID/environ.
_SPACE, _SPACE_BYTES = "LOCKSTEP_TESTS_SPACE", 1 << 16
# From <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# Those of lockstep's own commands. What they say but the first is in the environment as well.
_OPTIONS = ("-P", "-B")


class Interrupted(Exception):
    """The server has ended."""


class _Start(NamedTuple):
    """A process to start.

    Attributes:
        argv: The command.
        environment: Its environment variables.
        directory: Its working directory.
        descriptors: The numbers under which it has the descriptors that come with this.
        parent: The process whose child it becomes.
        new_session: Whether it leads a session of its own.
        before: What to call before it begins, by cloudpickle; or nothing.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    descriptors: Sequence[int]
    parent: int
    new_session: bool
    before: bytes


class ForkServer:
    """A process that forks interpreters, and the caller's side of it."""

    def __init__(self) -> None:
        self._line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._owner = os.getpid()
        environment = {_SPACE: "-" * _SPACE_BYTES, **os.environ}
        self._environment = environment
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno())],
                env=environment,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """End the server; what it has forked goes on."""
        self._line.close()
        self._process.wait()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let ``subprocess`` and ``multiprocessing`` start interpreters here."""
        import _posixsubprocess

        original = _posixsubprocess.fork_exec

        def fork_exec(*args: Any) -> int:
            start = self._read(args)
            return original(*args) if start is None else self._fork(*start)

        _posixsubprocess.fork_exec = fork_exec
        subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
        try:
            yield
        finally:
            _posixsubprocess.fork_exec = original
            subprocess._fork_exec = original  # type: ignore[attr-defined]

    def _read(self, args: Sequence[Any]) -> tuple[_Start, list[int]] | None:
        """What ``_posixsubprocess.fork_exec(*args)`` would start, with the descriptors it keeps.

        Returns:
            None if that isn't to be forked from here.
        """
        argv, executables, close_fds, kept, directory, variables = args[:6]
        stdin, _, _, stdout, _, stderr, _, error_pipe = args[6:14]
        _, new_session, group, gid, gids, uid, mask, before = args[14:22]
        if (
            os.getpid() != self._owner
            or os.fsdecode(executables[0]) != sys.executable
            or not close_fds
            or (group, gid, gids, uid, mask) != (-1, None, None, None, -1)
        ):
            return None
        words = [os.fsdecode(word) for word in argv]
        environment = dict(os.environ)
        if variables is not None:
            pairs = (os.fsdecode(variable).partition("=") for variable in variables)
            environment = {name: value for name, _, value in pairs}
        if not _can_be_forked(words) or self._differs(environment):
            return None
        descriptors = {fd: fd for fd in kept if fd != error_pipe}
        for number, given in enumerate((stdin, stdout, stderr)):
            descriptors[number] = number if given == -1 else given
        for number in range(3):
            with suppress(OSError):
                os.fstat(descriptors[number])
                continue
            del descriptors[number]
        start = _Start(
            words,
            environment,
            os.fsdecode(directory or os.getcwd()),
            list(descriptors),
            self._owner,
            bool(new_session),
            _pickled(before),
        )
        return start, list(descriptors.values())

    def _differs(self, environment: Mapping[str, str]) -> bool:
        """Whether an interpreter with ``environment`` would be another one than the server."""
        names = {name for name in {*environment, *self._environment} if name.startswith("PYTHON")}
        return any(environment.get(name) != self._environment.get(name) for name in names)

    def _fork(self, start: _Start, descriptors: list[int]) -> int:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        # The server's child forks the process and ends, which makes it this one's child.
        with _adopting_orphans(), os.fdopen(os.memfd_create("start"), "w+b") as file:
            pickle.dump(tuple(start), file)
            file.flush()
            rights[2].append(file.fileno())
            self._line.sendmsg([b"start"], [rights])
            pid = int(self._line.recv(100) or 0)
        if not pid:
            raise Interrupted("the process that forks interpreters has ended")
        return pid


_adopting = threading.Lock()  # the kernel keeps one setting for all threads


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose parent exits meanwhile."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    with _adopting:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


_servers: list[ForkServer] = []  # one, once it is needed


@contextmanager
def forked() -> Iterator[None]:
    """Let interpreters that are started meanwhile be forks, where this is possible."""
    # In other versions fork_exec has other arguments.
    if sys.version_info[:2] != (3, 11):
        yield
        return
    if not _servers:
        _servers.append(ForkServer())
    with _servers[0].installed():
        yield


def end_server() -> None:
    """End the process that forks interpreters, if there is one."""
    while _servers:
        _servers.pop().close()


def _can_be_forked(words: Sequence[str]) -> bool:
    _, rest = _split(words)
    if rest[:1] in (["-m"], ["-c"]):
        return len(rest) > 1 and "resource_tracker" not in rest[1]
    return bool(rest) and not rest[0].startswith("-")


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter's options, and what follows them."""
    rest = list(itertools.dropwhile(lambda word: word in _OPTIONS, words[1:]))
    return list(words[1 : len(words) - len(rest)]), rest


def _pickled(before: Callable[[], object] | None) -> bytes:
    if before is None:
        return b""
    import cloudpickle

    return bytes(cloudpickle.dumps(before))


# From here on: in the server, and in what it forks.


class _Replaced(BaseException):
    """Raised by ``os.execve`` of this interpreter."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__()
        self.argv, self.environment = argv, environment


def _serve(line: socket.socket) -> object:
    import gc
    import pkgutil

    import lockstep

    # By the first step of an optimizer, and with the tests' own modules.
    for name in ("torch._dynamo", "hypothesis", "psutil", "pytest"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
        if "__main__" not in module.name and "integrations" not in module.name:
            importlib.import_module(module.name)
    # But for OpenBLAS's, which end before a fork and start anew on both sides.
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, ancillary, _, _ = line.recvmsg(100, socket.CMSG_SPACE(4 * 200))
        if not message:
            os._exit(0)
        received = array.array("i")
        for _, _, data in ancillary:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
        told, telling = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                # Its number is closed below. Freed when the process ends, it would close what has
                # that number by then, such as one of Gloo's that a thread waits for.
                line.detach()
                return _become(*received)
            os.write(telling, str(pid).encode())
            os._exit(0)
        for fd in (*received, telling):
            os.close(fd)
        os.waitpid(between, 0)
        line.send(os.read(told, 100))
        os.close(told)


def _become(*received: int) -> object:
    """Be the process that was asked for; returns what to exit with."""
    *descriptors, file = received
    with open(file, "rb", closefd=False) as opened:
        opened.seek(0)
        start = _Start(*pickle.load(opened))
    _set_descriptors(dict(zip(start.descriptors, descriptors, strict=True)))
    while os.getppid() != start.parent:  # soon it is
        time.sleep(0.0005)
    if start.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(start.directory)
    if start.before:
        pickle.loads(start.before)()
    os.execve = _execve
    argv, environment = start.argv, start.environment
    while True:
        try:
            _begin(environment)
            return _run(argv)
        except _Replaced as replaced:
            argv, environment = replaced.argv, replaced.environment
            _close_on_exec()


_original_execve = os.execve


def _execve(path: str, argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    if path == sys.executable and _can_be_forked(argv):
        raise _Replaced(argv, environment)
    _original_execve(path, argv, environment)


def _set_descriptors(sources: Mapping[int, int]) -> None:
    """Have each number be what its source is, and no other descriptor be open."""
    import fcntl

    above = max([*sources, *sources.values()]) + 1
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in sources.items()}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in copies.values():
            with suppress(OSError):  # the one that listed them
                os.close(fd)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


def _close_on_exec() -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not os.get_inheritable(fd):
                os.close(fd)


def _begin(environment: Mapping[str, str]) -> None:
    """Have what an interpreter has when it begins."""
    os.environ.clear()
    _show_environment(environment)
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked for again, in TMPDIR
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        with suppress(OSError, ValueError):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = _PATH
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = None
        with suppress(OSError):
            options = {"errors": "backslashreplace"} if number == 2 else {}
            stream = open(number, mode, closefd=False, **options)  # noqa: SIM115
            if number == 2:
                stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    import torch

    # What torch reads in the environment once, as it is imported. With the level of the server, a
    # launcher's store would log what TORCH_CPP_LOG_LEVEL leaves out, with stacks of C++.
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    core = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    ctypes.CDLL(core)._ZN3c1011initLoggingEv()  # c10::initLogging()


def _show_environment(environment: Mapping[str, str]) -> None:
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin = int(fields[50 - 3])
    block = b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in environment.items()) + b"\0"
    assert len(block) < _SPACE_BYTES
    ctypes.memmove(begin, block, len(block))


def _run(argv: Sequence[str]) -> object:
    """Run what the command says; return what to exit with."""
    options, words = _split(argv)
    is_safe = "-P" in options
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if words[0] == "-m":
            import runpy

            sys.argv[:] = words[1:]
            sys.path[:0] = [] if is_safe else [os.getcwd()]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            return None
        if words[0] == "-c":
            sys.argv[:] = ["-c", *words[2:]]
            sys.path[:0] = [] if is_safe else [""]
            code = compile(words[1], "<string>", "exec", dont_inherit=True)
        else:
            sys.argv[:] = words
            sys.path[:0] = [] if is_safe else [os.path.dirname(os.path.realpath(words[0]))]
            main.__file__ = os.path.abspath(words[0])
            with open(words[0], "rb") as file:
                code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except _Replaced:
        raise
    except SystemExit as error:
        return error.code
    except BaseException as error:
        trace = error.__traceback__
        error = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return None


def _end(code: object) -> NoReturn:
    """End as an interpreter does, but for the half second in which it frees torch's modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    _PATH = sys.path[1:]
    sys.path[:] = _PATH
    _, _number = sys.argv
    _end(_serve(socket.socket(fileno=int(_number))))
