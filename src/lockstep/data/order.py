"""The order of the samples of an epoch, as torch's own samplers give it, without a list of it.

Samples that aren't shuffled are arithmetic. A shuffle is torch's permutation, of 8 bytes a sample;
of very many samples it is computed where it is asked for, and takes no memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.comm import bytes_of

# Up to this number of samples a permutation is kept: 256 MiB.
MAX_KEPT = 2**25
# How many samples are computed at once: few enough that torch takes one thread.
_CHUNK = 2**13
_NUM_ROUNDS = 8
_MASK = 2**32 - 1


class Order:
    """The numbers from 0 to ``length - 1`` in an order of their own.

    Args:
        length: How many they are.
        generator: Of the random numbers of a shuffle; None to keep their order. Up to
            :data:`MAX_KEPT` it is the order of ``torch.randperm(length, generator=generator)``.
    """

    def __init__(self, length: int, generator: torch.Generator | None = None) -> None:
        self.length = length
        self._kept: Tensor | None = None
        self._keys: list[int] = []
        if generator is not None and length <= MAX_KEPT:
            self._kept = torch.randperm(length, generator=generator, device="cpu")
        elif generator is not None:
            keys = torch.randint(2**32, (_NUM_ROUNDS,), generator=generator, device="cpu")
            self._keys = keys.tolist()

    def __getitem__(self, place: slice) -> Tensor:
        """The numbers at these places, int64; a step is 1."""
        if self._kept is not None:
            return self._kept[place]
        start, stop, _ = place.indices(self.length)
        places = torch.arange(start, max(start, stop), device="cpu")
        return _permuted(places, self.length, self._keys) if self._keys else places

    def batches(self, batch_size: int, *, drop_last: bool, start: int = 0) -> Iterator[Tensor]:
        """Yield batches of so many numbers, from the place ``start`` on."""
        chunk = max(1, _CHUNK // batch_size) * batch_size
        end = self.length - self.length % batch_size if drop_last else self.length
        for first in range(start, end, chunk):
            numbers = self[first : min(first + chunk, end)]
            for place in range(
                0, len(numbers), batch_size
            ):  # split() takes time and memory at once
                yield numbers[place : place + batch_size]

    def checksum(self, length: int) -> int | None:
        """The CRC-32 of the first ``length`` numbers as bytes; None if they can't be others.

        Torch may shuffle in another way some day. The other orders are ours.
        """
        if self._kept is None:
            return None
        return zlib.crc32(bytes_of(self._kept[:length]))


def _permuted(places: Tensor, length: int, keys: list[int]) -> Tensor:
    """Return what a permutation of ``length`` numbers, chosen by ``keys``, has at ``places``.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): a Feistel network
    over pairs; of a little more numbers than there are, those beyond the end are permuted again.
    """
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    found, walks = places, torch.ones_like(places, dtype=torch.bool)
    while True:
        row, column = found // columns, found % columns
        for number, key in enumerate(keys):
            if number % 2:
                row = (row + _hash(column, key)) % rows
            else:
                column = (column + _hash(row, key)) % columns
        found = torch.where(walks, row * columns + column, found)
        walks = found >= length
        if not walks.any():
            return found


def _hash(numbers: Tensor, key: int) -> Tensor:
    """Return 32 bits for each of ``numbers`` below ``2**32``.

    The multipliers are those of "lowbias32" by Chris Wellons.
    """
    numbers = (numbers + key) & _MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & _MASK
    return numbers ^ (numbers >> 16)
