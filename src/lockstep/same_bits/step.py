"""``shards()``: a step's batch in shards, with the same bits at any number of ranks."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Sequence
from functools import partial
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
from lockstep.same_bits.facts import FactsOfStep, as_digits, exchanged
from lockstep.same_bits.local_step import LocalStep
from lockstep.same_bits.over_ranks import EarlyChunks
from lockstep.same_bits.refusals import check
from lockstep.same_bits.sums import Gradients, shards_of
from lockstep.same_bits.turns import exclusive
from lockstep.world import seed_accelerators

_log = logging.getLogger("lockstep")

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
        earlier.abandon()
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
        self._local: LocalStep | None = None  # while the loop runs
        self._is_over = self._has_told = self._is_abandoned = False

    def __iter__(self) -> Self:
        """The iterator itself."""
        return self

    def __next__(self) -> Any:
        """End the turn of one shard, and begin that of the next; after the last, end the step."""
        if self._is_abandoned:
            self._is_abandoned = False
            raise ModelError(
                "Another loop over lockstep.shards() has begun in the body of this one, which was "
                "given up: its gradients are dropped. Take one loop behind the other."
            )
        if self._is_over:
            raise StopIteration
        try:
            if self._local is None:
                local = self._local = self._begun()
            else:
                local = self._local
                local.end_shard()
            if self._left:
                number = self._left.pop(0)
                local.begin_shard(Shard(number, weakref.WeakMethod(self._abandon)))
                self._seed_all(number)
                return self._batches.pop(number)
            self._finish(local)
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Give up the step, if the loop hasn't come to its end: gradients stay as before it.

        The other ranks are told before the next collective. An iterator that is dropped, as when
        the loop was left by an error, is closed.
        """
        if (local := self._local) is None:
            return
        try:
            local.buffers.begin_shard()
        finally:
            self._leave(local)
            local.put_back()
            if self._group is not None and not self._has_told:
                tell = partial(_tell_failed, local.early)
                backward_sync_of(self._group).tell_failed_step = tell

    def _abandon(self) -> None:
        """Close it, as another loop begins; to go on with this one is an error."""
        self._is_abandoned = self._local is not None
        self.close()

    def __del__(self) -> None:
        """Close it."""
        if self._local is not None:
            _log.warning(
                "A loop over lockstep.shards() was left before its end, by an error, by break or "
                "by a zip() that ended first. The gradients of this step are dropped."
            )
            self.close()

    def _begun(self) -> LocalStep:
        if self._group is not None:
            sync = backward_sync_of(self._group)
            sync.finish_failed()
            for engine in self._state.engines:
                sync.refresh(engine)
        use_threads()
        watch_steps_in_shards()
        return LocalStep(self._state, self._num_shards, self._mine)

    def _finish(self, local: LocalStep) -> None:
        """End the step with the other ranks."""
        terms, kept = local.terms(), self._state.context.get(StepsOfModel)
        with torch.no_grad():
            if local.early is not None:
                local.early.send_rest(terms)
            local.read()
            mine = self._facts(local, terms)
            self._has_told = True
            facts = self._told_by_all(mine, local.early)
            if self._group is None:
                total = local.whole()
                for gradient in total:
                    if gradient is not None:
                        gradient.div_(facts.divisor)
            else:
                context_of(self._group).get(StepsInShards)
                sums = kept.sums(self._group, self._num_shards, local.parameters)
                early = local.early
                sent = {} if early is None else early.gathered(facts.again, facts.divisor)
                total = sums(terms, facts.used, facts.divisor, sent)
            local.buffers.finish(self._group, facts.changed, facts.shards)
        self.loss = facts.loss
        kept.note(mine["fingerprint"], tells=self._rank == 0)
        self._leave(local)
        local.put_back(total)
        for engine in self._state.engines:
            engine.take_means()
        with exclusive:
            self._seed_all(self._num_shards)

    def _told_by_all(self, mine: dict[str, Any], early: EarlyChunks | None) -> FactsOfStep:
        try:
            return FactsOfStep(exchanged(self._group, mine), self._group)
        except BaseException:
            if early is not None:
                early.drop()
            raise

    def _facts(self, local: LocalStep, terms: list[list[Gradients]]) -> dict[str, Any]:
        """Return what this rank tells the others at the end of the step."""
        sets = [*itertools.chain(*terms)]
        used = [any(its[at] is not None for its in sets) for at in range(len(local.names))]
        return {
            "fingerprint": fingerprint_of(self._num_shards, {p.device for p in local.parameters}),
            "place": self._place,
            "buffers": local.buffers.digest(),
            "told": local.told,
            "used": as_digits(used),
            "changed": as_digits(local.buffers.changed()),
            "again": as_digits([] if local.early is None else local.early.changed()),
            "shards": self._had,
        }

    def _leave(self, local: LocalStep) -> None:
        """End what lasts as long as the loop."""
        self._local, self._is_over = None, True
        local.close()

    def _seed_all(self, number: int) -> None:
        seed = self._seed(number)
        self._seeds.put(seed)
        seed_accelerators(seed)

    def _seed(self, number: int) -> int:
        return mixed(*self._place, number, _SHARDS)


def _tell_failed(early: EarlyChunks | None, group: dist.ProcessGroup) -> None:
    """Tell the other ranks, which wait at the end of the step, that it has failed here."""
    if early is not None:
        early.send_rest(None)
    exchanged(group, None)
    if early is not None:
        early.drop()
