"""Parameters whose update is on its way from other ranks, while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from lockstep.comm import Started, has_compiled, uncompiled
from lockstep.errors import CollectiveFailed
from lockstep.grad import DeferredParameter
from lockstep.torch_private import DisableTorchFunctionSubclass
from lockstep.world import is_capturing

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

    On a GPU streams wait, not the host, and the one that reads first isn't the only one: the
    program may have made another stream wait for that of the step before, which doesn't make it
    wait for the all-gather. So each stream that reads waits, until one has passed the end. Shown by
    test_each_stream_that_reads_parameters_waits_for_their_update.
    """

    def __init__(
        self,
        collective: Started,
        parameters: Sequence[nn.Parameter],
        note_error: Callable[[CollectiveFailed], None],
    ) -> None:
        self._collective: Started | None = collective
        self._note_error, self._lock = note_error, threading.Lock()
        device = parameters[0].device
        self._device = None if device.type == "cpu" else device
        # The streams that wait for it, and an event after the first of these waits.
        self._streams: set[int] = set()
        self._event: torch.Event | None = None
        for parameter in parameters:  # of the last step, or of two optimizers
            if (earlier := vars(parameter).get("_arrival")) is not None:
                # Its values are there: the step has looked for parameters that have moved.
                earlier.end()
        self._classes = {parameter: type(parameter) for parameter in parameters}
        if not all(map(_may_arrive, parameters)):
            self.wait()
            self.end()
            return
        for parameter in parameters:
            parameter._arrival = self  # type: ignore[attr-defined]
            parameter.__class__ = ArrivingParameter

    def wait(self, *, on_host: bool = False) -> None:
        """Wait until the values are there; on a GPU, the current stream does, or the host.

        Raises:
            CollectiveFailed: If a rank is lost, or doesn't come in time. The values are undefined.
        """
        with self._lock:
            if self._collective is None:
                return
            is_over = True
            try:
                is_over = self._wait(self._collective, on_host)
            except CollectiveFailed as error:
                self._note_error(error)
                raise
            finally:
                if is_over:
                    self._end()

    def _wait(self, collective: Started, on_host: bool) -> bool:
        """Wait, and return whether no reader has to any more."""
        if self._device is None:
            collective.wait()
            return True
        # What was read before a graph is captured has arrived: torch.cuda.graph begins when the
        # device has done all.
        if self._event is not None and (is_capturing() or self._event.query()):
            return True
        stream = torch.accelerator.current_stream(self._device)
        if stream.stream_id not in self._streams:
            collective.wait()
            self._streams.add(stream.stream_id)
            self._event = self._event or stream.record_event()
        if on_host and self._event is not None:
            self._event.synchronize()
        return on_host

    def end(self) -> None:
        """Let parameters be read without a wait."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._collective = None
        for parameter, cls in self._classes.items():
            parameter.__class__ = cls
            vars(parameter).pop("_arrival", None)
        self._classes = {}

    def set_read(self, parameter: nn.Parameter, is_read: bool) -> bool:
        """Let a function read ``parameter`` after its wait, or none; return if others wait yet."""
        with self._lock:
            if (cls := self._classes.get(parameter)) is None:
                return False
            parameter.__class__ = cls if is_read else ArrivingParameter
            return True


@contextmanager
def _read(parameters: Iterable[ArrivingParameter]) -> Iterator[dict[torch.Tensor, Arrival]]:
    """Wait for ``parameters`` and let them be read; yield those that other streams wait for yet."""
    # Another thread may have waited meanwhile.
    pairs = [(each, vars(each).get("_arrival")) for each in parameters]
    found = [(parameter, arrival) for parameter, arrival in pairs if arrival is not None]
    for _, arrival in found:
        arrival.wait()
    try:
        yield {each: arrival for each, arrival in found if arrival.set_read(each, True)}
    finally:
        for parameter, arrival in found:
            arrival.set_read(parameter, False)


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
        with _read(_arriving_among((args, arguments))) as coming:
            result = function(*args, **arguments)
            is_alias = bool(coming) and _is_alias(result, coming)
        for arrival in coming.values() if is_alias else ():
            arrival.wait(on_host=True)  # any stream may read the result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter."""
        with _read([self]):
            return self.__reduce_ex__(protocol)  # of the class that it has now


def _arriving_among(value: object) -> Iterator[ArrivingParameter]:
    """Yield the parameters in ``value`` that are arriving, in lists and the like of any class.

    torch looks for parameters there too, and calls ``__torch_function__`` until none is arriving.
    """
    if isinstance(value, list | tuple):
        for each in value:
            yield from _arriving_among(each)
    elif isinstance(value, dict):
        yield from _arriving_among([*value.values()])
    elif isinstance(value, ArrivingParameter):
        yield value


def _is_alias(value: object, parameters: Collection[torch.Tensor]) -> bool:
    """Whether ``value`` has memory of ``parameters``, which any stream may read through it."""
    if isinstance(value, list | tuple):
        return any(_is_alias(each, parameters) for each in value)
    if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
        return True
    if not isinstance(value, torch.Tensor) or any(value is each for each in parameters):
        return False
    try:
        return any(_address(value) == _address(each) for each in parameters)
    except RuntimeError:  # in a transform of torch.func, which hides it
        return True


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
