"""The four steps of ``lockstep.data_parallel``, each by a function of its own.

    python examples/data_parallel_by_hand.py                   two replicas, both on the CPU
    python examples/data_parallel_by_hand.py cuda:0 cuda:1     one replica on each of two GPUs

The batch is split, every device gets a replica of the model, all replicas run at the same time, and
their outputs are joined. Backward goes the same way in reverse, and the model's parameters get the
sums of the replicas' gradients.
"""

import argparse

import torch
from torch import nn

import lockstep


def by_hand(model: nn.Module, batch: torch.Tensor, devices: list[str]) -> torch.Tensor:
    """The output of ``model`` for ``batch``, computed on several devices at the same time."""
    parts = lockstep.scatter(batch, devices)
    used = devices[: len(parts)]  # there are fewer parts if there are fewer rows than devices
    replicas = lockstep.replicate(model, used)
    outputs = lockstep.parallel_apply(replicas, parts, devices=used)
    for device, part in zip(used, parts, strict=True):
        print(f"{len(part)} rows on {device}")
    return lockstep.gather(outputs, used[0])


def by_function(model: nn.Module, batch: torch.Tensor, devices: list[str]) -> torch.Tensor:
    """The same in one call."""
    return lockstep.data_parallel(model, batch, devices)


def alone(model: nn.Module, batch: torch.Tensor, devices: list[str]) -> torch.Tensor:
    """The same on one device, without lockstep."""
    return model(batch.to(devices[0]))


def main() -> None:
    """Run all three forward and backward, and compare outputs and gradients."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("devices", nargs="*", default=["cpu", "cpu"])
    devices = parser.parse_args().devices

    torch.manual_seed(1)
    # In float64, so that differences can only be rounding errors.
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3)).double().to(devices[0])
    batch = torch.randn(13, 20, dtype=torch.float64)

    results = []
    for call in (by_hand, by_function, alone):
        model.zero_grad()
        output = call(model, batch, devices)
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in model.parameters())])

    mine, *others = results
    for name, theirs in zip(("lockstep.data_parallel", "the model alone"), others, strict=True):
        difference = max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))
        print(f"largest difference to {name}, in outputs and gradients: {difference:.1e}")


if __name__ == "__main__":
    main()
