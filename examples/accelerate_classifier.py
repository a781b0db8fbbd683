"""The classifier of ``image_classifier.py``, through Hugging Face's Accelerate.

    pip install accelerate
    python examples/accelerate_classifier.py
    lockstep run -n 2 examples/accelerate_classifier.py

On two ranks it prints::

    epoch 0: validation loss 0.5044, accuracy 92.0%
    epoch 1: validation loss 0.1253, accuracy 94.0%
    epoch 2: validation loss 0.1424, accuracy 95.0%
"""

import torch
from accelerate import Accelerator
from image_classifier import NUM_EPOCHS, Digits, evaluate, network
from torch.nn import functional as F

import lockstep
from lockstep.integrations import replace_torch_ddp


def main() -> None:
    """Train, and validate after each epoch."""
    world = lockstep.init()  # first: Accelerate takes the process group that is there
    accelerator = Accelerator(cpu=world.device.type == "cpu")
    lockstep.seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    loader = lockstep.DataLoader(Digits(0, 1300, augment=True), batch_size=64, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=NUM_EPOCHS * len(loader)
    )
    with replace_torch_ddp():  # prepare() wraps the model, and leaves the loader as it is
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    validation = Digits(1300, 1500)

    for epoch in range(NUM_EPOCHS):
        for x, y in loader:
            losses = F.cross_entropy(
                model(x.to(world.device)), y.to(world.device), reduction="none"
            )
            accelerator.backward(lockstep.mean(losses))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        loss, accuracy = evaluate(model, validation, world.device)
        accelerator.print(f"epoch {epoch}: validation loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
