"""The measuring ranks: contenders take turns, and the time of the slowest rank counts.

Note [The time of a call]: in training, a rank writes gradients and then sends them, so no other
rank's cache holds them. Therefore every rank writes its whole buffer before each call, which isn't
counted. Above ``_BACK_TO_BACK_BYTES``, each call follows a barrier. Its time runs from the first
begin on any rank to the last end, by the clock of their host: a rank that started late, as there
are fewer cores than ranks, must not seem quick. Smaller calls would take less time than barriers
vary by, so writes and calls follow each other, and the time is what the slowest rank spent in its
calls.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import (
    Collectives,
    SharedMemoryGroup,
    Signature,
    reduction_for,
    register_backends,
)
from lockstep.deadline import Deadline
from lockstep.errors import SharedMemoryFull
from lockstep.world import World

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")

# The contenders. BOUND is a lower bound on the time of an all-reduce: its passes over memory.
GLOO, SHM, IN_PLACE, MPI, BOUND = "gloo", "shm", "shm in place", "mpi", "bound"
# Pairs whose times are compared, the slower one first.
_RATIOS = ((GLOO, SHM), (GLOO, IN_PLACE), (MPI, IN_PLACE), (IN_PLACE, BOUND))
UNITS = ("B", "KiB", "MiB", "GiB")

_BACK_TO_BACK_BYTES = 64 * 1024
_WARM_UP_CALLS = 3
_SECONDS_PER_TURN = 0.03
_MAX_CALLS_PER_TURN = 300
_TIMEOUT_SECONDS = 300.0

# From this size on, memory bandwidth decides, and the bound is measured.
_BOUND_FROM_BYTES = 2**20
# Each rank's block of this size fits into a core's own cache.
_BLOCK_NUMEL = 64 * 1024

_SMALL_CALL_BYTES = 1024
_ARRIVAL_BYTES = 64  # about those of the message by which a rank says that it has arrived


@dataclass(frozen=True)
class Workload:
    """What one set of ranks measures."""

    operations: tuple[str, ...]
    num_bytes: tuple[int, ...]  # the sizes of the tensor
    rounds: int  # the number of turns of each contender


class Quartiles(NamedTuple):
    """The median and the quartiles of several values."""

    median: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles; of a single value, that value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)


@dataclass(frozen=True)
class Case:
    """The times of one operation, for one tensor size and one number of ranks."""

    operation: str
    num_ranks: int
    num_bytes: int
    seconds: dict[str, list[float]]  # by contender, per call in each round

    def ratio(self, slow: str, fast: str) -> Quartiles | None:
        """Summarize ``slow / fast`` of each round; None unless both were measured."""
        if slow not in self.seconds or fast not in self.seconds:
            return None
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return summarize([a / b for a, b in pairs])

    def ratios(self) -> dict[str, Quartiles]:
        """All ratios of which both times were measured, by name."""
        ratios = {f"{slow} / {fast}": self.ratio(slow, fast) for slow, fast in _RATIOS}
        return {name: ratio for name, ratio in ratios.items() if ratio}

    def bandwidth(self) -> float | None:
        """Bytes per second that all ranks together read and wrote while the bound was measured."""
        if BOUND not in self.seconds:
            return None
        # Each rank reads its share from every rank's buffer, and writes it to every rank's buffer.
        return 2 * self.num_ranks * self.num_bytes / summarize(self.seconds[BOUND]).median

    def as_data(self) -> dict[str, object]:
        """All times, and the figures that follow from them, for JSON."""
        return asdict(self) | {
            "summary": {name: summarize(times)._asdict() for name, times in self.seconds.items()},
            "ratios": {name: ratio._asdict() for name, ratio in self.ratios().items()},
            "bandwidth_bytes_per_second": self.bandwidth(),
        }


@dataclass(frozen=True)
class Stage:
    """One part of a small call: its seconds per call in each round."""

    name: str
    seconds: list[float]
    within: str = ""  # the name of the part around it


@dataclass(frozen=True)
class SmallCall:
    """The seconds per call in each round, of a call that moves few bytes, and of its parts."""

    num_ranks: int
    num_bytes: int
    whole: list[float]
    parts: list[Stage]


@dataclass
class Report:
    """Measurements: those of one set of ranks or, with facts of the machine, all of them."""

    rounds: int
    cases: list[Case] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # a line with the reason for each
    small_calls: list[SmallCall] = field(default_factory=list)
    mpi: str = ""  # the name and version of the MPI library
    machine: dict[str, object] = field(default_factory=dict)

    def as_data(self) -> dict[str, object]:
        """All results, for JSON; times are in seconds."""
        first = {"benchmark": "collectives", "dtype": "float32", "machine": self.machine}
        return {**first, **asdict(self), "cases": [case.as_data() for case in self.cases]}


def format_size(num_bytes: int) -> str:
    """``65536`` as ``"64 KiB"``: in the largest unit that leaves a whole number."""
    exponent = max(i for i in range(len(UNITS)) if num_bytes % 1024**i == 0)
    return f"{num_bytes // 1024**exponent} {UNITS[exponent]}"


# An implementation of an operation: a write to its buffer, which isn't timed, and the timed call.
Contender = tuple[Callable[[], object], Callable[[], object]]


class MeasuringRanks(NamedTuple):
    """The ranks that measure together; ``slowest`` returns the elementwise maximum over them."""

    rank: int
    size: int
    barrier: Callable[[], object]
    slowest: Callable[[list[float]], list[float]]


def measure(world: World, plan: Workload) -> Report:
    """Measure ``plan`` on every rank of ``world``, which must all call it; all return the same."""
    register_backends()
    gloo, shm = dist.new_group(backend="gloo"), dist.new_group(backend=SHM)
    assert isinstance(gloo, dist.ProcessGroup)
    assert isinstance(shm, SharedMemoryGroup)

    def slowest(seconds: list[float]) -> list[float]:
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=shm)
        return [float(value) for value in values]

    ranks = MeasuringRanks(shm.rank(), shm.size(), partial(dist.barrier, shm), slowest)
    report = Report(plan.rounds)
    for operation in plan.operations:
        for num_bytes in plan.num_bytes:
            what = f"{operation}, {ranks.size} ranks, {format_size(num_bytes)}"
            report_progress(ranks.rank, what)
            shared = _room_or_reason(num_bytes, gloo, shm)
            if isinstance(shared, str):
                report.skipped.append(f"{what}: {shared}")
                continue
            contenders = _contenders(operation, shared, gloo, shm)
            seconds = take_turns(ranks, contenders, num_bytes, plan.rounds)
            # Their memory is needed for the next size.
            del contenders, shared
            report.cases.append(Case(operation, ranks.size, num_bytes, seconds))
    if "all_reduce" in plan.operations:
        report_progress(ranks.rank, f"all_reduce, {ranks.size} ranks, the parts of a small call")
        report.small_calls.append(_measure_small_call(ranks, shm, plan.rounds))
    return report


def report_progress(rank: int, what: str) -> None:
    """Say on standard error, on rank 0 alone, what is being measured."""
    if rank == 0:
        print(f"measuring {what}", file=sys.stderr, flush=True)


def _room_or_reason(
    num_bytes: int, gloo: dist.ProcessGroup, shm: SharedMemoryGroup
) -> torch.Tensor | str:
    """A float32 tensor in shared memory, or, if any rank lacks memory for it, the reason."""
    reasons = [""] * shm.size()
    try:
        shared, reason = shm.empty(num_bytes // 4, dtype=torch.float32), ""
    except SharedMemoryFull as error:
        shared, reason = torch.empty(0), str(error)
    dist.all_gather_object(reasons, reason, group=gloo)
    return next((why for why in reasons if why), shared)


def take_turns(
    ranks: MeasuringRanks, contenders: Mapping[str, Contender], num_bytes: int, rounds: int
) -> dict[str, list[float]]:
    """Return each contender's seconds per call in every round; see Note [The time of a call].

    All ranks must call it, and all return the same.
    """
    turn = partial(_turn, ranks, apart=num_bytes > _BACK_TO_BACK_BYTES)
    num_calls: dict[str, int] = {}
    for name, contender in contenders.items():
        turn(contender, _WARM_UP_CALLS)  # the first use of its memory takes longest
        wanted = int(_SECONDS_PER_TURN / turn(contender, _WARM_UP_CALLS))
        num_calls[name] = max(1, min(_MAX_CALLS_PER_TURN, wanted))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = deque(contenders)
    for _ in range(rounds):
        for name in names:
            seconds[name].append(turn(contenders[name], num_calls[name]))
        names.rotate(-1)  # the first one meets another state of the machine than the last
    return seconds


def _turn(ranks: MeasuringRanks, contender: Contender, calls: int, apart: bool) -> float:
    (write, call), begins, ends = contender, [], []
    ranks.barrier()
    for _ in range(calls):
        write()
        if apart:
            ranks.barrier()
        begins.append(time.perf_counter())
        call()
        ends.append(time.perf_counter())
        if apart:
            # Otherwise the next write would take a core from a rank that is still in its call.
            ranks.barrier()
    if not apart:
        return ranks.slowest([(sum(ends) - sum(begins)) / calls])[0]
    last_ends, first_begins = ranks.slowest(ends), ranks.slowest([-begin for begin in begins])
    return (sum(last_ends) + sum(first_begins)) / calls


def _contenders(
    operation: str, shared: torch.Tensor, gloo: dist.ProcessGroup, shm: SharedMemoryGroup
) -> dict[str, Contender]:
    """The implementations of ``operation``; all ranks must call this alike."""

    def contender(whole: torch.Tensor, group: dist.ProcessGroup) -> Contender:
        parts = list(whole.chunk(group.size()))
        # This rank's part of a gathered or scattered tensor is a tensor by itself.
        part = torch.empty_like(parts[group.rank()])
        call: Callable[[], object] = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "broadcast": partial(dist.broadcast, whole, group_src=0, group=group),
            "all_gather": partial(dist.all_gather, parts, part, group=group),
            "reduce_scatter": partial(dist.reduce_scatter, part, parts, group=group),
        }[operation]
        written = part if operation == "all_gather" else whole
        return partial(written.fill_, 1.0), call

    ordinary = torch.empty(shared.numel())
    found = {
        GLOO: contender(ordinary, gloo),
        SHM: contender(ordinary, shm),
        IN_PLACE: contender(shared, shm),
    }
    if operation == "all_reduce" and shared.nbytes >= _BOUND_FROM_BYTES:
        found[BOUND] = partial(shared.fill_, 1.0), _passes(shared, shm)
    return found


@torch.inference_mode()
def _passes(shared: torch.Tensor, shm: SharedMemoryGroup) -> Callable[[], None]:
    """The passes over memory of an all-reduce in place, without any synchronisation.

    Each rank reads its share of the elements from every rank's buffer, and writes the sum to every
    rank's buffer: the least that an all-reduce needs in which each element is summed once.
    """
    transport = shm.transport
    address = transport.find(shared)
    assert address is not None
    addresses = transport.exchange(Signature("bound"), address, Deadline(_TIMEOUT_SECONDS))
    buffers = [
        shared
        if rank == transport.rank
        else transport.at(rank, address, shared.dtype, shared.numel())
        for rank, address in enumerate(addresses)
    ]
    shares = [buffer.chunk(shm.size())[shm.rank()] for buffer in buffers]
    blocks = list(zip(*(share.split(_BLOCK_NUMEL) for share in shares), strict=True))

    @torch.inference_mode()
    def run() -> None:
        for target, *others in blocks:
            for other in others:
                torch.add(target, other, out=target)
            for other in others:
                other.copy_(target)

    return run


def _measure_small_call(ranks: MeasuringRanks, shm: SharedMemoryGroup, rounds: int) -> SmallCall:
    """Measure a small all-reduce, and each of its parts by itself, in turns with the whole."""
    tensor = torch.ones(_SMALL_CALL_BYTES // 4)
    write = partial(tensor.fill_, 1.0)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    message, received = bytes(_ARRIVAL_BYTES), bytearray(8192)

    def call_system() -> None:
        """The system calls of a barrier at which no rank has to wait."""
        for _ in range(ranks.size - 1):
            here.send(message)
            there.recv_into(received, 0, socket.MSG_DONTWAIT)

    with here, there:
        calls = {"sockets": call_system, **_parts_of_all_reduce(tensor, shm)}
        contenders = {name: (write, call) for name, call in calls.items()}
        seconds = take_turns(ranks, contenders, _SMALL_CALL_BYTES, rounds)

    def part(name: str, whole: str, *less: str, within: str = "") -> Stage:
        columns = zip(*(seconds[each] for each in (whole, *less)), strict=True)
        return Stage(name, [value - sum(rest) for value, *rest in columns], within)

    meeting = "meeting: all tell all that they are here, and wait until all are"
    sockets = "its system calls: a send to, and a receive from, each"
    rest = "the rest of the algorithm, and waiting for the slower rank"
    parts = [
        part("torch.distributed's all_reduce(), around the group", "whole", "group"),
        part("the group: options, queue, Work", "group", "algorithm"),
        part("copying the tensor to shared memory", "copy"),
        part(meeting, "meeting"),
        part(sockets, "sockets", within=meeting),
        part("adding up", "sum"),
        part(rest, "algorithm", "copy", "meeting", "sum"),
    ]
    return SmallCall(ranks.size, _SMALL_CALL_BYTES, seconds["whole"], parts)


@torch.inference_mode()
def _parts_of_all_reduce(
    tensor: torch.Tensor, shm: SharedMemoryGroup
) -> dict[str, Callable[[], object]]:
    transport, options = shm.transport, dist.AllreduceOptions()
    options.asyncOp = False
    reduction = reduction_for(dist.ReduceOp.SUM, tensor.dtype)
    signature = Signature("all_reduce", tensor.dtype, tensor.shape, reduction.name)
    address, slot = transport.stage(tensor.dtype, tensor.numel())
    addresses = transport.exchange(signature, address, Deadline(_TIMEOUT_SECONDS))

    def algorithm() -> None:
        Collectives(transport, signature, Deadline(_TIMEOUT_SECONDS)).all_reduce(tensor, reduction)

    def copy() -> None:
        transport.stage(tensor.dtype, tensor.numel())
        slot.copy_(tensor)

    def add_up() -> None:
        buffers = [
            transport.at(rank, address, tensor.dtype, tensor.numel())
            for rank, address in enumerate(addresses)
        ]
        reduction.into(tensor, buffers)

    parts = {"algorithm": algorithm, "copy": copy, "sum": add_up}
    return {
        "whole": partial(dist.all_reduce, tensor, group=shm),
        "group": lambda: shm.allreduce([tensor], options).wait(),
        "meeting": partial(transport.exchange, signature, 0, Deadline(_TIMEOUT_SECONDS)),
        **{name: torch.inference_mode()(part) for name, part in parts.items()},
    }
