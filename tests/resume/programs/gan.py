"""Two models in turns, each with an optimizer, and an average of the generator's weights."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from tests.resume.programs import ends

STEPS, CRITIC_STEPS = 30, 3


class Average:
    """An average of weights, in attributes of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.number = 0

    def update(self, model: nn.Module) -> None:
        self.number += 1
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.detach()

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def main() -> None:
    lockstep.init()
    torch.manual_seed(0)
    data = torch.randn(64, 6)
    generator = lockstep.parallelize(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)))
    critic = lockstep.parallelize(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    averaged = torch.optim.swa_utils.AveragedModel(copy.deepcopy(generator))
    average = Average(generator)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    of_critic = lockstep.shard_optimizer(torch.optim.Adam(critic.parameters(), lr=0.01))
    modules = {"generator": generator, "critic": critic, "averaged": averaged}
    optimizers = {"of_generator": of_generator, "of_critic": of_critic}
    for step in lockstep.steps(STEPS, snapshot_every=1, average=average, **modules, **optimizers):
        rows = torch.tensor(random.sample(range(64), 8)) + np.random.randint(1)
        ends.here(step, "forward")
        fake = generator(torch.randn(8, 4))
        if step % CRITIC_STEPS < CRITIC_STEPS - 1:
            of_critic.zero_grad()
            scores = critic(data[rows]), critic(fake.detach())
            loss = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
            loss.backward()
            ends.here(step, "backward")
            of_critic.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.5, 0.5)
        else:
            of_generator.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            ends.here(step, "backward")
            of_generator.step()
            averaged.update_parameters(generator)
            average.update(generator)
        ends.here(step, "update")
    values = [*critic.parameters(), *averaged.state_dict().values(), *average.shadow.values()]
    ends.tell(*generator.parameters(), *values)


if __name__ == "__main__":
    main()
