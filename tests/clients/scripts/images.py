"""In the manner of PyTorch's ImageNet example: a ConvNet, a sampler, a scheduler, meters."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

if sys.argv[1] == "lockstep":
    from lockstep import DistributedDataParallel
else:
    from torch.nn.parallel import DistributedDataParallel

out_path, backend, global_batch, epochs = sys.argv[2], sys.argv[3], 8, 2


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(out)))


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count])
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    distributed = "WORLD_SIZE" in os.environ
    rank, size = 0, 1
    if distributed:
        dist.init_process_group(backend=backend, init_method="env://")
        rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).append(nn.Linear(4, 5))
    if distributed:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, 8, 8, generator=generator)
    data = TensorDataset(images, torch.randint(5, (40,), generator=generator))
    # A sampler of one rank too, so that one process takes the same batches.
    sampler = DistributedSampler(data, size, rank)
    workers = {"num_workers": 1, "persistent_workers": True}
    loader = DataLoader(data, global_batch // size, sampler=sampler, **workers)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, target in loader:
            loss = criterion(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    meter = AverageMeter()
    model.eval()
    with torch.no_grad():
        for x, target in loader:
            meter.update(criterion(model(x), target).item(), len(x))
    if distributed:
        meter.all_reduce()
    path = os.path.join(out_path, "checkpoint.pt")
    if rank == 0:
        state = model.state_dict()
        torch.save({"model": state, "optimizer": optimizer.state_dict()}, path)
    if distributed:
        dist.barrier()
        model.load_state_dict(torch.load(path)["model"])
    bare = model.module if distributed else model
    result = {"model": bare.state_dict(), "losses": [torch.tensor(meter.sum / meter.count)]}
    torch.save(result, os.path.join(out_path, f"{rank}.pt"))
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
