"""A run on four ranks, of which one is killed, that goes on with three and then with one.

    python examples/same_bits.py
    lockstep run -n 3 examples/same_bits.py --folder run

Without a folder, it starts itself on these numbers of ranks, one after the other, and then on one
rank from the beginning to the end. Both runs end with the same parameters, bit by bit.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

NUM_SHARDS = 4
NUM_EPOCHS = 2


def train(folder: str, kill_at: int, stop_at: int) -> None:
    """Train from the last checkpoint in ``folder`` on, and print the digest of the parameters.

    The last rank kills itself in step ``kill_at``. After step ``stop_at`` the run ends early.
    """
    world = lockstep.init()
    lockstep.seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, 1, 8, 8, generator=generator)
    dataset = TensorDataset(x, x.view(500, 4, 16).sum(2).argmax(1))
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(288, 4)),
    )
    model = lockstep.parallelize(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = lockstep.DataLoader(dataset, 32, shuffle=True, seed=0, shards=NUM_SHARDS)

    things = {"model": model, "optimizer": optimizer}
    steps = lockstep.steps(loader, folder, epochs=NUM_EPOCHS, save_every=5, **things)
    for batch in steps:
        if steps.step == kill_at and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for x, y in lockstep.shards(model, batch):
            losses = F.cross_entropy(model(x), y, reduction="none")
            lockstep.mean(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        if steps.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)  # the run ends with this step, and saves

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    world.print(f"{world.world_size} ranks: {digest.hexdigest()}")


def run(num_ranks: int, folder: str, *options: str) -> str:
    """Train on some ranks, and return what they print."""
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(num_ranks), __file__]
    done = subprocess.run(
        [*command, "--folder", folder, *options], stdout=subprocess.PIPE, text=True
    )
    print(f"{num_ranks} ranks {' '.join(options)}: exit code {done.returncode}")
    return done.stdout.strip().rpartition(" ")[2]


def main() -> None:
    """Compare a run that changes its ranks with one on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        run(4, f"{folder}/changing", "--kill-at", "8")
        run(3, f"{folder}/changing", "--stop-at", "19")
        changing = run(1, f"{folder}/changing")
        undisturbed = run(1, f"{folder}/undisturbed")
    print(f"on 4, 3 and 1 ranks: {changing}")
    print(f"on one alone:        {undisturbed}")
    if changing != undisturbed:
        sys.exit("They differ.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--kill-at", type=int, default=-1, metavar="STEP")
    parser.add_argument("--stop-at", type=int, default=-1, metavar="STEP")
    arguments = parser.parse_args()
    if arguments.folder is None:
        main()
    else:
        train(arguments.folder, arguments.kill_at, arguments.stop_at)
