"""Replicas that run in parallel: which one a thread runs, and their sums."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual

from lockstep.arguments import Device
from lockstep.errors import ModelError
from lockstep.nn.replicas.devices import as_device, check_kwargs, on_device
from lockstep.nn.replicas.nested import leaves, tensors_in
from lockstep.nn.replicas.worker_threads import (
    WorkerThreads,
    is_interruption,
    raise_first,
    wait_for,
)
from lockstep.torch_private import forward_level, peek_interpreter_stack

T = TypeVar("T")

Finish = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Replica:
    """The replica that the current thread runs."""

    index: int  # among the replicas of its call
    count: int  # the number of replicas of its call
    num_around: int  # the product of the counts of the calls around this one, 1 if there are none
    sums: ReplicaSums

    def add_up(self, tensor: torch.Tensor, finish: Finish | None = None) -> torch.Tensor:
        """Return ``finish`` of the sum of all replicas' tensors, in the order of the replicas.

        Args:
            tensor: This replica's tensor, of the same shape and dtype on all, on any device.
            finish: A function, which is called once, with the sum over these replicas and all
                replicas around them. If None, the sum is over the replicas of this call alone.
        """
        return self.sums.add_up(self.index, tensor, finish).to(tensor.device)


class ReplicaSums:
    """The sums of the replicas of one call, such as those of ``lockstep.mean``.

    A replica that has returned or failed counts as zeros: the others don't wait for it.
    """

    def __init__(self, count: int) -> None:
        self._around = _replica.get()
        self._num_present = count
        self._lock = threading.Lock()
        # That of one replica, which all others raise instead of a sum without its part.
        self.interruption: BaseException | None = None
        # The current sum: the parts that have arrived, by the index of the replica.
        self._parts: dict[int, torch.Tensor] = {}
        self._finish: Finish | None = None
        self._total = Future[torch.Tensor]()

    def add_up(self, index: int, tensor: torch.Tensor, finish: Finish | None) -> torch.Tensor:
        """Return the sum of all replicas' tensors: see :meth:`Replica.add_up`."""
        if finish is not None and self._around is not None:
            finish = partial(self._around.add_up, finish=finish)
        with self._lock:
            self._parts[index], self._finish, total = tensor, finish, self._total
        self._finish_if_complete()
        wait_for([total])
        return total.result()

    def leave(self) -> None:
        """Stop waiting for one of the replicas, which has returned or failed."""
        with self._lock:
            self._num_present -= 1
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        with self._lock:
            parts, total, finish = self._parts, self._total, self._finish
            if not parts or (self.interruption is None and len(parts) < self._num_present):
                return
            self._parts, self._total = {}, Future()
        # Without the lock, as finish() may wait for other ranks.
        try:
            if self.interruption is not None:
                raise self.interruption
            first, *others = (parts[index] for index in sorted(parts))
            sum_of_all = first.clone()
            for part in others:
                sum_of_all += part.to(first.device)
            total.set_result(sum_of_all if finish is None else finish(sum_of_all))
        except BaseException as failure:  # every replica raises it
            total.set_exception(failure)


def as_replicas(tasks: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
    """Return ``tasks``, each of which runs as one replica, in any thread."""
    sums, count = ReplicaSums(len(tasks)), len(tasks)

    def run(replica: Replica, task: Callable[[], T]) -> T:
        token = _replica.set(replica)
        try:
            return task()
        except BaseException as error:
            if is_interruption(error):
                sums.interruption = error
            raise
        finally:
            _replica.reset(token)
            sums.leave()

    return [
        partial(run, Replica(index, count, num_replicas(), sums), task)
        for index, task in enumerate(tasks)
    ]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Any]:
    """Call each of ``modules`` on its inputs, each in a thread of its own. ::

        replicas = lockstep.replicate(model, ["cpu", "cpu"])
        outputs = lockstep.parallel_apply(replicas, lockstep.scatter(x, ["cpu", "cpu"]))

    The threads take over the caller's grad mode, inference mode, autocast, default device and
    dtype, context variables, and each accelerator's current stream.

    Args:
        modules: The modules to call.
        inputs: For each module its positional arguments, as a tuple or list, or its only argument.
        kwargs_tup: For each module its keyword arguments.
        devices: For each module the current device of its call; by default the device of the first
            tensor among its inputs.

    Returns:
        The results of the modules.

    Raises:
        TypeError: If an argument isn't a list, or has an element of a wrong type.
        ValueError: If the lists have different lengths, or a device doesn't exist.
        BaseException: The error of the first module that failed, with a note that names its number
            and device, and a note for each other module that failed.
    """
    called, inputs = _listed(modules, "modules"), _listed(inputs, "inputs")
    count = len(called)
    kwargs = [{}] * count if kwargs_tup is None else _listed(kwargs_tup, "kwargs_tup")
    given = [None] * count if devices is None else _listed(devices, "devices")
    counts = (count, len(inputs), len(kwargs), len(given))
    if len(set(counts)) > 1:
        raise ValueError(
            "There must be as many modules as inputs, kwargs_tup and devices, and there are "
            "{}, {}, {} and {}.".format(*counts)
        )
    for index, module in enumerate(called):
        if not callable(module):
            raise TypeError(f"modules[{index}] is {reprlib.repr(module)}; give a torch.nn.Module.")
    for index, each in enumerate(kwargs):
        check_kwargs(each, f"kwargs_tup[{index}]")
    tasks, where = [], []
    for index, (module, x, kw, device) in enumerate(
        zip(called, inputs, kwargs, given, strict=True)
    ):
        args, kw = tuple(x) if isinstance(x, tuple | list) else (x,), kw or {}
        if device is None:
            where.append(_device_of_first_tensor((args, kw)))
        else:
            where.append(as_device(device, f"devices[{index}]"))
        tasks.append(on_device(where[-1], partial(module, *args, **kw)))
    if len(tasks) < 2:
        return [task() for task in tasks]
    refuse_transforms("parallel_apply()")
    workers = WorkerThreads(len(tasks))
    with closing(workers), workers.sharing():
        futures = workers.run(as_replicas(tasks))
    raise_first([future.exception() for future in futures], where)
    return [future.result() for future in futures]


def _listed(values: Iterable[T], name: str) -> Sequence[T]:
    is_scalar = isinstance(values, torch.Tensor) and values.ndim == 0
    is_one = is_scalar or isinstance(values, str | Mapping)
    if is_one or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {reprlib.repr(values)}; give a list, with one for each module.")
    return values if isinstance(values, Sequence) else list(values)


def _device_of_first_tensor(arguments: object) -> torch.device:
    tensors = (leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


_replica: ContextVar[Replica | None] = ContextVar("lockstep_replica", default=None)


def this_replica() -> Replica | None:
    """Return the replica that this thread runs, if any."""
    return _replica.get()


def num_replicas() -> int:
    """Return how many replicas run the current code, over all nested calls; 1 without any."""
    replica = _replica.get()
    return 1 if replica is None else replica.count * replica.num_around


def refuse_in_replica(call: str) -> None:
    """Raise ModelError if this is one of several replicas: ranks make the call ``call`` once."""
    if this_replica() is not None:
        raise ModelError(
            f"{call}() was called in a replica of a DataParallel, where each replica would call "
            "it, and for its part of the batch alone. Call it outside of the module, with what the "
            "module returns. (Only lockstep.mean() can be called in replicas.)"
        )


def refuse_transforms(call: str) -> None:
    """Raise ModelError in transforms of torch.func, which hold in the thread that entered them."""
    if peek_interpreter_stack() is not None:
        raise ModelError(
            f"{call} was called inside of grad(), vmap(), jvp() or another transform of "
            "torch.func, of which its replicas, in other threads, would know nothing. Call the "
            "module itself there, without replicas; for gradients, use backward() or "
            "torch.autograd.grad()."
        )


def refuse_forward_mode(*values: object) -> None:
    """Raise ModelError if a tensor in ``values`` has a tangent, which kept replicas would drop."""
    if forward_level() >= 0 and any(
        unpack_dual(each).tangent is not None for each in tensors_in(values)
    ):
        raise ModelError(
            "DataParallel was called in forward-mode AD, whose tangents don't pass through its "
            "replicas. Call lockstep.data_parallel(module, inputs, device_ids), or the module "
            "itself, there."
        )


# Scalars that are equal on all replicas


def mark_as_one(tensor: torch.Tensor) -> None:
    """Mark a scalar as equal on all replicas: gather() returns one, and divides its gradient."""
    tensor._is_one_of_all_replicas = True  # type: ignore[attr-defined]


def is_one(tensor: torch.Tensor) -> bool:
    """Whether :func:`mark_as_one` has marked it."""
    return hasattr(tensor, "_is_one_of_all_replicas")
