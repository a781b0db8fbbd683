"""Gradients in chunks, each of which ranks sum at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lockstep.grad import aligned, gradient_dtype, view_like
from lockstep.nn import Number
from lockstep.same_bits.sums import Gradients, scale
from lockstep.torch_private import _foreach_add_, _foreach_copy_

# The most bytes of gradients that ranks sum at once, if no single one is larger: Gloo's all-gather
# of 64 MiB takes longer than four of 16.
_CAP_BYTES = 16 * 1024 * 1024
# Adding it changes no number, and 0.0 would make 0.0 of -0.0. Shown by
# test_a_parameter_without_gradient_in_some_shards_keeps_the_sign_of_zero.
_NOTHING = -0.0


class Chunk(NamedTuple):
    """Gradients that ranks sum at once, of one dtype on one device.

    Attributes:
        dtype, device: Theirs.
        indices: Which they are.
        offsets: Where each begins.
        forms: Their parameters, of the same form.
        numel: The number of elements, a multiple of what each rank sums.
    """

    dtype: torch.dtype
    device: torch.device
    indices: list[int]
    offsets: list[int]
    forms: list[torch.Tensor]
    numel: int

    def rows(self, memory: torch.Tensor) -> torch.Tensor:
        """Return ``memory`` as rows, each for one sum."""
        count = len(memory) // self.numel
        return memory[: count * self.numel].view(count, self.numel)

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients in ``row``, each in the form of its parameter."""
        pairs = zip(self.offsets, self.forms, strict=True)
        return [view_like(row, offset, form) for offset, form in pairs]

    def fill(
        self, row: torch.Tensor, terms: Sequence[Gradients], weight: Number | None = None
    ) -> None:
        """Write to ``row`` the sum of ``terms``, from the last one on, without changing them.

        Those of the last one are multiplied by ``weight``, if there is one.
        """
        *earlier, last = terms
        filled: list[torch.Tensor] = []
        more: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in terms]
        for index, view in zip(self.indices, self.views(row), strict=True):
            its = [each[index] for each in reversed(earlier)]
            found = [gradient for gradient in (last[index], *its) if gradient is not None]
            if not found:
                view.fill_(_NOTHING)
            elif last[index] is not None:
                filled.append(view)
            for pairs, gradient in zip(more, found, strict=False):
                pairs.append((view, gradient))
        for number, pairs in enumerate(filter(None, more)):
            function = _foreach_add_ if number else _foreach_copy_
            function([view for view, _ in pairs], [gradient for _, gradient in pairs])
            if not number:
                scale(filled, weight)

    def take(
        self, total: torch.Tensor, mine: Gradients, used: Sequence[bool], result: Gradients
    ) -> None:
        """Copy gradients that are ``used`` out of ``total``, to memory that has ``mine`` or new."""
        targets: list[torch.Tensor] = []
        sources = []
        for index, view in zip(self.indices, self.views(total), strict=True):
            if not used[index]:
                continue
            sources.append(view)
            target = mine[index]
            if target is None or target.stride() != view.stride():
                target = total.new_empty_strided(view.shape, view.stride())
            targets.append(target)
            result[index] = target
        _foreach_copy_(targets, sources)


def in_chunks(parameters: Sequence[torch.Tensor], num_ranks: int) -> Iterator[Chunk]:
    """Yield chunks of the gradients of ``parameters``, those first that a backward computes first.

    These are, as a rule, of the parameters that come last.
    """
    kinds = [(gradient_dtype(parameter), parameter.device) for parameter in parameters]
    for kind in dict.fromkeys(kinds):
        dtype = kind[0]
        cap = _CAP_BYTES // dtype.itemsize
        indices: list[int] = []
        offsets = [0]
        for index in reversed([index for index, each in enumerate(kinds) if each == kind]):
            size = aligned(parameters[index].numel())
            if indices and offsets[-1] + size > cap:
                yield _chunk(kind, indices, offsets, parameters, num_ranks)
                indices, offsets = [], [0]
            indices.append(index)
            offsets.append(offsets[-1] + size)
        yield _chunk(kind, indices, offsets, parameters, num_ranks)


def _chunk(
    kind: tuple[torch.dtype, torch.device],
    indices: list[int],
    offsets: list[int],
    parameters: Sequence[torch.Tensor],
    num_ranks: int,
) -> Chunk:
    numel = num_ranks * aligned(-(-offsets[-1] // num_ranks))
    return Chunk(*kind, indices, offsets[:-1], [parameters[index] for index in indices], numel)
