"""What a guard may be entered with: one group of ranks, and no step that has begun."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence, Sized
from functools import lru_cache

import torch.distributed as dist
from torch import nn

from lockstep.comm import join_state_of
from lockstep.errors import ModelError
from lockstep.grad import gradient_of
from lockstep.guarding.step import GuardOptions
from lockstep.nn import ParallelState


def group_of(states: Iterable[ParallelState]) -> dist.ProcessGroup | None:
    """Return the only group of ranks of parallel models; None if no part of them is parallel."""
    groups = [*dict.fromkeys(engine.process_group for s in states for engine in s.engines)]
    if len(groups) > 1:
        raise ModelError(
            "guard() takes models that are parallel over the same ranks, and these are over "
            f"{len(groups)} groups of ranks. Guard the models of each group in a step of their "
            "own."
        )
    return groups[0] if groups else None


def check_group(group: dist.ProcessGroup) -> None:
    """Raise unless ranks of the group can be guarded now."""
    if join_state_of(group) is not None:
        raise ModelError(
            "A guard is entered in join(), where ranks without data take part in steps of the "
            "others, and have none to guard. Use lockstep.DataLoader, which gives all ranks "
            "equally many batches, or leave out the guard."
        )


def check_repeats(options: GuardOptions, states: Sequence[ParallelState], *, is_with: bool) -> None:
    """Raise if steps are to be repeated that can't be, as in a with statement."""
    repeats = "trace_nonfinite=True" if options.traces else ""
    if options.verify_every is not None:
        repeats = f"verify_every={options.verify_every}"
    if options.on_skip in ("retry", "verify"):
        repeats = f'on_skip="{options.on_skip}"'
    if repeats and is_with:
        raise ModelError(
            f'{repeats} repeats the step, which a "with" can\'t. Put its body into a '
            "function, and call guard(...).run(body)."
        )
    if repeats and _has_micro_batches(states):
        raise ModelError(
            f"{repeats} repeats a step of which micro-batches were accumulated before the "
            "guard, and would repeat it without them. Put all micro-batches of the step into "
            "the function that is given to run()."
        )


def check_batch(options: GuardOptions, *batch: Sized) -> None:
    """Raise if a step is to be repeated on another rank, and ``run()`` was given no batch."""
    if any(batch) or (options.on_skip != "verify" and options.verify_every is None):
        return
    raise ModelError(
        'on_skip="verify" and verify_every= give the batch of a rank to another one: write the '
        "body as a function of it, and call guard(...).run(body, *batch)."
    )


def _has_micro_batches(states: Sequence[ParallelState]) -> bool:
    """Whether there are gradients of this rank that were accumulated before, unreduced."""
    if any(state.has_batch() for state in states):
        return True
    return any(
        has_grown and (gradient := gradient_of(parameter)) is not None and bool(gradient.any())
        for table in (engine.reducer.table for state in states for engine in state.engines)
        for has_grown, parameter in zip(table.accumulated, table.parameters, strict=False)
    )


def fingerprint(
    models: Iterable[nn.Module], things: Iterable[object], options: GuardOptions, *others: object
) -> int:
    """Return a number that guards of the same things, with the same options, have in common."""
    if not isinstance(options.on_skip, str):
        options = options._replace(on_skip="drop")
    shapes = tuple(tuple(p.shape for p in model.parameters()) for model in models)
    kinds = tuple(type(each).__name__ for each in things)
    return zlib.crc32(repr(others).encode(), _checksum(options, shapes, kinds))


@lru_cache(maxsize=64)  # most steps are alike
def _checksum(*things: object) -> int:
    return zlib.crc32(repr(things).encode())
