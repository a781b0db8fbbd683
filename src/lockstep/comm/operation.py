"""The forms in which torch takes one and the same call of a process group, brought into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])

_TIMEOUT = "timeout"


def operation(
    options: type, *parameters: str, values: Mapping[str, str] | None = None
) -> Callable[[_Method], _Method]:
    """Let a method of a group be called in every form that torch's groups can be called in.

    torch takes options, as in ``group.broadcast([tensor], opts)``, or in their place the values
    themselves, as in ``group.broadcast(tensor, 0, timeout=timeout)``. The method is given
    options always. Tensors that aren't on the CPU are handed to the group for their device.

    Args:
        options: The class of the options.
        parameters: The names of what comes before them; ``"a|b"`` where torch's forms differ.
        values: By the names and in the order in which they may be given in place of options,
            the fields of the options; the time-out may be given after them.
    """
    count = len(parameters)
    fields = {**(values or {}), _TIMEOUT: _TIMEOUT}

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != count + 1 or not isinstance(args[count], options):
                args = _with_options(method.__name__, options, parameters, fields, args, kwargs)
            tensor = _first_tensor(args[:count])
            if tensor is not None and not tensor.is_cpu:
                other = self._others.group(tensor.device.type)
                return getattr(other, method.__name__)(*args)
            return method(self, *args)

        return call  # type: ignore[return-value]

    return decorate


def of_any_device(method: _Method) -> _Method:
    """Make a method that takes no options hand on tensors that aren't on the CPU."""

    @wraps(method)
    def call(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor(tensors)
        if tensor is not None and not tensor.is_cpu:
            other = self._others.group(tensor.device.type)
            return getattr(other, method.__name__)(tensors, *args, **kwargs)
        return method(self, tensors, *args, **kwargs)

    return call  # type: ignore[return-value]


def _with_options(
    name: str,
    options: type,
    parameters: Sequence[str],
    fields: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    given = list(args)
    for aliases in parameters[len(given) :]:
        for alias in aliases.split("|"):
            if alias in kwargs:
                given.append(kwargs.pop(alias))
                break
        else:
            raise TypeError(f"{name}() lacks the argument {aliases.split('|')[0]!r}.")
    count = len(parameters)
    rest = given[count:]
    opts = kwargs.pop("opts", None)
    if opts is None:
        opts = rest.pop(0) if rest and isinstance(rest[0], options) else options()
        values = dict(zip(fields, rest, strict=False)) | kwargs
    else:
        values = kwargs
    if len(rest) > len(fields) or not set(values) <= set(fields):
        raise TypeError(
            f"{name}() was given {[*map(repr, rest), *kwargs]} beside the tensors. It takes "
            f"{options.__name__}, or {', '.join(fields)}."
        )
    for parameter, value in values.items():
        if value is not None:
            setattr(opts, fields[parameter], value)
    return (*given[:count], opts)


def _first_tensor(values: Any) -> torch.Tensor | None:
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, (list, tuple)):
        for value in values:
            tensor = _first_tensor(value)
            if tensor is not None:
                return tensor
    return None
