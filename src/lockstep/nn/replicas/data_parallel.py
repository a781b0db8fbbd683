"""``DataParallel`` and ``data_parallel``: one process, several replicas of a module."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lockstep.arguments import Device
from lockstep.comm import uncompiled
from lockstep.nn.replicas.devices import (
    as_device,
    as_devices,
    as_dim,
    check_kwargs,
    check_module,
)
from lockstep.nn.replicas.group import parallel_apply, refuse_transforms
from lockstep.nn.replicas.module_copy import check_home, replicate
from lockstep.nn.replicas.nested import leaves, map_tensors
from lockstep.nn.replicas.replicas import Replicas
from lockstep.nn.replicas.scatter_gather import gather, scatter_kwargs
from lockstep.nn.verify import refusal_of_divided
from lockstep.nn.wrapper import Wrapper

# More threads compete for the interpreter more than they compute.
_MOST_THREADS = 4


class DataParallel(Wrapper, nn.DataParallel[nn.Module]):
    """A drop-in for :class:`torch.nn.DataParallel`, on accelerators and on CPUs.

    The batch is split among replicas of the module, one per device. Each replica runs its forward
    and backward in its own thread, and the outputs are concatenated. Gradients are those of the
    whole batch, summed in the order of the replicas. ::

        model = lockstep.DataParallel(Net())
        loss = criterion(model(x), y)   # or model.encode(x): any method called with tensors
        loss.backward()

    It is a subclass of torch's class with the same attributes, but runs none of torch's code.
    Subclasses may override :meth:`scatter`, :meth:`replicate`, :meth:`parallel_apply` and
    :meth:`gather`. If ``replicate`` or ``parallel_apply`` is overridden, each call makes new
    replicas, and their backwards run in one thread.

    It may wrap a part of a model, and DataParallel modules may be nested. ``state_dict()`` is the
    module's, without the prefix ``module.``; ``load_state_dict()`` takes keys with or without it.

    Replicas are made once. Replicas on the module's device share its parameters. Replicas on other
    devices have copies, which are updated when a parameter has changed (a write to
    ``parameter.data`` on an accelerator isn't noticed). The module keeps the first replica's writes
    to buffers. Assignments to attributes (``self.count += 1``) and to buffers in a replica are
    lost: each call starts from the module's attributes. The module's hooks run in each replica. All
    threads draw random numbers from one generator, in no fixed order. ``torch.utils.checkpoint``
    can't restore that order, so a checkpoint around dropout needs a process for each device:
    :func:`lockstep.launch`, and :func:`lockstep.parallelize` there. Hooks of
    :func:`torch.autograd.graph.saved_tensors_hooks` see the first replica's tensors only.

    Args:
        module: The module to replicate. Its parameters and buffers are on the first device.
        device_ids: The devices, which may repeat: ``[0, 1]`` for two accelerators, and
            ``["cpu", "cpu"]`` for two replicas on the CPU, which share its intra-op threads. By
            default all accelerators; on a host without accelerators, one replica per intra-op
            thread (:func:`torch.get_num_threads`), four at most. Like torch, DataParallel ignores
            indices where there are no accelerators.
        output_device: The device of the outputs; by default the first of ``device_ids``. -1 is the
            CPU. An index is ignored if those of ``device_ids`` are.
        dim: The dimension along which inputs are split and outputs concatenated.
        workers: ``"threads"``, in which the replicas after the first run; the first runs in the
            caller's. This argument, of which there was another value, will go: leave it out.
        buffers: ``"first"`` keeps the first replica's buffers; ``"mean"`` averages floating-point
            buffers over all replicas.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an option is unknown, or a device doesn't exist.
        RuntimeError: In forward, if a parameter or buffer isn't on the first device.
    """

    output_device: int | torch.device  # type: ignore[assignment]  # torch's is an index
    _replicas: Replicas | None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        workers: Literal["threads"] = "threads",
        buffers: Literal["first", "mean"] = "first",
    ) -> None:
        nn.Module.__init__(self)  # and not that of torch's DataParallel
        check_module(module, "module")
        if buffers not in ("first", "mean"):
            raise ValueError(f"buffers is {buffers!r}, but only 'first' and 'mean' are known.")
        self.device_ids = devices_for(device_ids)
        if len(self._devices) > 1 and (divided := refusal_of_divided(module)):
            raise divided
        if workers != "threads":
            count, kind = len(self._devices), type(module).__name__
            raise ValueError(
                f"workers is {workers!r}, but replicas run in threads of this process. To give "
                f"each of {count} devices a process of its own, train in a function train(world) "
                f"with model = lockstep.parallelize({kind}(...).to(world.device)), and call "
                f"lockstep.launch(train, nprocs={count})."
            )
        self.module, self.dim, self.buffer_policy = module, as_dim(dim), buffers
        self.src_device_obj = home = self._devices[0]
        target = _target(output_device, device_ids, home)
        self.output_device = -1 if output_device == -1 else _as_torch_says(target)
        if len(self._devices) == 1:
            module.to(home)
        self._is_ready = True

    @property  # type: ignore[override]  # torch's has indices alone
    def device_ids(self) -> list[int | torch.device]:
        """The devices of the replicas, the module's first. Assigning them makes new replicas."""
        return [_as_torch_says(device) for device in self._devices]

    @device_ids.setter
    def device_ids(self, device_ids: Sequence[Device]) -> None:
        self._devices, self._replicas = devices_for(device_ids), None

    # If a DataParallel around this one copies it, each copy keeps replicas of its own.
    _kept_by_copies = ("_replicas",)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: D102 - as the module's
        return self._call("__call__", inputs, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute; a method with tensor arguments runs in all replicas."""
        value = super().__getattr__(name)
        module = self.__dict__["_modules"].get("module")
        is_method = inspect.ismethod(value) and value.__self__ is module
        return partial(self._call_method, name) if is_method else value

    @uncompiled
    def _call_method(self, name: str, /, *inputs: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves((inputs, kwargs))):
            return getattr(self.module, name)(*inputs, **kwargs)
        return self._call(name, inputs, kwargs)

    @uncompiled
    def _call(self, name: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method, is_alone = getattr(self.module, name), len(self._devices) == 1
        if is_alone and self._devices[0].type == "cpu" and not self._overrides("scatter"):
            return method(*inputs, **kwargs)
        parts, kwargs_parts = self.scatter(inputs, kwargs, self.device_ids)
        if not parts and not kwargs_parts:
            parts, kwargs_parts = ((),), ({},)
        if is_alone:
            return method(*parts[0], **kwargs_parts[0])
        if self._overrides("replicate", "parallel_apply"):
            outputs = self._call_new_replicas(name, parts, kwargs_parts)
        elif len(parts) == 1:
            outputs = [method(*parts[0], **kwargs_parts[0])]
        else:
            refuse_transforms("DataParallel")
            if self._replicas is None:
                averages_buffers = self.buffer_policy == "mean"
                self._replicas = Replicas(self._devices, averages_buffers=averages_buffers)
            arguments = list(zip(parts, kwargs_parts, strict=True))
            outputs = self._replicas.call(self.module, name, arguments)
        return self.gather(outputs, self.output_device)

    def _overrides(self, *names: str) -> bool:
        """Whether a subclass or this instance overrides one of the methods ``names``."""
        return any(
            getattr(getattr(self, name), "__func__", None) is not vars(DataParallel)[name]
            for name in names
        )

    def _call_new_replicas(
        self, name: str, parts: Sequence[Any], kwargs_parts: Sequence[Any]
    ) -> list[Any]:
        """Call the replicas through a subclass's :meth:`replicate` and :meth:`parallel_apply`."""
        if self.buffer_policy != "first":
            raise ValueError(
                f"{type(self).__name__} has a replicate() or parallel_apply() of its own, which "
                "buffers='mean' knows nothing of. Leave out the one or the other."
            )
        check_home([*self.module.parameters(), *self.module.buffers()], self._devices[0])
        replicas = self.replicate(self.module, self.device_ids[: len(parts)])
        if name != "__call__":
            replicas = [getattr(replica, name) for replica in replicas]
        return self.parallel_apply(replicas, parts, kwargs_parts)

    # Methods that a subclass may override

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        device_ids: Sequence[Device],
    ) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
        """Return the positional and the keyword arguments of each replica."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Concatenate the outputs of all replicas on ``output_device``."""
        return gather(outputs, output_device, self.dim)

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> list[nn.Module]:
        """Return replicas of ``module``, by :func:`lockstep.replicate`."""
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Call the replicas by :func:`lockstep.parallel_apply`, and return their outputs."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    # Methods of a module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module, without the prefix ``module.``."""
        return self.module.state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the replicas, which a copy makes anew."""
        return self.__dict__ | {"_replicas": None}


@uncompiled
def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call ``module`` on ``inputs``, split among replicas on several devices. ::

        output = lockstep.data_parallel(model, x, device_ids=["cpu", "cpu"])

    It composes :func:`scatter_kwargs`, :func:`replicate`, :func:`parallel_apply` and
    :func:`gather`, and can be differentiated any number of times. Backwards of replicas on the CPU
    run one after the other in one thread; those of :class:`DataParallel` run in parallel.

    Args:
        module: The module to call; it is on the first device.
        inputs: A tuple of positional arguments, or a single one; None for no argument.
        device_ids, output_device, dim: As for :class:`DataParallel`.
        module_kwargs: Its keyword arguments.

    Returns:
        The result of ``module(*inputs, **module_kwargs)``.

    Source: ``torch.nn.parallel.data_parallel``.
    """
    check_module(module, "module")
    check_kwargs(module_kwargs, "module_kwargs")
    devices = devices_for(device_ids)
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    parts: Sequence[Any]
    kwargs: Sequence[Any]
    parts, kwargs = scatter_kwargs(arguments, module_kwargs, devices, dim)
    if not parts:
        parts, kwargs = ((),), ({},)
    used = devices[: len(parts)]
    target = _target(output_device, device_ids, devices[0])
    check_home([*module.parameters(), *module.buffers()], devices[0])
    if len(devices) == 1:
        return gather([module(*parts[0], **kwargs[0])], target, dim)
    # Parts of one tensor share its version counter: autograd would take an in-place write to one
    # part for a write to all parts.
    calls = [map_tensors(torch.clone, call) for call in zip(parts, kwargs, strict=True)]
    parts, kwargs = [args for args, _ in calls], [named for _, named in calls]
    outputs = parallel_apply(replicate(module, used), parts, kwargs, used)
    return gather(outputs, target, dim)


def devices_for(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """Return the devices that ``device_ids`` of :class:`DataParallel` names, or the default."""
    if isinstance(device_ids, Iterable) and not isinstance(device_ids, str | torch.Tensor):
        device_ids = list(device_ids)
        if not device_ids:
            raise ValueError("device_ids is empty. Name a device, or leave it out.")
        if all(map(_is_missing, device_ids)):
            device_ids = None
    if device_ids is not None:
        return as_devices(device_ids, "device_ids")
    if torch.accelerator.is_available():
        return as_devices(range(torch.accelerator.device_count()), "device_ids")
    return [torch.device("cpu")] * min(_MOST_THREADS, torch.get_num_threads())


def _target(
    output_device: Device | None, device_ids: Sequence[Device] | None, home: torch.device
) -> torch.device:
    """Return the device of the outputs; ``home`` is the first replica's device."""
    are_named = device_ids is not None and not all(map(_is_missing, device_ids))
    # Like torch, ignore the index if device_ids are missing or ignored, and only then.
    if output_device is None or (_is_missing(output_device) and not are_named):
        return home
    return as_device(output_device, "output_device")


def _is_missing(device: Device | None) -> bool:
    """Whether ``device`` is an accelerator's index on a host without accelerators."""
    is_index = isinstance(device, int) and not isinstance(device, bool) and device >= 0
    return is_index and not torch.accelerator.is_available()


def _as_torch_says(device: torch.device) -> int | torch.device:
    """Return an accelerator's index, as torch's attributes have it, or the CPU's device."""
    return device if device.index is None or device.type == "cpu" else device.index
