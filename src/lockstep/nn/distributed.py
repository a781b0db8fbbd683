"""``DistributedDataParallel``: torch's wrapper, around our engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from lockstep.nn.attachment import Options, attach, check_bucket_cap, engine_of
from lockstep.nn.engine import accumulating
from lockstep.nn.parallelize import DEFAULT_BUCKET_CAP_MB
from lockstep.world import init

_Device = int | str | torch.device


class DistributedDataParallel(nn.Module):
    """A drop-in for :class:`torch.nn.parallel.DistributedDataParallel`.

    The model is ``self.module``, and ``state_dict`` keys begin with ``module.``, as there. Other
    than there, every method and attribute of the model can be used through the wrapper
    (``model.middle(x)``), and gradients are synchronised whichever method made the loss. To keep
    the model itself instead of a wrapper, use :func:`lockstep.parallelize`.

    Args:
        module: The model, already on its device.
        device_ids: None, or the one GPU of this rank; inputs are moved there.
        output_device: Only for compatibility: outputs stay where they are.
        dim: Only for compatibility.
        broadcast_buffers: Whether buffers follow rank 0's.
        init_sync: Whether to check that the ranks' models agree and to start from rank 0's.
        process_group: The ranks to keep in step; by default all of ``lockstep.init()``.
        bucket_cap_mb: How much makes a bucket full, in MiB; 25 by default.
        find_unused_parameters: Not needed: parameters may be unused at any time.
        check_reduction: Not needed, as in torch.
        gradient_as_bucket_view: Gradients are always views of the buckets.
        static_graph: Not needed: the graph may change or not.

    Raises:
        ModelMismatch: If the ranks' models or options differ; it names the first difference.
        NothingToTrain: If no parameter requires a gradient.
        AlreadyParallel: If one of its parameters is parallel already.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[_Device] | None = None,
        output_device: _Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        cap = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        check_bucket_cap(cap)
        self._input_device = _only_device(device_ids)
        self.module = module
        self.device_ids = [self._input_device] if self._input_device else None
        self.output_device = output_device
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        group = process_group or init().process_group
        self.process_group = group
        attach(self, module, group, Options(cap, broadcast_buffers, init_sync))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: D102 - as the module's
        if self._input_device is not None:
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(self._input_device), (inputs, kwargs)
            )
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards add up gradients on each rank; the first one after reduces them."""
        return accumulating(engine_of(self))

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return next(self.module.parameters()).device

    def __getattr__(self, name: str) -> Any:
        """What the wrapper doesn't have is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before __init__ is done (in unpickling, say) there is no model to ask.
            if name == "module":
                raise
            return getattr(self.module, name)


def _only_device(device_ids: Sequence[_Device] | None) -> torch.device | None:
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ValueError(
            f"device_ids names {len(device_ids)} devices, but a rank has one. Start a rank for "
            "each, with 'lockstep run -n', or leave device_ids out."
        )
    device = device_ids[0]
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
