"""Copies of a module that share all but their tensors with it, and those tensors."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.nn.replicas.linked_embedding import leaf_as_linked, linked_embeddings_in
from lockstep.torch_private import _NormBase


class ModuleCopy:
    """A second tree of modules, of the same classes and with the same attributes.

    Each :meth:`update` gives the copy the attributes that the original has then. Attributes that
    were assigned in the copy are lost, but for those that the class names in ``_own_in_copies``.
    Their values are shared.

    Attributes:
        module: The copy.
    """

    def __init__(self, original: nn.Module) -> None:
        for part in original.modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise TypeError(
                    f"{type(original).__name__} can't be replicated: it has a ScriptModule in it, "
                    "whose parameters can't be replaced. Replicate what that was made from."
                )
        self._pairs = [(part, type(part).__new__(type(part))) for part in original.modules()]
        self._copies: dict[nn.Module | None, nn.Module] = dict(self._pairs)
        self.module = self._copies[original]

    def is_copy_of(self, parts: Sequence[nn.Module]) -> bool:
        """Whether the original's tree still consists of ``parts``."""
        return [part for part, _ in self._pairs] == list(parts)

    def update(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Take the original's attributes, with ``tensors`` in place of its own, by their ``id()``.

        Tensors that are missing there are shared.
        """
        for original, own in self._pairs:
            state = original.__dict__.copy()
            for kind in ("_parameters", "_buffers"):
                state[kind] = {name: tensors.get(id(t), t) for name, t in state[kind].items()}
            state["_modules"] = {
                name: self._copies.get(part, part) for name, part in state["_modules"].items()
            }
            if isinstance(original, nn.RNNBase):
                weights = state["_parameters"]
                names = state["_flat_weights_names"]
                state["_flat_weights"] = [weights.get(name) for name in names]
            for name, value in state.items():
                # A method that was assigned to an attribute is bound to the copy.
                if type(value) is MethodType and value.__self__ in self._copies:
                    state[name] = MethodType(value.__func__, self._copies[value.__self__])
            for name in getattr(original, "_own_in_copies", ()):
                state[name] = own.__dict__.get(name)
            # Not through the module's own __setattr__, which looks for parameters.
            object.__setattr__(own, "__dict__", state)


class ModuleState(NamedTuple):
    """What a module consists of at the time of a call.

    Attributes:
        parts: It and its submodules.
        parameters: Its parameters, and buffers that require a gradient.
        buffers: All other buffers.
        versions: For each buffer an object that differs once the buffer has changed.
    """

    parts: list[nn.Module]
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    versions: list[object]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """The state of ``module`` now."""
        parts = list(module.modules())
        all_buffers = list(own_tensors(parts, "_buffers"))
        trained = [buffer for buffer in all_buffers if buffer.requires_grad]
        buffers = [buffer for buffer in all_buffers if not buffer.requires_grad]
        parameters = [*own_tensors(parts, "_parameters"), *trained]
        return cls(parts, parameters, buffers, versions_of(buffers, parts))


class LocalReplica:
    """A replica in this process, which is kept from call to call.

    Note [Leaves]: a replica's parameters are leaves of its own graph. On the device of a parameter
    its leaf shares memory and version with it: what is written to one is written to both, and
    autograd notices what it would have noticed without replicas. Inputs are not shared so: those
    of all replicas are views of one tensor, with one version, and autograd would take what one
    replica does to its own in place for a change of the others'.

    Args:
        original: The module that is replicated.
        device: The replica's device.
        owns_buffers: Whether it has the module's own buffers, so that what it does to them stays.
            Otherwise it has copies, and what it saves for its backward isn't written to when the
            module gets the mean of all replicas' buffers.

    Attributes:
        leaves: The leaf of each of the module's parameters, in their order.
    """

    def __init__(self, original: nn.Module, device: torch.device, *, owns_buffers: bool) -> None:
        self.device = device
        self.leaves: list[torch.Tensor] = []
        self._copy = ModuleCopy(original)
        self.module = self._copy.module
        self._owns_buffers = owns_buffers
        self._leaf_of: dict[int, _Leaf] = {}
        self._buffer_of: dict[int, _Buffer] = {}

    def is_of(self, parts: Sequence[nn.Module]) -> bool:
        """Whether the module's tree still consists of ``parts``."""
        return self._copy.is_copy_of(parts)

    def update(self, state: ModuleState) -> None:
        """Bring the replica to the state of the module."""
        leaves, self._leaf_of = self._leaf_of, {}
        linked = linked_embeddings_in(state.parts)
        for parameter in state.parameters:
            leaf = leaves.get(id(parameter))
            if leaf is None or not leaf.is_current(parameter):
                leaf = _Leaf(parameter, self.device, is_linked=id(parameter) in linked)
            self._leaf_of[id(parameter)] = leaf
        self.leaves = [leaf.tensor for leaf in self._leaf_of.values()]
        if not self._owns_buffers:
            copies, self._buffer_of = self._buffer_of, {}
            for buffer, version in zip(state.buffers, state.versions, strict=True):
                copied = copies.get(id(buffer))
                if copied is None or not copied.is_current(buffer, version):
                    copied = _Buffer(buffer, version, self.device)
                self._buffer_of[id(buffer)] = copied
        tensors = {key: leaf.tensor for key, leaf in self._leaf_of.items()}
        tensors |= {key: copied.tensor for key, copied in self._buffer_of.items()}
        self._copy.update(tensors)

    def copy_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The replica's copy of a buffer of the module."""
        return self._buffer_of[id(buffer)].tensor


class _Leaf:
    """A leaf that shares a parameter's memory or, on another device, is a copy."""

    def __init__(self, original: torch.Tensor, device: torch.device, *, is_linked: bool) -> None:
        self._original = original  # its id() is the key of this leaf, and must not be reused
        self._version = version_of(original)
        self._is_shared = original.device == device
        there = original.detach()
        if not self._is_shared:
            there = there.to(device)
        if isinstance(original, nn.Parameter):
            there = nn.Parameter(there, requires_grad=original.requires_grad)
            there = leaf_as_linked(there) if is_linked else there
            there.__dict__.update(original.__dict__)
        self.tensor = there.requires_grad_(original.requires_grad)

    def is_current(self, original: torch.Tensor) -> bool:
        """Whether it still is that parameter's leaf; a copy is given a changed value here."""
        leaf = self.tensor
        if self._original is not original or leaf.requires_grad != original.requires_grad:
            return False
        if self._is_shared:
            is_there = leaf.shape == original.shape if leaf.is_meta else leaf.is_set_to(original)
            return leaf.dtype == original.dtype and is_there
        if leaf.shape != original.shape or leaf.dtype != original.dtype:
            return False
        if self._version != (version := version_of(original)):
            self._version = version
            with torch.no_grad():
                leaf.copy_(original, non_blocking=True)
        return True


class _Buffer:
    """A copy of a buffer, for a replica to write to; replaced when either has changed.

    An earlier value may be needed for a backward that is still to come.
    """

    def __init__(self, original: torch.Tensor, version: object, device: torch.device) -> None:
        self._original, self._version = original, version
        self.tensor = original.detach().to(device, copy=True)
        self._own_version = version_of(self.tensor)

    def is_current(self, original: torch.Tensor, version: object) -> bool:
        is_same = self._original is original and self._version == version
        return is_same and self._own_version == version_of(self.tensor)


def write_mean(buffer: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Give ``buffer`` the mean of the replicas' values or, if that isn't floating point, the first.

    A buffer that no replica has changed keeps its bits.
    """
    there = [value.to(buffer.device) for value in values]
    # By value, as not all that writes to a tensor is counted by its version.
    if not all(torch.equal(value, buffer) for value in there):
        with torch.no_grad():
            buffer.copy_(torch.stack(there).mean(0) if buffer.is_floating_point() else there[0])


class ModuleSnapshot:
    """The state of a module when it was sent to other processes.

    An attribute counts as changed if it is another object, or a container of another length.
    """

    def __init__(self, state: ModuleState) -> None:
        self._objects = _objects_of(state)
        self._starts = [parameter.data_ptr() for parameter in state.parameters]
        self._containers = [v for v in self._objects if isinstance(v, dict | list | set)]
        self.ignore_lengths()

    def ignore_lengths(self) -> None:
        """Take no container for changed that has its present length."""
        self._lengths = [*map(len, self._containers)]

    def is_current(self, state: ModuleState) -> bool:
        """Whether nothing but the values of tensors has changed."""
        objects = _objects_of(state)
        return (
            len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and [parameter.data_ptr() for parameter in state.parameters] == self._starts
            and [*map(len, self._containers)] == self._lengths
        )


def _objects_of(state: ModuleState) -> list[object]:
    # Not the training mode, which is sent with each call.
    attributes = [v for part in state.parts for v in (part.__dict__ | {"training": None}).values()]
    return [*state.parts, None, *state.parameters, None, *state.buffers, None, *attributes]


def own_tensors(parts: Sequence[nn.Module], kind: str) -> Iterator[torch.Tensor]:
    """Each of the ``"_parameters"`` or ``"_buffers"`` of ``parts``, once."""
    seen: set[int] = set()
    for part in parts:
        for tensor in part.__dict__[kind].values():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def versions_of(buffers: Sequence[torch.Tensor], parts: Sequence[nn.Module]) -> list[object]:
    """For each of the buffers of ``parts`` an object that differs once the buffer has changed."""
    # Statistics are written to without their version being counted. Shown by
    # test_statistics_are_those_of_the_last_call.
    counting = {
        id(buffer)
        for part in parts
        if part.training and isinstance(part, _NormBase)
        for buffer in part._buffers.values()
    }
    return [object() if id(buffer) in counting else version_of(buffer) for buffer in buffers]


def version_of(tensor: torch.Tensor) -> object:
    """An object that differs once the tensor has been written to, as far as torch tells."""
    # Inference tensors have no version, and so always count as changed.
    return object() if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def check_module(module: object, name: str) -> None:
    """Check that an argument is a module.

    Raises:
        TypeError: If it isn't.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} is {reprlib.repr(module)}; give a torch.nn.Module.")


def check_home(tensors: Sequence[torch.Tensor], home: torch.device) -> None:
    """Check that all tensors of a module are on the device of the first replica.

    Raises:
        RuntimeError: If one isn't, or has no shape yet.
    """
    for tensor in tensors:
        if tensor.device != home:
            raise RuntimeError(
                f"DataParallel's replicas start from the module on {home}, the first of its "
                f"device_ids, and one of the module's tensors is on {tensor.device}. Move the "
                f"module there: module.to({str(home)!r})."
            )
    check_shapes(tensors)


def check_shapes(tensors: Iterable[torch.Tensor]) -> None:
    """Check that all tensors of a module have a shape.

    Raises:
        RuntimeError: If one has none yet.
    """
    if any(map(is_lazy, tensors)):
        raise RuntimeError(
            "A parameter has no shape yet. Run one forward of the bare module on a sample before "
            "replicating it."
        )
