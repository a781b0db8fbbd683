"""``DataParallel`` and ``data_parallel``: one process, several replicas of a module."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
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
from lockstep.nn.replicas.group import is_beside_processes, parallel_apply
from lockstep.nn.replicas.module_copy import check_home, replicate
from lockstep.nn.replicas.nested import leaves, map_tensors
from lockstep.nn.replicas.replicas import Replicas
from lockstep.nn.replicas.scatter_gather import gather, scatter_kwargs
from lockstep.nn.wrapper import Wrapper

# More threads compete for the interpreter more than they compute.
_MOST_THREADS = 4
# The devices on which processes can share memory; meta has none to share.
_SHARED_BY_PROCESSES = {"cpu", "cuda", "meta"}
_TIMEOUT = timedelta(minutes=10)


class DataParallel(Wrapper, nn.DataParallel[nn.Module]):
    """A drop-in for :class:`torch.nn.DataParallel`, on accelerators and on CPUs.

    A batch is cut up among replicas of the module, one for each device; each runs in a thread of
    its own, forward and backward, and their outputs are joined. Gradients are those of the whole
    batch, added up in the order of the replicas. ::

        model = lockstep.DataParallel(Net())
        loss = criterion(model(x), y)   # or model.middle(x): any method that is given tensors
        loss.backward()

    It is a subclass of torch's, none of whose code runs, with the attributes of torch's. Its own
    subclasses may override :meth:`scatter`, :meth:`replicate`, :meth:`parallel_apply` and
    :meth:`gather`; with one of the two in the middle overridden, replicas are made anew in each
    call, and their backwards run in one thread.

    It may be around a part of a model, and inside of another one. ``state_dict()`` is that of the
    module, without ``module.`` before its keys; both kinds are loaded.

    Replicas are made once. Those on the module's device share its parameters; others get those that
    have changed (a write to ``parameter.data`` of an accelerator isn't noticed). What the first
    replica does to buffers stays. What replicas do to attributes (``self.count += 1``) is lost, as
    these are the module's before every call; so is a buffer that is assigned anew. Hooks of the
    module run in each replica. Random numbers are drawn by all threads from one generator, in no
    fixed order: ``torch.utils.checkpoint`` can't restore them, so a checkpoint with dropout in it
    needs replicas in processes. Hooks of :func:`torch.autograd.graph.saved_tensors_hooks` are
    called for the first replica's tensors. Gradients can be differentiated again, unless replicas
    are in processes, which raises an error.

    Args:
        module: What is replicated. Its parameters and buffers are on the first device.
        device_ids: The devices, which may repeat: ``[0, 1]`` for two accelerators, and
            ``["cpu", "cpu"]`` for two replicas on the CPU, which share its intra-op threads. By
            default all accelerators; without any, one replica for each intra-op thread
            (:func:`torch.get_num_threads`), up to four. Indices are ignored, as by torch, where
            there are no accelerators.
        output_device: Where outputs are joined; by default on the first device. -1 is the CPU. An
            index is ignored where ``device_ids`` are.
        dim: The dimension of inputs that is cut, and of outputs that is joined.
        workers: Where replicas run, but for the first, which runs in the caller's thread:
            ``"threads"``, or ``"processes"`` of their own, on CPUs or CUDA devices, where no other
            replica holds up Python's interpreter. They start with the first call, which moves
            parameters on the CPU to shared memory, and end with this object. The module and its
            inputs must be picklable; an attribute that is changed in place, other than in its
            length, isn't noticed. Inside of such a process replicas are threads. Each process takes
            memory for all gradients, and on a GPU for a CUDA context.
        buffers: ``"first"`` keeps the first replica's changes, ``"mean"`` the mean over all
            replicas, of buffers of floating point.
        timeout: How long to wait for a replica in a process to do its part of a call or of a
            backward; 10 minutes by default. Then all of them are ended, and
            :class:`~lockstep.errors.ReplicaLost` names it. Their start may take two minutes anyway.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an option isn't known, or a device isn't there.
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
        workers: Literal["threads", "processes"] = "threads",
        buffers: Literal["first", "mean"] = "first",
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        nn.Module.__init__(self)  # and not that of torch's DataParallel
        check_module(module, "module")
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            kind = ValueError if isinstance(timeout, timedelta) else TypeError
            raise kind(
                f"timeout is {timeout!r}; give a timedelta above 0, as timedelta(minutes=2)."
            )
        if workers not in ("threads", "processes"):
            raise ValueError(
                f"workers is {workers!r}, but only 'threads' and 'processes' are known."
            )
        if buffers not in ("first", "mean"):
            raise ValueError(f"buffers is {buffers!r}, but only 'first' and 'mean' are known.")
        self.device_ids = devices_for(device_ids)
        kinds = {device.type for device in self._devices}
        if workers == "processes" and not kinds <= _SHARED_BY_PROCESSES:
            raise ValueError(
                "Replicas in processes compute on the CPU or on CUDA devices. For others, use "
                "workers='threads'."
            )
        self.module, self.dim = module, as_dim(dim)
        self.workers, self.buffer_policy, self._timeout = workers, buffers, timeout
        self.src_device_obj = home = self._devices[0]
        target = _target(output_device, device_ids, home)
        self.output_device = -1 if output_device == -1 else _as_torch_says(target)
        if len(self._devices) == 1:
            module.to(home)
        self._is_ready = True

    @property  # type: ignore[override]  # torch's has indices alone
    def device_ids(self) -> list[int | torch.device]:
        """The devices of the replicas, that of the module first; others may be assigned."""
        return [_as_torch_says(device) for device in self._devices]

    @device_ids.setter
    def device_ids(self, device_ids: Sequence[Device]) -> None:
        self._devices, self._replicas = devices_for(device_ids), None

    # The attribute that a copy of this module, in a replica of one around it, has for itself.
    _own_in_copies = ("_replicas",)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: D102 - as the module's
        return self._call("__call__", inputs, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute; its methods are called in all replicas."""
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
            if self._replicas is None:
                in_threads = self.workers == "threads" or is_beside_processes()
                self._replicas = Replicas(
                    self._devices,
                    averages_buffers=self.buffer_policy == "mean",
                    timeout=None if in_threads else self._timeout.total_seconds(),
                )
            arguments = list(zip(parts, kwargs_parts, strict=True))
            outputs = self._replicas.call(self.module, name, arguments)
        return self.gather(outputs, self.output_device)

    def _overrides(self, *names: str) -> bool:
        """Whether a subclass, or this object, has one of the methods that can be overridden."""
        return any(
            getattr(getattr(self, name), "__func__", None) is not vars(DataParallel)[name]
            for name in names
        )

    def _call_new_replicas(
        self, name: str, parts: Sequence[Any], kwargs_parts: Sequence[Any]
    ) -> list[Any]:
        """Call the replicas through a subclass's :meth:`replicate` and :meth:`parallel_apply`."""
        if self.workers != "threads" or self.buffer_policy != "first":
            raise ValueError(
                f"{type(self).__name__} has a replicate() or parallel_apply() of its own, which "
                "workers='processes' and buffers='mean' know nothing of. Leave out the one or the "
                "other."
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
        """The arguments of each replica."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """The outputs of all replicas, as one."""
        return gather(outputs, output_device, self.dim)

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> list[nn.Module]:
        """Replicas of a module, as :func:`lockstep.replicate` makes them."""
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """The results of replicas, as :func:`lockstep.parallel_apply` calls them."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    # Methods of a module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the module."""
        return self.module.state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """All attributes but the replicas."""
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
    """Call ``module`` on ``inputs``, which are cut up among replicas on several devices.

    It is made of :func:`scatter_kwargs`, :func:`replicate`, :func:`parallel_apply` and
    :func:`gather`, and can be differentiated any number of times. The backward of replicas on the
    CPU runs in one thread; those of :class:`DataParallel` run at the same time.

    Args:
        module: The module to call; it is on the first device.
        inputs: Its positional arguments as a tuple, or the only one; None for none.
        device_ids, output_device, dim: As for :class:`DataParallel`.
        module_kwargs: Its keyword arguments.

    Returns:
        The result that ``module(*inputs, **module_kwargs)`` would have.

    Source: ``torch.nn.parallel.data_parallel``.
    """
    check_module(module, "module")
    check_kwargs(module_kwargs, "module_kwargs")
    devices = devices_for(device_ids)
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    parts, kwargs = scatter_kwargs(arguments, module_kwargs, devices, dim)
    if not parts:
        parts, kwargs = ((),), ({},)
    used = devices[: len(parts)]
    target = _target(output_device, device_ids, devices[0])
    check_home([*module.parameters(), *module.buffers()], devices[0])
    if len(devices) == 1:
        return gather([module(*parts[0], **kwargs[0])], target, dim)
    # Parts of one tensor have one version, and autograd would take what a replica does to its own
    # in place for a change of the others'.
    parts, kwargs = map_tensors(torch.clone, (parts, kwargs))
    outputs = parallel_apply(replicate(module, used), parts, kwargs, used)
    return gather(outputs, target, dim)


def devices_for(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """The devices that are meant by the ``device_ids`` of :class:`DataParallel`."""
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
    """The device of joined outputs; ``home`` is that of the first replica."""
    are_named = device_ids is not None and not all(map(_is_missing, device_ids))
    # As torch ignores both, but not beside devices that are there.
    if output_device is None or (_is_missing(output_device) and not are_named):
        return home
    return as_device(output_device, "output_device")


def _is_missing(device: Device | None) -> bool:
    """Whether it is the index of an accelerator where there are none."""
    is_index = isinstance(device, int) and not isinstance(device, bool) and device >= 0
    return is_index and not torch.accelerator.is_available()


def _as_torch_says(device: torch.device) -> int | torch.device:
    """An accelerator by its index, as the attributes of torch's class do."""
    return device if device.index is None or device.type == "cpu" else device.index
