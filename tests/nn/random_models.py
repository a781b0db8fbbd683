"""Models drawn at random: parts that take each other's outputs, as plain data and as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3


class Part(NamedTuple):
    """One part of a model.

    Attributes:
        kind: Which one, of :data:`KINDS`.
        source: Whose output it takes: 0 for the input, n for the n-th part.
        of: Which earlier part it shares a module or a weight with.
        is_used: Whether the model's own methods ever use it.
        is_checkpointed: Whether its activations are recomputed in backward.
        is_reentrant: Whether a backward inside of the backward does that.
    """

    kind: str
    source: int = 0
    of: int = 0
    is_used: bool = True
    is_checkpointed: bool = False
    is_reentrant: bool = False


class Use(NamedTuple):
    """What one rank does with its samples for one loss.

    Attributes:
        method: Which method gives the outputs, of :data:`METHODS`.
        left_out: Which parts aren't used this time.
        at: Which part is called, if it is one alone.
    """

    method: str = "forward"
    left_out: Sequence[int] = ()
    at: int = 0


# "part" calls a submodule. "nothing" and "leaf" touch no part of the model; "leaf" has something
# to run backward through all the same.
METHODS = ("forward", "features", "pieces", "part", "nothing", "leaf")


class Factor(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.empty.sum()


class Phase(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.phase).real


class Single(nn.Module):
    """A side branch in float32, through which no gradient flows back."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.single(x.detach().float()).double()


class Wide(nn.Module):
    """A parameter so large that its gradient is dealt with by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5500, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.square().mean(0)


class Buffered(nn.Module):
    """Buffers: one that is used and stays, one that is set anew, one that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("scale", torch.rand(WIDTH, dtype=torch.float64))
        self.register_buffer("average", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.5 * self.average + len(x)
        self.count += 1
        return x * self.scale * self.weight


def _linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "nested": lambda: nn.Sequential(_linear(), nn.Tanh(), nn.Sequential(_linear(bias=False))),
    "norm": lambda: nn.LayerNorm(WIDTH, dtype=torch.float64),
    "factor": Factor,
    "empty": Empty,
    "phase": Phase,
    "single": Single,
    "wide": Wide,
    "buffered": Buffered,
    "again": _linear,
    "tied": _linear,
}


class RandomModel(nn.Module):
    """Parts that take each other's outputs; what comes out is the outputs of all that are used.

    Samples don't meet, so that the mean over parts of a batch is the mean.
    """

    def __init__(self, recipe: Sequence[Part]) -> None:
        super().__init__()
        self.recipe = list(recipe)
        self.parts = nn.ModuleList()
        for part in recipe:
            self.parts.append(self._make(part))

    def _make(self, part: Part) -> nn.Module:
        earlier = self.parts[part.of] if part.of < len(self.parts) else None
        if part.kind == "again" and earlier is not None:
            return earlier
        module = KINDS[part.kind]()
        if part.kind == "tied" and isinstance(earlier, nn.Linear):
            module.weight = earlier.weight
        return module

    def forward(self, x: torch.Tensor, use: Use) -> torch.Tensor:
        return torch.cat([x, *self.pieces(x, use)], dim=1)

    def features(self, x: torch.Tensor, use: Use) -> torch.Tensor:
        """Only what the first half of the parts gives."""
        return torch.cat([x, *self.pieces(x, use, self._half())], dim=1)

    def pieces(self, x: torch.Tensor, use: Use, stop: int | None = None) -> Iterator[torch.Tensor]:
        """The outputs of the parts that are used, one after the other."""
        values = [x]
        used = self._used(use, stop)
        for index, part in enumerate(self.recipe[:stop]):
            value = values[part.source]
            if index in used:
                piece = self.run(index, value)
                if not isinstance(self.parts[index], Single):
                    piece = value = torch.tanh(piece + value)
                yield piece
            values.append(value)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        part, module = self.recipe[index], self.parts[index]
        if part.is_checkpointed:
            # Ranks that are threads share torch's generator, whose state is not to be put back.
            return checkpoint(module, x, use_reentrant=part.is_reentrant, preserve_rng_state=False)
        return module(x)

    def _half(self) -> int:
        return (len(self.recipe) + 1) // 2

    def _used(self, use: Use, stop: int | None = None) -> list[int]:
        parts = enumerate(self.recipe[:stop])
        return [index for index, part in parts if part.is_used and index not in use.left_out]

    def touched(self, uses: Iterable[Use]) -> set[int]:
        """Which parameters, by number, get gradients from losses that are made in these ways."""
        parts = {index for use in uses for index in self._runs(use)}
        found = {id(p) for index in parts for p in self.parts[index].parameters()}
        parameters = enumerate(self.parameters())
        return {index for index, p in parameters if id(p) in found and p.requires_grad}

    def _runs(self, use: Use) -> Sequence[int]:
        if use.method == "part":
            return [use.at]
        if use.method in ("nothing", "leaf"):
            return []
        return self._used(use, self._half() if use.method == "features" else None)

    def freeze(self, frozen: Sequence[int]) -> None:
        """Freeze the parameters of these parts, and train all others."""
        self.requires_grad_(True)
        for index in frozen:
            self.parts[index].requires_grad_(False)


def build(recipe: Sequence[Part]) -> RandomModel:
    """The same model every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(recipe))
        return RandomModel(recipe)


def outputs_of(model: nn.Module, x: torch.Tensor, use: Use) -> torch.Tensor:
    """What ``use`` makes of the samples, in a row for each; ``model`` may be in a wrapper."""
    if use.method == "nothing":
        return x
    if use.method == "leaf":
        return x * torch.ones(WIDTH, dtype=x.dtype, requires_grad=True)
    if use.method == "part":
        return model.parts[use.at](x)
    if use.method == "pieces":
        return torch.cat([x, *(piece for piece in model.pieces(x, use))], dim=1)
    if use.method == "features":
        return model.features(x, use)
    return model(x, use)


def samples(seed: int, count: int) -> torch.Tensor:
    """The same ones every time, on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
