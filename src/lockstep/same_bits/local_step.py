"""A rank's part of a step in shards: what there is while the loop over its shards runs."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.nn import ParallelState, Shard, current_shard, policy_of, set_current_shard
from lockstep.same_bits.between_steps import StepsOfModel
from lockstep.same_bits.buffers import BuffersOfStep
from lockstep.same_bits.facts import ShardFacts
from lockstep.same_bits.late import read
from lockstep.same_bits.sums import Gradients, LocalSums, scale
from lockstep.same_bits.turns import exclusive
from lockstep.torch_private import gradient_of

# As torch's allocator aligns memory.
LINE_BYTES = 64


class LocalStep:
    """Made when the loop begins, and closed at its end, with all of its fields.

    Args:
        state: The parallel model. It has no gradients until :meth:`put_back`.
        num_shards: The number of shards of all ranks.
        shards: Those of this rank.

    Attributes:
        names, parameters: The parameters that are trained.
        buffers: The model's buffers, before the step and after each shard.
        told: What is told to the other ranks of each shard that had a backward, after :meth:`read`.
        early: What is sent to them before the end of the step, if anything.
    """

    def __init__(self, state: ParallelState, num_shards: int, shards: range) -> None:
        module = state.module()
        assert module is not None  # the program holds it
        self._state, self._shards = state, shards
        self._shard: Shard | None = None  # whose turn it is, and the thread that has begun it
        self._thread = threading.current_thread()
        self.told: list[ShardFacts] = []
        self._had_backward: list[Shard] = []
        named = dict(module.named_parameters())
        self.names = [name for name, each in named.items() if each.requires_grad]
        self.parameters = [named[name] for name in self.names]
        self._sums = LocalSums(num_shards, shards)
        self.early = state.context.get(StepsOfModel).early(num_shards, self.parameters)
        self._before: Gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
            if type(parameter) is not nn.Parameter:
                # Its update may be on its way. Nobody waits for another rank in a shard's turn: if
                # that is a thread, it may wait for the turn.
                parameter.detach()
        policies = state.options.broadcast_buffers
        self.buffers = BuffersOfStep(module, lambda name: policy_of(name, policies))
        self._until_end = ExitStack()
        self._until_end.enter_context(state.no_sync())

    def begin_shard(self, shard: Shard) -> None:
        """Begin the turn of ``shard``, from the buffers' values before the step."""
        self._thread = exclusive.begin()
        self._shard = shard
        set_current_shard(shard)
        self.buffers.begin_shard()
        if self.early and shard.number == self._shards.stop - 1:
            self._sums.come_to(shard.number, len(self.parameters))
            self.early.begin(self._sums.terms(), lambda: shard.weight)
            for engine in self._state.engines:
                engine.when_kept = self.early.ready

    def end_shard(self) -> None:
        """End the turn of the shard that has it, if any, and add its gradients."""
        if (shard := self._shard) is None:
            return
        self._end_turn()
        self._refuse_other_parameters(shard)
        if self.early:
            self.early.end_shard()
        gradients = [*map(gradient_of, self.parameters)]
        for parameter in self.parameters:
            parameter.grad = None
        there = [gradient for gradient in gradients if gradient is not None]
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ModelError(
                    f"The gradient of {name!r} is {gradient.layout}, and shards() adds up dense "
                    "ones alone."
                )
        self.buffers.end_shard(shard.number)
        if shard.weight is not None or there:
            self._had_backward.append(shard)
        with torch.no_grad():
            scale(there, shard.weight)
            self._sums.add(shard.number, gradients)

    def _refuse_other_parameters(self, shard: Shard) -> None:
        """Raise if there is a gradient of a parameter that wasn't trained when the loop began."""
        module, known = self._state.module(), {*map(id, self.parameters)}
        assert module is not None
        for name, each in module.named_parameters():
            if id(each) not in known and each.requires_grad and each.grad is not None:
                raise ModelError(
                    f"{name!r} has a gradient after the turn of shard {shard.number}, and was not "
                    "trained, or not there, when the loop over lockstep.shards() began. Unfreeze "
                    "parameters, and put others in place, before the loop."
                )

    def read(self) -> None:
        """Read what devices have computed of this rank's shards: the host waits for it, once.

        Raises:
            ModelError: If a shard has changed a buffer that each rank has for itself.
            ValueError: If a shard has two means of different weights.
        """
        shards = self._had_backward
        values = iter(
            read([*(n for s in shards for n in (*s.weights, s.total)), *self.buffers.unread()])
        )
        for shard in shards:
            weights = [*itertools.islice(values, len(shard.weights))]
            shard.check(weights)
            weight = weights[0] if weights else None
            self.told.append(ShardFacts(shard.number, weight, next(values)))
        self.buffers.take_read([*values])

    def terms(self) -> list[list[Gradients]]:
        """Return what is to be added up over this rank's shards, for each of its largest nodes."""
        with torch.no_grad():
            self._sums.come_to(self._shards.stop, len(self.parameters))
        return self._sums.terms()

    def whole(self) -> Gradients:
        """Return the sum over all shards, which are this rank's."""
        with torch.no_grad():
            return self._sums.whole()

    def close(self) -> None:
        """End the turn of a shard, if one has it, and what lasts as long as the loop."""
        self._end_turn()
        self._until_end.close()

    def _end_turn(self) -> None:
        if self._shard is not None:
            if current_shard() is self._shard:
                set_current_shard(None)
            self._shard = None
            for engine in self._state.engines:
                engine.when_kept = None
            exclusive.end(self._thread)

    def put_back(self, total: Gradients | None = None) -> None:
        """Give parameters the gradients that they had before, with ``total`` added to them."""
        more = total or [None] * len(self.parameters)
        for parameter, before, mean in zip(self.parameters, self._before, more, strict=True):
            if before is not None and mean is not None:
                with torch.no_grad():
                    before.add_(mean)
            parameter.grad = _aligned(mean) if before is None else before


def _aligned(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient that begins at a whole line, as memory for numbers of its own does.

    Autograd may have computed several as views of one memory.
    """
    is_aligned = gradient is None or gradient.data_ptr() % LINE_BYTES == 0
    return gradient if gradient is None or is_aligned else gradient.clone()
