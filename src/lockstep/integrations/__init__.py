"""Use of lockstep in libraries that train models.

Most need nothing from here: wrap the model in :class:`lockstep.DistributedDataParallel`, which is a
subclass of torch's, after :func:`lockstep.init` has made the process group.

- Accelerate, Transformers' Trainer: :func:`replace_torch_ddp`.
- Lightning's Trainer: :class:`lockstep.integrations.lightning.LockstepStrategy`.
- Fabric: :class:`lockstep.integrations.fabric.LockstepStrategy`.
- torchmetrics: :func:`gather_all_tensors`, which names ranks that differ; its own works too.
- Ray Train: ``TorchConfig(backend="shm")``, and our wrapper instead of ``prepare_model``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

import lockstep.nn
import lockstep.optim
from lockstep.metrics import gather_all_tensors

# The method of Transformers' Trainer that every rank calls, and in which rank 0 alone saves.
_SAVE = "_save_optimizer_and_scheduler"

__all__ = ["gather_all_tensors", "replace_torch_ddp"]


@contextlib.contextmanager
def replace_torch_ddp() -> Iterator[None]:
    """Let ``torch.nn.parallel.DistributedDataParallel`` be lockstep's for as long as this lasts.

    For libraries that look the class up there when they wrap a model, as Accelerate does, and with
    it Transformers' Trainer. Models that they have wrapped remain as they are afterwards. ::

        from lockstep.integrations import replace_torch_ddp

        lockstep.init()  # before Accelerator() or TrainingArguments(), to use its process group
        accelerator = Accelerator()
        with replace_torch_ddp():
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        with replace_torch_ddp():
            trainer.train()

    In ``Trainer.train()``, every rank takes part when rank 0 saves a sharded optimizer.

    It holds for all threads of the process.
    """
    theirs = torch.nn.parallel.DistributedDataParallel
    ours = lockstep.nn.DistributedDataParallel
    torch.nn.parallel.DistributedDataParallel = ours  # type: ignore[assignment, misc]
    try:
        with _trainer_saves_sharded_optimizers():
            yield
    finally:
        torch.nn.parallel.DistributedDataParallel = theirs  # type: ignore[misc]


@contextlib.contextmanager
def _trainer_saves_sharded_optimizers() -> Iterator[None]:
    """Let each rank call a sharded optimizer's ``state_dict()`` where Transformers saves it."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    save = getattr(trainer, _SAVE, None)
    if save is None:
        yield
        return

    @functools.wraps(save)
    def save_on_every_rank(self: Any, *args: Any, **options: Any) -> Any:
        if not self.args.should_save and lockstep.optim.sharding_of(self.optimizer) is not None:
            self.optimizer.state_dict()
        return save(self, *args, **options)

    setattr(trainer, _SAVE, save_on_every_rank)
    try:
        yield
    finally:
        setattr(trainer, _SAVE, save)
