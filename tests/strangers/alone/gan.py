"""A GAN draws points on a circle; an average of the generator's weights is what is kept."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Circle(torch.utils.data.Dataset):
    """Points on a circle, each with the noise of which the generator is to make one."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        angle = torch.tensor(index * 0.006283)
        point = torch.stack([angle.cos(), angle.sin()])
        return point + 0.02 * torch.randn(2), torch.randn(8)


def network(num_in, num_out):
    hidden = nn.Linear(num_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)
    return nn.Sequential(*hidden, nn.Linear(64, num_out)).to(device)


def adversarial_loss(logits, is_real):
    targets = torch.full_like(logits, float(is_real))
    return F.binary_cross_entropy_with_logits(logits, targets)


generator = network(8, 2)
critic = network(2, 1)
averaged = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.95))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
loader = torch.utils.data.DataLoader(Circle(), batch_size=100, shuffle=True)

for epoch in range(3):
    for real, noise in loader:
        real, fake = real.to(device), generator(noise.to(device))

        critic_loss = adversarial_loss(critic(real), True)
        critic_loss = critic_loss + adversarial_loss(critic(fake.detach()), False)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        generator_loss = adversarial_loss(critic(fake), True)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        averaged.update_parameters(generator)
    drawn = averaged(torch.ones(1, 8, device=device))
    losses = f"critic {critic_loss.item():.6f} generator {generator_loss.item():.6f}"
    print(f"epoch {epoch}: {losses} drawn {drawn.sum().item():.6f}")
