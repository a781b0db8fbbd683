"""A program that trains twice: first one part of a model, and then all of it."""

from __future__ import annotations

import sys

import torch
from torch import nn

import lockstep
from tests.resume.programs import ends


def main(path: str | None) -> None:
    lockstep.init()
    torch.manual_seed(3)
    model = lockstep.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1)))
    number = 0
    for part in (model[2], model):
        optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
        folder = None if path is None else f"{path}/{number // 6}"
        steps = lockstep.steps(6, folder, snapshot_every=1, model=model, optimizer=optimizer)
        for step in steps:
            ends.here(number + step, "forward")
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
        number += 6
    ends.tell(*model.parameters())


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
