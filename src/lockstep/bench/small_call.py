"""Where the time of a small all-reduce goes: Python's floor, part by part.

Each part is run by itself, as the whole runs it, and takes turns with the whole.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions

from lockstep.bench.figures import Part, SmallCall
from lockstep.bench.turns import Contender, Ranks, take_turns
from lockstep.comm import Collectives, SharedMemoryGroup, Signature, reduction_for

NUM_BYTES = 1024
_TIMEOUT_SECONDS = 300.0
_ARRIVAL_BYTES = 24  # what a rank tells another when they meet

_WHOLE, _GROUP, _ALGORITHM = "dist.all_reduce", "group.allreduce", "algorithm"
_MEETING, _SOCKETS, _STAGING, _SUM = "meeting", "sockets", "staging", "sum"


def take_apart(ranks: Ranks, shm: SharedMemoryGroup, rounds: int) -> SmallCall:
    """Measure a call and its parts; all ranks must call it."""
    tensor = torch.ones(NUM_BYTES // 4)
    with contextlib.ExitStack() as stack:
        runs = {
            _WHOLE: lambda: dist.all_reduce(tensor, group=shm),
            _GROUP: _group_call(tensor, shm),
            _SOCKETS: stack.enter_context(_socket_calls(ranks.size - 1)),
            **_parts(tensor, shm),
        }
        contenders = [Contender(name, lambda: tensor.fill_(1.0), run) for name, run in runs.items()]
        seconds = take_turns(ranks, contenders, NUM_BYTES, rounds)
    whole, group, algorithm = seconds[_WHOLE], seconds[_GROUP], seconds[_ALGORITHM]
    meeting = "meeting: all tell all that they are here, and wait until all are"
    parts = [
        Part("torch.distributed's all_reduce(), around the group", _minus(whole, group)),
        Part("the group: options, queue, Work", _minus(group, algorithm)),
        Part("copying the tensor to shared memory", seconds[_STAGING]),
        Part(meeting, seconds[_MEETING]),
        Part("its system calls: a send to, and a receive from, each", seconds[_SOCKETS], meeting),
        Part("adding up", seconds[_SUM]),
        Part(
            "the rest of the algorithm, and waiting for the slower rank",
            _minus(algorithm, seconds[_STAGING], seconds[_MEETING], seconds[_SUM]),
        ),
    ]
    return SmallCall(ranks.size, NUM_BYTES, whole, parts)


def _minus(values: list[float], *others: list[float]) -> list[float]:
    return [value - sum(rest) for value, *rest in zip(values, *others, strict=True)]


def _group_call(tensor: torch.Tensor, shm: SharedMemoryGroup) -> Callable[[], object]:
    options = AllreduceOptions()
    options.asyncOp = False
    return lambda: shm.allreduce([tensor], options).wait()


def _parts(tensor: torch.Tensor, shm: SharedMemoryGroup) -> dict[str, Callable[[], object]]:
    team = shm._transport
    reduction = reduction_for(dist.ReduceOp.SUM, tensor.dtype)
    call = Signature("all_reduce", tensor.dtype, tensor.shape, reduction.name)
    with torch.inference_mode():
        place, slot = team.stage(tensor.dtype, tensor.numel())
        places = team.exchange(call, place, _TIMEOUT_SECONDS)

    def algorithm() -> None:
        with torch.inference_mode():
            Collectives(team, call, _TIMEOUT_SECONDS).all_reduce(tensor, reduction)

    def staging() -> None:
        with torch.inference_mode():
            team.stage(tensor.dtype, tensor.numel())
            slot.copy_(tensor)

    def add_up() -> None:
        with torch.inference_mode():
            everyone = [
                team.at(rank, place, tensor.dtype, tensor.numel())
                for rank, place in enumerate(places)
            ]
            reduction.into(tensor, everyone)

    return {
        _ALGORITHM: algorithm,
        _STAGING: staging,
        _MEETING: lambda: team.exchange(call, 0, _TIMEOUT_SECONDS),
        _SUM: add_up,
    }


@contextlib.contextmanager
def _socket_calls(num_peers: int) -> Iterator[Callable[[], None]]:
    """What a rank asks of the kernel in a meeting at which nobody has to wait."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    message, received = bytes(_ARRIVAL_BYTES), bytearray(8192)

    def run() -> None:
        for _ in range(num_peers):
            here.send(message)
            there.recv_into(received, 0, socket.MSG_DONTWAIT)

    with here, there:
        yield run
