"""Lightning's Trainer, with its own strategy and with lockstep's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.clients.forks import Forks
from tests.clients.toy import Net, assert_ranks_as_alone, dataset, loader, parameters_of, place


def fits(strategy: str) -> dict[str, Any]:
    """What comes of training in several ways, one after the other."""
    results = {
        "plain": fit(strategy),
        "accumulated": fit(strategy, accumulate_grad_batches=2),
        "clipped": fit(strategy, gradient_clip_val=0.1),
        "by hand": fit(strategy, is_manual=True),
        "by hand, static graph": fit(strategy, is_manual=True, static_graph=True),
    }
    if strategy == "lockstep":
        assert dist.get_backend() == "shm"
    return results


def strategy_of(name: str, **options: Any) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from lockstep.integrations.lightning import LockstepStrategy

    if name == "alone":
        return "auto"
    if name == "lockstep":
        return LockstepStrategy(**options)
    return DDPStrategy(process_group_backend=name, **options)


def fit(strategy: str, *, is_manual: bool = False, static_graph: bool = False, **how: Any) -> Any:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not is_manual

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train", loss, on_epoch=True, on_step=False, sync_dist=True)
            if is_manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    options: dict[str, Any] = {"static_graph": True} if static_graph else {}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=place()[1],
        strategy=strategy_of(strategy, **options),
        precision="64-true",
        max_epochs=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **how,
    )
    model = Model()
    trainer.fit(model, loader(dataset()), loader(dataset()))
    with tempfile.TemporaryDirectory() as folder:
        path = trainer.strategy.broadcast(str(Path(folder) / "model.ckpt"))
        trainer.save_checkpoint(path)
        if place()[0] == 0:
            saved = torch.load(path, weights_only=False)["state_dict"]
            assert list(saved) == list(model.state_dict())
        trainer.strategy.barrier()
    metrics = {name: value.double() for name, value in trainer.callback_metrics.items()}
    return parameters_of(model), metrics


@pytest.fixture(scope="module")
def alone(forks: Forks) -> Any:
    return forks.run(fits, 1, "alone")[0]


@pytest.mark.parametrize("strategy", ["gloo", "shm", "lockstep"])
def test_the_trainer_gives_what_one_process_gives(forks: Forks, alone: Any, strategy: str) -> None:
    assert_ranks_as_alone(forks.run(fits, 2, strategy), alone)
