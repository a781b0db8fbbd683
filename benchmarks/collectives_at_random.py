"""Collectives drawn at random, the same on every rank, whose every value is checked."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.comm.group import SharedMemoryGroup

_SIZES = (1, 7, 300, 5_000, 40_000, 300_000, 700_000)
_DTYPES = (torch.float32, torch.float64, torch.int64)


class WrongValue(AssertionError):
    """A collective came back with something that it should not have."""


def given(rank: int, step: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` puts in: small whole numbers, of which every sum is exact."""
    return ((torch.arange(numel) + 7 * rank + step) % 97).to(dtype)


class _Draw:
    """What all ranks have drawn for a step."""

    def __init__(self, step: int, rng: random.Random) -> None:
        self.step = step
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.numel = rng.choice(_SIZES)
        self.dtype = rng.choice(_DTYPES)
        self.root = rng.randrange(self.size)
        self.in_place = rng.random() < 0.3
        self.is_async = rng.random() < 0.3

    def of(self, rank: int) -> torch.Tensor:
        return given(rank, self.step, self.numel, self.dtype)

    @property
    def everyone(self) -> list[torch.Tensor]:
        return [self.of(rank) for rank in range(self.size)]

    def mine(self) -> torch.Tensor:
        group = dist.group.WORLD
        if self.in_place and isinstance(group, SharedMemoryGroup):
            return group.empty(self.numel, dtype=self.dtype).copy_(self.of(self.rank))
        return self.of(self.rank)

    def total(self) -> torch.Tensor:
        return torch.stack(self.everyone).sum(0).to(self.dtype)

    def check(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if not torch.equal(got, expected):
            wrong = (got != expected).sum().item()
            raise WrongValue(f"{what}, step {self.step}, {self.numel} elements: {wrong} are wrong")


def _all_reduce(draw: _Draw) -> None:
    tensor = draw.mine()
    work = dist.all_reduce(tensor, async_op=draw.is_async)
    if work is not None:
        work.wait()
    draw.check(tensor, draw.total(), "all_reduce")


def _several_at_once(draw: _Draw) -> None:
    tensors = [draw.mine() for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        draw.check(tensor, draw.total(), "asynchronous all_reduce")


def _max(draw: _Draw) -> None:
    tensor = draw.mine()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    draw.check(tensor, torch.stack(draw.everyone).amax(0), "all_reduce of MAX")


def _broadcast(draw: _Draw) -> None:
    tensor = draw.mine()
    dist.broadcast(tensor, src=draw.root)
    draw.check(tensor, draw.of(draw.root), "broadcast")


def _reduce(draw: _Draw) -> None:
    tensor = draw.mine()
    dist.reduce(tensor, dst=draw.root)
    if draw.rank == draw.root:
        draw.check(tensor, draw.total(), "reduce")


def _all_gather(draw: _Draw) -> None:
    tensor = draw.mine()
    outputs = [torch.empty_like(tensor) for _ in range(draw.size)]
    dist.all_gather(outputs, tensor)
    draw.check(torch.stack(outputs), torch.stack(draw.everyone), "all_gather")


def _gather(draw: _Draw) -> None:
    tensor, is_root = draw.mine(), draw.rank == draw.root
    outputs = [torch.empty_like(tensor) for _ in range(draw.size)] if is_root else None
    dist.gather(tensor, outputs, dst=draw.root)
    if outputs is not None:
        draw.check(torch.stack(outputs), torch.stack(draw.everyone), "gather")


def _scatter(draw: _Draw) -> None:
    output = torch.empty(draw.numel, dtype=draw.dtype)
    dist.scatter(output, draw.everyone if draw.rank == draw.root else None, src=draw.root)
    draw.check(output, draw.of(draw.rank), "scatter")


def _reduce_scatter(draw: _Draw) -> None:
    output = torch.empty(draw.numel, dtype=draw.dtype)
    dist.reduce_scatter(output, [draw.of(draw.rank + part) for part in range(draw.size)])
    expected = sum(draw.of(rank + draw.rank) for rank in range(draw.size))
    assert isinstance(expected, torch.Tensor)
    draw.check(output, expected, "reduce_scatter")


def _all_to_all(draw: _Draw) -> None:
    numel = -(-draw.numel // draw.size) * draw.size
    draw.numel = numel
    output = torch.empty(numel, dtype=draw.dtype)
    dist.all_to_all_single(output, draw.of(draw.rank))
    each = numel // draw.size
    local = slice(draw.rank * each, (draw.rank + 1) * each)
    draw.check(output, torch.cat([part[local] for part in draw.everyone]), "all_to_all_single")


def _barrier(draw: _Draw) -> None:
    dist.barrier()


def _send(draw: _Draw) -> None:
    receiver = (draw.root + 1) % draw.size
    if draw.rank == draw.root:
        dist.send(draw.mine(), receiver, tag=draw.step)
    elif draw.rank == receiver:
        tensor = torch.empty(draw.numel, dtype=draw.dtype)
        dist.recv(tensor, draw.root, tag=draw.step)
        draw.check(tensor, draw.of(draw.root), "recv")


def _ring(draw: _Draw) -> None:
    tensor = torch.empty(draw.numel, dtype=draw.dtype)
    before, after = (draw.rank - 1) % draw.size, (draw.rank + 1) % draw.size
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, draw.mine(), after), dist.P2POp(dist.irecv, tensor, before)]
    ):
        work.wait()
    draw.check(tensor, draw.of(before), "batch_isend_irecv")


_KINDS: tuple[Callable[[_Draw], None], ...] = (
    _all_reduce,
    _several_at_once,
    _max,
    _broadcast,
    _reduce,
    _all_gather,
    _gather,
    _scatter,
    _reduce_scatter,
    _all_to_all,
    _barrier,
    _send,
    _ring,
)


def random_step(step: int, rng: random.Random) -> None:
    """Call what ``rng``, in the same state on every rank, draws.

    Raises:
        WrongValue: If a result isn't what it should be.
        CollectiveFailed: If the ranks could not carry it out.
    """
    draw = _Draw(step, rng)
    rng.choice(_KINDS)(draw)
