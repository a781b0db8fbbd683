"""Sums of gradients over the ranks, some of which begin while a backward computes others.

Note [Chunks that are sent early]: over groups whose collectives go on while the program computes,
a chunk of gradients is sent when the backward of this rank's last shard has computed it. Ranks send
them in one order, before they exchange the facts of the step, and those that weren't ready at its
end: so each decides by itself when. Whether anything adds to a gradient later isn't known then, as
a shard may have several backwards. If something does on any rank, the facts say so, and that chunk
is sent once more. Which chunks are sent early is known from the step before: those that any rank
had gradients of.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import can_overlap
from lockstep.nn import Number
from lockstep.same_bits.chunks import Chunk, in_chunks
from lockstep.same_bits.in_memory import in_memory
from lockstep.same_bits.messages import Messages, Sent
from lockstep.same_bits.sums import Gradients, cover, shards_of
from lockstep.torch_private import gradient_of

# What is to be added up, for each node of this rank.
Terms = Sequence[Sequence[Gradients]]
_NOTHING_SENT: Mapping[int, torch.Tensor] = {}


class SumOverRanks:
    """Sums over all shards, of the gradients of some parameters, on each of the ranks of a group.

    Where ranks reach each other's memory, each sums some elements of all nodes in place, and writes
    them to all. Else each gets some elements of all nodes from all ranks, and sends them the sum.

    Args:
        group: The ranks.
        num_shards: The number of shards.
        parameters: The parameters.

    Attributes:
        early: What the next step sends before its end; nothing in the first one.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_shards: int, parameters: Sequence[torch.Tensor]
    ) -> None:
        size, root = group.size(), (0, num_shards)
        nodes = [cover(shards_of(rank, size, num_shards), root) for rank in range(size)]
        self._chunks = [*in_chunks(parameters, size)]
        self._num_parameters = len(parameters)
        self._in_memory = in_memory(group, nodes, root)
        self._messages = Messages(group, nodes, root)
        self._can_overlap = can_overlap(group)
        self.early = EarlyChunks(self._messages, parameters, [], set())

    def __call__(
        self,
        terms: Terms,
        used: Sequence[bool],
        divisor: float,
        sent: Mapping[int, torch.Tensor] = _NOTHING_SENT,
    ) -> Gradients:
        """Return the sums of all shards, divided by ``divisor``. Every rank must call it.

        Args:
            terms: This rank's sums; their memory may be used for the result.
            used: Whether any rank has a gradient, by parameter; the others stay without.
            divisor: What to divide by.
            sent: The sums of chunks that were sent early, by their first indices.
        """
        result: Gradients = [None] * self._num_parameters
        mine = terms[0][0]
        for chunk in self._chunks:
            if any(used[index] for index in chunk.indices):
                total = sent.get(chunk.indices[0])
                if total is None:
                    total = self._total(chunk, terms, divisor)
                chunk.take(total, mine, used, result)
        self._note(terms, used)
        return result

    def _total(self, chunk: Chunk, terms: Terms, divisor: float) -> torch.Tensor:
        kind = chunk.dtype, chunk.device
        most = max(each.numel for each in self._chunks if (each.dtype, each.device) == kind)
        in_memory = self._in_memory if chunk.device.type == "cpu" else None
        rows = None if in_memory is None else in_memory.rows(chunk, most)
        if rows is None:
            rows = self._messages.rows(chunk, most)
            fill(chunk, rows, terms)
            return self._messages.total(rows, divisor)
        assert in_memory is not None
        fill(chunk, rows, terms)
        total = in_memory.total(chunk, divisor)
        return self._messages.total(rows[: len(terms)], divisor) if total is None else total

    def _note(self, terms: Terms, used: Sequence[bool]) -> None:
        """Let the next step send early what this one has shown to be used."""
        if self._can_overlap:
            chunks = [each for each in self._chunks if any(used[index] for index in each.indices)]
            last = {at for at, gradient in enumerate(terms[-1][-1]) if gradient is not None}
            self.early = self.early.renewed(chunks, last)


def fill(chunk: Chunk, rows: torch.Tensor, terms: Terms, weight: Number | None = None) -> None:
    """Write this rank's sums to ``rows``; the last shard's gradients are weighted there if need be.

    Of ``terms``, the last one of the last node is that shard's.
    """
    for row, each in zip(rows, terms, strict=False):
        chunk.fill(row, each, weight if each is terms[-1] else None)


class _SentGradients(NamedTuple):
    """Gradients of the last shard that are on their way, and what they were then."""

    weight: Number | None
    gradients: list[torch.Tensor | None]
    versions: list[int | None]


class EarlyChunks:
    """Chunks that are sent while this rank's last shard is computed, in one order on all ranks.

    See Note [Chunks that are sent early].

    Args:
        messages: Sends them.
        parameters: The parameters.
        chunks: The chunks.
        expected: The parameters whose gradients are waited for.
    """

    def __init__(
        self,
        messages: Messages,
        parameters: Sequence[torch.Tensor],
        chunks: Sequence[Chunk],
        expected: set[int],
    ) -> None:
        self._messages, self._parameters, self._chunks = messages, parameters, chunks
        self._expected = expected
        self._memory: dict[int, torch.Tensor] = {}  # by the first index of the chunk
        # Autograd computes gradients of each device in a thread of its own.
        self._lock = threading.Lock()
        # Whether this rank's step has nothing to send in them, while other ranks' may have.
        self._is_void = False
        places = {index: at for at, chunk in enumerate(chunks) for index in chunk.indices}
        self._places = {id(parameters[index]): (index, place) for index, place in places.items()}
        self.open()

    def open(self) -> None:
        """Forget what was sent before: a step begins."""
        self._sent: list[Sent] = []
        self._seen: list[_SentGradients] = []
        self._changed: list[bool] = []
        self._left = deque(self._chunks)
        self._missing = [{*each.indices} & self._expected for each in self._chunks]
        self._terms: Terms = []
        self._events: dict[torch.device, torch.Event] = {}
        self._weight: Callable[[], Number | None] = lambda: None

    def renewed(self, chunks: Sequence[Chunk], expected: set[int]) -> EarlyChunks:
        """Return those of the next step."""
        if [*map(id, chunks)] != [*map(id, self._chunks)]:
            kept = self._memory
            renewed = EarlyChunks(self._messages, self._parameters, chunks, expected)
            firsts = {chunk.indices[0] for chunk in chunks}
            renewed._memory = {first: its for first, its in kept.items() if first in firsts}
            return renewed
        self._expected = expected
        return self

    def voided(self) -> EarlyChunks:
        """Return these, for a step that sums other gradients, to which ranks come alike or not."""
        self._is_void = True
        return self

    def __bool__(self) -> bool:
        """Whether any is sent early."""
        return bool(self._chunks) and not self._is_void

    def begin(self, terms: Terms, weight: Callable[[], Number | None]) -> None:
        """Begin to send: the last shard has its turn.

        Args:
            terms: What is to be added up with its gradients, for each node.
            weight: Returns what these are to be multiplied by, as far as it is known.
        """
        self._terms, self._weight = terms, weight
        # A backward may compute gradients on other streams than that of the sums so far.
        devices = {chunk.device for chunk in self._chunks if chunk.device.type != "cpu"}
        self._events = {
            device: torch.accelerator.current_stream(device).record_event() for device in devices
        }

    def ready(self, parameter: torch.Tensor) -> None:
        """Note that a gradient of the last shard is there."""
        place, gradient = self._places.get(id(parameter)), gradient_of(parameter)
        if place is None or gradient is None or gradient.layout is not torch.strided:
            return
        with self._lock, torch.no_grad():
            self._missing[place[1]].discard(place[0])
            while self._left and not self._missing[len(self._sent)]:
                self._send(self._left.popleft())

    def _send(self, chunk: Chunk) -> None:
        gradients: Gradients = [None] * len(self._parameters)
        for index in chunk.indices:
            gradients[index] = gradient_of(self._parameters[index])
        if (event := self._events.get(chunk.device)) is not None:
            torch.accelerator.current_stream(chunk.device).wait_event(event)
        weight, found = self._weight(), [gradients[index] for index in chunk.indices]
        self._seen.append(_SentGradients(weight, found, [*map(_version_of, found)]))
        *others, last = self._terms
        rows = self._rows(chunk)
        fill(chunk, rows, [*others, [*last, gradients]], weight)
        self._sent.append(self._messages.start(rows))

    def _rows(self, chunk: Chunk) -> torch.Tensor:
        if (first := chunk.indices[0]) not in self._memory:
            self._memory[first] = self._messages.new_rows(chunk)
        return self._memory[first]

    def end_shard(self) -> None:
        """Compare what was sent with the gradients that there are at the end of the last shard."""
        weight = self._weight()
        for chunk, seen in zip(self._chunks, self._seen, strict=False):
            now = [gradient_of(self._parameters[index]) for index in chunk.indices]
            is_same = _are_same(seen.weight, weight) or not any(g is not None for g in now)
            is_same &= all(a is b for a, b in zip(now, seen.gradients, strict=True))
            self._changed.append(not is_same or [*map(_version_of, now)] != seen.versions)
        self._seen = []

    def send_rest(self, terms: Terms | None) -> None:
        """Send the other chunks, at the end of a step; without ``terms``, anything."""
        while self._left:
            chunk = self._left.popleft()
            rows = self._rows(chunk)
            if terms is not None and not self._is_void:
                fill(chunk, rows, terms)
            self._sent.append(self._messages.start(rows))

    def changed(self) -> list[bool]:
        """Return, for each chunk, whether it is to be sent once more."""
        if self._is_void:
            return [True] * len(self._chunks)
        return self._changed + [False] * (len(self._chunks) - len(self._changed))

    def gathered(self, again: Sequence[bool], divisor: float) -> dict[int, torch.Tensor]:
        """Return the sums of chunks that needn't be sent ``again``, by their first indices."""
        started = [
            (chunk.indices[0], sent, self._messages.start_gather(sent, divisor))
            for chunk, sent, is_again in zip(self._chunks, self._sent, again, strict=True)
            if not is_again
        ]
        for sent, is_again in zip(self._sent, again, strict=True):
            if is_again:
                sent.work.wait()
        for _, _, wait in started:
            wait()
        return {first: sent.rows[0] for first, sent, _ in started}

    def drop(self) -> None:
        """Drop what is on its way, as the step has failed: all ranks have sent it."""
        for each in self._sent:
            each.work.wait()


def _are_same(one: Number | None, other: Number | None) -> bool:
    """Whether two weights are the same, as far as the host knows."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return one == other


def _version_of(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None or gradient.is_inference() else gradient._version
