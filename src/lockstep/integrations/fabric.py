"""A strategy for Fabric. To import it takes ``pip install lightning``."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy
from torch import nn

from lockstep.nn import DistributedDataParallel
from lockstep.world import choose_backend


class LockstepStrategy(DDPStrategy):  # type: ignore[misc]
    """Fabric's ``"ddp"``, with lockstep's wrapper and process group in place of torch's.

    ``Fabric(strategy=LockstepStrategy(), devices=2)``

    Args:
        args: As those of Fabric's ``DDPStrategy``.
        kwargs: The same; what it doesn't know itself goes to
            :class:`lockstep.DistributedDataParallel`. Where ``process_group_backend`` isn't given,
            it is that of :func:`lockstep.init`: shared memory on CPUs, NCCL on GPUs.
    """

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or choose_backend(self.root_device)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module``, which is on its device already."""
        return DistributedDataParallel(
            module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs
        )
