"""One backward pass, through all parallel models of a group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from torch.autograd.function import BackwardCFunction

from lockstep.deadline import Deadline
from lockstep.errors import CollectiveFailed
from lockstep.grad import Phase
from lockstep.nn.engine import Engine
from lockstep.torch_private import _current_graph_task_id

End = partial[None]
# How long autograd may take to drop a backward that has failed, as it does at once.
_TO_DROP_SECONDS = 1.0
_POLL_SECONDS = 0.01


class Outcome(Enum):
    """How a backward has ended on this rank."""

    SUCCEEDED = auto()  # on all ranks: gradients are means
    FAILED_ELSEWHERE = auto()  # on another rank: its gradients are lost
    FAILED_HERE = auto()  # it is to be finished with the other ranks before anything else
    MISMATCHED = auto()  # ranks met in different calls, and no rank goes on with it


@dataclass(eq=False)
class BackwardPass:
    """One backward, from its first gradient to the end of its reductions."""

    # Autograd's task; None for a backward of other ranks, to which this rank adds nothing.
    task: int | None = None
    # The group's generation when it began; None if the group has no generations.
    generation: object = None
    # The engine of a copied model that got its number in this backward, if there is one.
    new_copy: Engine | None = None
    # The engines that have begun to reduce gradients in it, in the order in which they launch.
    engines: list[Engine] = field(default_factory=list)
    # The number of those engines that began in a failed backward, which this one finishes.
    num_continued: int = 0
    # Engines that begin at the end of the backward: their models are inside of reentrant
    # checkpoints, so that autograd can't foresee their gradients.
    late: set[Engine] = field(default_factory=set)
    # Whether ranks tell each other their late engines.
    tells_late: bool = False
    # Whether it launches nothing before its end, as that of an earlier group does.
    comes_later: bool = False
    # The id() of parameters whose gradients are yet to come, under compiled autograd, which calls
    # no callback at the end of a backward. None otherwise.
    awaited: set[int] | None = None
    # The callback at the end of the backward, as long as autograd holds it.
    end: weakref.ref[End] | None = None
    # The autograd node whose backward() runs this backward. Until it returns, no callback can be
    # queued for the end of the outermost backward.
    enclosing: weakref.ref[BackwardCFunction] | None = None
    # The error to raise if it has failed on another rank.
    failed_elsewhere: CollectiveFailed | None = None

    def begin(self, engines: Sequence[Engine], *, launches_early: bool) -> None:
        """Begin with ``engines``, in the order in which they launch."""
        launch_order = [engine.reducer for engine in engines] if launches_early else []
        # Autograd has a thread for each accelerator.
        num_devices = len({device for engine in engines for device in engine.devices})
        task = self.task if num_devices == 1 and self.awaited is None else None
        sees_graph = self.task is not None and self.enclosing is None
        for engine in engines:
            self.engines.append(engine)
            engine.begin_backward(launch_order, task, sees_graph=sees_graph)

    def await_failure(self) -> None:
        """Wait until it is dropped if it is over, as it has failed on a GPU.

        The thread that autograd has for a GPU drops the callback, maybe after the program has the
        error. Shown by test_a_backward_that_fails_on_one_rank_and_is_caught_is_named_on_all.
        """
        if self.end is not None and _current_graph_task_id() == -1:
            Deadline(_TO_DROP_SECONDS).until(lambda: self.end is None, _POLL_SECONDS)

    def finish(self) -> Outcome:
        """Wait for the gradients of all engines, and exchange buffers behind the last ones."""
        engines = self.engines
        for engine in engines:
            engine.reducer.launch_last(tells=engine.has_to_tell())
        # Buffers are exchanged along with the last gradients, and not before the next forward,
        # which could be any method, and would wait. After the launch of all buckets, since ranks
        # have launched different numbers of buckets until here.
        exchanges = [engine.buffers.start() for engine in engines]
        failures = []
        for engine, finish_buffers in zip(engines, exchanges, strict=True):
            failures.append(engine.reducer.finish())
            finish_buffers()
        for engine in [one for one in engines if one.has_to_agree()]:
            engine.agree()
        for engine in engines:
            engine.refuse_changes_of_one_rank()
        self.failed_elsewhere = next(filter(None, failures), None)
        return Outcome.SUCCEEDED if self.failed_elsewhere is None else Outcome.FAILED_ELSEWHERE

    def drop(self, outcome: Outcome) -> bool:
        """Drop what belongs to it; return whether it is to be finished with the other ranks."""
        engines = [*dict.fromkeys([*self.engines, *self.late])]
        is_over = outcome in (Outcome.SUCCEEDED, Outcome.FAILED_ELSEWHERE)
        for engine in engines:
            (engine.end_backward if is_over else engine.fail_backward)()
        if outcome is Outcome.MISMATCHED:
            for engine in self.engines[self.num_continued :]:
                engine.num_backwards -= 1
        return any(engine.reducer.phase is Phase.FAILED for engine in self.engines)
