"""Which gradients have come in a backward, and the facts about it that ranks exchange."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist

from lockstep.comm import broadcast_tensors

# The state of a gradient in one backward: its bucket waits for it, or doesn't since the backward
# won't compute it (it may come nevertheless), or it has come. Numbers and not an Enum, as each
# gradient of each step passes here.
AWAITED, UNUSED, READY = 0, 1, 2
# The number of ranks on which the backward failed, and the sum of their numbers.
_NUM_FAILURE_FACTS = 2


class ReadyState:
    """Which gradients have come in a backward, by their positions in the order in which they come.

    Most come in order, and many are told at once. Sparse ones, for which no bucket waits, are last.

    Attributes:
        sparse: The indices of parameters whose gradients are sparse.
        num_dense: The number of the other gradients.
        order: The index of the parameter at each position.
        parameters: The parameter at each position.
        of: The position of each parameter, by its ``id()``.
        accumulated: At each position 1 if the gradient has grown since it was last reduced.
            Buckets hold views of this memory.
        states: At each position AWAITED, UNUSED or READY.
        indices: The indices of parameters whose gradients have come, in that order.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], sparse: Collection[int]
    ) -> None:
        self._named = named
        self.sparse = sparse
        self.num_dense = len(named) - len(sparse)
        self.accumulated = bytearray(len(named))
        # Reversed registration order is a good guess: backward ends where forward began.
        dense = [index for index in reversed(range(len(named))) if index not in sparse]
        self.order = [*dense, *sparse]
        self.rearrange(dense)

    def reset(self) -> None:
        """No gradient has come."""
        self.states = bytearray(self.num_dense) + bytes([UNUSED]) * len(self.sparse)
        self.indices: list[int] = []
        self._next_position = 0

    def rearrange(self, dense: Iterable[int]) -> None:
        """Put the gradients that aren't sparse into the order ``dense``, by index."""
        accumulated = dict(zip(self.order, self.accumulated, strict=True))
        self.order[: self.num_dense] = dense
        self.accumulated[:] = bytes(accumulated[index] for index in self.order)
        self.parameters = [self._named[index][1] for index in self.order]
        self.of = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        self.reset()

    def name(self, position: int) -> str:
        """Return the name of the parameter at ``position``."""
        return self._named[self.order[position]][0]

    def order_of_rank_0(self, own: Sequence[int], group: dist.ProcessGroup) -> list[int]:
        """Return the order, by index, in which gradients came on rank 0; all ranks must call it."""
        missing = sorted(set(self.order) - set(own), reverse=True)
        order = torch.tensor([*own, *missing], device=self.parameters[0].device)
        broadcast_tensors(group, [order])
        return [int(index) for index in order.tolist()]

    def take_over(self, previous: ReadyState) -> None:
        """Mark gradients as accumulated that ``previous``, of other parameters, has not reduced."""
        for position, parameter in enumerate(self.parameters):
            if id(parameter) in previous.of:
                self.accumulated[position] = previous.accumulated[previous.of[id(parameter)]]
            elif parameter.grad is not None:
                self.accumulated[position] = 1

    def next_positions(self, parameters: Sequence[torch.Tensor]) -> range | None:
        """Return the positions of ``parameters`` if they are the next ones, and all awaited."""
        first, last = self._next_position, self._next_position + len(parameters)
        if (
            last <= self.num_dense
            and all(map(operator.is_, parameters, self.parameters[first:last]))
            and not any(self.states[first:last])
        ):
            return range(first, last)
        return None

    def mark_ready(self, positions: range) -> None:
        """The gradients at ``positions`` have come."""
        first, last = positions.start, positions.stop
        self._next_position = last
        self.states[first:last] = bytes([READY]) * len(positions)
        self.accumulated[first:last] = b"\1" * len(positions)
        self.indices += self.order[first:last]

    def missing(self) -> list[int]:
        """Return the indices of parameters whose gradients haven't come."""
        if self.states.count(READY) == len(self.states):  # as after most backwards
            return []
        states = zip(self.order, self.states, strict=True)
        return sorted(index for index, state in states if state != READY)


def num_facts(num_parameters: int) -> int:
    """Return the number of elements that the facts take behind the last bucket."""
    return num_parameters + _NUM_FAILURE_FACTS


def write_facts(tail: torch.Tensor, accumulated: bytearray, failed_rank: int | None) -> None:
    """Write which gradients this rank adds, or that its backward has failed: then it adds none."""
    used, failures = tail[:-_NUM_FAILURE_FACTS], tail[-_NUM_FAILURE_FACTS:]
    failures.zero_()
    if failed_rank is not None:
        used.zero_()
        failures.copy_(torch.tensor([1, failed_rank]))
    elif all(accumulated):
        used.fill_(1)
    else:
        used.copy_(torch.tensor(list(accumulated), dtype=used.dtype))


def used_by_any(tail: torch.Tensor) -> list[float]:
    """Return at each position more than 0 if any rank added a gradient. It waits for a GPU."""
    used: list[float] = tail[:-_NUM_FAILURE_FACTS].tolist()
    return used


def failed_ranks(tail: torch.Tensor, divisor: int) -> tuple[int, int]:
    """Return the number of ranks on which the backward failed, and their sum; (0, 0) on a GPU.

    Reading it would wait for the GPU. There, a rank whose backward has failed sends NaN or, to a
    communication hook, which may remember it, 0. The sums of ``tail`` were divided by ``divisor``.
    """
    if tail.device.type != "cpu":
        return 0, 0
    facts = tail[-_NUM_FAILURE_FACTS:]
    number, ranks = (facts.real if facts.is_complex() else facts).tolist()
    return round(number * divisor), round(ranks * divisor)
