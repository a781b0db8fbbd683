"""``shards()``: a step's batch in shards, with the same bits at any number of ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from lockstep.arguments import as_whole_number, check_module
from lockstep.comm import context_of
from lockstep.errors import ModelError, SplitError
from lockstep.generators import Seeds, mixed
from lockstep.nn import (
    ParallelState,
    Shard,
    backward_sync_of,
    current_shard,
    policy_of,
    set_current_shard,
    state_of,
    watch_steps_in_shards,
)
from lockstep.same_bits.batch import ShardedBatch, cut
from lockstep.same_bits.between_steps import (
    StepsInShards,
    StepsOfModel,
    fingerprint_of,
    use_threads,
)
from lockstep.same_bits.buffers import BuffersOfStep
from lockstep.same_bits.facts import Facts, ShardFacts, as_digits, exchanged
from lockstep.same_bits.refusals import check
from lockstep.same_bits.sums import Gradients, LocalSums, shards_of
from lockstep.same_bits.turns import exclusive
from lockstep.torch_private import _foreach_mul_, gradient_of

_log = logging.getLogger("lockstep")

# As torch's allocator aligns memory.
LINE_BYTES = 64
# Apart from other seeds that are mixed of a seed and some numbers.
_SHARDS = -5


def shards(
    model: nn.Module, batch: Any, num_shards: int | None = None, *, step: int | None = None
) -> Shards:
    """Divide a step into shards: its numbers have the same bits at any number of ranks. ::

        loader = lockstep.DataLoader(dataset, batch_size, shuffle=True, shards=2)
        for batch in loader:
            for x, y in lockstep.shards(model, batch):
                lockstep.mean(criterion(model(x), y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()

    The loop yields this rank's shards, one after the other. Each is computed with random numbers of
    its own (of torch, Python and NumPy), from the values that buffers had when the step began, in
    memory of its own. Gradients are added up in the order of a binary tree over all shards, and
    divided by their weight at the end of the loop. After it, ``.grad`` of each parameter is the
    mean over the batch, on every rank, added to what was there before the loop; and buffers are
    those of shard 0, or the mean over the shards, by their policy.

    So runs on 1 to ``num_shards`` ranks end with the same bits, also where the number of ranks
    changes at a checkpoint. That is promised on CPUs of one kind with the same torch, for models
    whose forward keeps no state but buffers, and draws from the global generators alone. Each rank
    computes with one thread, ``torch.set_num_threads(1)``, from the first call on.

    In the loop :func:`lockstep.mean` is no collective. A shard that has a backward without it
    counts as one, whatever its size; one that has no backward doesn't count. Samples that are
    too few leave shards without any, which aren't yielded. Several forwards and backwards are one
    shard's, and parameters may be unused. After the loop Python's, NumPy's and torch's generators
    are seeded alike on all ranks.

    Every rank must run the loop to its end, which blocks until all have. A rank that leaves it by
    an error tells the others when it comes to its next collective, or ends: they raise
    CollectiveFailed then, without gradients of this step.

    Args:
        model: A model that was given to :func:`parallelize`, or is in a wrapper, on one rank too.
        batch: What ``DataLoader(shards=...)`` gave. Or a global batch, the same on every rank: its
            tensors are cut in their first dimension, in tuples, lists, dicts and dataclasses.
        num_shards: The number of shards, at least that of the ranks. The loader has told it.
        step: The number of the step, from which random numbers are, if there is no loader. By
            default steps are counted from 0; :func:`lockstep.save` saves the count with the model.

    Returns:
        An iterator over the shards, whose ``loss`` is that of the step after the loop.

    Raises:
        ModelError: If the model isn't parallel, or can't be trained so; the error says why.
        SplitError: If there are fewer shards than ranks, or the batch can't be cut.
        ModelMismatch: At the end of the loop, on every rank, if ranks differ in what bits depend
            on: the number of shards, threads, torch, the kind of CPU, the seed, the step.
        CollectiveFailed: At the end of the loop, if a rank has failed in it or is lost.
        ValueError: At the end of the loop, on every rank, if some shards use :func:`lockstep.mean`
            and others don't.

    Source: the order of sums is that of EasyScale (Li et al., 2023), as a tree.
    """
    check_module(model)
    state = state_of(model)
    module = state.module()
    assert module is not None  # the program holds it
    earlier = current_shard()  # of a loop that was left, while something still holds its iterator
    if earlier is not None:
        earlier.give_up()
    kept = state.context.get(StepsOfModel)
    check(state, module, are_parts_known=kept.are_known(module))
    if isinstance(batch, ShardedBatch):
        if num_shards not in (None, batch.num_shards) or step is not None:
            raise SplitError(
                f"shards() got a batch of {batch.num_shards} shards from a loader, which counts "
                "steps itself. Leave num_shards and step out."
            )
        place = *batch.place, batch.next_use()
        return Shards(state, batch, batch.numbers, batch.num_shards, (batch.seed, *place))
    if num_shards is None:
        raise SplitError(
            f"shards() got a {type(batch).__name__} that DataLoader(shards=...) hasn't made. Give "
            "num_shards, into how many shards it is to be cut."
        )
    num_shards = as_whole_number("num_shards", num_shards, "a number of shards", at_least=1)
    number = kept.num_steps if step is None else as_whole_number("step", step, at_least=0)
    kept.num_steps = number + 1
    group = group_of(state)
    check_num_shards(num_shards, 1 if group is None else group.size())
    mine = shards_of(*((0, 1) if group is None else (group.rank(), group.size())), num_shards)
    batches, numbers = cut(batch, num_shards, mine)
    return Shards(state, batches, numbers, num_shards, (state.seed, number))


def group_of(state: ParallelState) -> dist.ProcessGroup | None:
    """Return the ranks of a parallel model; None for one alone."""
    return next((engine.process_group for engine in state.engines), None)


def check_num_shards(num_shards: int, num_ranks: int) -> None:
    """Raise SplitError if a rank would have no shard."""
    if num_shards < num_ranks:
        raise SplitError(
            f"{num_shards} shards can't be divided among {num_ranks} ranks: a shard is computed by "
            "one rank. Use more shards, or fewer ranks. A run that changes its number of ranks "
            "keeps its number of shards, so that is to be the most ranks that it may have."
        )


class Shards:
    """The shards of one step, of which a loop computes those of this rank.

    Attributes:
        loss: After the loop, the mean over the batch of the values of each shard's first
            :func:`lockstep.mean` that had a backward; None before, or without such a mean.
    """

    def __init__(
        self,
        state: ParallelState,
        batches: Sequence[Any],
        numbers: Sequence[int],
        num_shards: int,
        place: tuple[int, ...],
    ) -> None:
        self.loss: float | None = None
        self._state, self._place, self._num_shards = state, place, num_shards
        self._group = group = group_of(state)
        self._rank, self._num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._batches = dict(zip(numbers, batches, strict=True))
        self._had, self._left = [*numbers], [*numbers]
        self._mine = shards_of(self._rank, self._num_ranks, num_shards)
        self._seeds = Seeds()
        # While the loop runs: what it undoes at its end; the shard whose turn it is.
        self._open: ExitStack | None = None
        self._is_over = self._has_told = self._is_given_up = False
        self._shard: Shard | None = None
        self._told: list[ShardFacts] = []

    def __iter__(self) -> Self:
        """The iterator itself."""
        return self

    def __next__(self) -> Any:
        """End the turn of one shard, and begin that of the next; after the last, end the step."""
        if self._is_given_up:
            self._is_given_up = False
            raise ModelError(
                "Another loop over lockstep.shards() has begun in the body of this one, which was "
                "given up: its gradients are dropped. Take one loop behind the other."
            )
        if self._is_over:
            raise StopIteration
        try:
            if self._open is None:
                self._begin()
            elif self._shard is not None:
                self._end_shard(self._shard)
            if self._left:
                return self._begin_shard(self._left.pop(0))
            self._finish()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Give up the step, if the loop hasn't come to its end: gradients stay as before it.

        The other ranks are told before the next collective. An iterator that is dropped, as when
        the loop was left by an error, is closed.
        """
        if self._open is None:
            return
        try:
            self._buffers.begin_shard()
        finally:
            self._leave()
            self._put_back()
            if self._group is not None and not self._has_told:
                backward_sync_of(self._group).tell_failed_step = _tell_failed

    def _give_up(self) -> None:
        """Close it, as another loop begins; to go on with this one is an error."""
        self._is_given_up = self._open is not None
        self.close()

    def __del__(self) -> None:
        """Close it."""
        if self._open is not None:
            _log.warning(
                "A loop over lockstep.shards() was left before its end, by an error, by break or "
                "by a zip() that ended first. The gradients of this step are dropped."
            )
            self.close()

    def _begin(self) -> None:
        state, module = self._state, self._state.module()
        assert module is not None
        if self._group is not None:
            sync = backward_sync_of(self._group)
            sync.finish_failed()
            for engine in state.engines:
                sync.refresh(engine)
        use_threads()
        watch_steps_in_shards()
        named = dict(module.named_parameters())
        self._names = [name for name, each in named.items() if each.requires_grad]
        self._parameters = [named[name] for name in self._names]
        self._sums = LocalSums(self._num_shards, self._mine)
        self._before: Gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
            if type(parameter) is not nn.Parameter:
                # Its update may be on its way. Nobody waits for another rank in a shard's turn: if
                # that is a thread, it may wait for the turn.
                parameter.detach()
        policies = state.options.broadcast_buffers
        self._buffers = BuffersOfStep(module, lambda name: policy_of(name, policies))
        self._next = self._mine.start
        self._open = ExitStack()
        self._open.enter_context(state.no_sync())

    def _begin_shard(self, number: int) -> Any:
        assert self._open is not None
        self._thread = exclusive.begin()
        self._shard = Shard(number, weakref.WeakMethod(self._give_up))
        set_current_shard(self._shard)
        self._buffers.begin_shard()
        self._seeds.put(self._seed(number))
        return self._batches.pop(number)

    def _end_shard(self, shard: Shard) -> None:
        self._end_turn()
        self._refuse_other_parameters(shard)
        gradients = [*map(gradient_of, self._parameters)]
        for parameter in self._parameters:
            parameter.grad = None
        there = [gradient for gradient in gradients if gradient is not None]
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ModelError(
                    f"The gradient of {name!r} is {gradient.layout}, and shards() adds up dense "
                    "ones alone."
                )
        self._buffers.end_shard(shard.number)
        weight = shard.weight
        if weight is not None and weight != 1 and there:
            with torch.no_grad():
                _foreach_mul_(there, weight)
        if weight is not None or there:
            self._told.append(ShardFacts(shard.number, weight, shard.total))
        self._add(shard.number, gradients)

    def _refuse_other_parameters(self, shard: Shard) -> None:
        """Raise if there is a gradient of a parameter that wasn't trained when the loop began."""
        module, known = self._state.module(), {*map(id, self._parameters)}
        assert module is not None
        for name, each in module.named_parameters():
            if id(each) not in known and each.requires_grad and each.grad is not None:
                raise ModelError(
                    f"{name!r} has a gradient after the turn of shard {shard.number}, and was not "
                    "trained, or not there, when the loop over lockstep.shards() began. Unfreeze "
                    "parameters, and put others in place, before the loop."
                )

    def _add(self, number: int, gradients: Gradients) -> None:
        """Add the gradients of a shard; those before it had no samples."""
        nothing: Gradients = [None] * len(self._parameters)
        with torch.no_grad():
            for empty in range(self._next, number):
                self._sums.add(empty, nothing)
            self._sums.add(number, gradients)
        self._next = number + 1

    def _finish(self) -> None:
        """End the step with the other ranks."""
        if self._next < self._mine.stop:
            self._add(self._mine.stop - 1, [None] * len(self._parameters))
        nodes = self._sums.nodes()
        mine, kept = self._facts(nodes), self._state.context.get(StepsOfModel)
        self._has_told = True
        facts = Facts(exchanged(self._group, mine), self._group)
        with torch.no_grad():
            if self._group is None:
                (total,) = nodes.values()
                for gradient in total:
                    if gradient is not None:
                        gradient.div_(facts.divisor)
            else:
                context_of(self._group).get(StepsInShards)
                sums = kept.sums(self._group, self._num_shards, self._parameters)
                total = sums(nodes, facts.used, facts.divisor)
            self._buffers.finish(self._group, facts.changed, facts.shards)
        self.loss = facts.loss
        kept.note(mine["fingerprint"], tells=self._rank == 0)
        self._leave()
        self._put_back(total)
        for engine in self._state.engines:
            engine.take_means()
        with exclusive:
            self._seeds.put(self._seed(self._num_shards))

    def _facts(self, nodes: Mapping[Any, Gradients]) -> dict[str, Any]:
        """Return what this rank tells the others at the end of the step."""
        sets = nodes.values()
        used = [any(its[at] is not None for its in sets) for at in range(len(self._names))]
        return {
            "fingerprint": fingerprint_of(self._num_shards),
            "place": self._place,
            "buffers": self._buffers.digest(),
            "told": self._told,
            "used": as_digits(used),
            "changed": as_digits(self._buffers.changed()),
            "shards": self._had,
        }

    def _leave(self) -> None:
        """End what lasts as long as the loop."""
        assert self._open is not None
        self._end_turn()
        opened, self._open, self._is_over = self._open, None, True
        opened.close()

    def _end_turn(self) -> None:
        if self._shard is not None:
            if current_shard() is self._shard:
                set_current_shard(None)
            self._shard = None
            exclusive.end(self._thread)

    def _put_back(self, total: Gradients | None = None) -> None:
        """Give parameters the gradients that they had before, with ``total`` added to them."""
        more = total or [None] * len(self._parameters)
        for parameter, before, mean in zip(self._parameters, self._before, more, strict=True):
            if before is not None and mean is not None:
                with torch.no_grad():
                    before.add_(mean)
            parameter.grad = _aligned(mean) if before is None else before

    def _seed(self, number: int) -> int:
        return mixed(*self._place, number, _SHARDS)


def _tell_failed(group: dist.ProcessGroup) -> None:
    """Tell the other ranks, which wait at the end of the step, that it has failed here."""
    exchanged(group, None)


def _aligned(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient that begins at a whole line, as memory for numbers of its own does.

    Autograd may have computed several as views of one memory.
    """
    is_aligned = gradient is None or gradient.data_ptr() % LINE_BYTES == 0
    return gradient if gradient is None or is_aligned else gradient.clone()
