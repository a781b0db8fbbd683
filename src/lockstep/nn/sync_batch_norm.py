"""``SyncBatchNorm``: batch normalisation with the statistics of all ranks' samples together."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lockstep.arguments import (
    as_device,
    as_finite_number,
    as_whole_number,
    check_flag,
    check_module,
    check_process_group,
    check_type,
)
from lockstep.comm import gather_in_step, sum_in_step
from lockstep.comm.uncompiled import uncompiled
from lockstep.nn.backward import begin_if_others_must_know, finish_failed
from lockstep.torch_private import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """A drop-in for :class:`torch.nn.SyncBatchNorm`, on the CPU too.

    In training, mean and variance are those of the whole batch, the samples of all ranks
    together, whatever each rank's number of samples, none included: outputs, gradients and running
    statistics are those of BatchNorm in one process. Every rank's forward and backward take part,
    so a rank with no samples runs both as well, on an input of size 0. In evaluation, on one
    rank, and without a process group, it is BatchNorm.

    A model that has one whose ``process_group`` is the model's own reduces its gradients at the end
    of each backward: the ranks may compute them in different orders, and then their reductions
    would come between the sums of different SyncBatchNorms. One with a group of its own leaves
    them free to overlap with the backward.

    Args:
        num_features: How many channels there are: ``C`` of inputs of shape ``(N, C, *)``.
        eps: What is added to the variance.
        momentum: The weight of a new value in the running statistics; None for their mean.
        affine: Whether it has ``weight`` and ``bias``, of shape ``(C,)``.
        track_running_stats: Whether it has running statistics, of shape ``(C,)``.
        process_group: The ranks whose samples belong together; by default all.
        device: Where it is to be.
        dtype: Of parameters and running statistics.

    Raises:
        TypeError: If an argument is of a wrong type; it says which.
        ValueError: If ``num_features`` or ``eps`` is negative, ``eps`` or ``momentum`` not finite.
            In forward, if the input has fewer than two dimensions or another number of
            channels, or if all ranks together have one value per channel in training.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flag("affine", affine)
        check_flag("track_running_stats", track_running_stats)
        check_type("dtype", dtype, torch.dtype | None, "a torch.dtype")
        check_process_group(process_group)
        super().__init__(
            as_whole_number("num_features", num_features, "a number of channels", at_least=0),
            as_finite_number("eps", eps, "a finite number, 0 or more", at_least=0),
            None if momentum is None else as_finite_number("momentum", momentum),
            affine,
            track_running_stats,
            device=None if device is None else as_device("device", device),
            dtype=dtype,
        )
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Put a SyncBatchNorm in the place of each BatchNorm of ``module``.

        They take over the parameters and the running statistics themselves, so an optimizer that
        has them may stay. A BatchNorm that is used in several places stays one.

        One of a class derived from BatchNorm stays what it is, and becomes a SyncBatchNorm as
        well: the ``batch_norm()`` in its ``forward`` is over all ranks, and whatever else its
        class does (an activation, say), it does still.

        Args:
            module: A module, changed in place, or a BatchNorm.
            process_group: The ranks whose samples belong together; by default all.

        Returns:
            ``module``, or what takes its place if it is a BatchNorm itself.

        Raises:
            ValueError: If a BatchNorm has no shape yet.
        """
        check_module(module)
        made: dict[nn.Module, nn.Module] = {}
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if isinstance(child, _BatchNorm):
                    if child not in made:
                        made[child] = cls._in_place_of(child, process_group)
                    parent._modules[name] = made[child]
        return cls._in_place_of(module, process_group) if isinstance(module, _BatchNorm) else module

    @classmethod
    def _in_place_of(
        cls, module: _BatchNorm, process_group: dist.ProcessGroup | None
    ) -> SyncBatchNorm:
        kind = type(module)
        if any(map(is_lazy, module.parameters())):
            raise ValueError(
                f"A {kind.__name__} has no shape yet. Run one forward on a sample before you "
                "convert the model."
            )
        if kind not in _PLAIN:
            if not issubclass(kind, SyncBatchNorm | nn.SyncBatchNorm):
                module.__class__ = _synchronised(cls, kind)
            module.process_group = process_group  # type: ignore[assignment]
            return cast(SyncBatchNorm, module)
        new = cls(module.num_features, module.eps, module.momentum, process_group=process_group)
        new.affine, new.track_running_stats = module.affine, module.track_running_stats
        for name in ("weight", "bias"):
            new.register_parameter(name, getattr(module, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            new.register_buffer(name, getattr(module, name))
        new.training = module.training
        return new

    def _check_input_dim(self, input: torch.Tensor) -> None:
        check_type("input", input, torch.Tensor, "a tensor of shape (N, C, *)")
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm takes inputs of shape (N, C, *), and got {tuple(input.shape)}."
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"This SyncBatchNorm is for {self.num_features} channels, and got "
                f"{input.shape[1]}, in an input of shape {tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as BatchNorm's
        group = self._group()
        if group is None or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        momentum = 0.0
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = self.momentum or 0.0
            if self.momentum is None:
                momentum = 1 / self.num_batches_tracked.item()
        mean, variance = self.running_mean, self.running_var
        if not self.track_running_stats:
            mean = variance = None
        return _normalize(input, mean, variance, self.weight, self.bias, momentum, self.eps, group)

    def _group(self) -> dist.ProcessGroup | None:
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        return group if group is not None and group.size() > 1 else None


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)
_made: dict[tuple[type, type], type[SyncBatchNorm]] = {}


def _synchronised(cls: type[SyncBatchNorm], kind: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """A class that does what ``kind`` does, but normalises with the statistics of all ranks."""
    if (cls, kind) in _made:
        return _made[cls, kind]

    def forward(self: SyncBatchNorm, *args: Any, **kwargs: Any) -> Any:
        group = self._group()
        if group is None or not self.training:
            return kind.forward(self, *args, **kwargs)
        with _OverAllRanks(group) as found:
            output = kind.forward(self, *args, **kwargs)
        if not found.num_calls:
            raise TypeError(
                f"The forward of {kind.__name__}, a class derived from BatchNorm, doesn't call "
                "batch_norm(), so it can't be synchronised. Derive it from "
                "lockstep.SyncBatchNorm instead of converting it."
            )
        return output

    def reduce(self: SyncBatchNorm) -> tuple[Any, ...]:
        return _made_of, (cls, kind), self.__dict__

    methods = {"forward": forward, "__reduce__": reduce, "__module__": kind.__module__}
    _made[cls, kind] = type(f"Sync{kind.__name__}", (cls, kind), methods)
    return _made[cls, kind]


def _made_of(cls: type[SyncBatchNorm], kind: type[_BatchNorm]) -> SyncBatchNorm:
    made = _synchronised(cls, kind)
    return made.__new__(made)


class _OverAllRanks(TorchFunctionMode):
    """Lets ``batch_norm()`` in training normalise with the statistics of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.num_calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        return _normalize(input, running_mean, running_var, weight, bias, momentum, eps, self.group)


@uncompiled
def _normalize(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """``batch_norm()`` in training, of all ranks' samples."""
    finish_failed(group)
    output, mean, square, count = cast(
        tuple[torch.Tensor, ...],
        _Normalize.apply(input, weight, bias, eps, group),  # type: ignore[no-untyped-call]
    )
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            running_var.mul_(1 - momentum).add_(square / (count - 1), alpha=momentum)
    return output


@uncompiled
class _Normalize(torch.autograd.Function):
    """Normalise with the statistics of all ranks.

    Returns, beside the output, their mean, the sum of their squared deviations from it, and how
    many values per channel they are of. These are exact to float64, and summed up in rank order, so
    they have the same bits on every rank.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979, for statistics of parts; Ioffe and Szegedy, "Batch normalization",
    2015, for the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, square, count = _statistics(input, group)
        # Of the input's precision, or better: half precision is normalised in float32.
        wide = torch.promote_types(input.dtype, torch.float32)
        variance = square / count
        scale = (mean.to(wide), variance.to(wide))
        output = torch.empty_like(input)
        if input.numel():
            output = F.batch_norm(input, *scale, weight, bias, training=False, eps=eps)
        ctx.save_for_backward(input, weight, *scale, count)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean, square, count)
        return output, mean, square, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        input, weight, mean, variance, count = ctx.saved_tensors
        # As if the statistics were constants. What it gives for weight and bias is this rank's
        # part of their gradients, which is reduced as those of all parameters are.
        d_input, d_weight, d_bias = _backward_of_constants(
            d_output, input, weight, mean, variance, ctx.eps
        )
        if ctx.needs_input_grad[0]:
            # How the loss, of all ranks, depends on the input through the statistics.
            begin_if_others_must_know(ctx.group)
            sums = torch.stack([d_bias, d_weight]).double()
            sum_in_step(ctx.group, sums)
            to_bias, to_weight = sums / count
            inverse = (variance + ctx.eps).rsqrt()
            factor = inverse if weight is None else inverse * weight
            slope = factor * inverse * to_weight
            _subtract_line(d_input, input, slope, factor * to_bias - slope * mean)
        needs = ctx.needs_input_grad
        return (
            d_input if needs[0] else None,
            d_weight.to(weight.dtype) if needs[1] else None,
            d_bias.to(weight.dtype) if needs[2] else None,
            None,
            None,
        )


def _statistics(
    input: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, sum of squared deviations, and count, per channel, over all ranks; in float64."""
    channels = input.shape[1]
    count = input.numel() // channels
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if count:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, dims, correction=0)
        torch.cat([mean.double(), variance.double() * count, own.new_tensor([count])], out=own)
    everyone = torch.stack(gather_in_step(group, own))
    means, squares, counts = everyone.split([channels, channels, 1], dim=1)
    total = counts.sum(0)
    # If there is one value in all, no rank has two; to look at the total waits for a GPU.
    if count < 2 and total < 2:
        raise ValueError(
            f"All ranks together have {int(total)} values per channel, of an input of shape "
            f"{tuple(input.shape)} here, and a variance takes two. Give a larger batch."
        )
    mean = (means * counts).sum(0) / total
    square = (squares + counts * (means - mean).square()).sum(0)
    return mean, square, total


def _backward_of_constants(
    d_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of input, weight and bias, if mean and variance were constants."""
    if not input.numel():
        return torch.zeros_like(input), torch.zeros_like(mean), torch.zeros_like(mean)
    return cast(
        tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        torch.ops.aten.native_batch_norm_backward(
            d_output, input, weight, mean, variance, None, None, False, eps, [True, True, True]
        ),
    )


def _subtract_line(
    target: torch.Tensor, input: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor
) -> None:
    """Subtract ``slope * input + offset``, which are per channel, from ``target``."""
    shape = [1, -1, *[1] * (input.dim() - 2)]
    line = torch.addcmul(offset.view(shape), slope.view(shape), input.to(slope.dtype))
    target.sub_(line.to(target.dtype))
