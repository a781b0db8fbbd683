"""Parameters whose update is on its way from other ranks, while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from lockstep.comm import Pending, has_compiled, uncompiled
from lockstep.errors import CollectiveFailed
from lockstep.grad import DeferredParameter
from lockstep.torch_private import DisableTorchFunctionSubclass

# Functions of torch that need no values: properties, and methods.
_PROPERTIES = """
    device dtype grad grad_dtype grad_fn is_cpu is_cuda is_leaf is_meta is_quantized is_sparse
    itemsize layout nbytes ndim output_nr requires_grad retains_grad shape
"""
_METHODS = """
    __hash__ __len__ dim element_size get_device is_complex is_contiguous
    is_floating_point is_inference is_same_size is_signed ndimension nelement numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
"""
_descriptor_of = partial(getattr_static, torch.Tensor)
_WITHOUT_VALUES: set[object] = {
    *(_descriptor_of(name).__get__ for name in _PROPERTIES.split()),
    *(_descriptor_of(name).__set__ for name in ("grad", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
}


class Arrival:
    """An all-gather of updated parameters, for which whatever reads one of them waits.

    Until then they are instances of :class:`ArrivingParameter`. ``note_error`` is called with the
    error if a rank is lost meanwhile.
    """

    def __init__(
        self,
        pending: Pending,
        parameters: Sequence[nn.Parameter],
        note_error: Callable[[CollectiveFailed], None],
    ) -> None:
        self._pending: Pending | None = pending
        self._note_error, self._lock = note_error, threading.Lock()
        device = parameters[0].device
        # The program makes its other streams wait for that of the step, and not for the all-gather.
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        for parameter in parameters:  # of two optimizers
            if isinstance(parameter, ArrivingParameter):
                parameter._arrival.wait()
        self._classes = [(parameter, type(parameter)) for parameter in parameters]
        if not all(map(_may_arrive, parameters)):
            self.wait()
            return
        for parameter in parameters:
            parameter._arrival = self  # type: ignore[attr-defined]
            parameter.__class__ = ArrivingParameter

    def wait(self) -> None:
        """Wait until the values are there; on a GPU, the current stream and that of the step do.

        Raises:
            CollectiveFailed: If a rank is lost, or doesn't come in time. The values are undefined.
        """
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None:
                return
            try:
                if self._stream is not None:
                    with self._stream:
                        pending.wait()
                pending.wait()
            except CollectiveFailed as error:
                self._note_error(error)
                raise
            finally:
                for parameter, cls in self._classes:
                    parameter.__class__ = cls
                    vars(parameter).pop("_arrival", None)
                self._classes = []


def _may_arrive(parameter: nn.Parameter) -> bool:
    """Whether code that reads ``parameter`` can be made to wait.

    Not if it is of a class of the program's, nor if torch.compile() is used, whose code is for one
    class of parameters.
    """
    return type(parameter) in (nn.Parameter, DeferredParameter) and not has_compiled()


class ArrivingParameter(DeferredParameter):
    """A parameter whose value is on its way: functions of torch that read it wait for it first."""

    _arrival: Arrival

    @classmethod
    @uncompiled
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``function``, with the values that all parameters among its arguments get."""
        arguments = kwargs or {}
        if function in _WITHOUT_VALUES:
            with DisableTorchFunctionSubclass():
                return function(*args, **arguments)
        for arrival in _arrivals_among((args, arguments)):
            arrival.wait()
        return function(*args, **arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter."""
        self._arrival.wait()
        return self.__reduce_ex__(protocol)  # of the class that it has now


def _arrivals_among(value: object) -> Iterator[Arrival]:
    """Yield the arrivals of parameters in ``value``, in lists and the like of any class.

    torch looks for parameters there too, and calls ``__torch_function__`` until none is arriving.
    """
    if isinstance(value, list | tuple):
        for each in value:
            yield from _arrivals_among(each)
    elif isinstance(value, dict):
        yield from _arrivals_among([*value.values()])
    elif isinstance(value, ArrivingParameter):
        # Another thread may have waited meanwhile.
        arrival: Arrival | None = vars(value).get("_arrival")
        if arrival is not None:
            yield arrival
