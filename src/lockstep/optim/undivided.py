"""Optimizers that aren't divided: each rank updates all parameters, with equal random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.comm import all_gather_json, join_state_of, uncompiled
from lockstep.errors import ModelError
from lockstep.generators import Generators, generators_of, global_generators
from lockstep.nn import finish_failed
from lockstep.world import parameters_of


def leave_undivided(optimizer: Optimizer) -> None:
    """Let ``optimizer`` be as it is, with the option that its ``state_dict()`` has if divided."""
    vars(optimizer).update(state_dict=MethodType(_state_dict, optimizer))


def draw_alike(optimizer: Optimizer, groups: Sequence[dist.ProcessGroup]) -> None:
    """Let its steps draw the random numbers of rank 0 on every rank of ``groups``."""
    original_step: Any = optimizer.step

    @wraps(original_step)  # which a learning rate scheduler may have marked
    @uncompiled
    def step(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        with _DrawsAlike(optimizer, groups) as draws:
            if closure is not None:
                options["closure"] = draws.wrapped(closure)
            return original_step(**options)

    vars(optimizer).update(step=MethodType(step, optimizer))


def is_undivided(optimizer: Optimizer) -> bool:
    """Whether it was left undivided by :func:`leave_undivided`."""
    return getattr(optimizer.state_dict, "__func__", None) is _state_dict


def _state_dict(optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
    """Return the state dict, with the option that it has where it is divided among ranks."""
    return type(optimizer).state_dict(optimizer)


def generators_drawn_from(optimizer: Optimizer) -> Generators:
    """Return the global generators, and those that ``optimizer`` has itself."""
    found = global_generators()
    owners = vars(optimizer), *optimizer.param_groups
    found.update(generators_of(parameters_of(optimizer), *owners))
    return found


class _DrawsAlike:
    """A context in which generators are in the state that they have on rank 0.

    Where they were in another one before, they are put back afterwards. Every rank must enter it;
    it blocks.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[dist.ProcessGroup]) -> None:
        self._optimizer, self._groups = optimizer, groups
        self._generators = generators_drawn_from(optimizer)
        self._local: dict[str, Any] = {}

    def __enter__(self) -> _DrawsAlike:
        states = self._generators.read()
        self._is_alone = any(join_state_of(group) is not None for group in self._groups)
        self._local = states if self._is_alone else {}
        for group in () if self._is_alone else self._groups:
            finish_failed(group)
            of_rank_0 = all_gather_json(group, states if group.rank() == 0 else {})[0]
            for name, state in of_rank_0.items():
                if name in states and states[name] != state:
                    self._local[name] = states[name]
                    self._generators.write({name: state})
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not self._is_alone:
            self._generators.write(self._local)
        elif self._local != self._generators.read():
            raise ModelError(
                f"A step of {type(self._optimizer).__name__} has drawn random numbers in join(), "
                "where ranks can't tell each other which. Let all ranks have equally many batches, "
                "and leave out join()."
            )

    def wrapped(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure``, which draws what it would without this context."""

        @wraps(closure)
        def call() -> Any:
            self.__exit__(None, None, None)
            try:
                return closure()
            finally:
                self.__enter__()

        return call
