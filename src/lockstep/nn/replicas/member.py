"""A replica's process, as the caller has it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.comm.shm.sockets import shut_down
from lockstep.errors import ReplicaLost
from lockstep.nn.replicas.meeting import Meeting, Round
from lockstep.nn.replicas.messages import Ask, Error, Sum, as_error, as_exception
from lockstep.nn.replicas.wire import Packed, Wire
from lockstep.nn.replicas.workers import Outcome
from lockstep.world.environment import allocator_environment

_PATIENCE_SECONDS = 2.0
# A process that does nothing ends in less.
_GRACE_SECONDS = 0.5
_MAIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from lockstep.nn.replicas.process import main
main(sys.argv[1:])
"""


class Member:
    """One process, as the caller has it.

    Attributes:
        number: Which replica it is.
        device: Where that is.
        owner: The process that has started it.

    Args:
        number: As above.
        devices: Those of all replicas.
    """

    def __init__(self, number: int, devices: Sequence[torch.device]) -> None:
        self.number, self.device = number, devices[number]
        self.owner = os.getpid()
        self._timeout = 0.0  # until it is set
        (mine, its), (lifeline, of_its) = socket.socketpair(), socket.socketpair()
        self._wire = Wire(mine, [devices[0], devices[number]])
        # Held open: when this process ends, however it does, so does the other.
        self._lifeline = lifeline
        num_threads = max(1, torch.get_num_threads() // len(devices))
        seed = (torch.initial_seed() + number) % 2**63
        numbers = (its.fileno(), of_its.fileno(), number, num_threads, seed)
        with its, of_its:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _MAIN,
                    json.dumps([*map(str, sys.path)]),
                    *map(str, (*numbers, *devices)),
                ],
                stdin=subprocess.DEVNULL,
                env={
                    **allocator_environment(),
                    **os.environ,
                    "OMP_NUM_THREADS": str(num_threads),
                },
                pass_fds=(its.fileno(), of_its.fileno()),
                start_new_session=True,  # Ctrl-C is for the caller
            )

    def set_timeout(self, seconds: float) -> None:
        """Wait no longer than that for it to read, or for the rest of what it says."""
        self._timeout = seconds
        self._wire.set_timeout(seconds)

    def send(self, packed: Packed) -> None:
        """Send it something.

        Raises:
            ReplicaLost: If the process has ended, or doesn't read.
        """
        try:
            self._wire.send_packed(packed)
        except TimeoutError as error:
            raise self.overdue() from error
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> Any:
        """What it says.

        Raises:
            ReplicaLost: If the process has ended, or stops in the middle.
        """
        try:
            return self._wire.receive()
        except TimeoutError as error:
            raise self.overdue() from error
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _lost(self) -> ReplicaLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_SECONDS)
        return ReplicaLost(
            f"The process of replica {self.number} (pid {self._process.pid}) has ended, with exit "
            f"code {self._process.returncode}. What it wrote may tell why; if it is -9, it was "
            "killed, perhaps for want of memory. The next call starts new ones."
        )

    def overdue(self) -> ReplicaLost:
        """What tells that it hasn't answered in time."""
        return ReplicaLost(
            f"The process of replica {self.number} (pid {self._process.pid}) has not answered "
            f"within {self._timeout:g} s: it was stopped, hangs, or takes longer. It is ended now, "
            "and the next call starts new ones. If it needs more time, give DataParallel a longer "
            "timeout."
        )

    def fileno(self) -> int:
        """What to wait for until it says something."""
        return self._wire.fileno()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def hang_up(self) -> None:
        """Let it end, once it is through with what it does."""
        self._wire.close()

    def wait(self) -> None:
        """Wait until it has ended, or end it."""
        for end in (partial(shut_down, self._lifeline), self._process.kill):
            try:
                self._process.wait(_GRACE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()
        self._lifeline.close()


def end_members(members: Sequence[Member]) -> None:
    """Let all end, and wait for them."""
    if any(member.owner != os.getpid() for member in members):
        return  # this process was forked from that which has them
    for member in members:
        member.hang_up()
    for member in members:
        member.wait()


def answers_of(
    members: Sequence[Member], meeting: Meeting | None, timeout: float
) -> list[Outcome[Any]]:
    """The answers of all, before which they may ask."""
    waiting = dict(enumerate(members))
    outcomes: list[Outcome[Any]] = [Outcome() for _ in members]
    # Until when each has to say something; those that wait for a sum need not.
    due = dict.fromkeys(waiting, time.monotonic() + timeout)
    try:
        while waiting:
            first_due = min(due, key=due.__getitem__)
            left = due[first_due] - time.monotonic()
            if left <= 0:
                raise waiting[first_due].overdue()
            for which in _first_to_speak(waiting, min(left, timeout)):
                member = waiting[which]
                answer = member.receive()
                if isinstance(answer, Ask):
                    _answer(member, _answer_to(answer))
                    _postpone(due, which, timeout)
                elif isinstance(answer, Sum):
                    assert meeting is not None
                    due[which] = math.inf
                    tell = partial(_tell_sum, member, partial(_postpone, due, which, timeout))
                    meeting.bring(member.number, answer.own, answer.finish, tell)
                else:
                    if isinstance(answer, Error):
                        outcomes[which].error = as_exception(answer)
                    else:
                        outcomes[which].value = answer
                    del waiting[which], due[which]
                    if meeting is not None:
                        meeting.leave()
    except BaseException as error:
        if meeting is not None:
            meeting.fail(error)
        raise
    return outcomes


def _answer(member: Member, answer: object) -> None:
    """Tell a replica what it has asked for; if that fails, it is what it raises."""
    try:
        member.send(Packed(answer))
    except ReplicaLost:
        raise
    except Exception as error:
        member.send(Packed(as_error(error)._replace(traceback="")))


def _answer_to(question: Ask) -> object:
    """What a replica is told that asks this."""
    try:
        return question.function(*question.arguments)
    except Exception as error:  # it is raised there
        return as_error(error)._replace(traceback="")


def _postpone(due: dict[int, float], which: int, timeout: float) -> None:
    """What is due of a replica is due from now on."""
    due[which] = time.monotonic() + timeout


def _tell_sum(member: Member, is_told: Callable[[], None], over: Round) -> None:
    """Tell a replica what all have added up to."""
    answer: object = over.total
    if over.error is not None:
        if not isinstance(over.error, Exception):
            return  # who is interrupted ends it
        answer = as_error(over.error)._replace(traceback="")
    is_told()
    with contextlib.suppress(ReplicaLost):  # who listens to it will notice
        _answer(member, answer)


def _first_to_speak(members: Mapping[int, Member], seconds: float) -> list[int]:
    """Wait until some of ``members`` have said something, or have ended; return their numbers.

    There are none if that many seconds have passed.
    """
    poll = select.poll()
    numbers = {member.fileno(): number for number, member in members.items()}
    for descriptor in numbers:
        poll.register(descriptor, select.POLLIN)
    return sorted(numbers[descriptor] for descriptor, _ in poll.poll(1000 * seconds))
