"""From gradients that trickle in to gradients that are the mean over all ranks.

The reducer knows parameters, buckets and a process group. It knows neither modules nor autograd:
whoever does says when a backward begins, when each gradient has come, and when it is over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto

import torch
import torch.distributed as dist

from lockstep.grad.arrangement import agreed_order, make_buckets
from lockstep.grad.assignment import FIRST_BUCKET_BYTES
from lockstep.grad.bucket import Bucket
from lockstep.grad.comm_hook import CommHook
from lockstep.grad.facts import failed_ranks, used_by_any, write_facts
from lockstep.grad.launch_order import LaunchOrder
from lockstep.grad.ready_state import COME, EXCUSED, TOUCHED_EARLIER, TOUCHED_NOW, ReadyState
from lockstep.grad.same_data import SameData
from lockstep.grad.sparse import SparseGradient
from lockstep.grad.wording import failed_elsewhere, late, naming, tell_of_unused


class Phase(Enum):
    """Where a reducer is in the course of a step."""

    IDLE = auto()  # no backward runs; gradients are what the last one left
    COLLECTING = auto()  # a backward runs; full buckets are on their way
    FINISHING = auto()  # the backward is over; the rest is launched and all is waited for


class Reducer:
    """Replaces gradients by their mean over the ranks, while backward still computes others.

    Three rules keep the ranks together, whatever each of them does in between:

    - Buckets launch in index order, not in the order in which they fill. Ranks fill them in
      different orders, and collectives that don't match are what hangs are made of. Shown by
      test_buckets_launch_in_index_order.
    - The last bucket launches when the backward is over, and carries which parameters this rank
      used. So no step needs another collective to learn which ones nobody used.
    - After the first backward the buckets are arranged anew, in the order in which rank 0 saw
      its gradients come.

    In the first backward nothing is launched before its end. It shows whether a parameter gets
    several gradients in one backward (as it does where reentrant checkpoints share weights); if
    one does, buckets go on waiting for the end.

    Args:
        named_parameters: The parameters to reduce, in the same order on every rank.
        group: The process group; every rank of it must have a reducer of the same parameters.
        cap_bytes: How much makes a bucket full.
        first_cap_bytes: How much makes the first one full.
        skip_unused: Whether a bucket that this rank used nothing of stays here. The other ranks
            must leave out the same ones.
        sparse: Those parameters, by their place in ``named_parameters``, whose gradients are
            sparse.

    Attributes:
        phase: Where it is in the course of a step.
        process_group: As given.
        share: What the gradients of each rank are multiplied by before they are added up.
        is_rearranged: Whether buckets have the order in which gradients came.
        has_failed: Whether a backward has failed, and was not finished since.
        takes_early: Whether gradients are copied into their bucket when they come, and not only
            when it is full. A backward inside of a backward may add to them later, and one with
            ``create_graph`` gives them a graph.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        cap_bytes: int,
        first_cap_bytes: int = FIRST_BUCKET_BYTES,
        skip_unused: bool = False,
        sparse: Collection[int] = (),
    ) -> None:
        self.phase = Phase.IDLE
        self.process_group = group
        self._size = group.size()
        self.share = 1 / self._size
        self._comm_hook: CommHook | None = None
        self.takes_early = False
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._cap_bytes = cap_bytes
        self._first_cap_bytes = first_cap_bytes
        self._skip_unused = skip_unused
        arrivals = self._arrivals = ReadyState(self._parameters, sparse)
        self._sparse = {
            place: SparseGradient(arrivals.in_order[place])
            for place in range(arrivals.num_dense, len(self._parameters))
        }
        self._left_out: list[int] = []
        self._used_by_any: Iterable[float] = ()  # at each position, after a backward
        # Empty until the first backward: a copy that is never trained needs no memory for it.
        self._buckets: list[Bucket] = []
        self._bucket_at: list[Bucket] = []
        self._has_reduced = False
        self._skipped: set[int] = set()
        self.is_rearranged = False
        self._launches_early = False
        self._gets_gradients_twice = False
        self._has_told_of_unused = False
        self._next_launch = 0
        # Of the backward that runs; not longer, as it holds this reducer.
        self._turns: LaunchOrder | None = None
        self._has_begun = self.has_failed = False
        self._failed_ranks = 0, 0  # how many, and their numbers added up
        self._same_data = SameData()

    @property
    def comm_hook(self) -> CommHook | None:
        """What reduces the buckets instead of an all-reduce."""
        return self._comm_hook

    @comm_hook.setter
    def comm_hook(self, hook: CommHook | None) -> None:
        self._comm_hook = hook
        self._buckets, self._bucket_at = [], []  # they are made of other memory for a hook

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """The names of the parameters in each bucket, in launch order, after the first backward."""
        return [bucket.parameter_names for bucket in self._buckets]

    @property
    def bucket_bytes(self) -> Sequence[int]:
        """The size of each bucket's gradients, in bytes."""
        return [bucket.num_bytes for bucket in self._buckets]

    @property
    def unused(self) -> Sequence[str]:
        """The names of those parameters that the last backward gave no gradient on this rank."""
        return [self._names[index] for index in self._left_out]

    @property
    def left_out(self) -> Sequence[torch.nn.Parameter]:
        """Those parameters that the last backward gave no gradient: see :meth:`excuse`."""
        return [self._parameters[index] for index in self._left_out]

    @property
    def reduced(self) -> list[torch.nn.Parameter]:
        """Parameters that any rank used in the last backward, in the same order on every rank."""
        return [*itertools.compress(self._arrivals.in_order, self._used_by_any)]

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients have been added up since they were last reduced, and are there."""
        return self._arrivals.has_unreduced()

    def is_unreduced(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of ``parameter`` has grown since it was last reduced."""
        return bool(self._arrivals.touched[self._arrivals.places[id(parameter)]])

    def take_over(self, previous: Reducer) -> None:
        """Go on where ``previous`` stops: it had other parameters, of which some are here too."""
        self.share, self._comm_hook = previous.share, previous.comm_hook
        self._same_data = previous._same_data
        self._gets_gradients_twice = previous._gets_gradients_twice
        self._arrivals.take_over(previous._arrivals)

    def begin(self, turns: LaunchOrder | None = None, *, takes_early: bool = False) -> None:
        """A backward has begun on every rank; an earlier one that failed is finished first.

        Args:
            turns: The reducers of the same group that the backward runs through, this one too.
            takes_early: Whether to copy gradients into their bucket when they come.
        """
        if self.has_failed:
            self.finish()
        self._has_begun = True
        self._turns = turns or LaunchOrder([self])
        if self._has_reduced and not self.is_rearranged:
            self.is_rearranged = True
            self._arrange(agreed_order(self._arrivals, self.process_group))
        if not self._buckets:
            self._arrange(self._arrivals.order)
        self._arrivals.begin()
        self.phase = Phase.COLLECTING
        self.takes_early = takes_early
        if takes_early:
            for bucket in self._buckets:
                # In the first backward, some may come twice.
                bucket.take_early(self._scale_of(bucket) if self._launches_early else 1)

    def excuse(self, parameters: Iterable[torch.Tensor]) -> None:
        """Don't let buckets wait for these gradients: this backward won't compute them."""
        arrivals = self._arrivals
        for place in {arrivals.places[id(parameter)] for parameter in parameters}:
            if place < arrivals.num_dense:
                arrivals.states[place] = EXCUSED
                bucket = self._bucket_at[place]
                bucket.num_missing -= 1
                bucket.takes_at = max(0, bucket.takes_at - 1)

    def mark_accumulated(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` has grown, and is not to be reduced yet."""
        self._arrivals.touched[self._arrivals.places[id(parameter)]] = TOUCHED_EARLIER

    def mark_late(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` has come, before :meth:`begin` could be called."""
        arrivals, place = self._arrivals, self._arrivals.places[id(parameter)]
        if arrivals.states[place] == COME:
            self._gets_gradients_twice = True
        arrivals.states[place] = COME
        arrivals.touched[place] = TOUCHED_EARLIER

    def mark_ready(self, parameters: Sequence[torch.Tensor]) -> int:
        """The gradients of ``parameters`` have come; buckets leave when they are full.

        Returns:
            How many more may come before there is something to do, and this has to be called again.
        """
        arrivals = self._arrivals
        places = arrivals.next_places(parameters)
        if places is not None:
            self._take_awaited(places)
        else:
            for place in [arrivals.places[id(parameter)] for parameter in parameters]:
                if arrivals.states[place]:
                    self._take_unawaited(place)
                else:
                    self._take_awaited(range(place, place + 1))
        return self._num_until_next()

    def _take_awaited(self, places: range) -> None:
        """The gradients at ``places`` have come."""
        self._arrivals.come(places)
        first, last = places.start, places.stop
        while first < last:
            bucket = self._bucket_at[first]
            stop = min(last, bucket.stop)
            bucket.num_missing -= stop - first
            if bucket.num_missing <= bucket.takes_at:
                self._attend_to(bucket, range(first - bucket.start, stop - bucket.start))
            first = stop

    def _attend_to(self, bucket: Bucket, places: Iterable[int]) -> None:
        """There is something to do with ``bucket``; its gradients at ``places`` came last."""
        if self.takes_early:
            if bucket.scales_on_the_way:
                for place in places:
                    bucket.take(place)
            while bucket.takes_at and bucket.num_missing <= bucket.takes_at:
                bucket.take_chunk()
        if not bucket.num_missing and self._launches_early and self._turns:
            self._turns.launch_full_buckets()

    def _num_until_next(self) -> int:
        """After how many gradients there is something to do, if they come as they did before.

        That is for the next bucket that isn't full, and the one behind it: others may come first.
        """
        behind = itertools.islice(self._buckets, self._next_launch, None)
        filling = itertools.islice((bucket for bucket in behind if bucket.num_missing), 2)
        numbers = [bucket.num_missing - bucket.takes_at for bucket in filling]
        return max(1, min(numbers, default=len(self._parameters)))

    def _take_unawaited(self, place: int) -> None:
        """A gradient has come that was excused, or that came before in this backward."""
        arrivals = self._arrivals
        if place < arrivals.num_dense:
            bucket = self._bucket_at[place]
            if bucket.has_taken(place - bucket.start):
                self._gets_gradients_twice, self._launches_early = True, False
                raise late(self._name_at(place))
        if arrivals.states[place] == COME:
            self._gets_gradients_twice = True
        else:
            arrivals.states[place], arrivals.touched[place] = COME, TOUCHED_NOW
            arrivals.seen.append(arrivals.order[place])

    def give_up(self) -> None:
        """The backward has failed; gradients that haven't left stay, and are added to.

        Other ranks have launched more or fewer buckets of it, or wait for its end. So before
        anything else is reduced, :meth:`finish` has to send what is lacking, and that it failed.
        Shown by test_a_backward_that_fails_at_different_places_on_each_rank.
        """
        self.phase = Phase.IDLE
        self._turns = None
        self._arrivals.forget()
        self.has_failed = self._has_begun
        self._same_data.drop()
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.give_back()

    def launch_full_buckets(self) -> bool:
        """Launch what is full; return whether only the last bucket is left."""
        last = len(self._buckets) - 1
        with torch.no_grad():
            while self._launches_early and self._next_launch < last:
                before = self._buckets[max(0, self._next_launch - 1)]
                if self._buckets[self._next_launch].num_missing or not before.is_hook_done():
                    return False
                self._launch()
        return self._next_launch >= last

    def launch_all_but_last(self) -> None:
        """The backward is over: send what has not been sent yet, but for the last bucket.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        if self.phase is Phase.FINISHING:
            return
        self.phase = Phase.FINISHING
        with torch.no_grad():
            while self._next_launch < len(self._buckets) - 1:
                self._launch()
            if self._sparse:
                self.finish_hooks()
                self._reduce_sparse()

    def _reduce_sparse(self) -> None:
        arrivals, hook = self._arrivals, self.comm_hook
        for index, (place, gradient) in enumerate(self._sparse.items(), len(self._buckets) - 1):
            arrivals.touched[place] *= gradient.is_there  # as Bucket.fill() does
            if self._skips(index + len(self._bucket_at), bool(arrivals.touched[place])):
                continue
            with naming(self._name_at(place), self.process_group):
                if hook is None:
                    gradient.reduce(self.process_group, self.share)
                else:
                    is_last = not self._bucket_at and place == len(self._parameters) - 1
                    gradient.reduce_through(hook, index, is_last=is_last)

    def finish_hooks(self) -> None:
        """Wait until no communication hook is at work."""
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.finish_hook(self.process_group)

    def launch_last(self) -> None:
        """Send the last bucket, with what the others need to know; raises as before it."""
        with torch.no_grad():
            if self._next_launch < len(self._buckets):
                self._launch()

    def finish(self) -> None:
        """Wait until every gradient is the mean over all ranks.

        A parameter that no rank used keeps the gradient that it had, None included.

        Raises:
            ParameterChanged: As :meth:`launch_all_but_last`, which need not have been called.
            CollectiveFailed: If another rank is lost, or doesn't come in time.
        """
        try:
            self.launch_all_but_last()
            self.launch_last()
            with torch.no_grad():
                for bucket in self._buckets:
                    bucket.wait(self.process_group)
                if not self.has_failed:
                    self._take_what_came()
            self._left_out = self._arrivals.missing()
        finally:
            has_failed = self.has_failed
            self._reset()
        if not has_failed:
            self._arrivals.touched[:] = bytes(len(self._parameters))
        self._has_reduced = True
        self._launches_early = not self._gets_gradients_twice

    def check_all_have_succeeded(self) -> None:
        """Raise CollectiveFailed if the backward that was finished last failed on another rank."""
        (num_failed, ranks), self._failed_ranks = self._failed_ranks, (0, 0)
        if num_failed:
            raise failed_elsewhere(num_failed, ranks, self.process_group)

    def _take_what_came(self) -> None:
        """Make the mean the gradient of all that were used on any rank."""
        last = self._buckets[-1]
        factor = self._size if self._averages(last) else 1
        self._failed_ranks = failed_ranks(last.tail, factor)
        if self._failed_ranks[0]:
            lost: Iterable[Bucket | SparseGradient] = (*self._buckets, *self._sparse.values())
            for one in lost:
                one.drop()
            return
        for place, gradient in self._sparse.items():
            if self._arrivals.touched[place]:
                gradient.adopt()
        self._adopt_what_others_used()
        if self._same_data.is_looking:
            self._same_data.compare(is_rank_0=self.process_group.rank() == 0)

    def _launch(self) -> None:
        """Launch the next bucket."""
        index, bucket = self._next_launch, self._buckets[self._next_launch]
        is_last = index == len(self._buckets) - 1
        if not is_last and self._skips(index, any(bucket.touched)):
            bucket.has_left, self._next_launch = True, index + 1
            return
        if not bucket.has_left:  # as it may, if its hook has failed
            self._fill(bucket)
        if is_last:
            # All are filled by now, and so every one of these facts is final.
            failed_rank = self.process_group.rank() if self.has_failed else None
            write_facts(bucket.tail, self._arrivals.touched, failed_rank)
        if self.comm_hook is None:
            bucket.launch(self.process_group, average=self._averages(bucket))
        else:
            # One after the other: hooks launch further collectives when their first is through,
            # and in between none of another bucket may come, on some ranks only. Shown by
            # test_hooks_of_several_collectives_keep_their_order.
            if index:
                self._buckets[index - 1].finish_hook(self.process_group)
            if bucket.parameter_names and not bucket.has_left:
                number = index + len(self._sparse) * is_last  # sparse ones come before the last
                bucket.launch_through(self.comm_hook, number, is_last=is_last)
            if is_last:
                bucket.finish_hook(self.process_group)
                bucket.launch_tail(self.process_group)
        self._next_launch += 1

    def _skips(self, number: int, is_used: bool) -> bool:
        """Whether a bucket, or sparse gradient, of that number is not to be sent."""
        if not self._skip_unused:
            return False
        # What a backward that failed would have used, the one before it tells.
        if not self.has_failed:
            (self._skipped.discard if is_used else self._skipped.add)(number)
        return number in self._skipped

    def _fill(self, bucket: Bucket) -> None:
        """Bring into ``bucket`` what this rank adds to the sum."""
        if self.has_failed:  # a hook may remember what it is given
            bucket.fill_with(math.nan if self.comm_hook is None else 0)
            return
        bucket.fill(self._scale_of(bucket))
        if self._same_data.is_looking and self.comm_hook is None and self.share == 1 / self._size:
            self._same_data.keep(bucket.gradients, 1 if self._averages(bucket) else self._size)

    def _averages(self, bucket: Bucket) -> bool:
        """Whether the group is to average ``bucket``, and not to add it up."""
        return bucket.averages and self.comm_hook is None and self.share == 1 / self._size

    def _scale_of(self, bucket: Bucket) -> float:
        """What gradients are to be multiplied by on their way into ``bucket``."""
        return 1 if self.comm_hook is not None or self._averages(bucket) else self.share

    def _adopt_what_others_used(self) -> None:
        """Take the mean for parameters that this rank left out and another one used."""
        # Reading the tail waits for a GPU. A rank that used everything has no need to.
        touched_here = self._arrivals.touched
        if all(touched_here):
            self._used_by_any = itertools.repeat(1)
            return
        self._used_by_any = used_by_any(self._buckets[-1].tail)
        pairs = zip(self._used_by_any, touched_here, strict=True)
        for place, (used, touched) in enumerate(pairs):
            if used and not touched:
                if place in self._sparse:
                    self._sparse[place].adopt()
                else:
                    bucket = self._bucket_at[place]
                    bucket.adopt(place - bucket.start)
        used_here = zip(self._arrivals.order, self._used_by_any, strict=True)
        unused = [index for index, used in used_here if not used]
        if unused and not self._has_told_of_unused and self.process_group.rank() == 0:
            self._has_told_of_unused = True
            tell_of_unused([self._names[index] for index in sorted(unused)])

    def _arrange(self, order: Sequence[int]) -> None:
        """Make buckets for gradients that become ready in ``order``; old ones move over."""
        # Before others are made: they are as large as all gradients.
        self._buckets, self._bucket_at = [], []
        self._skipped.clear()
        self._buckets = make_buckets(
            self._names,
            self._arrivals,
            order,
            cap_bytes=self._cap_bytes,
            first_cap_bytes=self._first_cap_bytes,
            buffers_from=self.process_group if self.comm_hook is None else None,
        )
        self._bucket_at = [bucket for bucket in self._buckets for _ in bucket.parameter_names]

    def _reset(self) -> None:
        self.phase = Phase.IDLE
        self._has_begun = self.has_failed = False
        self._turns = None
        self._next_launch = 0
        self._arrivals.forget()
        for bucket in self._buckets:
            bucket.forget()

    def _name_at(self, place: int) -> str:
        return repr(self._names[self._arrivals.order[place]])
