"""The reducer: replaces gradients by their means over the ranks, as they become ready.

The reducer knows parameters, buckets and a process group, and neither modules nor autograd: its
caller calls it when a backward begins, when gradients are ready, and when the backward is over.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist

from lockstep.comm import broadcast_tensors, mean_divisor, sum_rows
from lockstep.errors import CollectiveFailed, CollectiveMismatch
from lockstep.grad.assign import FIRST_BUCKET_BYTES, assign_buckets
from lockstep.grad.bucket import (
    AWAITED,
    READY,
    TOLD,
    UNUSED,
    Bucket,
    num_facts,
    without_autograd,
)
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer
from lockstep.grad.diagnostics import GradientLog, failed_elsewhere, late_gradient, naming
from lockstep.grad.memory import gradient_dtype, rows_of
from lockstep.grad.order import GradientOrder, Phase
from lockstep.grad.pending import Assigned, PendingBucket, with_runs


class Reducer(GradientOrder):
    """Replaces gradients by their mean over the ranks while the backward computes others.

    Three rules give all ranks the same order of collectives, whatever each rank computes:

    - Buckets launch in index order, not in the order in which they fill, which differs among
      ranks: collectives that don't match hang. Shown by test_buckets_launch_in_index_order.
    - The last bucket launches when the backward is over, and carries the facts: which parameters
      this rank used, and whether its backward failed. So no step needs a collective for those.
    - After the first backward, gradients are assigned to buckets again, in the order in which they
      became ready on rank 0.

    The first backward launches nothing before its end. It shows whether a parameter gets several
    gradients in one backward (as with reentrant checkpoints of shared weights); if one does,
    later backwards don't launch before their end either.

    Args:
        named_parameters: The parameters to reduce, in the same order on every rank of ``group``.
        cap_bytes, first_cap_bytes: As for :func:`assign_buckets`.
        skip_unused: Whether buckets are not sent if no rank uses any of their parameters.
        sparse: The indices of parameters with sparse gradients.
        is_kept: Whether it reduces more than one backward. Then it logs unusual gradients, and its
            buckets have memory that the group reduces in place, which is scarce.

    Attributes:
        scale: The factor of each rank's gradients in the sum; :meth:`begin` sets it for a mean.
        comm_hook: The communication hook that replaces the all-reduce of buckets, if there is one.
        is_to_tell, was_told: Whether this rank, or any in the last backward, has a fact to tell.
        is_rearranged: Whether buckets are in the order in which gradients became ready.
        copies_early: Whether gradients are copied before their bucket is full. They must not be if
            a nested backward may add to them later, or if they have a graph.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        cap_bytes: int | Sequence[int],
        first_cap_bytes: int = FIRST_BUCKET_BYTES,
        skip_unused: bool = False,
        sparse: Collection[int] = (),
        is_kept: bool = True,
    ) -> None:
        self.process_group, self._size, self.scale = group, group.size(), 1.0
        super().__init__(named_parameters, sparse)
        self._cap_bytes, self._first_cap_bytes = cap_bytes, first_cap_bytes
        self._skip_unused, self._is_kept = skip_unused, is_kept
        self._skipped: set[int] = set()  # numbers of buckets, and of sparse gradients behind them
        self.comm_hook: CommHook | None = None
        self._log = GradientLog(is_on=is_kept and group.rank() == 0)
        # Empty until the first backward: a copied model that is never trained needs no buckets.
        self._buckets: list[Bucket] = []
        self._bucket_at: list[Bucket] = []
        # The indices of parameters whose gradients stay pending, which have buckets of their own.
        self._runs: list[Assigned] = []
        self.is_rearranged = self._gets_gradients_twice = self.is_to_tell = self.was_told = False
        self.reset()

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """The names of each bucket's parameters, in launch order, from the first backward on."""
        return [bucket.parameter_names for bucket in self._buckets]

    def defer(self, runs: Sequence[tuple[Sequence[torch.Tensor], type[PendingBucket]]]) -> None:
        """Give each run of parameters, of one dtype and device, a bucket of pending gradients."""
        index = {id(parameter): index for index, (_, parameter) in enumerate(self.named)}
        self._runs = [Assigned([index[id(p)] for p in run], kind) for run, kind in runs]
        self.sum_pending()
        self._buckets = []  # they are made when the next backward begins

    def sum_pending(self) -> None:
        """Sum the pending gradients of deferred buckets, before others are added to them."""
        for bucket in self._buckets:
            bucket.sum_pending()

    @property
    def _launches_early(self) -> bool:
        return self.is_rearranged and not self._gets_gradients_twice

    def take_over(self, previous: Reducer) -> None:
        """Continue from the state of ``previous``, a reducer of some of these parameters."""
        self.comm_hook, self._log = previous.comm_hook, previous._log
        self._log.logs_unused = self._log.is_on
        self._gets_gradients_twice = previous._gets_gradients_twice
        for position, p in enumerate(self._parameters):
            has_grown = previous.is_unreduced(p) if id(p) in previous.ids else p.grad is not None
            self._accumulated[position] = has_grown

    def reset(self, phase: Phase = Phase.IDLE) -> None:
        """Drop the state of the last backward: no gradient of the next one is ready."""
        self.phase, self.copies_early = phase, False
        self._launch_order: Sequence[Reducer] = ()  # dropped, as it is a cycle of references
        self._next_launch = 0  # the index of the bucket to be launched next
        self._states = bytearray(self._sparse.start) + bytes([UNUSED]) * len(self._sparse)
        self._arrivals: list[int] = []  # indices of parameters, as their gradients became ready
        self._next_position = 0  # the position of the next gradient, if they come in order
        self._reduced_sparse: dict[int, torch.Tensor | None] = {}  # by position; None: not sent
        for bucket in self._buckets:
            bucket.reset()

    def begin(
        self, launch_order: Sequence[Reducer] | None = None, *, copies_early: bool = False
    ) -> None:
        """Begin a backward, on every rank; one that failed is finished before.

        ``launch_order`` lists the group's reducers in this backward, in the same order on every
        rank; by default this one. A reducer launches buckets before the end of the backward when
        those before it in the list have only their last bucket left. Last buckets follow at the
        end, in the same order. Shown by test_two_models_in_one_backward_launch_in_one_order.
        """
        if self.phase is Phase.FAILED:
            self.finish()
        self.phase = Phase.COLLECTING  # also if there is no memory for buckets
        if self._last_order is not None and not self.is_rearranged:
            missing = sorted({*self._order} - {*self._last_order}, reverse=True)
            order = torch.tensor([*self._last_order, *missing], device=self._parameters[0].device)
            broadcast_tensors(self.process_group, [order])  # that of rank 0
            self.is_rearranged = True  # on every rank, as none of them has raised
            self._arrange(order.tolist())
        if not self._buckets or self._buckets[0].is_hooked != bool(self.comm_hook):
            self._arrange(self._order)
        if self._arrivals:  # of a model that is begun at the end of a backward
            self.reset(Phase.COLLECTING)
        self.scale = 1 / mean_divisor(self.process_group)
        Bucket.begin_all(self._buckets)
        self.copies_early = copies_early
        self._launch_order = [self] if launch_order is None else launch_order
        if copies_early and self._launches_early:  # the first backward may add to a gradient twice
            for bucket in self._buckets:
                bucket.copy_scale = self._scale_of(bucket)

    def _arrange(self, order: Sequence[int]) -> None:
        """Make buckets for gradients that become ready in ``order``; if it raises, none."""
        # The old ones are dropped before: they are as large as all gradients, and memory is short.
        self.sum_pending()
        kept = [bucket for bucket in self._buckets if isinstance(bucket, PendingBucket)]
        self._buckets, self._bucket_at, self._skipped = [], [], set()
        assignment = self.assignment(order)
        self._rearrange(itertools.chain(*(one.indices for one in assignment)))
        memory_from = self.process_group if self._is_kept and not self.comm_hook else None
        buckets: list[Bucket] = []
        for number, (group, kind) in enumerate(assignment, 1):
            start = buckets[-1].stop if buckets else 0
            named = [self.named[index] for index in group]
            accumulated = memoryview(self._accumulated)[start : start + len(group)]
            num_told = len(self.named) if number == len(assignment) else 0
            if kind is None:
                bucket = Bucket(
                    named,
                    accumulated,
                    start=start,
                    tail_size=num_facts(num_told) if num_told else 0,
                    buffers_from=memory_from,
                    is_hooked=self.comm_hook is not None,
                    like=self.named[0][1],
                )
            else:
                facts = accumulated, start, self.process_group, num_told
                bucket = kept.pop(0) if kept else kind(named, *facts)  # as it was, if it was
            buckets.append(bucket)
        self._buckets = buckets
        self._bucket_at = [bucket for bucket in buckets for _ in bucket.parameter_names]

    def assignment(self, order: Sequence[int]) -> list[Assigned]:
        """Return the buckets to make for gradients that become ready in ``order``."""
        runs = [] if self.comm_hook else self._runs
        apart = {
            *itertools.chain(*(run.indices for run in runs)),
            *self._order[self._sparse.start :],
        }
        parameters = [parameter for _, parameter in self.named]
        groups = assign_buckets(
            [p.numel() * gradient_dtype(p).itemsize for p in parameters],
            [(gradient_dtype(p), p.device) for p in parameters],
            [index for index in order if index not in apart],
            cap_bytes=self._cap_bytes,
            first_cap_bytes=self._first_cap_bytes,
        )
        return with_runs(groups, runs)

    def mark_unused(self, parameters: Iterable[torch.Tensor]) -> None:
        """Don't wait for the gradients of ``parameters``, which this backward won't compute."""
        for position in {self._position_of[id(parameter)] for parameter in parameters}:
            if position < self._sparse.start:
                self._states[position] = UNUSED
                self._bucket_at[position].num_missing -= 1

    def mark_accumulated(self, parameter: torch.Tensor) -> None:
        """Note that the gradient of ``parameter``, if it is known here, has grown unreduced."""
        if (position := self._position_of.get(id(parameter))) is not None:
            self._accumulated[position] = 1
            if self._runs:
                self.sum_pending()

    def mark_ready(self, parameters: Sequence[torch.Tensor]) -> int:
        """Note that the gradients of ``parameters`` are ready, and launch buckets that are full.

        Returns:
            The number of further gradients that may become ready before the next call.

        Raises:
            LateGradient: If the bucket of a gradient has been launched already in this backward.
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        first, last = self._next_position, self._next_position + len(parameters)
        if (  # as for most gradients: these are the next ones, and awaited
            last <= self._sparse.start
            and all(map(operator.is_, parameters, self._parameters[first:last]))
            and not any(self._states[first:last])
        ):
            self._mark_awaited(first, last)
        else:
            self._mark_one_by_one(parameters)
        # If gradients come in order, the next bucket that isn't full will be, or the one behind it.
        filling = (bucket for bucket in self._buckets[self._next_launch :] if bucket.num_missing)
        most = len(self.named)
        for bucket in itertools.islice(filling, 2):
            most = min(most, bucket.num_missing, bucket.chunk if self.copies_early else most)
        return most

    def _mark_awaited(self, first: int, last: int) -> None:
        """Note that the gradients from position ``first`` to ``last`` are ready."""
        self._next_position = last
        self._states[first:last] = bytes([READY]) * (last - first)
        self._accumulated[first:last] = b"\1" * (last - first)
        self._arrivals += self._order[first:last]
        while first < last:
            bucket = self._bucket_at[first]
            stop = min(last, bucket.stop)
            bucket.num_missing -= stop - first
            first = stop
            self._look_at(bucket)

    def _mark_one_by_one(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that the gradients of ``parameters``, in any order, are ready."""
        grown: dict[Bucket, None] = {}
        for parameter in parameters:
            position = self._position_of[id(parameter)]
            if self._states[position] != AWAITED:
                self.mark_unawaited(parameter)
                continue
            self._states[position] = READY
            self._accumulated[position] = 1
            self._arrivals.append(self._order[position])
            self._next_position = position + 1
            bucket = self._bucket_at[position]
            bucket.num_missing -= 1
            grown[bucket] = None
        for bucket in grown:
            self._look_at(bucket)

    def _look_at(self, bucket: Bucket) -> None:
        """Copy new gradients of ``bucket`` early, or launch buckets if it is full."""
        if self.copies_early and bucket.num_missing:
            bucket.copy_ready(self._states)
        if bucket.is_full() and self._launches_early:
            for reducer in self._launch_order:
                if not reducer.launch_full_buckets():
                    break

    def mark_unawaited(self, parameter: torch.Tensor) -> None:
        """Note that a gradient is ready for which no bucket waits, or before :meth:`begin`.

        Raises:
            LateGradient: If its bucket has been launched already in this backward.
        """
        position = self._position_of[id(parameter)]
        if position < len(self._bucket_at):
            bucket = self._bucket_at[position]
            if bucket.is_too_late_for(position - bucket.start):
                self._gets_gradients_twice = True
                raise late_gradient(self.named[self._order[position]][0])
        if self._states[position] == READY:
            self._gets_gradients_twice = True
        else:
            self._states[position] = READY
            self._accumulated[position] = 1
            self._arrivals.append(self._order[position])

    def give_up(self) -> None:
        """Note that the backward has failed; the next one adds to gradients not launched yet.

        Other ranks have launched more buckets or fewer, or wait for the end. So before any other
        reduction, :meth:`finish` has to launch the rest, and tell the other ranks of the failure.
        Shown by test_a_backward_that_fails_at_different_places_on_each_rank.
        """
        if self.phase is Phase.IDLE:
            if self._arrivals:  # the backward has not begun here
                self.reset()
            return
        self.phase = Phase.FAILED
        self._launch_order = ()
        self._log.drop()
        for bucket in self._buckets:
            bucket.undo_copies()

    def launch_full_buckets(self) -> bool:
        """Launch full buckets, up to the first that isn't; return whether only the last is left."""
        last = len(self._buckets) - 1
        while self._launches_early and self._next_launch < last:
            before = self._buckets[max(0, self._next_launch - 1)]
            if self._buckets[self._next_launch].num_missing or not before.is_hook_done():
                return False
            with without_autograd():
                self._launch()
        # Sparse gradients come between the other buckets and the last one.
        return self._next_launch >= last and not self._sparse

    def launch_all_but_last(self) -> None:
        """Launch all buckets but the last, and reduce sparse gradients: the backward is over.

        It waits for communication hooks and sparse gradients, and raises as :meth:`finish`. The
        caller disables autograd, also for :meth:`launch_last`, as gradients may have a graph.
        """
        last = len(self._buckets) - 1
        while self._next_launch < last:
            self._launch()
        for bucket in self._buckets:
            bucket.finish_hook(self.process_group)
        for index, position in enumerate(self._sparse, last):
            if position not in self._reduced_sparse:
                name, _ = self.named[self._order[position]]
                with naming([name], self.process_group):
                    self._reduced_sparse[position] = self._reduce_sparse(index, position)

    def _reduce_sparse(self, index: int, position: int) -> torch.Tensor | None:
        """Return the mean of a sparse gradient; None if it is not sent, as no rank uses it.

        It is dense if this rank's gradient is. A communication hook gets it as the bucket
        ``index``, and not scaled.
        """
        parameter = self._parameters[position]
        gradient = parameter.grad
        self._accumulated[position] *= gradient is not None
        if self._skips(index + len(self._bucket_at), bool(self._accumulated[position])):
            return None
        rows = rows_of(parameter)
        if self.comm_hook is None:
            total, self.row_bytes[position] = sum_rows(self.process_group, rows, self.scale)
        else:
            is_last = not self._bucket_at and position == len(self.named) - 1
            bucket = GradBucket(index, rows, [parameter], is_last=is_last)
            total = reduced_buffer(self.comm_hook(bucket), rows.numel())
        return total if gradient is None or gradient.is_sparse else total.to_dense()

    def launch_last(self) -> None:
        """Launch the last bucket, which carries this rank's facts."""
        if self._next_launch < len(self._buckets):
            self._launch()

    def finish(self) -> CollectiveFailed | None:
        """Wait until the gradients of all parameters that any rank used are means over the ranks.

        Returns the error to raise, after the reducers of other models have finished too, if the
        backward failed on another rank: its gradients are lost.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
            CollectiveFailed: If another rank is lost, or times out.
        """
        error = None
        try:
            with without_autograd():
                self.launch_all_but_last()
                self.launch_last()
                Bucket.wait_for_all(self._buckets, self.process_group)
                lacks = len(self._arrivals) < len(self._order)
                self.unused_indices = sorted({*self._order} - {*self._arrivals}) if lacks else []
                if self.phase is not Phase.FAILED:
                    error = self._use_reduced()
                    self._accumulated[:] = bytes(len(self.named))
            self._last_order = self._arrivals
        except CollectiveMismatch:
            self.give_up()
            raise
        finally:
            self.reset()
        return error

    def _use_reduced(self) -> CollectiveFailed | None:
        """Make the mean the gradient of every parameter that any rank used."""
        self.was_told, last = False, self._buckets[-1]
        num_failed, ranks = last.failed_ranks(self._size if self._averages(last) else 1)
        if num_failed:
            for bucket in self._buckets:
                bucket.drop()
            for position in self._sparse:
                self._parameters[position].grad = None
            return failed_elsewhere(num_failed, ranks, self.process_group)
        self.was_told = last.is_any_set(TOLD, on_gpu=self.is_to_tell)
        for bucket in self._buckets:
            bucket.finish()
        # Reading the facts waits for a GPU. A rank that used everything need not.
        used: Sequence[int] = self._sparse
        self._used_by_any = itertools.repeat(1)
        if not all(self._accumulated):
            self._used_by_any = last.used_by_any()
            used = [position for position, number in enumerate(self._used_by_any) if number]
            if len(used) < len(self.named) and self._log.logs_unused:
                unused = {*self._order} - {self._order[position] for position in used}
                self._log.unused([self.named[index][0] for index in sorted(unused)])
        for position in used:
            if (reduced := self._reduced_sparse.get(position)) is not None:
                self._parameters[position].grad = reduced
            elif position not in self._sparse and not self._accumulated[position]:
                self._bucket_at[position].use_as_grad(position - self._bucket_at[position].start)
        Bucket.end_all(self._buckets)
        if self._log.compares:
            for bucket in self._buckets:
                self._log.keep_of_ranks(bucket.gradients_of_ranks())
            self._log.compare()
        return None

    def _launch(self) -> None:
        index, bucket = self._next_launch, self._buckets[self._next_launch]
        bucket.note_launch()
        is_last = index == len(self._buckets) - 1
        if not is_last and self._skips(index, any(bucket.accumulated)):
            bucket.is_launched, self._next_launch = True, index + 1
            return
        is_failed = self.phase is Phase.FAILED
        if is_failed and not bucket.is_launched:
            # 0 for a hook, which may keep it for later steps.
            bucket.fill_with(math.nan if self.comm_hook is None else 0)
        elif not bucket.is_launched:  # it is if its hook has failed
            bucket.fill(self._scale_of(bucket))
            is_summed = self.comm_hook is None and not bucket.is_deferred
            if self._log.compares and is_summed and self.scale == 1 / self._size:
                self._log.keep(bucket.gradients, 1 if self._averages(bucket) else self._size)
        if is_last:
            # All buckets are filled by now, so the facts are final.
            failed_rank = self.process_group.rank() if is_failed else None
            facts = any(bucket.is_watched for bucket in self._buckets), self.is_to_tell
            bucket.write_facts(self._accumulated, failed_rank, [f / 4 / self._size for f in facts])
        if self.comm_hook is None:
            bucket.launch(self.process_group, average=self._averages(bucket))
        else:
            # One hook after the other: a hook may launch a second collective when its first is
            # done, and collectives of two buckets must not interleave differently on each rank.
            # Shown by test_hooks_of_several_collectives_keep_their_order.
            self._buckets[max(0, index - 1)].finish_hook(self.process_group)
            if bucket.parameter_names and not bucket.is_launched:
                number = index + len(self._sparse) * is_last  # sparse ones come before the last
                bucket.launch_hook(self.comm_hook, number, is_last=is_last)
            if is_last:
                bucket.finish_hook(self.process_group)
                bucket.launch(self.process_group)
        self._next_launch += 1

    def _skips(self, number: int, is_used: bool) -> bool:
        """Whether the bucket, or the sparse gradient, ``number`` is not sent."""
        if not self._skip_unused:
            return False
        # A failed backward skips what the one before it skipped, as the other ranks do.
        if self.phase is not Phase.FAILED:
            (self._skipped.discard if is_used else self._skipped.add)(number)
        return number in self._skipped

    def _averages(self, bucket: Bucket) -> bool:
        return bucket.averages and self.comm_hook is None and self.scale == 1 / self._size

    def _scale_of(self, bucket: Bucket) -> float:
        """The factor by which gradients are multiplied on their way into ``bucket``."""
        return 1 if self.comm_hook is not None or self._averages(bucket) else self.scale
