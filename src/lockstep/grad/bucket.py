"""Buckets: gradients that leave this rank together, and come back as means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist

from lockstep import spans
from lockstep.comm import agree, can_average, start_all_reduce
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer
from lockstep.grad.contents import Contents
from lockstep.grad.diagnostics import GradientLog, naming, raise_named
from lockstep.grad.facts import Facts, Flags, write_facts
from lockstep.grad.memory import held
from lockstep.torch_private import gradient_of

_NOTHING = nullcontext()
# Called with what a bucket has of this rank and, if these aren't in its memory, its rows.
Inspect = Callable[[Contents, torch.Tensor | None], None]


def without_autograd() -> AbstractContextManager[object]:
    """Return ``torch.no_grad()``, or nothing where autograd is disabled, as in most backwards."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


class Bucket:
    """Gradients of some parameters, and how they are reduced: all-reduced, with facts behind them.

    Other classes have other ways. In each backward the reducer calls :meth:`open_pass` and
    :meth:`begin`; when all gradients are there, :meth:`fill`, in the last bucket
    :meth:`write_facts`, and :meth:`launch`; :meth:`wait`; then, if no rank has failed,
    :meth:`finish`, :meth:`use_as_grad` for each gradient that only other ranks have, and
    :meth:`settle`; and :meth:`end`. If the backward fails here, it calls :meth:`undo` instead, and
    later :meth:`fill_failed`, :meth:`launch` and :meth:`wait` for the other ranks' sake.

    Attributes:
        contents: The gradients.
        group: The ranks.
        can_average: Whether the group can average them faster than this rank can scale its own.
    """

    # For those who show buckets.
    is_hooked = is_deferred = False

    def __init__(self, contents: Contents, group: dist.ProcessGroup) -> None:
        self.contents, self.group = contents, group
        # For small gradients scaling takes another pass over the memory; and a half or a quarter
        # of a number is exact.
        is_scaled = contents.is_large and group.size().bit_count() == 1
        can = contents.plan.group is not None and not is_scaled
        self.can_average = can and can_average(group, contents.plan.device)

    @property
    def num_bytes(self) -> int:
        """The size of what is sent."""
        return self.contents.num_bytes

    def open_pass(self, scale: float) -> None:
        """Take up what belongs to a backward, in which sums are means of gradients by ``scale``."""
        is_averaged = self.can_average and scale == 1 / self.group.size()
        self.contents.open_pass(1 if is_averaged else scale, is_averaged=is_averaged)

    def begin(self) -> None:
        """Prepare for a backward: leave the memory to the program if it keeps gradients there."""
        self.contents.leave_held(map(gradient_of, self.contents.parameters))

    def fill(self) -> None:
        """Copy every gradient to where it leaves from."""
        self.contents.fill()

    def fill_failed(self) -> None:
        """Fill what leaves with NaN, in other memory if the gradients are to stay."""
        self.contents.leave_held(itertools.repeat(None))
        self.contents.fill_with(math.nan)

    def show_local(self, inspect: Inspect) -> None:
        """Show this rank's gradients, once it is filled."""
        inspect(self.contents, None)

    def drop(self) -> None:
        """Drop the gradients of this backward, which has failed here or on another rank."""
        self.contents.drop()

    def write_facts(
        self, accumulated: bytearray, flags: Flags, failed_rank: int | None = None
    ) -> None:
        """Write this rank's facts, as it is the last bucket, or that its backward has failed."""
        tail, size = self.contents.memory.tail, self.group.size()
        write_facts(tail, accumulated, flags, failed_rank=failed_rank, num_ranks=size)

    def launch(self, number: int, *, is_last: bool) -> None:
        """Start the reduction of the gradients, and if it ``is_last`` of the facts.

        Every rank must call it, in the same order of ``number``.
        """
        self.contents.now.is_launched = True
        op = dist.ReduceOp.AVG if self.contents.now.is_averaged else dist.ReduceOp.SUM
        self.contents.now.work = start_all_reduce(self.group, self.contents.memory.buffer, op)

    def finish_hook(self) -> None:
        """Wait for the communication hook, if one runs."""

    def is_hook_done(self) -> bool:
        """Whether no communication hook is running on it."""
        return True

    def wait(self) -> None:
        """Wait until the bucket is reduced; on a GPU, its stream waits."""
        if (work := self.contents.now.work) is not None:
            self.contents.now.work = None
            work.wait()

    def facts(self) -> Facts:
        """Return the facts of all ranks."""
        divisor = self.group.size() if self.contents.now.is_averaged else 1
        return Facts(self.contents.memory.tail, divisor)

    def finish(self) -> None:
        """Make the reduced gradients those of the parameters: all ranks' backwards succeeded."""
        for position in self.contents.now.kept:
            if self.contents.accumulated[position]:
                self.use_as_grad(position)

    def use_as_grad(self, position: int) -> None:
        """Set the gradient of a parameter that any rank used: to the mean."""
        self.contents.use_mean(position)

    def settle(self) -> None:
        """Restore the gradients that no rank has used, once all others are set."""
        self.contents.restore_unchanged()

    def undo(self) -> None:
        """Undo the scaling of gradients that weren't launched: the backward has failed here."""
        self.contents.undo_copies()

    def end(self) -> None:
        """Drop what belongs to the backward, which is over."""
        self.contents.end_pass()

    def when_rearranged(self) -> Self | None:
        """Return this bucket if it stays when gradients become ready in another order."""
        return None

    def sum_unsummed(self) -> None:
        """Sum gradients that have not been summed yet, before others are added to them."""

    def is_watched(self) -> bool:
        """Whether the program may see its gradients past ``parameter.grad``, and it isn't summed.

        If one is on any rank, every rank calls :meth:`sum_watched` at the end of the backward.
        """
        return False

    def sum_watched(self) -> None:
        """Sum gradients that the program may see past ``parameter.grad``."""

    def log_filled(self, log: GradientLog) -> None:
        """Have ``log`` keep this rank's gradients, to be compared with their means."""
        # They aren't scaled if they are averaged.
        factor = 1 if self.contents.now.is_averaged else self.group.size()
        log.keep(self.contents.gradients, factor)

    def log_of_ranks(self, log: GradientLog) -> None:
        """Have ``log`` compare the gradients of all ranks, where this rank can read them."""

    @staticmethod
    def begin_all(buckets: Sequence[Bucket]) -> None:
        """Begin a backward with ``buckets``, and find the gradients that the program holds."""
        for bucket in buckets:
            bucket.begin()
        contents = [bucket.contents for bucket in buckets]
        others = [(each, position) for each in contents for position in each.elsewhere()]
        gradients: list[Any] = [gradient_of(each.parameters[at]) for each, at in others]
        for number in itertools.compress(range(len(others)), held(gradients)):
            each, position = others[number]
            each.now.kept[position] = gradients[number]

    @staticmethod
    def wait_for_all(buckets: Sequence[Bucket]) -> None:
        """Wait for the collectives of ``buckets``, and tell whoever records of their times."""
        for index, bucket in enumerate(buckets):
            try:
                bucket.wait()
            except RuntimeError as error:
                raise_named(error, bucket.contents.parameter_names, bucket.group)
            if spans.recorder is not None and (launched := bucket.contents.now.launched_at):
                times = (bucket.contents.now.full_at or launched, launched, spans.now())
                spans.recorder.bucket(bucket, index, times)


class HookedBucket(Bucket):
    """A bucket whose gradients a communication hook of the program reduces; the facts are not.

    The facts have memory of their own, since the hook may resize the buffer.
    """

    is_hooked = True

    def __init__(self, contents: Contents, group: dist.ProcessGroup, hook: CommHook) -> None:
        super().__init__(contents, group)
        self._hook = hook

    def open_pass(self, scale: float) -> None:
        """Take up what belongs to a backward; scaling is the hook's."""
        self.contents.open_pass(1, is_averaged=False)

    def fill_failed(self) -> None:
        """Fill what leaves with 0, as a hook may keep it for later steps."""
        self.contents.leave_held(itertools.repeat(None))
        self.contents.fill_with(0)

    def log_filled(self, log: GradientLog) -> None:
        """Keep nothing: the hook may make anything of the gradients."""

    def launch(self, number: int, *, is_last: bool) -> None:
        """Let the hook start, and the facts follow it if it ``is_last``."""
        contents = self.contents
        if contents.parameters and not self.contents.now.is_launched:
            bucket = GradBucket(
                number, contents.memory.gradients, contents.parameters, is_last=is_last
            )
            agree(self.group, "a communication hook")
            with spans.span("launch", "hook"):
                self.contents.now.hooked = self._hook(bucket)
            self.contents.now.is_launched = True
        if is_last:
            self.finish_hook()
            self.contents.now.is_launched = True
            self.contents.now.work = start_all_reduce(self.group, contents.memory.tail)

    def is_hook_done(self) -> bool:
        """Whether the communication hook isn't running on it."""
        return self.contents.now.hooked is None or self.contents.now.hooked.done()

    def finish_hook(self) -> None:
        """Wait for the communication hook, if it runs, and copy its result to the buffer."""
        if (hooked := self.contents.now.hooked) is not None:
            self.contents.now.hooked, contents = None, self.contents
            names = contents.parameter_names
            with naming(names, self.group), spans.span("wait", "hook", self.num_bytes):
                reduced = reduced_buffer(hooked, contents.numel)
            if reduced.data_ptr() != contents.memory.gradients.data_ptr():
                contents.gradients.copy_(reduced.view(-1))
