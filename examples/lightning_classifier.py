"""The classifier of ``image_classifier.py``, through Lightning.

    pip install lightning
    python examples/lightning_classifier.py
    lockstep run -n 2 examples/lightning_classifier.py

On two ranks it prints::

    epoch 0: validation loss 0.5044, accuracy 92.0%
    epoch 1: validation loss 0.1253, accuracy 94.0%
    epoch 2: validation loss 0.1424, accuracy 95.0%
"""

from typing import Any

import lightning.pytorch as pl
import torch
from image_classifier import NUM_EPOCHS, Digits, evaluate, network
from torch.nn import functional as F

import lockstep
from lockstep.integrations.lightning import LockstepStrategy


class Classifier(pl.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.validation = Digits(1300, 1500)

    def train_dataloader(self) -> Any:
        """Made here, where the ranks have met."""
        return lockstep.DataLoader(Digits(0, 1300, augment=True), batch_size=64, shuffle=True)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The mean over the global batch."""
        x, y = batch
        return lockstep.mean(F.cross_entropy(self.net(x), y, reduction="none"))

    def configure_optimizers(self) -> Any:
        """A schedule that goes on with each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_epoch_end(self) -> None:
        """Each sample once, whatever the number of ranks."""
        loss, accuracy = evaluate(self.net, self.validation, self.device)
        text = f"validation loss {loss:.4f}, accuracy {accuracy:.1%}"
        lockstep.init().print(f"epoch {self.current_epoch}: {text}")


def main() -> None:
    """Train, and validate after each epoch."""
    world = lockstep.init()
    lockstep.seed(0)
    trainer = pl.Trainer(
        accelerator=world.device.type,
        devices=world.local_world_size,
        strategy=LockstepStrategy() if world.world_size > 1 else "auto",
        max_epochs=NUM_EPOCHS,
        use_distributed_sampler=False,  # lockstep.DataLoader has divided the batches
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier())


if __name__ == "__main__":
    main()
