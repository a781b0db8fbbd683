"""Which modules are parallel, through which engines, and the micro-batches that they accumulate."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.arguments import check_module
from lockstep.comm import this_thread
from lockstep.errors import ModelError
from lockstep.nn.autograd import current_task, is_any_reached, is_backward_of_replicas
from lockstep.nn.engine import Engine


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Let backwards add up gradients on each rank; the first one after the context reduces them.

    What counts is where ``backward()`` runs, not where ``forward()`` did.

    Args:
        module: A module that was given to :func:`parallelize`, a wrapper, or the module in one.
            Parallel parts of it accumulate too.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    return state_of(module).no_sync()


@contextlib.contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Let backwards add up gradients on each rank; the first one after the context reduces them.

    This applies to each ``backward()`` within the context, wherever its ``forward()`` ran. With
    :func:`lockstep.mean`, gradients become those of the mean over all micro-batches of the step,
    the one after the context included; without it they add up, as in torch. ::

        for number, (x, y) in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with contextlib.nullcontext() if last else lockstep.accumulate(model):
                lockstep.mean(loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    Each backward of a mean is a micro-batch: it scales the existing gradients, whatever made them.
    To give up an unfinished batch, call ``zero_grad()``, which sets gradients to None.

    Args:
        module: A module that was given to :func:`lockstep.parallelize`, a wrapper, or the module
            in a wrapper. Its parallel parts accumulate too.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    state = state_of(module)
    with state.no_sync():
        state.rank = this_thread()
        state.num_contexts += 1
        try:
            yield
        except BaseException:
            state.count = None  # the batch is not to be finished
            raise
        finally:
            state.num_contexts -= 1


class ParallelState:
    """The engines of a parallel module, or of the one in a wrapper, and the batch it accumulates.

    A batch has the micro-batches of one step that have had their backward.
    """

    def __init__(self, module: nn.Module, engines: Sequence[Engine], *, is_wrapped: bool) -> None:
        self.module = weakref.ref(module)
        self.is_wrapped = is_wrapped
        # The module's own engine, if it has parameters of its own, and those of parallel modules
        # in it; none on a rank that is alone.
        self.engines = list(engines)
        # The trained parameters that no other parallel module had before.
        self.parameters = WeakIdKeyDictionary()
        # The number of open accumulate() contexts. When it is 0, the next micro-batch is the last.
        self.num_contexts = 0
        # The thread that accumulates.
        self.rank = this_thread()
        # The number of samples that the gradients are the mean of; None before the first.
        self.count: torch.Tensor | None = None
        # Whether autograd can't see that backwards reach the model.
        self.is_hidden = False
        # The last backward with replicas in it that reached the model.
        self.reached_in: int | None = None
        # The last backward, with the count of its mean and the sum of all counts until then.
        self._last: tuple[int, torch.Tensor, torch.Tensor] | None = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in this context add up gradients on each rank, without reducing them."""
        before = {engine: engine.is_syncing for engine in self.engines}
        for engine in before:
            engine.is_syncing = False
        try:
            yield
        finally:
            for engine, was_syncing in before.items():
                engine.is_syncing = was_syncing

    def is_open(self) -> bool:
        """Whether the running backward may be that of one of several micro-batches."""
        is_last = self._last is not None and self._last[0] == current_task()
        return bool(self.num_contexts) or self.count is not None or is_last

    def is_reached(self) -> bool:
        """Whether the running backward is one of this model."""
        if is_backward_of_replicas():
            return self.reached_in == current_task()
        return is_any_reached(self._parameters())

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that the model has."""
        return [p.grad for p in self._parameters() if p.grad is not None]

    def _parameters(self) -> list[nn.Parameter]:
        module = self.module()
        return [] if module is None else [p for p in module.parameters() if p.requires_grad]

    def add_micro_batch(
        self, count: torch.Tensor, goes_on: torch.Tensor, scaled: set[int]
    ) -> torch.Tensor:
        """Add a micro-batch, scale gradients whose id() is not in ``scaled``; return the sum."""
        task = current_task()
        if self._last is not None and self._last[0] == task:
            _, last, total = self._last
            if not torch.equal(last, count.to(last.device)):
                raise ValueError(
                    f"One backward under accumulate() has two means, over {count.item():g} and "
                    f"over {last.item():g} samples, and gradients that are added up can't be "
                    "divided by both. Let both be over as many, or put the values into one mean, "
                    "with weights."
                )
            return total
        total = count
        if self.count is not None:
            # If no rank has gradients any more, zero_grad() has dropped the batch.
            before = torch.where(goes_on > 0, self.count.to(count.device), 0)
            total = before + count
            scale = before / torch.where(total != 0, total, 1)
            with torch.no_grad():
                for gradient in self.gradients():
                    if id(gradient) not in scaled:
                        gradient.mul_(scale.to(gradient.device))
                        scaled.add(id(gradient))
        self._last = (task, count, total) if task != -1 else None
        self.count = total if self.num_contexts else None
        return total


# Ranks may be threads, and a dictionary that another thread changes can't be iterated over.
_lock = threading.Lock()
# By the module that was given to parallelize(), or the wrapper. These are left as they were, to
# pickle and copy as before. Weakly: a wrapper that is gone leaves its model free.
_states: weakref.WeakKeyDictionary[nn.Module, ParallelState] = weakref.WeakKeyDictionary()


def find_state(owner: nn.Module) -> ParallelState | None:
    """Return the state of a wrapper, or of a module that was given to parallelize()."""
    return _states.get(owner)


def find_state_around(module: nn.Module) -> ParallelState | None:
    """Return the state of the wrapper that ``module`` is in, if there is one."""
    return next((s for s in all_states() if s.is_wrapped and s.module() is module), None)


def set_state(owner: nn.Module, state: ParallelState, previous: ParallelState | None) -> None:
    """Register ``state`` for ``owner``, and for all owners of the ``previous`` state."""
    with _lock:
        owners = [other for other, its in _states.items() if its is previous]
        _states.update(dict.fromkeys([owner, *owners], state))


def state_of(module: nn.Module) -> ParallelState:
    """Return the state of a wrapper, the module in one, or a module given to parallelize()."""
    check_module(module)
    state = find_state(module) or find_state_around(module)
    if state is None:
        raise ModelError(
            f"This {type(module).__name__} isn't parallel. Call parallelize() on it first, or "
            "pass the module that was given to parallelize()."
        )
    return state


def all_states() -> list[ParallelState]:
    """Return the states of all parallel modules, each once."""
    with _lock:
        return list(dict.fromkeys(_states.values()))


def all_engines() -> list[Engine]:
    """Return the engines of parallel modules, each once, in the order of their making.

    Those that register_comm_hook() makes for a rank that is alone are left out.
    """
    engines = dict.fromkeys(engine for state in all_states() for engine in state.engines)
    return [engine for engine in engines if engine.process_group.size() > 1]


def engines_with(parameters: Iterable[torch.Tensor]) -> list[Engine]:
    """Return the engines of some of ``parameters``, in the order of their making."""
    known = list(parameters)
    return [engine for engine in all_engines() if engine.has(known)]


# Replicas have their backwards at the same time.
_scaling = threading.Lock()


def _with_open_batches(rank: int) -> list[ParallelState]:
    return [state for state in all_states() if state.rank == rank and state.is_open()]


def begun_batch() -> tuple[int, bool]:
    """Return this thread, and whether it has gradients of earlier micro-batches of a step."""
    thread = this_thread()
    states = _with_open_batches(thread)
    return thread, any(state.count is not None and state.gradients() for state in states)


def count_micro_batch(
    count: torch.Tensor, goes_on: torch.Tensor, rank: int, has_samples: bool, is_backward: bool
) -> torch.Tensor:
    """Scale existing gradients for those of a micro-batch to be added; return its divisor.

    It is called in the backward of a mean, before any gradient of this backward is computed.

    Args:
        count: The weight of all ranks' samples in the mean.
        goes_on: The number of ranks that had gradients of earlier micro-batches.
        rank: The thread that took the mean; autograd may have another one for its backward.
        has_samples: Whether this rank has any of the samples.
        is_backward: Whether gradients are accumulated; not so in ``torch.autograd.grad()``.
    """
    states = _with_open_batches(rank) if is_backward or has_samples else []
    if has_samples:  # there may be other models, with other batches or none
        reached = [s for s in states if (is_backward and s.is_hidden) or s.is_reached()]
        if is_backward and not reached:
            # A model wholly inside of reentrant checkpoints can't be seen from outside of them.
            reached = [state for state in states if state.num_contexts]
            for state in reached:
                state.is_hidden = True
        states = reached
    # Parallel parts of a parallel model share parameters with it: each is scaled once.
    scaled: set[int] = set()
    with _scaling:
        totals = [state.add_micro_batch(count, goes_on, scaled) for state in states]
    if has_samples and any(not torch.equal(total, totals[0]) for total in totals[1:]):
        numbers = ", ".join(f"{total.item():g}" for total in totals)
        raise ValueError(
            "One backward under accumulate() runs through several models whose batches have come "
            f"to different numbers of samples: {numbers}. Accumulate them in the same backwards."
        )
    return totals[0] if totals else count


def remember_reached() -> None:
    """Note which models the running backward reaches, before those of replicas run.

    From the replicas' backwards, which reach only leaves of their own, it can't be seen.
    """
    if not is_backward_of_replicas():
        for state in all_states():
            if state.is_open() and state.is_reached():
                state.reached_in = current_task()
