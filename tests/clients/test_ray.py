"""Ray Train, over shared memory, with its own way to wrap a model and with ours."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import lockstep
from tests.clients.forks import Forks
from tests.clients.toy import Net, assert_ranks_as_alone, dataset, loader, parameters_of


def train_by_ray(kind: str) -> Any:
    net = Net().double()
    if kind == "torch":
        from ray.train.torch import prepare_model

        model = prepare_model(net)
    else:
        model = lockstep.DistributedDataParallel(net) if kind == "wrapper" else net
        model = lockstep.parallelize(net) if kind == "in place" else model
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in loader(dataset()):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(net)


def train_under_ray(folder: str) -> Any:
    """All three in one run: to start Ray takes most of the time."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def train_each() -> None:
        rank = ray.train.get_context().get_world_rank()
        assert torch.distributed.get_backend() == "shm"
        results = {kind: train_by_ray(kind) for kind in ("torch", "wrapper", "in place")}
        torch.save(results, Path(folder) / f"{rank}.pt")

    os.environ["PYTHONPATH"] = os.getcwd()
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "120"  # instead of starting them anew
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            train_each,
            torch_config=TorchConfig(backend="shm"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    finally:
        ray.shutdown()
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def test_ray_train_gives_what_one_process_gives(forks: Forks) -> None:
    (alone,) = forks.run(train_by_ray, 1, "alone")
    with tempfile.TemporaryDirectory() as folder:
        (ranks,) = forks.run(train_under_ray, 1, folder)
    for kind in ("torch", "wrapper", "in place"):
        assert_ranks_as_alone([rank[kind] for rank in ranks], alone)
