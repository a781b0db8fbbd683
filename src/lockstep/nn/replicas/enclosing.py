"""The caller's backward, which those of replicas are part of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lockstep.torch_private import _current_graph_task_id

_task: ContextVar[int | None] = ContextVar("lockstep_task", default=None)


@contextmanager
def as_backward_of_replicas() -> Iterator[None]:
    """Run replicas' backward, which is part of the one that is running, if there is one here."""
    token = _task.set(current_task())
    try:
        yield
    finally:
        _task.reset(token)


def is_backward_of_replicas() -> bool:
    """Whether a replica's backward runs in this thread."""
    return _task.get() is not None


def current_task() -> int:
    """Autograd's number for the backward that is running: in replicas for the caller's."""
    task = _task.get()
    return _current_graph_task_id() if task is None else task
