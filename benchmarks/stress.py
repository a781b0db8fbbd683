"""Random collectives from several threads over overlapping groups, every result checked.

Each rank is a process, or with ``--ranks threads`` a thread. In each, every thread has a group of
its own over some of the ranks; ranks that share one draw the same calls from the same seed.

    python -m benchmarks.stress --calls 10000
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.threads.transport import join

SIZE = 4
MEMBERS = ((0, 1, 2, 3), (0, 1), (1, 2, 3), (2, 3), (0, 3), (0, 2, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.bool)
TIMEOUT = timedelta(seconds=60)


class Draw(NamedTuple):
    """One call, the same on all ranks of its group."""

    operation: str
    dtype: torch.dtype
    numel: int
    root: int
    is_async: bool
    is_shared: bool
    seed: int


def draw_call(draw: random.Random, size: int) -> Draw:
    return Draw(
        operation=draw.choice(sorted(OPERATIONS)),
        dtype=draw.choice(DTYPES),
        numel=draw.choice([0, 1, draw.randrange(300), draw.randrange(30_000), 400_000])
        if draw.random() < 0.98
        else 1_500_000,
        root=draw.randrange(size),
        is_async=draw.random() < 0.4,
        is_shared=draw.random() < 0.3,
        seed=draw.getrandbits(30),
    )


def values(call: Draw, rank: int, numel: int) -> torch.Tensor:
    """What ``rank`` gives; sums of them are exact in every dtype."""
    row = (torch.arange(numel) * (rank + 1) + call.seed) % 7
    return row.to(call.dtype)


def _memory(group: SharedMemoryGroup, call: Draw, filled_with: torch.Tensor) -> torch.Tensor:
    if not call.is_shared:
        return filled_with
    return group.empty(filled_with.numel(), dtype=call.dtype).copy_(filled_with)


# Each starts its call, and gives the work with what it checks afterwards: what came, and what
# should have. The last is a function, so that it costs nothing while others wait.
Started = tuple[dist.Work, Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]]


def _all_reduce(group: SharedMemoryGroup, call: Draw) -> Started:
    tensor = _memory(group, call, values(call, group.rank(), call.numel))

    def check() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(tensor, _sum([values(call, r, call.numel) for r in range(group.size())]))]

    return group.allreduce(tensor), check


def _broadcast(group: SharedMemoryGroup, call: Draw) -> Started:
    tensor = _memory(group, call, values(call, group.rank(), call.numel))
    work = group.broadcast(tensor, call.root)
    return work, lambda: [(tensor, values(call, call.root, call.numel))]


def _reduce(group: SharedMemoryGroup, call: Draw) -> Started:
    rank, size = group.rank(), group.size()
    tensor = values(call, rank, call.numel)

    def check() -> list[tuple[torch.Tensor, torch.Tensor]]:
        everyone = [values(call, r, call.numel) for r in range(size)]
        return [(tensor, _sum(everyone) if rank == call.root else everyone[rank])]

    return group.reduce(tensor, call.root), check


def _all_gather(group: SharedMemoryGroup, call: Draw) -> Started:
    size = group.size()
    numels = [call.numel // (1 + (r + call.seed) % 3) for r in range(size)]
    outputs = [torch.empty(n, dtype=call.dtype) for n in numels]
    work = group.allgather(outputs, values(call, group.rank(), numels[group.rank()]))
    return work, lambda: [(outputs[r], values(call, r, numels[r])) for r in range(size)]


def _reduce_scatter(group: SharedMemoryGroup, call: Draw) -> Started:
    rank, size = group.rank(), group.size()
    numel = call.numel // size
    output = torch.empty(numel, dtype=call.dtype)
    work = group.reduce_scatter_single(output, values(call, rank, numel * size))

    def check() -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = [values(call, r, numel * size)[rank * numel :][:numel] for r in range(size)]
        return [(output, _sum(parts))]

    return work, check


def _all_to_all(group: SharedMemoryGroup, call: Draw) -> Started:
    rank, size = group.rank(), group.size()
    # What rank i has for rank j.
    rows = [
        [(call.numel // size) // (1 + (i + j + call.seed) % 4) for j in range(size)]
        for i in range(size)
    ]
    incoming = [row[rank] for row in rows]
    output = torch.empty(sum(incoming), dtype=call.dtype)
    mine = values(call, rank, sum(rows[rank]))
    work = group.all_to_all_single(output, mine, incoming, rows[rank])

    def check() -> list[tuple[torch.Tensor, torch.Tensor]]:
        sent = [values(call, i, sum(row)).split(row)[rank] for i, row in enumerate(rows)]
        return list(zip(output.split(incoming), sent, strict=True))

    return work, check


def _gather(group: SharedMemoryGroup, call: Draw) -> Started:
    rank, size = group.rank(), group.size()
    count = size if rank == call.root else 0
    outputs = [torch.empty(call.numel, dtype=call.dtype) for _ in range(count)]
    work = group.gather(outputs, values(call, rank, call.numel), call.root)
    return work, lambda: [(outputs[r], values(call, r, call.numel)) for r in range(count)]


def _scatter(group: SharedMemoryGroup, call: Draw) -> Started:
    rank, size = group.rank(), group.size()
    count = size if rank == call.root else 0
    output = torch.empty(call.numel, dtype=call.dtype)
    work = group.scatter(output, [values(call, r, call.numel) for r in range(count)], call.root)
    return work, lambda: [(output, values(call, rank, call.numel))]


def _ring(group: SharedMemoryGroup, call: Draw) -> Started:
    rank, size = group.rank(), group.size()
    received = torch.empty(call.numel, dtype=call.dtype)
    tag = call.seed % 5
    work = group.recv([received], (rank - 1) % size, tag)
    group.send([values(call, rank, call.numel)], (rank + 1) % size, tag).wait()
    return work, lambda: [(received, values(call, (rank - 1) % size, call.numel))]


def _barrier(group: SharedMemoryGroup, call: Draw) -> Started:
    return group.barrier(), list


OPERATIONS: dict[str, Callable[[SharedMemoryGroup, Draw], Started]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "ring": _ring,
    "barrier": _barrier,
}


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, tensors)


def stress_group(group: SharedMemoryGroup, calls: int, seed: int) -> None:
    """Make ``calls`` calls that ``seed`` decides, some of them under way at once.

    Raises:
        AssertionError: If a result is wrong.
    """
    draw = random.Random(seed)
    under_way: list[tuple[int, Draw, Started]] = []
    for number in range(calls):
        call = draw_call(draw, group.size())
        under_way.append((number, call, OPERATIONS[call.operation](group, call)))
        if call.is_async and len(under_way) < 8:
            continue
        # Which is waited for first, each rank chooses for itself.
        random.Random(seed + number + group.rank()).shuffle(under_way)
        for begun, made, (work, check) in under_way:
            work.wait()
            for got, expected in check():
                assert torch.equal(got, expected), f"call {begun} of seed {seed}: {made}"
        under_way.clear()
    for _, _, (work, _) in under_way:
        work.wait()


def stress_rank(
    make_group: Callable[[str, int, int], SharedMemoryGroup], rank: int, calls: int, seed: int
) -> None:
    """Be one of :data:`SIZE` ranks: a thread for each group that it is in.

    Args:
        make_group: Takes the group's name, this rank's number in it, and its size.
        rank: Which rank.
        calls: How many calls in all groups together.
        seed: Decides them.
    """
    failures: list[BaseException] = []
    each = -(-calls // len(MEMBERS))

    def run(index: int, members: tuple[int, ...]) -> None:
        try:
            group = make_group(f"group-{index}", members.index(rank), len(members))
            try:
                stress_group(group, each, seed + index)
                group.barrier().wait()
            finally:
                group.shutdown()
        except BaseException as error:
            failures.append(error)

    runners = [
        threading.Thread(target=run, args=(index, members))
        for index, members in enumerate(MEMBERS)
        if rank in members
    ]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    if failures:
        raise failures[0]


def stress_process(path: str, rank: int, size: int, calls: int, seed: int) -> None:
    """Be one rank, that is a process."""
    torch.set_num_threads(1)

    def make_group(name: str, position: int, count: int) -> SharedMemoryGroup:
        # A store isn't for several threads at once.
        store = dist.FileStore(f"{path}-{name}", count)
        team = ShmTransport(store, position, count, TIMEOUT.total_seconds())
        return SharedMemoryGroup(team, "shm", TIMEOUT)

    stress_rank(make_group, rank, calls, seed)


def stress_threads(calls: int, seed: int) -> None:
    """Run all ranks as threads of this process."""
    stores: dict[str, dist.Store] = {
        f"group-{index}": dist.HashStore() for index in range(len(MEMBERS))
    }
    failures: list[BaseException] = []

    def make_group(name: str, position: int, count: int) -> SharedMemoryGroup:
        team = join(stores[name], position, count, TIMEOUT.total_seconds())
        return SharedMemoryGroup(team, "threads", TIMEOUT)

    def run(rank: int) -> None:
        try:
            stress_rank(make_group, rank, calls, seed)
        except BaseException as error:
            failures.append(error)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if failures:
        raise failures[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", choices=["processes", "threads"], default="processes")
    arguments = parser.parse_args()
    started = time.monotonic()
    codes: list[int | None] = []
    if arguments.ranks == "threads":
        stress_threads(arguments.calls, arguments.seed)
    else:
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(
                    target=stress_process,
                    args=(f"{folder}/store", rank, SIZE, arguments.calls, arguments.seed),
                )
                for rank in range(SIZE)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            codes = [process.exitcode for process in processes]
    seconds = time.monotonic() - started
    well = not any(codes)
    print(
        f"{arguments.calls} calls in {len(MEMBERS)} groups of {SIZE} ranks ({arguments.ranks}): "
        f"{'all results right' if well else f'exit codes {codes}'}, {seconds:.1f} s"
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
