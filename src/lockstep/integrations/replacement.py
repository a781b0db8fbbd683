"""Our DistributedDataParallel for libraries that construct torch's by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lockstep.nn import DistributedDataParallel


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

    It holds for all threads of the process.
    """
    theirs = torch.nn.parallel.DistributedDataParallel
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.nn.parallel.DistributedDataParallel = theirs  # type: ignore[misc]
