"""A classifier of images as one writes it: augmentation, validation, the best checkpoint, resume.

    python examples/image_classifier.py
    lockstep run -n 2 examples/image_classifier.py
    lockstep run -n 2 --restarts 3 examples/image_classifier.py --folder run1

With --folder it keeps checkpoints there, of which the best one is tested at the end; stopped at any
moment and started again, it goes on. On two ranks it prints::

    epoch 0: validation loss 0.4714, accuracy 91.5%, the best so far
    epoch 1: validation loss 0.1286, accuracy 96.0%, the best so far
    epoch 2: validation loss 0.1394, accuracy 95.0%
    test accuracy 92.6% of 297 images
"""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

NUM_EPOCHS = 3


class Digits(Dataset):
    """Some of scikit-learn's digits, shifted and rotated a little if ``augment``."""

    def __init__(self, begin: int, end: int, augment: bool = False) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[begin:end] / 16, dtype=torch.float32)[:, None]
        self.labels = torch.tensor(digits.target[begin:end])
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Random numbers of a sample don't depend on the number of ranks or workers."""
        image = self.images[index]
        if self.augment:
            angle, dx, dy = (torch.rand(3) - 0.5).mul(torch.tensor([0.4, 0.3, 0.3])).unbind()
            rows = (angle.cos(), -angle.sin(), dx), (angle.sin(), angle.cos(), dy)
            theta = torch.stack([torch.stack(row) for row in rows])
            grid = F.affine_grid(theta[None], [1, 1, 8, 8], align_corners=False)
            image = F.grid_sample(image[None], grid, align_corners=False)[0]
        return image, self.labels[index]


def network() -> nn.Module:
    """Two convolutions with batch normalization, of the statistics of all ranks."""
    layers = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(32 * 16, 10)),
    )
    return lockstep.SyncBatchNorm.convert_sync_batchnorm(layers)


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Digits, device: torch.device) -> tuple[float, float]:
    """The loss and the accuracy, of all samples, on all ranks the same."""
    model.eval()
    counts = {"loss": 0.0, "right": 0, "samples": 0}
    for x, y in lockstep.DataLoader(dataset, batch_size=128):
        logits, y = model(x.to(device)), y.to(device)
        counts["loss"] += F.cross_entropy(logits, y, reduction="sum").item()
        counts["right"] += (logits.argmax(1) == y).sum().item()
        counts["samples"] += len(y)
    model.train()
    counts = lockstep.reduce(counts, "sum")
    return counts["loss"] / counts["samples"], counts["right"] / counts["samples"]


def main(folder: str) -> None:
    """Train, validate after each epoch, and test the best state."""
    world = lockstep.init()
    lockstep.seed(0)
    model = lockstep.parallelize(network().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    loader = lockstep.DataLoader(Digits(0, 1300, augment=True), batch_size=64, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=NUM_EPOCHS * len(loader)
    )
    validation, test = Digits(1300, 1500), Digits(1500, 1797)

    things = {"model": model, "optimizer": optimizer, "schedule": schedule}
    steps = lockstep.steps(loader, folder, epochs=NUM_EPOCHS, **things)
    for x, y in steps:
        losses = F.cross_entropy(model(x.to(world.device)), y.to(world.device), reduction="none")
        lockstep.mean(losses).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if steps.is_last_of_epoch:
            loss, accuracy = evaluate(model, validation, world.device)
            note = ", the best so far" if steps.best(loss) else ""
            numbers = f"validation loss {loss:.4f}, accuracy {accuracy:.1%}"
            world.print(f"epoch {steps.epoch}: {numbers}{note}")

    lockstep.load(f"{folder}/best", model=model)
    _, accuracy = evaluate(model, test, world.device)
    world.print(f"test accuracy {accuracy:.1%} of {len(test)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="where checkpoints are kept; by default nowhere")
    if given := parser.parse_args().folder:
        main(given)
    else:
        lockstep.init()
        with tempfile.TemporaryDirectory() as temporary:
            main(lockstep.broadcast(temporary))
