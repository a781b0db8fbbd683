"""What the process imports that forks the ranks. Nothing in it may start a thread."""

import importlib

for name in (
    "accelerate",
    "ignite.distributed",
    "lightning.fabric",
    "lightning.pytorch",
    "lockstep.integrations",
    "peft",
    "torchmetrics.classification",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
):
    importlib.import_module(name)
