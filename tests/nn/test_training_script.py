"""A training script written for torch's wrapper, in which only the import is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.forks

THEIRS = "from torch.nn.parallel import DistributedDataParallel as DDP"
OURS = "from lockstep import DistributedDataParallel as DDP"

SCRIPT = """
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
{import}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.25)
        self.fc1 = nn.Linear(4 * 3 * 3, 16)
        self.fc2 = nn.Linear(16, 3)
        self.tail = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x, use_tail=False):
        x = F.max_pool2d(torch.tanh(self.norm(self.conv(x))), 2)
        x = torch.tanh(self.fc1(x.flatten(1)))
        if use_tail:
            x = x + self.tail[0](x)
        return self.fc2(self.drop(x))


def build(args):
    # Another start on each rank, of which rank 0's is the one.
    torch.manual_seed(args.seed + dist.get_rank())
    model = Net().double()
    model = DDP(model, find_unused_parameters=True, bucket_cap_mb=0.001)
    decay = [p for name, p in model.named_parameters() if p.dim() > 1]
    plain = [p for name, p in model.named_parameters() if p.dim() <= 1]
    groups = [{{"params": decay, "weight_decay": 0.1}}, {{"params": plain, "weight_decay": 0}}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return model, optimizer


def train(args, model, optimizer, scheduler, loader, epoch):
    model.train()
    for step, (x, y) in enumerate(loader):
        last = step % args.accumulate == args.accumulate - 1 or step == len(loader) - 1
        if last:
            loss = F.cross_entropy(model(x, epoch % 2 == 1), y) / args.accumulate
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                loss = F.cross_entropy(model(x, epoch % 2 == 1), y) / args.accumulate
                loss.backward()
    scheduler.step()


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    rank, size = dist.get_rank(), dist.get_world_size()
    out = model(x[rank::size])
    total = torch.tensor([F.cross_entropy(out, y[rank::size], reduction="sum").item(), len(out)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend")
    parser.add_argument("--out")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    assert rank == int(os.environ["LOCAL_RANK"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(53, 1, 8, 8, generator=generator)
    y = torch.randint(3, (53,), generator=generator)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=5, sampler=sampler)

    model, optimizer = build(args)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    losses = []
    path = os.path.join(args.out, "checkpoint.pt")
    for epoch in range(args.epochs):
        if epoch == 2:  # as if it had been stopped and started again
            model, optimizer = build(args)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
            saved = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        sampler.set_epoch(epoch)
        train(args, model, optimizer, scheduler, loader, epoch)
        losses.append(evaluate(model, x, y))
        if rank == 0:
            state = {{
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }}
            torch.save(state, path)
        dist.barrier()
    result = {{
        "wrapped": model.state_dict(),
        "bare": model.module.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "losses": torch.tensor(losses),
        "random": torch.rand(4),
    }}
    torch.save(result, os.path.join(args.out, f"rank-{{rank}}.pt"))
    # Torch's wrapper must not be the last to hold the group: freeing both, it joins Gloo's thread
    # with the interpreter's lock, for which that thread waits if it frees a barrier's tensors.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def results_of(folder: Path, line: str, backend: str) -> list[dict]:
    """Run the script on two ranks; return what they saved."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT.format_map({"import": line}))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script)]
    with subprocess.Popen(
        [*command, "--backend", backend, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        try:
            printed, _ = run.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            look = [sys.executable, "-m", "lockstep", "status", "--stacks", str(run.pid)]
            where = subprocess.run(look, capture_output=True, text=True, timeout=60).stdout
            run.terminate()  # which ends the ranks
            pytest.fail(f"After 150 s the run was here:\n{where}\n{run.communicate()[0]}")
    assert run.returncode == 0, printed
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return results_of(tmp_path_factory.mktemp("theirs") / "run", THEIRS, "gloo")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.long
def test_a_script_for_torchs_wrapper_gives_the_same_with_ours(
    backend: str, theirs: list[dict], tmp_path: Path
) -> None:
    ours = results_of(tmp_path / "run", OURS, backend)
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine["wrapped"]) == list(other["wrapped"])
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        losses = mine["losses"].tolist()
        assert losses[-1] < losses[0]
    for name, value in ours[0]["bare"].items():
        assert torch.equal(value, ours[1]["bare"][name]), name
    assert not torch.equal(ours[0]["random"], ours[1]["random"])
