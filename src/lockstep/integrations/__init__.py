"""A word for libraries that train models: how they come to use lockstep.

Most need none: what they wrap in torch's DistributedDataParallel by name may be wrapped in
:class:`lockstep.DistributedDataParallel`, which is one, and they use the process group that
:func:`lockstep.init` has made before them. Nothing of this package is imported unless asked for.

- Accelerate, Transformers' Trainer: :func:`replace_torch_ddp`.
- Lightning's Trainer: :class:`lockstep.integrations.lightning.LockstepStrategy`.
- Fabric: :class:`lockstep.integrations.fabric.LockstepStrategy`.
- Ray Train: ``TorchConfig(backend="shm")``, and our wrapper instead of
  ``prepare_model``.
"""

from lockstep.integrations.replacement import replace_torch_ddp

__all__ = ["replace_torch_ddp"]
