"""Values as JSON; the tensors among them as flat elements, which files of bytes take."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Classes of collections, by their names in JSON.
_SEQUENCES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (deque, frozenset, set, torch.Size, tuple)
}
_MAPPINGS: dict[str, type[Any]] = {"Counter": Counter, "OrderedDict": OrderedDict, "pairs": dict}
_OTHERS: dict[str, Callable[[Any], Any]] = {
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "bytes": base64.b64decode,
    "complex": lambda parts: complex(*parts),
    "device": torch.device,
    "dtype": lambda name: _DTYPES[name],
}
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class Header(NamedTuple):
    """Dtype, shape and memory order of a tensor."""

    dtype: str  # without "torch."
    shape: tuple[int, ...]
    order: tuple[int, ...]  # its dimensions, from the one with the largest stride on

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of all elements."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype; a KeyError if torch has none of this name."""
        return _DTYPES[self.dtype]


class Range(NamedTuple):
    """Elements of a tensor, counted in the order in which they are in memory."""

    key: str
    start: int
    elements: torch.Tensor  # of one dimension


class Collector:
    """Encodes values as JSON, and collects the tensors among them.

    Attributes:
        headers: All tensors, by their names.
        whole: Tensors, each of one dimension.
        ranges: Elements of tensors of which other ranks have other elements.
    """

    def __init__(self) -> None:
        self.headers: dict[str, Header] = {}
        self.whole: dict[str, torch.Tensor] = {}
        self.ranges: list[Range] = []
        self._known: dict[object, tuple[str, torch.Tensor]] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return ``value`` as JSON keeps it; ``path`` names it in errors.

        Raises:
            TypeError: If it, or something in it, is of a type that isn't saved.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str) or isinstance(value, float):
            return float(value) if isinstance(value, float) else value
        if isinstance(value, torch.Tensor):
            return {"tensor": self.add(value, path)}
        if kind is list:
            return [self.encode(each, f"{path}.{i}") for i, each in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value):
            return {
                "dict": {key: self.encode(each, f"{path}.{key}") for key, each in value.items()}
            }
        for name, made in _MAPPINGS.items():
            if kind is made:
                pairs = value.items()
                return {
                    name: [[self.encode(k, path), self.encode(v, f"{path}.{k}")] for k, v in pairs]
                }
        if kind is deque and value.maxlen is not None:
            return {"bounded": [value.maxlen, self.encode([*value], path)]}
        if kind in _SEQUENCES.values():
            found = [self.encode(each, f"{path}.{i}") for i, each in enumerate(value)]
            # The order of a set differs from process to process.
            return {kind.__name__: sorted(found, key=repr) if "set" in kind.__name__ else found}
        if kind in (bytes, bytearray):
            return {kind.__name__: base64.b64encode(value).decode()}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            array = numpy.ascontiguousarray(value).reshape(value.shape)
            if array.dtype.kind in "biufc" and array.dtype.isnative:
                scalar = isinstance(value, numpy.generic)
                return {"scalar" if scalar else "ndarray": self.add(torch.from_numpy(array), path)}
        raise TypeError(
            f"{path!r} is a {kind.__name__}, which is neither saved nor sent: numbers, strings, "
            "bytes, tensors, lists, tuples, sets and dictionaries of them are, and objects with a "
            "state_dict() are saved."
        )

    def add(self, tensor: torch.Tensor, path: str) -> str:
        """Collect a tensor, and return its name: that of one before if they are tied.

        Raises:
            TypeError: If it is a tensor of a kind that isn't saved.
        """
        check_tensor(tensor, path)
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        if tensor.numel() and place in self._known:
            return self._known[place][0]
        while path in self.headers:
            path += "'"
        self._known[place] = path, tensor  # kept, so that its memory isn't reused
        self.headers[path], self.whole[path] = header_of(tensor), flat_elements(tensor)
        return path

    def add_range(self, key: str, like: torch.Tensor, start: int, elements: torch.Tensor) -> None:
        """Collect some elements of a tensor of the shape and order of ``like``."""
        dtype = str(elements.dtype).removeprefix("torch.")
        self.headers[key] = header_of(like)._replace(dtype=dtype)
        self.ranges.append(Range(key, start, elements))


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Raise TypeError unless the elements of ``tensor`` are all here, one beside the other."""
    is_here = tensor.layout is torch.strided and tensor.device.type != "meta"
    if not is_here or tensor.is_quantized or hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{path!r} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}; "
            "only dense tensors with their values on this rank are saved. Convert it before (a "
            "DTensor by full_tensor(), a sparse one by to_dense())."
        )


class TensorName(str):
    """Stands for a tensor that isn't read, or for an array of NumPy's."""

    def numpy(self) -> TensorName:
        """Return the name."""
        return self

    def __getitem__(self, index: Any) -> TensorName:
        """Return the name."""
        return self


def decode(encoded: Any, tensor_of: Callable[[str], Any]) -> Any:
    """Return the value that :meth:`Collector.encode` was given, with tensors of ``tensor_of``.

    Errors of any class are those of JSON that didn't come from there.
    """
    if isinstance(encoded, list):
        return [decode(each, tensor_of) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, value),) = encoded.items()
    if kind == "dict":
        return {key: decode(each, tensor_of) for key, each in value.items()}
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(k, tensor_of): decode(v, tensor_of) for k, v in value})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(each, tensor_of) for each in value])
    if kind == "bounded":
        return deque(decode(value[1], tensor_of), maxlen=value[0])
    if kind == "tensor":
        return tensor_of(value)
    if kind in ("ndarray", "scalar"):
        array = tensor_of(value).numpy()
        return array if kind == "ndarray" else array[()]
    return _OTHERS[kind](value)


def header_of(tensor: torch.Tensor) -> Header:
    """Return the header of ``tensor``, whose elements are written side by side in any case."""
    order = tuple(range(tensor.dim()))
    if not tensor.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        # Strides of dimensions of size 1 say nothing, and differ between equal layouts.
        strides = tensor.stride()
        order = tuple(sorted(order, key=lambda d: (tensor.shape[d] > 1) * -strides[d]))
    return Header(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), order)


def flat_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of :func:`header_of`, where possible without a copy."""
    plain = tensor.detach().permute(header_of(tensor).order).resolve_conj().resolve_neg()
    return plain.reshape(-1).contiguous()


def from_flat(flat: torch.Tensor, header: Header) -> torch.Tensor:
    """Return the tensor of this header that has the elements ``flat``."""
    dims = range(len(header.shape))
    if sorted(header.order) != [*dims]:
        raise ValueError(f"{header.order} is no order of {len(dims)} dimensions")
    inverse = sorted(dims, key=header.order.__getitem__)
    return flat.view([header.shape[d] for d in header.order]).permute(inverse)
