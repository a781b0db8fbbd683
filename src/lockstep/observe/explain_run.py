"""``lockstep explain SCRIPT``: two steps of a program, and what its models are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.nn import parallel_modules
from lockstep.observe.explain import explain

# After the first step gradients are put into buckets anew.
_NUM_STEPS = 2
_NO_MODEL = (
    "The program has no parallel model. Give it one: model = lockstep.parallelize(model), after "
    "lockstep.init()."
)


@contextmanager
def explaining(rank: int) -> Iterator[None]:
    """Explain the models on rank 0 after two steps, or at the program's end; then end it."""
    num_steps = 0
    told: list[None] = []

    def tell() -> None:
        told.append(None)
        if rank:
            return
        console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        modules = parallel_modules()
        if not modules:
            console.print(_NO_MODEL)
        for module in modules:
            console.print(explain(module))

    def after_step(_: Optimizer, *rest: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == _NUM_STEPS and not told:
            tell()
            sys.exit(0)

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield
        if not told:
            tell()
    finally:
        handle.remove()
