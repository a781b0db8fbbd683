"""Where in a step the values of the ranks, taken together, are first not those of one process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.check.models import Models
from lockstep.torch_private import tree_leaves


class RowSums(NamedTuple):
    """What a module was given or gave, as sums over its rows."""

    name: str  # such as "what '0' (Linear) is given"
    sums: tuple[float, ...]  # of functions of single numbers: ranks' add up
    size: int  # how many numbers


class Trace:
    """Notes what the modules of a program are given and give, in each step."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._calls: list[tuple[weakref.ref[nn.Module], str, tuple[float, ...], int]] = []

    def note_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """What ``module`` is given; a hook."""
        self._note(module, "what {} is given", args)

    def note_output(self, module: nn.Module, args: object, output: object) -> None:
        """What ``module`` gives; a hook."""
        self._note(module, "the output of {}", output)

    def _note(self, module: nn.Module, words: str, value: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        dense = [t.detach() for t in leaves if t.dim() and t.layout is torch.strided]
        if not dense or any(t.is_complex() for t in dense):
            return
        # Not the plain sum: it is zero whatever the samples are, once they are standardised.
        flat = torch.cat([t.reshape(-1).double().cpu() for t in dense])
        sums = (float(flat.sin().sum()), float((3 * flat + 1).sin().sum()))
        self._calls.append((weakref.ref(module), words, sums, flat.numel()))

    def take(self) -> list[RowSums]:
        """The values of the step that ends."""
        names = {
            id(part): f"{path or root!r} ({type(part).__name__})"
            for root, model in self._models.modules()
            for path, part in model.named_modules()
        }
        found = []
        for ref, words, sums, size in self._calls:
            module = ref()
            name = names.get(id(module), type(module).__name__)
            found.append(RowSums(words.format(name), sums, size))
        self._calls = []
        return found


def first_difference(
    ranks: Sequence[list[RowSums]], alone: list[RowSums], eps: float
) -> tuple[str | None, bool]:
    """The first value that differs, and whether the values could be compared."""
    if not alone or any(len(each) != len(alone) for each in ranks):
        return None, False
    for values, one in zip(zip(*ranks, strict=True), alone, strict=True):
        if any(value.name != one.name for value in values):
            return None, False
        sizes = [value.size for value in values]
        if sum(sizes) != one.size and any(size != one.size for size in sizes):
            continue  # padded otherwise
        limit = max(1e-5, 4 * eps) * max(one.size, 1)
        are_sums = all(
            abs(sum(value.sums[k] for value in values) - one.sums[k]) <= limit for k in (0, 1)
        )
        are_same = all(
            abs(value.sums[k] - one.sums[k]) <= limit for value in values for k in (0, 1)
        )
        if not are_sums and not are_same:
            return one.name, True
    return None, True
