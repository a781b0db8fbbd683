"""``SyncBatchNorm``: batch normalisation with the statistics of all ranks' samples together."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
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
from lockstep.comm import gather_announced, sum_announced, uncompiled
from lockstep.errors import ModelError
from lockstep.nn.autograd import refuse_transforms
from lockstep.nn.backward import backward_sync_of, finish_failed
from lockstep.torch_private import _BatchNorm
from lockstep.world import device_of_sums

_log = logging.getLogger(__name__)
# Taken by the rank that says it: ranks may be threads.
_told_of_local_statistics = threading.Lock()


class SyncBatchNorm(_BatchNorm):
    """A drop-in for :class:`torch.nn.SyncBatchNorm`, on the CPU too. ::

        model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)
        model = lockstep.parallelize(model)

    In training, mean and variance are those of the samples of all ranks together, whatever each
    rank's number of samples: outputs, gradients and running statistics are those of BatchNorm in
    one process. Every rank takes part in its forward and backward, so a rank without samples runs
    both on an input of size 0. On one rank, and without a process group, it is BatchNorm. So it is
    in evaluation, where one rank may run alone: without running statistics each rank normalises by
    those of its own samples then, as torch's does, and a warning says so once.

    Gradients can be differentiated again, as in a gradient penalty; every rank must do so. Copies
    have the same process group. With another group than the default one it can't be pickled.

    If it has the same process group as the model around it, the model's gradients are reduced at
    the end of each backward: ranks may compute them in different orders, so that reductions would
    come between the sums of different SyncBatchNorms. If it has another process group, reductions
    overlap with the backward.

    Args:
        num_features: The number of channels: ``C`` of inputs of shape ``(N, C, *)``.
        eps: Added to the variance.
        momentum: The weight of a new value in the running statistics; None for their mean.
        affine: Whether it has ``weight`` and ``bias``, of shape ``(C,)``.
        track_running_stats: Whether it has running statistics, of shape ``(C,)``.
        process_group: The ranks whose samples belong together; by default all.
        device: The device of parameters and running statistics.
        dtype: The dtype of parameters and running statistics.

    Raises:
        TypeError: If an argument, which it names, is of a wrong type.
        ValueError: If ``num_features`` or ``eps`` is negative, ``eps`` or ``momentum`` not finite.
            In forward, if the input has fewer than two dimensions or another number of
            channels, or if all ranks together have one value per channel in training; on a GPU,
            where a check would have to wait, outputs are NaN then.
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
        """Put a SyncBatchNorm in place of each BatchNorm of ``module``.

        Parameters and running statistics stay the same tensors, so an optimizer that has them can
        be kept. A module of a class derived from BatchNorm stays the same object, and an instance
        of that class: the ``batch_norm()`` in its ``forward`` is over all ranks, and all else that
        its class does (an activation, say) is as before.

        Args:
            module: A module, changed in place, or a BatchNorm.
            process_group: The ranks whose samples belong together; by default all.

        Returns:
            ``module``, or the SyncBatchNorm in its place if it is a BatchNorm itself.

        Raises:
            ValueError: If a BatchNorm has no shape yet.
        """
        check_module(module)
        check_process_group(process_group)
        converted: dict[nn.Module | None, nn.Module] = {
            norm: cls._converted(norm, process_group)
            for norm in module.modules()
            if isinstance(norm, _BatchNorm)
        }
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in converted:
                    parent._modules[name] = converted[child]
        return converted.get(module, module)

    @classmethod
    def _converted(
        cls, module: _BatchNorm, process_group: dist.ProcessGroup | None
    ) -> SyncBatchNorm:
        kind = type(module)
        if any(map(is_lazy, module.parameters())):
            raise ValueError(
                f"A {kind.__name__} has no shape yet. Run one forward on a sample before you "
                "convert the model."
            )
        if kind in _PLAIN:
            new = cls(module.num_features, module.eps, module.momentum, process_group=process_group)
            new.affine, new.track_running_stats = module.affine, module.track_running_stats
            new._parameters.update(module._parameters)
            new._buffers.update(module._buffers)
            new.training = module.training
            return new
        if not issubclass(kind, SyncBatchNorm | nn.SyncBatchNorm):
            module.__class__ = _synchronised(cls, kind)  # type: ignore[arg-type]
        module.process_group = process_group  # type: ignore[assignment]
        return cast(SyncBatchNorm, module)

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
        bases = type(self).__mro__
        # The next class, as for super(): a class may be derived from this and another BatchNorm.
        kind = bases[bases.index(SyncBatchNorm) + 1]
        output: torch.Tensor = self._forward_of(kind, input)
        return output

    def _forward_of(self, kind: type[_BatchNorm], *args: Any, **kwargs: Any) -> Any:
        """Return the result of the forward of ``kind``, in training over all ranks."""
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None or group.size() == 1:
            return kind.forward(self, *args, **kwargs)
        if not self.training:
            if self.running_mean is None and _told_of_local_statistics.acquire(blocking=False):
                _log.warning(
                    "A SyncBatchNorm without running statistics is in evaluation, where it waits "
                    "for no other rank: each rank normalises by the statistics of its own samples, "
                    "and ranks differ from one process with all of them. Give it "
                    "track_running_stats=True, or evaluate in one rank."
                )
            return kind.forward(self, *args, **kwargs)
        return _forward_over(group, kind, self, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes, with a group that copies share; pickled, only the default one."""
        group = self.process_group
        return {**self.__dict__, "process_group": None if group is None else _Kept(group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes, and the group itself."""
        kept = state["process_group"]
        super().__setstate__(  # type: ignore[no-untyped-call]
            {**state, "process_group": kept.group if kept is not None else None}
        )


class _Kept:
    """A process group that stays the same one in copies."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not dist.group.WORLD:
            raise RuntimeError(
                "This SyncBatchNorm has a process group of its own, which can't be pickled. Pickle "
                "the state_dict(), or set its process_group to None before, which stands for all "
                "ranks."
            )
        return _Kept, (None,)


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)


@functools.cache
def _synchronised(cls: type[SyncBatchNorm], kind: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """Return a subclass of ``kind`` that normalises over all ranks."""

    def forward(self: SyncBatchNorm, *args: Any, **kwargs: Any) -> Any:
        return self._forward_of(kind, *args, **kwargs)

    def reduce(self: SyncBatchNorm) -> tuple[Any, ...]:
        return _made_of, (cls, kind), self.__getstate__()

    methods = {"forward": forward, "__reduce__": reduce, "__module__": kind.__module__}
    return type(f"Sync{kind.__name__}", (cls, kind), methods)


def _made_of(cls: type[SyncBatchNorm], kind: type[_BatchNorm]) -> SyncBatchNorm:
    made = _synchronised(cls, kind)  # type: ignore[arg-type]
    return made.__new__(made)


class _OverAllRanks(TorchFunctionMode):
    """Replaces ``F.batch_norm()`` by a function over all ranks, and counts its calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.num_calls = group, 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        self.num_calls += 1
        return _batch_norm(self.group, *args, **(kwargs or {}))


@uncompiled
def _forward_over(
    group: dist.ProcessGroup, kind: type[_BatchNorm], norm: _BatchNorm, args: Any, kwargs: Any
) -> Any:
    with _OverAllRanks(group) as mode:
        output = kind.forward(norm, *args, **kwargs)
    if not mode.num_calls:
        raise TypeError(
            f"The forward of {kind.__name__}, a class derived from BatchNorm, doesn't call "
            "batch_norm(), so it can't be synchronised. Derive it from lockstep.SyncBatchNorm "
            "instead of converting it."
        )
    return output


def _batch_norm(
    group: dist.ProcessGroup,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.batch_norm()``, in training with the statistics of all ranks."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    refuse_transforms(input)
    finish_failed(group)
    statistics = _statistics(input.detach(), group)
    if statistics is None:  # no rank has samples
        return F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    mean, square, count = statistics
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            for running, new in (running_mean, mean), (running_var, square / (count - 1)):
                before = running.clone() if _may_lack_values(input) else None
                running.mul_(1 - momentum).add_(_there(new, running), alpha=momentum)
                if before is not None:
                    running.copy_(torch.where(_there(count, running).isnan(), before, running))
        # Half precision is normalised in float32, other inputs in their own dtype.
        wide = torch.promote_types(input.dtype, torch.float32)
        mean, variance = (each.to(wide).to(input.device) for each in (mean, square / count))
    output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, mean, variance, count, eps, group
    )
    return output


@uncompiled
class _Normalize(torch.autograd.Function):
    """Normalises with given statistics, which depend on the inputs of all ranks.

    Source: Ioffe and Szegedy, "Batch normalization", 2015, for the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.eps, ctx.group, ctx.dtype = eps, group, None if weight is None else weight.dtype
        if ctx.dtype == input.dtype:  # half precision too, whose statistics are in float32
            weight, bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        ctx.save_for_backward(input, weight, mean, variance, count)
        if not input.numel():
            return torch.empty_like(input)
        return F.batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, d_output: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # with create_graph=True
            return _differentiable_backward(ctx, d_output)
        input, weight, mean, variance, count = ctx.saved_tensors
        needs = ctx.needs_input_grad
        # The gradients as if the statistics were constants. Those of weight and bias are this
        # rank's part, and are reduced along with those of all parameters.
        if input.numel():
            d_input, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
                d_output, input, weight, mean, variance, None, None, False, ctx.eps, [True] * 3
            )
        else:
            d_input, d_weight, d_bias = map(torch.zeros_like, (input, mean, mean))
        if needs[0]:
            # The part through which the loss of all ranks depends on the statistics.
            backward_sync_of(ctx.group).begin_before_collective()
            sums = torch.stack([d_bias, d_weight]).to(count.device).double()
            sum_announced(ctx.group, sums)
            to_bias, to_weight = _there(sums / count, mean)
            inverse = (variance + ctx.eps).rsqrt()
            factor = inverse if weight is None else inverse * weight
            slope = factor * inverse * to_weight
            offset = factor * to_bias - slope * mean
            per_channel = [1, -1, *[1] * (input.dim() - 2)]
            wide = input.to(slope.dtype)
            line = torch.addcmul(offset.view(per_channel), slope.view(per_channel), wide)
            d_input.sub_(line.to(d_input.dtype))
        d_weight = d_weight.to(ctx.dtype) if needs[1] else None
        d_bias = d_bias.to(ctx.dtype) if needs[2] else None
        return d_input if needs[0] else None, d_weight, d_bias, *[None] * 5


@uncompiled
class _Total(torch.autograd.Function):
    """The sum over the ranks, in a loss that is itself the sum of those of all ranks.

    ``name`` is a number, the same on all ranks for the same sum. A rank without samples may have
    another graph, of which autograd computes sums in another order.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, name: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.name, ctx.group = name, group
        backward_sync_of(group).begin_before_collective()
        total = torch.cat([local, torch.stack([name, torch.ones_like(name)])])
        sum_announced(group, total)
        names, count = total[-2:]
        are_same = torch.isclose(names, name * count, rtol=1e-9)
        if total.device.type != "cpu":
            total = torch.where(are_same, total, torch.nan)
        elif not are_same:
            raise ModelError(
                "The ranks differentiate gradients of SyncBatchNorms in different orders, as a "
                "rank without samples may do. Give each rank samples, or put the model in eval()."
            )
        summed: torch.Tensor = total[:-2]
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total: torch.Tensor = _Total.apply(  # type: ignore[no-untyped-call]
            gradient, ctx.name * 1.5, ctx.group
        )
        return total, None, None


def _differentiable_backward(ctx: Any, d_output: torch.Tensor) -> tuple[Any, ...]:
    """The backward in functions that have one, in which the statistics depend on the inputs too.

    It sums over the ranks twice more, and computes in float64.
    """
    input, weight, mean, variance, count = ctx.saved_tensors
    needs, dims = ctx.needs_input_grad, [dim for dim in range(input.dim()) if dim != 1]
    per_channel = [1, -1, *[1] * (input.dim() - 2)]
    there, tensors = count.device, (input, d_output, mean, variance)
    wide, d_wide, mean, variance = (each.to(there).double() for each in tensors)
    # All ranks have the same statistics, and other layers have others.
    names = (mean.sum() + number * variance.sum() for number in range(1, 5))

    def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
        arguments = values.sum(dims), next(names), ctx.group
        total: torch.Tensor = _Total.apply(*arguments)  # type: ignore[no-untyped-call]
        return total.div(count).view(per_channel)

    center, spread = mean.view(per_channel), variance.view(per_channel)
    if needs[0]:
        center = mean_over_ranks(wide)
        spread = mean_over_ranks((wide - center).square())
    inverse = (spread + ctx.eps).rsqrt()
    normal = (wide - center) * inverse
    d_input = None
    if needs[0]:
        factor = (
            inverse if weight is None else inverse * weight.to(there).double().view(per_channel)
        )
        slope = mean_over_ranks(d_wide * normal)
        d_input = factor * (d_wide - mean_over_ranks(d_wide) - normal * slope)
        d_input = d_input.to(input.dtype).to(input.device)
    d_weight = (d_wide * normal).sum(dims).to(ctx.dtype).to(input.device) if needs[1] else None
    d_bias = d_wide.sum(dims).to(ctx.dtype).to(input.device) if needs[2] else None
    return d_input, d_weight, d_bias, *[None] * 5


def _there(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``values``, on the device of ``like``; as ``like`` if they come from another one."""
    return values if values.device == like.device else values.to(like.dtype).to(like.device)


def _may_lack_values(input: torch.Tensor) -> bool:
    """Whether all ranks together may have fewer than two values per channel, and nobody looks.

    A rank with two need not look, and on a GPU a look would wait for it.
    """
    return input.device.type != "cpu" and input.numel() < 2 * input.shape[1]


def _statistics(
    input: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return mean, sum of squared deviations and count per channel, over all ranks.

    None if no rank has any values; NaN on a GPU, and if it may lack them. They are computed in
    float64 and summed in rank order, so that all ranks get the same bits.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979.
    """
    channels = input.shape[1]
    count = input.numel() // max(channels, 1)
    device = device_of_sums(input.device)
    local = torch.zeros(2 * channels + 1, dtype=torch.float64, device=device)
    if count:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, dims, correction=0)
        mean, variance = (each.to(device).double() for each in (mean, variance))
        torch.cat([mean, variance * count, local.new_full((1,), count)], out=local)
    everyone = torch.stack(gather_announced(group, local))
    means, squares, counts = everyone.split([channels, channels, 1], dim=1)
    total = counts.sum(0)
    if _may_lack_values(input):
        total = torch.where(total > 1, total, torch.nan)
    elif count < 2 and total < 2:
        if not total:
            return None
        raise ValueError(
            "All ranks together have one value per channel, of an input of shape "
            f"{tuple(input.shape)} here, and a variance takes two. Give a larger batch."
        )
    mean = (means * counts).sum(0) / total
    square = (squares + counts * (means - mean).square()).sum(0)
    return mean, square, total
