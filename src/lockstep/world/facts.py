"""What a rank tells others of an optimizer before a step, and where the ranks' facts differ.

Facts are what JSON has: ``options`` of each group, ``samples`` of gradients and values that
lockstep keeps the same, and ``checksums`` of gradients that nothing is known to reduce.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm import bytes_of
from lockstep.torch_private import gradient_of

# Options that mean the same on all ranks. Others may be what an optimizer remembers of its part.
_OPTIONS = (
    "lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "alpha", "rho", "eps",
    "maximize",
)  # fmt: skip
# Of how many gradients, and of how many of their elements, there is a checksum.
_NUM_GRADIENTS, _NUM_ELEMENTS = 8, 4096
# By how much samples may differ, as a part of the largest: programs may round in another way on
# another processor. In types of 16 bits and less, it is that of a few last digits.
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-3, 3e-2


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters in the order in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Sample(NamedTuple):
    """Some elements of a parameter before a step.

    Attributes:
        name: The parameter's.
        gradient: The same elements of its gradient; none where ranks may have different ones.
        value: The elements.
        tolerance: By how much they may differ, as a part of the largest.
    """

    name: str
    gradient: list[float]
    value: list[float]
    tolerance: float


class KeptInStep(NamedTuple):
    """What keeps parameters of an optimizer in step.

    Attributes:
        group: The ranks.
        num_backwards: In how many backwards it has reduced gradients.
        sample: Returns samples, for the number of the look.
    """

    group: dist.ProcessGroup
    num_backwards: int
    sample: Callable[[int], Iterable[Sample]]


class Difference(NamedTuple):
    """A fact that isn't the same on all ranks.

    Attributes:
        kind: ``"gradient"`` or ``"value"`` of a parameter, ``"option"``, or ``"checksum"`` of a
            gradient that nothing reduces.
        name: The parameter's name, or its position among the optimizer's; or the option's name.
        by_rank: What each rank has.
        group: The number of the option's group.
    """

    kind: str
    name: Any
    by_rank: Sequence[Any]
    group: int = 0


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group that mean the same on all ranks."""
    return [
        {name: _number(group[name]) for name in _OPTIONS if name in group}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [*map(_number, value)]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, bool | int | float) else None


def checksums_of(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the position of some parameters with their gradients' checksum.

    None for parameters of which each rank has a part, as DTensors.
    """
    if any(type(p) is not nn.Parameter and type(p) is not torch.Tensor for p in parameters):
        return []
    found = []
    for position, parameter in enumerate(parameters):
        gradient = gradient_of(parameter)
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            part = gradient.detach().reshape(-1)[:_NUM_ELEMENTS].cpu().contiguous()
            found.append([position, zlib.crc32(bytes_of(part.view(torch.uint8)))])
        if len(found) == _NUM_GRADIENTS:
            break
    return found


def samples_of(
    named: Iterable[tuple[str, torch.Tensor, torch.Tensor | None]],
) -> list[Sample]:
    """Return samples of parameters by their names, with the elements and those of gradients."""
    parts = [(name, value, value[:0] if grad is None else grad) for name, value, grad in named]
    if not parts:
        return []
    # At once, as each look at a GPU's values waits for it.
    device = parts[0][1].device
    every = [each.to(device, torch.float64) for _, value, grad in parts for each in (grad, value)]
    numbers, found, start = torch.cat(every).tolist(), [], 0
    for name, value, gradient in parts:
        middle, end = start + len(gradient), start + len(gradient) + len(value)
        tolerance = _TOLERANCE if value.dtype.itemsize > 2 else _TOLERANCE_OF_16_BITS
        found.append(Sample(name, numbers[start:middle], numbers[middle:end], tolerance))
        start = end
    return found


def first_difference(by_rank: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Return what differs: options before the values that they part, and gradients too."""
    for found in zip(*(facts.get("checksums", ()) for facts in by_rank), strict=False):
        same_place = len({position for position, _ in found}) == 1
        if same_place and len({checksum for _, checksum in found}) > 1:
            return Difference("checksum", found[0][0], [checksum for _, checksum in found])
    for index, groups in enumerate(zip(*(f.get("options", ()) for f in by_rank), strict=False)):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if len({json.dumps(value) for value in values}) > 1:  # NaN is like NaN
                return Difference("option", name, values, index)
    backwards = [facts.get("num_backwards") for facts in by_rank]
    if backwards.count(backwards[0] if backwards else None) == len(backwards):
        samples = zip(*(facts.get("samples", ()) for facts in by_rank), strict=False)
        ranks = [[Sample(*one) for one in found] for found in samples]
        for kind in ("gradient", "value"):
            for each in ranks:
                values = [getattr(one, kind) for one in each]
                if len({one.name for one in each}) == 1 and _differ(values, each[0].tolerance):
                    return Difference(kind, each[0].name, values)
    return None


def _differ(by_rank: Sequence[Sequence[float]], tolerance: float) -> bool:
    if not all(by_rank) or len({*map(len, by_rank)}) > 1:
        return False
    finite = [abs(number) for values in by_rank for number in values if math.isfinite(number)]
    allowed = tolerance * max(finite, default=0.0)
    return any(_are_apart(values, allowed) for values in zip(*by_rank, strict=True))


def _are_apart(values: Sequence[float], allowed: float) -> bool:
    """Whether numbers differ by more than ``allowed``, or some aren't finite and others are."""
    if not all(map(math.isfinite, values)):
        return len({str(value) for value in values}) > 1
    return max(values) - min(values) > allowed
