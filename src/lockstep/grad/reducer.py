"""The reducer: replaces gradients by their means over the ranks, as they become ready.

The reducer knows parameters, buckets and a process group, and neither modules nor autograd: its
caller calls it when a backward begins, when gradients are ready, and when the backward is over.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist

from lockstep import spans
from lockstep.comm import agree, mean_divisor
from lockstep.errors import CollectiveFailed, CollectiveMismatch
from lockstep.grad.arrangement import FIRST_BUCKET_BYTES, Assigned, assigned_for, make_buckets
from lockstep.grad.bucket import Bucket, Inspect, without_autograd
from lockstep.grad.comm_hook import CommHook
from lockstep.grad.diagnostics import GradientLog, failed_elsewhere, late_gradient, naming
from lockstep.grad.facts import Flags
from lockstep.grad.one_pass import AWAITED, READY, UNUSED, Launching, Phase, ReducerPass, Result
from lockstep.grad.row_bucket import RowTables
from lockstep.grad.rows import hooked_rows, mean_of_rows
from lockstep.grad.table import GradientOrder, GradientTable
from lockstep.grad.unsummed import UnsummedBucket


class Reducer:
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
        table: The parameters, in the order in which their gradients become ready.
        comm_hook: The communication hook that replaces the all-reduce of buckets, if there is one.
        last: What the last backward has left.
        order: The order in which gradients become ready, once ranks agree on it.
        tables: Which of them are tables whose gradients travel by rows.
        chunk_ends: The parameters whose gradients are the last ones to be copied at once.
        is_rearranged: Whether buckets are in the order in which gradients became ready.
        inspect: Called with this rank's gradients of each bucket, scaled, before they are reduced.
    """

    # What belongs to the backward that runs, or has failed and isn't finished; else there is none.
    _now: ReducerPass

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
        # What it reduces, and how.
        self.process_group = group
        self.table = GradientTable(named_parameters, sparse)
        self._caps = cap_bytes, first_cap_bytes
        self._skip_unused, self._is_kept = skip_unused, is_kept
        self.comm_hook: CommHook | None = None
        self.inspect: Inspect | None = None
        self._log = GradientLog(is_on=is_kept and group.rank() == 0)
        # Its buckets, and the bucket at each position. There are none until the first backward: a
        # copied model that is never trained needs no buckets.
        self._buckets: list[Bucket] = []
        self._bucket_at: list[Bucket] = []
        self.chunk_ends: Sequence[torch.Tensor] = ()
        self._arranged_for: CommHook | None = None  # the hook of these buckets
        # The indices of parameters whose gradients stay unsummed, which have buckets of their own.
        self.runs: list[Assigned] = []
        # What backwards have shown.
        self.is_rearranged = self._gets_gradients_twice = False
        self.order, self.tables = GradientOrder(self.table, group), RowTables(self.table, group)
        self._skipped: set[int] = set()  # numbers of buckets, and of sparse gradients behind them
        self.last = Result()

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        return self._now.phase if hasattr(self, "_now") else Phase.IDLE

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """The names of each bucket's parameters, in launch order, from the first backward on."""
        return [bucket.contents.parameter_names for bucket in self._buckets]

    def defer(self, runs: Sequence[tuple[Sequence[torch.Tensor], type[UnsummedBucket]]]) -> None:
        """Give each run of parameters, of one dtype and device, a bucket of unsummed gradients."""
        index = {id(parameter): index for index, (_, parameter) in enumerate(self.table.named)}
        self.runs = [Assigned([index[id(p)] for p in run], kind) for run, kind in runs]
        self.sum_unsummed()
        self._buckets = []  # they are made when the next backward begins

    def sum_unsummed(self) -> None:
        """Sum the unsummed gradients of deferred buckets, before others are added to them."""
        for bucket in self._buckets:
            bucket.sum_unsummed()

    @property
    def _launches_early(self) -> bool:
        return self.is_rearranged and not self._gets_gradients_twice

    def take_over(self, previous: Reducer) -> None:
        """Continue from the state of ``previous``, a reducer of some of these parameters."""
        self.comm_hook, self._log = previous.comm_hook, previous._log
        self.inspect = previous.inspect  # a model may be unfrozen in a step that is guarded
        self._log.logs_unused = self._log.is_on
        self._gets_gradients_twice = previous._gets_gradients_twice
        self.table.take_over(previous.table)

    @property
    def unused(self) -> Sequence[str]:
        """The names of :attr:`unused_parameters`."""
        return [self.table.named[index][0] for index in self.last.unused]

    @property
    def unused_parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that got no gradient in the last backward on this rank."""
        return [self.table.named[index][1] for index in self.last.unused]

    def stop_early_copies(self) -> None:
        """Copy no more gradients before their bucket is full: others may be added to them."""
        self._now.copies_early = False

    def drop_pass(self) -> None:
        """Drop what belongs to the backward, which is over, or which no rank goes on with."""
        vars(self).pop("_now", None)
        for bucket in self._buckets:
            bucket.end()

    def begin(
        self,
        launch_order: Sequence[Launching] | None = None,
        *,
        copies_early: bool = False,
        scale: float | None = None,
    ) -> None:
        """Begin a backward, on every rank; one that failed is finished before.

        ``launch_order`` lists the group's reducers in this backward, in the same order on every
        rank; by default this one. A reducer launches buckets before the end of the backward when
        those before it have only their last bucket left. Last buckets follow at the end, in order.
        Shown by test_two_models_in_one_backward_launch_in_one_order. ``scale`` is the factor of
        each rank's gradients in the sum, by default that of a mean.
        """
        if self.phase is Phase.FAILED:
            self.finish()
        table = self.table
        # Also if there is no memory for buckets. Gradients that came before are ``accumulated``.
        now = self._now = ReducerPass(table.sparse, Phase.COLLECTING)
        now.scale = 1 / mean_divisor(self.process_group) if scale is None else scale
        self._open_buckets()
        if self.last.order is not None and not self.is_rearranged:
            order = self.order.agreed(self.last.order)
            self.tables.agree()
            self.is_rearranged = True  # on every rank, as none of them has raised
            self._arrange(order)
        is_other = bool(self.tables.indices) and self.tables.leave_out(self._buckets, table.order)
        if is_other or not self._buckets or self._arranged_for is not self.comm_hook:
            self._arrange(table.order)
        Bucket.begin_all(self._buckets)
        now.copies_early = copies_early
        now.launch_order = [self] if launch_order is None else launch_order
        if copies_early and self._launches_early:  # the first backward may add to a gradient twice
            for bucket in self._buckets:
                bucket.contents.now.copy_scale = bucket.contents.now.scale

    def _open_buckets(self) -> None:
        # In a function of its own, whose end lets go of the last one: _arrange() drops them, and
        # there is memory for one of both. Shown by
        # test_a_bucket_stays_where_it_is_if_nobody_holds_its_gradients.
        for bucket in self._buckets:
            bucket.open_pass(self._now.scale)

    def _arrange(self, order: Sequence[int]) -> None:
        """Make buckets for gradients that become ready in ``order``; if it raises, none."""
        # The old ones are dropped before: they are as large as all gradients, and memory is short.
        self.sum_unsummed()
        kept = [*filter(None, (bucket.when_rearranged() for bucket in self._buckets))]
        self._buckets, self._bucket_at, self._skipped = [], [], set()
        assigned = self.assigned_for(order)
        self.table.arrange(itertools.chain(*(one.indices for one in assigned)))
        group, hook = self.process_group, self.comm_hook
        self._buckets = make_buckets(
            self.table, assigned, group, kept, hook=hook, is_shared=self._is_kept
        )
        self._arranged_for = hook
        self._open_buckets()
        self._bucket_at = [bucket for bucket in self._buckets for _ in bucket.contents.parameters]
        self.chunk_ends = [p for bucket in self._buckets for p in bucket.contents.chunk_ends()]

    def assigned_for(self, order: Sequence[int]) -> list[Assigned]:
        """Return the buckets to make for gradients that become ready in ``order``."""
        cap, first = self._caps
        apart = ([], set()) if self.comm_hook else (self.runs, self.tables.indices)
        return assigned_for(self.table, order, *apart, cap_bytes=cap, first_cap_bytes=first)

    def mark_unused(self, parameters: Iterable[torch.Tensor]) -> None:
        """Don't wait for the gradients of ``parameters``, which this backward won't compute."""
        for position in {self.table.position_of[id(parameter)] for parameter in parameters}:
            if position < self.table.sparse.start:
                self._now.states[position] = UNUSED
                self._bucket_at[position].contents.now.num_missing -= 1

    def mark_accumulated(self, parameter: torch.Tensor) -> None:
        """Note that the gradient of ``parameter``, if it is known here, has grown unreduced."""
        if (position := self.table.position_of.get(id(parameter))) is not None:
            self.table.accumulated[position] = 1
            if self.runs:
                self.sum_unsummed()

    def mark_ready(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that the gradients of ``parameters`` are ready, and launch buckets that are full.

        Raises:
            LateGradient: If the bucket of a gradient has been launched already in this backward.
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        now, table = self._now, self.table
        first, last = now.next_position, now.next_position + len(parameters)
        if (  # as for most gradients: these are the next ones, and awaited
            last <= table.sparse.start
            and all(map(operator.is_, parameters, table.parameters[first:last]))
            and not any(now.states[first:last])
        ):
            self._mark_awaited(first, last)
        else:
            self._mark_one_by_one(parameters)

    def next_few(self) -> int:
        """Return the number of gradients that may become ready before :meth:`mark_ready`."""
        # If gradients come in order, the next bucket that isn't full will be, or the one behind it.
        now, most = self._now, len(self.table.named)
        filling = (one for one in self._buckets[now.next_launch :] if one.contents.now.num_missing)
        for bucket in itertools.islice(filling, 2):
            chunk = bucket.contents.chunk if now.copies_early else most
            most = min(most, bucket.contents.now.num_missing, chunk)
        return most

    def _mark_awaited(self, first: int, last: int) -> None:
        """Note that the gradients from position ``first`` to ``last`` are ready."""
        now, table = self._now, self.table
        now.next_position = last
        now.states[first:last] = bytes([READY]) * (last - first)
        table.accumulated[first:last] = b"\1" * (last - first)
        now.arrivals += table.order[first:last]
        while first < last:
            bucket = self._bucket_at[first]
            stop = min(last, bucket.contents.stop)
            bucket.contents.now.num_missing -= stop - first
            first = stop
            self._look_at(bucket)

    def _mark_one_by_one(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that the gradients of ``parameters``, in any order, are ready."""
        now, table = self._now, self.table
        # Local names are fast: with a sharded optimizer, all gradients of every step pass here.
        position_of, states, accumulated = table.position_of, now.states, table.accumulated
        grown: dict[Bucket, None] = {}
        for parameter in parameters:
            position = position_of[id(parameter)]
            if states[position] != AWAITED:
                self.mark_unawaited(parameter)
                continue
            states[position], accumulated[position] = READY, 1
            now.arrivals.append(table.order[position])
            now.next_position = position + 1
            bucket = self._bucket_at[position]
            bucket.contents.now.num_missing -= 1
            grown[bucket] = None
        for bucket in grown:
            self._look_at(bucket)

    def _look_at(self, bucket: Bucket) -> None:
        """Copy new gradients of ``bucket`` early, or launch buckets if it is full."""
        now = self._now
        if bucket.contents.now.num_missing:
            if now.copies_early:
                bucket.contents.copy_ready(now.states)
            return
        bucket.contents.now.full_at = bucket.contents.now.full_at or spans.now()
        if self._launches_early:
            for reducer in now.launch_order:
                if not reducer.launch_full_buckets():
                    break

    def mark_unawaited(self, parameter: torch.Tensor) -> None:
        """Note that a gradient is ready for which no bucket waits, or before :meth:`begin`.

        Raises:
            LateGradient: If its bucket has been launched already in this backward.
        """
        table = self.table
        if not hasattr(self, "_now"):
            self._now = ReducerPass(table.sparse, Phase.IDLE)
        now, position = self._now, table.position_of[id(parameter)]
        if now.phase is not Phase.IDLE and position < len(self._bucket_at):
            contents = self._bucket_at[position].contents
            if contents.is_too_late_for(position - contents.start):
                self._gets_gradients_twice = True
                raise late_gradient(table.name_at(position))
        if now.states[position] == READY:
            self._gets_gradients_twice = True
        else:
            now.note_arrival(table, position)

    def fail(self) -> None:
        """Note that the backward has failed; the next one adds to gradients not launched yet.

        Other ranks have launched more buckets or fewer, or wait for the end. So before any other
        reduction, :meth:`finish` has to launch the rest, and tell the other ranks of the failure.
        Shown by test_a_backward_that_fails_at_different_places_on_each_rank.
        """
        if self.phase is Phase.IDLE:
            vars(self).pop("_now", None)  # of gradients that came before the backward began here
            return
        self._now.phase, self._now.launch_order = Phase.FAILED, ()
        self._log.drop()
        for bucket in self._buckets:
            bucket.undo()

    def launch_full_buckets(self) -> bool:
        """Launch full buckets, up to the first that isn't; return whether only the last is left."""
        now, last = self._now, len(self._buckets) - 1
        while self._launches_early and now.next_launch < last:
            before = self._buckets[max(0, now.next_launch - 1)]
            if self._buckets[now.next_launch].contents.now.num_missing or not before.is_hook_done():
                return False
            with without_autograd():
                self._launch()
        # Sparse gradients come between the other buckets and the last one.
        return now.next_launch >= last and not self.table.sparse

    def launch_all_but_last(self) -> None:
        """Launch all buckets but the last, and reduce sparse gradients: the backward is over.

        It waits for communication hooks and sparse gradients, and raises as :meth:`finish`. The
        caller disables autograd, also for :meth:`launch_last`, as gradients may have a graph.
        """
        now, last = self._now, len(self._buckets) - 1
        while now.next_launch < last:
            self._launch()
        for bucket in self._buckets:
            bucket.finish_hook()
        for index, position in enumerate(self.table.sparse, last):
            if position not in now.reduced_sparse:
                with naming([self.table.name_at(position)], self.process_group):
                    now.reduced_sparse[position] = self._reduce_sparse(index, position)

    def _reduce_sparse(self, index: int, position: int) -> torch.Tensor | None:
        """Return the mean of a sparse gradient; None if it is not sent, as no rank uses it."""
        table, parameter = self.table, self.table.parameters[position]
        table.accumulated[position] *= parameter.grad is not None
        if self._skips(index + len(self._bucket_at), bool(table.accumulated[position])):
            return None
        if self.comm_hook is None:
            return mean_of_rows(table, position, self.process_group, self._now.scale)
        is_last = not self._bucket_at and position == len(table.named) - 1
        agree(self.process_group, "a communication hook")
        return hooked_rows(self.comm_hook, parameter, index, is_last=is_last)

    def launch_last(self, *, tells: bool = False) -> None:
        """Launch the last bucket, with this rank's facts; ``tells``: it has one to tell others."""
        now = self._now
        if now.next_launch < len(self._buckets):
            # Shown by test_a_change_of_one_rank_alone_is_named_on_all.
            now.is_to_tell = self.table.heard.look() or tells
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
                Bucket.wait_for_all(self._buckets)
                self.last = self._now.result(self.table.order)
                if self.phase is not Phase.FAILED:
                    error = self._use_reduced()
                    self.table.accumulated[:] = bytes(len(self.table.named))
        except CollectiveMismatch:
            self.fail()
            raise
        finally:
            self.drop_pass()
        return error

    def _use_reduced(self) -> CollectiveFailed | None:
        """Make the mean the gradient of every parameter that any rank used."""
        table, now, last = self.table, self._now, self._buckets[-1]
        facts = last.facts()
        if facts.num_failed:
            for bucket in self._buckets:
                bucket.drop()
            for parameter in table.sparse_parameters:
                parameter.grad = None
            return failed_elsewhere(facts.num_failed, facts.sum_of_failed, self.process_group)
        told = table.heard.hear(facts, tells=now.is_to_tell)
        for bucket in self._buckets:
            bucket.finish()
        # Reading the facts waits for a GPU. A rank that used everything need not.
        used: Sequence[int] = table.sparse
        used_by_any: Iterable[float] = [1] * len(table.named)
        if not all(table.accumulated):
            used_by_any = facts.used_by_any()
            used = [position for position, number in enumerate(used_by_any) if number]
            if len(used) < len(table.named) and self._log.logs_unused:
                unused = {*table.order} - {table.order[position] for position in used}
                self._log.unused([table.named[index][0] for index in sorted(unused)])
        self.last = self.last._replace(used_by_any=used_by_any, told=told)
        for position in used:
            if (reduced := now.reduced_sparse.get(position)) is not None:
                table.parameters[position].grad = reduced
            elif position not in table.sparse and not table.accumulated[position]:
                bucket = self._bucket_at[position]
                bucket.use_as_grad(position - bucket.contents.start)
        if facts.is_watched:
            for bucket in self._buckets:
                bucket.sum_watched()
        for bucket in self._buckets:
            bucket.settle()
        if self._log.compares:
            for bucket in self._buckets:
                bucket.log_of_ranks(self._log)
            self._log.compare()
        return None

    def _launch(self) -> None:
        now, index = self._now, self._now.next_launch
        bucket = self._buckets[index]
        bucket.contents.now.launched_at = spans.now()
        is_last = index == len(self._buckets) - 1
        if not is_last and self._skips(index, any(bucket.contents.accumulated)):
            bucket.contents.now.is_launched, now.next_launch = True, index + 1
            return
        is_failed = now.phase is Phase.FAILED
        if not bucket.contents.now.is_launched:  # it is if its hook has failed
            if is_failed:
                bucket.fill_failed()
            else:
                bucket.fill()
                if self.inspect is not None:
                    bucket.show_local(self.inspect)
                if self._log.compares and now.scale == 1 / self.process_group.size():
                    bucket.log_filled(self._log)
        if is_last:
            # All buckets are filled by now, so the facts are final.
            flags = Flags(any(bucket.is_watched() for bucket in self._buckets), now.is_to_tell)
            failed_rank = self.process_group.rank() if is_failed else None
            bucket.write_facts(self.table.accumulated, flags, failed_rank)
        # One hook after the other: a hook may launch a second collective when its first is done,
        # and collectives of two buckets must not interleave differently on each rank. Shown by
        # test_hooks_of_several_collectives_keep_their_order.
        self._buckets[max(0, index - 1)].finish_hook()
        # Sparse gradients come before the last bucket.
        bucket.launch(index + len(self.table.sparse) * is_last, is_last=is_last)
        now.next_launch += 1

    def _skips(self, number: int, is_used: bool) -> bool:
        """Whether the bucket, or the sparse gradient, ``number`` is not sent."""
        if not self._skip_unused:
            return False
        # A failed backward skips what the one before it skipped, as the other ranks do.
        if self.phase is not Phase.FAILED:
            (self._skipped.discard if is_used else self._skipped.add)(number)
        return number in self._skipped
