"""Copies of a module with other tensors, and the state of the module that is copied."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from lockstep.arguments import Device
from lockstep.nn.lookups import renorm
from lockstep.nn.replicas.devices import as_devices, check_module
from lockstep.nn.replicas.group import Replica, this_replica
from lockstep.torch_private import DisableTorchFunctionSubclass, _NormBase

Network = TypeVar("Network", bound=nn.Module)


class ModuleCopy:
    """A copy, ``module``, of a module and its submodules, with the same classes and attributes.

    Each :meth:`update` copies the original's current attributes. Attributes that were assigned in
    the copy are lost, except those that the class lists in ``_kept_by_copies``.
    """

    def __init__(self, original: nn.Module) -> None:
        for submodule in original.modules():
            if isinstance(submodule, torch.jit.ScriptModule):
                raise TypeError(
                    f"{type(original).__name__} can't be replicated: it has a ScriptModule in it, "
                    "whose parameters can't be replaced. Replicate what that was made from."
                )
        self._pairs = [(each, type(each).__new__(type(each))) for each in original.modules()]
        self._copies: dict[nn.Module | None, nn.Module] = dict(self._pairs)
        self.module = self._copies[original]

    def update(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Copy the original's attributes, and replace its tensors by ``tensors``.

        The keys of ``tensors`` are the ``id()`` of the original's tensors; other tensors are
        shared.
        """
        for original, copy in self._pairs:
            state = original.__dict__.copy()
            for kind in ("_parameters", "_buffers"):
                state[kind] = {name: tensors.get(id(t), t) for name, t in state[kind].items()}
            state["_modules"] = {
                name: self._copies.get(each, each) for name, each in state["_modules"].items()
            }
            if isinstance(original, nn.RNNBase):
                weights = state["_parameters"]
                names = state["_flat_weights_names"]
                state["_flat_weights"] = [weights.get(name) for name in names]
            for name, value in state.items():
                # A method that was assigned to an attribute is bound to the copy.
                if type(value) is MethodType and value.__self__ in self._copies:
                    state[name] = MethodType(value.__func__, self._copies[value.__self__])
            for name in getattr(original, "_kept_by_copies", ()):
                state[name] = copy.__dict__.get(name)
            # Not through the module's own __setattr__, which looks for parameters.
            object.__setattr__(copy, "__dict__", state)


class ModuleState(NamedTuple):
    """The submodules and tensors of a module at the time of a call."""

    modules: list[nn.Module]  # it and its submodules
    parameters: list[torch.Tensor]  # and buffers that require a gradient
    buffers: list[torch.Tensor]  # all others
    versions: list[object]  # for each buffer an object that differs once the buffer has changed

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """The state of ``module`` now."""
        modules = list(module.modules())
        parameters, buffers = _tensors_of(modules, "_parameters"), _tensors_of(modules, "_buffers")
        parameters += [buffer for buffer in buffers if buffer.requires_grad]
        buffers = [buffer for buffer in buffers if not buffer.requires_grad]
        # Normalization layers write statistics without incrementing their version. Shown by
        # test_statistics_are_those_of_the_last_call.
        counting = {
            id(buffer)
            for each in modules
            if each.training and isinstance(each, _NormBase)
            for buffer in each._buffers.values()
        }
        versions = [
            object() if id(buffer) in counting else version_of(buffer) for buffer in buffers
        ]
        return cls(modules, parameters, buffers, versions)


def _tensors_of(modules: Sequence[nn.Module], kind: str) -> list[torch.Tensor]:
    """Each of the ``"_parameters"`` or ``"_buffers"`` of ``modules``, once."""
    found = {id(tensor): tensor for each in modules for tensor in each.__dict__[kind].values()}
    return [tensor for tensor in found.values() if tensor is not None]


def version_of(tensor: torch.Tensor) -> object:
    """Return an object that compares unequal once torch has counted a write to ``tensor``."""
    # Inference tensors have no version counter, and so always count as changed.
    return object() if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def check_home(tensors: Sequence[torch.Tensor], home: torch.device) -> None:
    """Check that a module's tensors can be those of the first replica.

    Raises:
        RuntimeError: If one isn't on the first device.
        ValueError: If one has no shape yet, as torch raises it.
    """
    for tensor in tensors:
        if tensor.device != home:
            raise RuntimeError(
                f"DataParallel's replicas start from the module on {home}, the first of its "
                f"device_ids, and one of the module's tensors is on {tensor.device}. Move the "
                f"module there: module.to({str(home)!r})."
            )
    _check_shapes(tensors)


def _check_shapes(tensors: Iterable[torch.Tensor]) -> None:
    if any(map(is_lazy, tensors)):
        raise ValueError(
            "A parameter has no shape yet. Run one forward of the bare module on a sample before "
            "replicating it."
        )


def replicate(network: Network, devices: Sequence[Device], detach: bool = False) -> list[Network]:
    """Return a replica of ``network`` for each of ``devices``. ::

        first, second = lockstep.replicate(model, ["cpu", "cpu"])
        (first(x) + second(more_x)).mean().backward()  # both add to model's gradients

    A replica is of the same class and has the same attributes. On the device of a parameter it has
    that parameter itself, and elsewhere a copy through which gradients flow back; so gradients of
    all replicas add up in ``network``. The first replica on the device of a buffer has the buffer
    itself, so that its changes stay; all others have copies.

    Args:
        network: A module, on any devices.
        devices: One device per replica, as an accelerator's index, a name or a
            ``torch.device``. A device may repeat.
        detach: Whether the replicas' parameters are detached from those of ``network``.

    Returns:
        The replicas, in the order of ``devices``.

    Raises:
        TypeError: If ``network`` isn't a module, or contains a ScriptModule.
        ValueError: If a device doesn't exist, or a parameter has no shape yet.
    """
    check_module(network, "network")
    modules = list(network.modules())
    parameters, buffers = _tensors_of(modules, "_parameters"), _tensors_of(modules, "_buffers")
    _check_shapes([*parameters, *buffers])
    replicas = []
    linked = linked_embeddings_in(modules)
    is_taken: set[int] = set()
    for device in as_devices(devices, "devices"):
        replica = ModuleCopy(network)
        tensors = {}
        for parameter in parameters:
            there = parameter.to(device).detach() if detach else parameter.to(device)
            tensors[id(parameter)] = as_linked(there) if id(parameter) in linked else there
        for buffer in buffers:
            if buffer.device == device and id(buffer) not in is_taken:
                is_taken.add(id(buffer))
                tensors[id(buffer)] = buffer
            else:
                copied = buffer.to(device, copy=True)
                tensors[id(buffer)] = copied.detach() if detach else copied
        replica.update(tensors)
        replicas.append(cast(Network, replica.module))
    return replicas


class LinkedEmbedding(nn.Parameter):
    """The weight of an embedding whose rows depend on the lookups of all replicas.

    ``max_norm`` scales rows in place when they are looked up; a replica must not do that while
    other replicas read the shared weight. ``scale_grad_by_freq`` divides a row's gradient by the
    number of its lookups in the whole batch.

    Source: ``__torch_function__`` in "Extending PyTorch", which torch calls for each function with
    such an argument.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            run = partial(_look_up, func) if func in _LOOKUPS else func
            return run(*args, **(kwargs or {}))


def linked_embeddings_in(modules: Sequence[nn.Module]) -> set[int]:
    """The ``id()`` of those weights in ``modules`` whose rows depend on all replicas' lookups."""
    return {
        id(each.weight)
        for each in modules
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
        and (each.max_norm is not None or each.scale_grad_by_freq)
    }


def as_linked(parameter: torch.Tensor) -> torch.Tensor:
    """Return a linked embedding with the values of ``parameter``, differentiable by it."""
    return _AsLinkedEmbedding.apply(parameter)  # type: ignore[no-untyped-call,no-any-return]


class _AsLinkedEmbedding(torch.autograd.Function):
    """Not a view of the parameter, as views have no sparse gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(LinkedEmbedding, parameter.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


_LOOKUPS = {each: inspect.signature(each) for each in (F.embedding, F.embedding_bag)}


def _look_up(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Look rows up as ``func`` does, with the lookups of all replicas taken into account."""
    call = _LOOKUPS[func].bind(*args, **kwargs)
    call.apply_defaults()
    given, replica = call.arguments, this_replica()
    weight, max_norm = given["weight"], given["max_norm"]
    if max_norm is None and not given["scale_grad_by_freq"]:
        return func(*args, **kwargs)
    counts = torch.bincount(given["input"].reshape(-1), minlength=len(weight))
    if replica is not None:
        # With a finish, though it changes nothing, the sum includes the replicas around these.
        counts = replica.add_up(counts, torch.clone)
    if max_norm is not None:
        arguments = weight, counts.nonzero().flatten(), max_norm, given["norm_type"]
        scale_rows = partial(renorm, *arguments)
        # Before any replica reads a row or saves the weight for its backward.
        scale_rows() if replica is None else _once_per_device(replica, weight.device, scale_rows)
    if given["scale_grad_by_freq"] and weight.requires_grad and torch.is_grad_enabled():
        weight = weight.view_as(weight)
        weight.register_hook(lambda gradient: gradient / counts.clamp(min=1).unsqueeze(1))
    given |= {"weight": weight, "max_norm": None, "scale_grad_by_freq": False}
    return func(*call.args, **call.kwargs)


def _once_per_device(replica: Replica, device: torch.device, do: Callable[[], object]) -> None:
    """Run ``do`` in the first replica on each device, while all others wait."""
    kinds = torch.zeros(replica.count, dtype=torch.long)
    kinds[replica.index] = kind = 1 + zlib.crc32(str(device).encode())
    first = replica.add_up(kinds).tolist().index(kind)
    try:
        if first == replica.index:
            do()
    finally:
        replica.add_up(torch.zeros(0))
