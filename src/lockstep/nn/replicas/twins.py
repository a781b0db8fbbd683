"""Copies of a module that share all but their tensors with it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.torch_private import _NormBase


class Twin:
    """A second tree of modules, of the same classes and with the same attributes.

    What the original's attributes are, the twin's are after each :meth:`take_after`; what is
    assigned to an attribute in the twin is lost then, but for those that the class names in
    ``_own_in_twins``. What attributes refer to is shared.

    Attributes:
        module: The twin.

    Args:
        original: What it is the twin of.
    """

    def __init__(self, original: nn.Module) -> None:
        for part in original.modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise TypeError(
                    f"{type(original).__name__} can't be replicated: it has a ScriptModule in it, "
                    "whose parameters can't be replaced. Replicate what that was made from."
                )
        self._pairs = [(part, type(part).__new__(type(part))) for part in original.modules()]
        self._twins: dict[nn.Module | None, nn.Module] = dict(self._pairs)
        self.module = self._twins[original]

    def is_twin_of(self, parts: Sequence[nn.Module]) -> bool:
        """Whether it is one of the tree that consists of ``parts``."""
        return [part for part, _ in self._pairs] == list(parts)

    def take_after(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Have the attributes that the original has, with ``tensors`` in the place of its own.

        Args:
            tensors: What takes the place of each parameter and buffer, by the ``id()`` of it.
        """
        for original, twin in self._pairs:
            state = original.__dict__.copy()
            for kind in ("_parameters", "_buffers"):
                state[kind] = {name: tensors.get(id(t), t) for name, t in state[kind].items()}
            state["_modules"] = {
                name: self._twins.get(part, part) for name, part in state["_modules"].items()
            }
            if isinstance(original, nn.RNNBase):
                own = state["_parameters"]
                state["_flat_weights"] = [own.get(name) for name in state["_flat_weights_names"]]
            for name, value in state.items():
                # A method that was assigned is that of the twin.
                if type(value) is MethodType and value.__self__ in self._twins:
                    state[name] = MethodType(value.__func__, self._twins[value.__self__])
            for name in getattr(original, "_own_in_twins", ()):
                state[name] = twin.__dict__.get(name)
            # Not through the module's own __setattr__, which looks for parameters.
            object.__setattr__(twin, "__dict__", state)


def own_tensors(parts: Sequence[nn.Module], kind: str) -> Iterator[torch.Tensor]:
    """Each of the ``"_parameters"`` or ``"_buffers"`` of ``parts``, once."""
    seen: set[int] = set()
    for part in parts:
        for tensor in part.__dict__[kind].values():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def trained_and_buffers(
    parts: Sequence[nn.Module],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters of ``parts``, and buffers that require a gradient; and all other buffers."""
    buffers = list(own_tensors(parts, "_buffers"))
    trained = [buffer for buffer in buffers if buffer.requires_grad]
    parameters = [*own_tensors(parts, "_parameters"), *trained]
    return parameters, [buffer for buffer in buffers if not buffer.requires_grad]


def versions_of(buffers: Sequence[torch.Tensor], parts: Sequence[nn.Module]) -> list[object]:
    """For each of the buffers of ``parts`` what is another one once it has changed."""
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
    """What is another one once the tensor has been written to, as far as torch tells."""
    # Inference tensors don't count, and so are always taken for changed.
    return object() if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def check_module(module: object, name: str) -> None:
    """Check that an argument is a module.

    Raises:
        TypeError: If it isn't.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} is {reprlib.repr(module)}; give a torch.nn.Module.")


def check_home(tensors: Sequence[torch.Tensor], home: torch.device) -> None:
    """Check that all tensors of a module are where replicas of it start from.

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
