"""The registry of parallel modules, with their engines and the micro-batches they accumulate.

A module becomes parallel in three steps: all ranks verify that they have the same one, they take
rank 0's values, and each makes an engine.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.arguments import check_module
from lockstep.comm import GroupContext, broadcast_tensors, this_thread
from lockstep.errors import AlreadyParallel, ModelError, NothingToTrain
from lockstep.grad import UnsummedBucket, gradient_dtype
from lockstep.nn.autograd import current_task, is_any_reached, is_backward_of_replicas
from lockstep.nn.backward import all_engines, backward_sync_of, engines_with, finish_failed
from lockstep.nn.engine import Engine
from lockstep.nn.global_hooks import watch
from lockstep.nn.loss_scale import watch_scalers
from lockstep.nn.options import Options
from lockstep.nn.renormed import refusal_of_tables
from lockstep.nn.verify import check_same_model, refusal_of_divided
from lockstep.nn.wrapper import Wrapper
from lockstep.torch_private import _execution_engine
from lockstep.world import begin_local_noise, seed_of_run

_log = logging.getLogger(__name__)

# Bound early, as lockstep.integrations may put our classes in their place.
TORCHS_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class ParallelState:
    """The engines of a parallel module, or of the module in a wrapper, and its accumulated batch.

    The batch consists of the micro-batches of one step that have had their backward.
    """

    def __init__(
        self, module: nn.Module, engines: Sequence[Engine], options: Options, *, is_wrapped: bool
    ) -> None:
        self.module = weakref.ref(module)
        self.is_wrapped, self.options = is_wrapped, options
        self.seed = 0  # that of the run, or torch's, when it was made parallel
        # What higher layers keep of it.
        self.context = GroupContext()
        # The engines of parallel modules in it, and its own if it has other parameters than those.
        # None of them on a rank that is alone.
        self.engines = list(engines)
        # Whether backwards reduce gradients, or would if there were other ranks.
        self.is_syncing = True
        self.is_released = False  # whether the module is a plain one again
        # Its trained parameters, except for those that other parallel modules had before.
        self.parameters = WeakIdKeyDictionary()
        # The number of open accumulate() contexts. When it is 0, the next micro-batch is the last.
        self.num_contexts = 0
        # The thread that accumulates.
        self.rank = this_thread()
        # The weight of the accumulated batch: of the samples that gradients are the mean of. None
        # before the first micro-batch.
        self.count: torch.Tensor | None = None
        # Whether autograd can't foresee that a backward reaches the model, as it is inside of a
        # reentrant checkpoint.
        self.is_hidden = False
        # The task of the last backward with replicas in it that reached the model.
        self.reached_in: int | None = None
        # The task of the last backward, the weight of its micro-batch, and that of the batch with
        # it.
        self._last: tuple[int, torch.Tensor, torch.Tensor] | None = None
        # The parameters that had a gradient at the end of the last micro-batch's backward, with the
        # version of that; None if it isn't known, as in backwards of replicas.
        self._had_gradients: list[tuple[nn.Parameter, int]] | None = None
        # The number of micro-batches in the batch, and the small factors of their losses.
        self._num_micro_batches = 0
        self._factors: list[float] = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in this context accumulate gradients on each rank without a reduction."""
        before = {engine: engine.is_syncing for engine in self.engines}
        for engine in before:
            engine.stop_syncing()
        would_sync, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = would_sync
            for engine, was_syncing in before.items():
                engine.is_syncing = was_syncing

    def is_open(self) -> bool:
        """Whether the running backward may be that of a micro-batch."""
        is_last = self._last is not None and self._last[0] == current_task()
        return bool(self.num_contexts) or self.count is not None or is_last

    def is_reached(self) -> bool:
        """Whether the running backward reaches this model."""
        if is_backward_of_replicas():
            return self.reached_in == current_task()
        return is_any_reached(self._parameters())

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that the model has."""
        return [p.grad for p in self._parameters() if p.grad is not None]

    def has_batch(self) -> bool:
        """Whether there are gradients of an accumulated batch, which zero_grad() has not dropped.

        It has if a parameter that had a gradient has none any more, or if all are zero and have
        been written to. Not all need have none: some may be in no optimizer.
        """
        if self.count is None or not self._had_gradients:
            return self.count is not None and bool(self.gradients())
        gradients = [p.grad for p, _ in self._had_gradients if p.grad is not None]
        if len(gradients) < len(self._had_gradients):
            return False
        versions = [version for _, version in self._had_gradients]
        pairs = zip(gradients, versions, strict=True)
        return any(gradient._version == version or gradient.any() for gradient, version in pairs)

    def _note_gradients(self) -> None:
        found = ((parameter, parameter.grad) for parameter in self._parameters())
        self._had_gradients = [(p, grad._version) for p, grad in found if grad is not None]

    def _parameters(self) -> list[nn.Parameter]:
        module = self.module()
        return [] if module is None else [p for p in module.parameters() if p.requires_grad]

    def add_micro_batch(
        self, count: torch.Tensor, goes_on: torch.Tensor, scaled: set[int]
    ) -> torch.Tensor:
        """Add a micro-batch to the batch, and return the weight of both together.

        Existing gradients are scaled, unless their id() is in ``scaled``, to which it is added.

        Args:
            count: The weight of the micro-batch.
            goes_on: The number of ranks that have gradients of the batch.
            scaled: The id() of gradients that other states have scaled.
        """
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
        if self.count is None:
            self._num_micro_batches, self._factors = 0, []
        self._num_micro_batches += 1
        if self.count is not None:
            # If no rank has gradients any more, zero_grad() has dropped the batch on all.
            before = torch.where(goes_on > 0, self.count.to(count.device), 0)
            total = before + count
            scale = before / torch.where(total != 0, total, 1)
            with torch.no_grad():
                for gradient in self.gradients():
                    if id(gradient) not in scaled:
                        gradient.mul_(scale.to(gradient.device))
                        scaled.add(id(gradient))
        self._last = (task, count, total) if task != -1 else None
        self.count, self._had_gradients = total if self.num_contexts else None, None
        if self.num_contexts and task != -1 and not is_backward_of_replicas():
            _execution_engine.queue_callback(self._note_gradients)
        return total

    def note_factor(self, factor: float) -> None:
        """Say so once if each loss of the batch is divided by the number of micro-batches."""
        global _has_warned
        self._factors.append(factor)
        number = self._num_micro_batches
        is_last = not self.num_contexts and number > 1 and len(self._factors) == number
        if is_last and not _has_warned and all(abs(f * number - 1) < 1e-3 for f in self._factors):
            _has_warned = True
            _log.warning(
                "Each of the %d losses of a step under lockstep.accumulate() is divided by %d. "
                "Gradients of lockstep.mean() are those of the mean over all micro-batches "
                "already, so that these are %d times too small. Leave the division out. (This is "
                "said once.)",
                *[number] * 3,
            )


# Whether such a division has been told of.
_has_warned = False
# Ranks may be threads, and a dictionary that another thread changes can't be iterated over.
_lock = threading.Lock()
# By the module that was given to parallelize(), or the wrapper. No attribute of the module has the
# state, so that it pickles and copies as before. Weakly: when a wrapper is gone, its model may be
# made parallel again.
_states: weakref.WeakKeyDictionary[nn.Module, ParallelState] = weakref.WeakKeyDictionary()


def _find_state_around(module: nn.Module) -> ParallelState | None:
    """Return the state of the wrapper around ``module``, if there is one."""
    return next((s for s in _all_states() if s.is_wrapped and s.module() is module), None)


def state_of(module: nn.Module) -> ParallelState:
    """Return the state of a wrapper, the module in one, or a module given to parallelize()."""
    check_module(module)
    state = _states.get(module) or _find_state_around(module)
    if state is None:
        raise ModelError(
            f"This {type(module).__name__} isn't parallel. Call parallelize() on it first, or "
            "pass the module that was given to parallelize()."
        )
    return state


def _all_states() -> list[ParallelState]:
    """Return the states of all parallel modules, each once."""
    with _lock:
        return list(dict.fromkeys(_states.values()))


def parallel_modules() -> list[nn.Module]:
    """Return the modules that are parallel, and those in wrappers, in the order they became so."""
    modules = [state.module() for state in _all_states()]
    return [module for module in modules if module is not None]


def groups_of(parameters: Sequence[nn.Parameter]) -> list[dist.ProcessGroup | None]:
    """Return for each parameter the group whose ranks keep it in step, if there is one.

    None for parameters with sparse gradients too, or with gradients of another dtype than theirs.
    """
    groups: dict[int, dist.ProcessGroup] = {}
    for engine in all_engines():
        sparse = {*map(id, engine.reducer.table.sparse_parameters)}
        followers = engine.tensors_in_step()
        groups |= {id(one): engine.process_group for one in followers if id(one) not in sparse}
    return [groups.get(id(p)) if gradient_dtype(p) is p.dtype else None for p in parameters]


def defer_gradients(parameters: Sequence[nn.Parameter], kind: type[UnsummedBucket]) -> None:
    """Let gradients of ``parameters`` stay unsummed, which are in a sharded optimizer's order.

    Every rank must call it.
    """
    for engine in engines_with(parameters):
        engine.defer(parameters, kind)


def refresh_engines_of(parameters: Iterable[nn.Parameter]) -> None:
    """Give those of ``parameters`` that are new in their modules rank 0's values.

    The next forward would do so. Every rank must call it.
    """
    ids = {*map(id, parameters)}
    for engine in all_engines():
        if not ids.isdisjoint(map(id, engine.tensors_in_step())):
            backward_sync_of(engine.process_group).refresh(engine)


def are_parallel(parameters: Iterable[nn.Parameter]) -> list[bool]:
    """Return for each parameter whether a parallel module has it now, on one rank too."""
    modules = [state.module() for state in _all_states() if not state.is_released]
    ids = {id(p) for module in modules if module is not None for p in module.parameters()}
    return [id(parameter) in ids for parameter in parameters]


def attach(
    owner: nn.Module,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    options: Options,
    *,
    is_copy: bool = False,
) -> None:
    """Keep ``module`` in step with its replicas for as long as ``owner`` lives.

    Every rank must call it; for a copy of a parallel model, only the ranks that train the copy.
    Parts that are parallel already, over this group or another, stay as they are. ``owner`` is
    ``module`` itself, or a wrapper around it, which replaces an earlier wrapper.

    Raises:
        ModelError: If the module can't be made parallel, on this rank or on another.
    """
    group = group if group is not None and group.size() > 1 else None
    seed = seed_of_run()
    seed = torch.initial_seed() % 2**62 if seed is None else seed
    inner = {each: state for each in module.modules() if (state := _states.get(each)) is not None}
    previous = _find_state_around(module) if owner is not module else None
    refusal = _refusal(owner, module, group, options, [previous, *inner.values()])
    engines = previous.engines if previous is not None else []
    for one in filter(None, [group, *(engine.process_group for engine in engines)]):
        finish_failed(one)
    if group is not None and options.init_sync and not is_copy:
        left_alone = options.left_alone(module)
        # With a refusal too, which it raises: otherwise the other ranks would wait for this one.
        compared = {**options._asdict(), "seed": seed_of_run()}
        check_same_model(module, group, compared, refusal, left_alone)
        named = [*module.named_parameters(), *module.named_buffers()]
        broadcast_tensors(group, [t.detach() for name, t in named if name not in left_alone])
    elif refusal is not None:
        raise refusal
    if group is not None and torch.__future__.get_swap_module_params_on_conversion():
        _log.warning(
            "torch.__future__.set_swap_module_params_on_conversion(True) is on: with it, torch "
            'refuses to convert this %s ("Couldn\'t swap") for as long as it is parallel. Convert '
            "it to its dtype and device before you make it parallel.",
            type(module).__name__,
        )
    new_engines: list[Engine] = []
    if group is not None:
        begin_local_noise()
        engine = backward_sync_of(group).new_engine(module, options, inner, is_copy=is_copy)
        if engine.parameters:
            new_engines.append(engine)
            watch(engine)
            watch_scalers()
    inner_engines = [engine for state in inner.values() for engine in state.engines]
    state = ParallelState(
        module, [*inner_engines, *new_engines], options, is_wrapped=owner is not module
    )
    state.seed = seed
    with _lock:  # also for the owners of the state that this one replaces
        owners = [other for other, its in _states.items() if its is previous]
        _states.update(dict.fromkeys([owner, *owners], state))
    _replace([engine for engine in engines if engine not in inner_engines], new_engines)
    others = [other.parameters for other in _all_states()]
    for parameter in module.parameters():
        if parameter.requires_grad and not any(parameter in known for known in others):
            state.parameters[parameter] = None


def release(wrapper: nn.Module) -> None:
    """Make the model in ``wrapper`` a plain one again, whose gradients are not reduced."""
    state = state_of(wrapper)
    for engine in state.engines:
        finish_failed(engine.process_group)
    _replace(list(state.engines), ())
    state.parameters.clear()
    state.is_released = True


def _replace(engines: Collection[Engine], replacements: Sequence[Engine]) -> None:
    """Stop ``engines``, and put ``replacements`` in their place in all states that list them."""
    for engine in engines:
        backward_sync_of(engine.process_group).remove(engine)
    for state in _all_states():
        kept = [engine for engine in state.engines if engine not in engines]
        if len(kept) < len(state.engines):
            state.engines[:] = [*kept, *replacements]


def _refusal(
    owner: nn.Module,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    options: Options,
    known: Collection[ParallelState | None],
) -> ModelError | None:
    """Return why ``module`` can't be made parallel; it may share parameters with ``known`` ones."""
    kind = type(module).__name__
    if owner in _states:
        return AlreadyParallel(
            f"This {kind} is parallel already. Go on with it as it is: parallelize() is called "
            "once for each model, and changes it in place."
        )
    for name, submodule in module.named_modules():
        if isinstance(submodule, TORCHS_WRAPPERS) and not isinstance(submodule, Wrapper):
            where = f"its part {name!r}" if name else "it"
            return AlreadyParallel(
                f"{kind} can't be made parallel: {where} is parallel already, through torch. Pass "
                "the bare model, once."
            )
    if group is not None:
        divided = refusal_of_divided(module, options.ignored)
        refusal = divided or refusal_of_tables(module, options.ignored)
        if refusal is not None:
            return refusal
    trained = False
    others = [state.parameters for state in _all_states() if state not in known]
    for name, parameter in module.named_parameters():
        if name in options.ignored:
            continue
        if is_lazy(parameter):
            return ModelError(
                f"{name!r} has no shape yet. Run one forward on a sample before making the model "
                "parallel."
            )
        if parameter.requires_grad and not parameter.is_leaf:
            return ModelError(
                f"{name!r} is computed from another tensor, which gets the gradients. Set it to "
                "nn.Parameter(value.detach()), or, if it is of a copied ScriptModule, copy the "
                "model before scripting it."
            )
        trained |= parameter.requires_grad
        if any(parameter in theirs for theirs in others):
            return AlreadyParallel(
                f"{kind} can't be made parallel: {name!r} is parallel already, in another model "
                "that has it too or around it, and would be reduced twice. Make the whole model "
                "parallel, or first the part and then the whole."
            )
    if not trained:
        return NothingToTrain(
            f"{kind} has no parameter that requires a gradient, so there is nothing to keep in "
            "step. Use it as it is, or unfreeze a part of it first."
        )
    dynamo = sys.modules.get("torch._dynamo")
    compiles = dynamo is not None and dynamo.config.compiled_autograd
    if compiles and group is not None and group.name() == "threads":  # torch would crash
        return ModelError(
            "torch._dynamo.config.compiled_autograd is on. It runs one backward at a time in a "
            "process, and here each rank is a thread, whose backward waits for those of the "
            "others. Let ranks be processes, or leave it off."
        )
    return None


# Backwards of replicas run at the same time, in threads.
_scaling = threading.Lock()


def _with_open_batches(rank: int) -> list[ParallelState]:
    return [state for state in _all_states() if state.rank == rank and state.is_open()]


def begun_batch() -> tuple[int, bool]:
    """Return this thread, and whether it has gradients of earlier micro-batches of a step."""
    thread = this_thread()
    states = _with_open_batches(thread)
    return thread, any(state.has_batch() for state in states)


def count_micro_batch(
    count: torch.Tensor, goes_on: torch.Tensor, rank: int, has_samples: bool, is_backward: bool
) -> torch.Tensor:
    """Scale existing gradients before a micro-batch is added; return the divisor of its losses.

    It is called in the backward of a mean, before any gradient of this backward is computed.

    Args:
        count: The weight of all ranks' samples in the mean.
        goes_on: The number of ranks that had gradients of earlier micro-batches.
        rank: The thread that called mean(); autograd may run the backward in another one.
        has_samples: Whether this rank has any of the samples.
        is_backward: Whether gradients are accumulated; False in ``torch.autograd.grad()``.
    """
    states = _with_open_batches(rank) if is_backward or has_samples else []
    if has_samples:  # other models may have other batches, or none
        reached = [s for s in states if (is_backward and s.is_hidden) or s.is_reached()]
        if is_backward and not reached:
            # Autograd doesn't foresee a model that is wholly inside of reentrant checkpoints.
            reached = [state for state in states if state.num_contexts]
            for state in reached:
                state.is_hidden = True
        states = reached
    # A parallel model shares parameters with its parallel parts: each gradient is scaled once.
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


def note_factor(rank: int, factor: float) -> None:
    """Note that the loss of the micro-batch that was counted last was multiplied by ``factor``."""
    for state in _with_open_batches(rank):
        state.note_factor(factor)


def remember_reached() -> None:
    """Note which models the running backward reaches, before it runs the backwards of replicas.

    In those it can't be found out, as they reach only leaves of their own.
    """
    if not is_backward_of_replicas():
        for state in _all_states():
            if state.is_open() and state.is_reached():
                state.reached_in = current_task()
