"""A replica's process, as the caller has it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.comm.shm.lines import shut_down
from lockstep.errors import ReplicaLost
from lockstep.nn.replicas.wire import Packed, Wire
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

    def send(self, packed: Packed) -> None:
        """Send it something.

        Raises:
            ReplicaLost: If the process has ended.
        """
        try:
            self._wire.send_packed(packed)
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> Any:
        """What it says.

        Raises:
            ReplicaLost: If the process has ended.
        """
        try:
            return self._wire.receive()
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


def first_to_speak(members: Mapping[int, Member]) -> list[int]:
    """Wait until some of ``members`` have said something, or have ended; return their numbers."""
    poll = select.poll()
    numbers = {member.fileno(): number for number, member in members.items()}
    for descriptor in numbers:
        poll.register(descriptor, select.POLLIN)
    return sorted(numbers[descriptor] for descriptor, _ in poll.poll())
