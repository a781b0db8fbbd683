"""Groups of every backend, with ranks that are threads of the test's process, and what to expect.

Those of ``"shm"`` run in processes in test_torch_over_shm.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

T = TypeVar("T")

# Ours promise what Gloo doesn't: every dtype and layout, sums in rank order, uneven sizes.
OURS = ("shm", "threads")
BACKENDS = ("gloo", *OURS)

# Before 2.13 torch knows them by their older names alone, which newer ones warn of.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (*FLOATS, *INTS, torch.bool, *COMPLEX, *FLOAT8)
# Gloo has no int16, and torch sends it complex numbers as pairs of real ones.
GLOO_DTYPES = tuple(dtype for dtype in DTYPES if dtype not in (torch.int16, *FLOAT8))
NARROW = (torch.float16, torch.bfloat16, *FLOAT8)

# Empty, without dimensions, odd, on both sides of what goes in one meeting, and in three pieces.
SHAPES = ((), (0,), (3, 0), (7,), (2, 3, 5), (16_385,), (600_001,))
# One that goes in one meeting, and one that takes several.
SMALL, LARGE = (3,), (700_001,)


def over_sizes(backends: Sequence[str]) -> pytest.MarkDecorator:
    """Each of ``backends`` with one to four ranks.

    Those that take most of the time are left to ``make test-long``: four ranks, three that are
    threads, which run the same code as those that are processes, and Gloo, by which the tests
    themselves are tested, with other than two.
    """
    cases = []
    for backend, size in itertools.product(backends, (1, 2, 3, 4)):
        is_long = size == 4 or (backend, size) == ("threads", 3)
        is_long |= backend == "gloo" and size != 2
        cases.append(pytest.param(backend, size, marks=[pytest.mark.long] if is_long else []))
    return pytest.mark.parametrize(("backend", "size"), cases)


over_ours = pytest.mark.parametrize("backend", OURS)
over_backends_and_sizes = over_sizes(BACKENDS)
over_ours_and_sizes = over_sizes(OURS)


def run_on(
    backend: str,
    size: int,
    body: Callable[[dist.ProcessGroup], T],
    seconds: float = 20,
    members: Sequence[int] | None = None,
) -> list[T]:
    """Run ``body(group)`` on every rank; return what they return, in rank order."""
    return run_ranks(size, lambda _, group: body(group), seconds, backend, members)


def values(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Numbers that any reduction of a few of them leaves in the range of ``dtype``."""
    return kept_values(dtype, tuple(shape), seed).clone()


@lru_cache(maxsize=4096)
def kept_values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same numbers, in one tensor that is compared with and never given away."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    low = 0 if dtype in (torch.bool, torch.uint8) else -3
    return torch.randint(low, 4, shape, generator=generator).to(dtype)


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a reduction over ranks that hold ``tensors`` gives: in rank order, bit for bit.

    What is narrower than float32 is combined in float32, and rounded once.
    """
    return _reduced(op, tuple(tensors))


# Every rank asks for the same of the same tensors, at nearly the same time.
@lru_cache(maxsize=2)
def _reduced(op: str, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype.is_complex and op == "AVG":  # which torch takes as pairs of real numbers
        return torch.view_as_complex(reduced(op, [torch.view_as_real(t) for t in tensors]))
    wide = torch.float32 if dtype in NARROW else dtype
    total = reduce(_COMBINE[op], (tensor.to(wide) for tensor in tensors))
    if op == "AVG":
        total = (
            total / len(tensors)
            if wide.is_floating_point
            else torch.div(total, len(tensors), rounding_mode="trunc").to(wide)
        )
    return total.to(dtype)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless both have the same shape, dtype and bits."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(_bits(got), _bits(expected)), f"{got} is not {expected}"


def assert_all_are(number: float, tensor: torch.Tensor) -> None:
    """Fail unless every element is that number, and there is one."""
    assert tensor.numel()
    assert (tensor == number).all(), f"{tensor} is not {number} throughout"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    row = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return row.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def assert_reduced(
    backend: str, got: torch.Tensor, op: str, tensors: Sequence[torch.Tensor]
) -> None:
    """Fail unless ``got`` is the reduction: the same bits from ours, as close as Gloo comes."""
    expected = reduced(op, tensors)
    if backend in OURS:
        assert_same_bits(got, expected)
    else:
        # Gloo rounds narrow numbers at every step, and adds in an order of its own.
        tolerance = {"rtol": 2e-2, "atol": 5e-2} if got.dtype in NARROW else {}
        torch.testing.assert_close(got, expected, **tolerance)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers, elsewhere in memory."""
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "strided":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "conj":
        return tensor.conj().resolve_conj().conj()
    if layout == "offset":
        return torch.cat([torch.zeros(3, dtype=tensor.dtype), tensor.view(-1)])[3:].view(
            tensor.shape
        )
    assert layout == "needs gradients"
    return tensor.clone().requires_grad_()
