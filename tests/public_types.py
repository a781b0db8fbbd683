"""The types that the public names have for a program's own type checker.

Nothing here is run: mypy, in ``make check``, fails where a type is another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.observe import Explanation


class Net(nn.Module):
    """A module of one's own, whose class must not get lost."""

    width = 3


class Words(Dataset[str]):
    """A dataset with a length, of samples of a known type."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> str:
        return ""


def start(world: lockstep.World, epochs: int) -> float:
    assert_type(lockstep.init(), lockstep.World)
    assert_type(world.rank, int)
    assert_type(world.world_size, int)
    assert_type(world.local_rank, int)
    assert_type(world.local_world_size, int)
    assert_type(world.device, torch.device)
    assert_type(world.process_group, dist.ProcessGroup | None)
    assert_type(world.is_main, bool)
    world.print("loss", 0.5, sep=" ", end="", file=sys.stderr, flush=False)
    with world.main_first(local=True) as nothing:
        assert_type(nothing, None)
    lockstep.seed(0)
    lockstep.seed(0.5)  # type: ignore[arg-type]
    assert_type(lockstep.launch(start, 2, (epochs,)), list[float])
    assert_type(lockstep.launch(start, ranks="threads"), list[float])
    return 0.0


def models(net: Net, x: Tensor, group: dist.ProcessGroup) -> None:
    assert_type(lockstep.parallelize(net, process_group=group), Net)
    assert_type(lockstep.parallelize(net).width, int)
    lockstep.parallelize(net, bucket_cap=1)  # type: ignore[arg-type]
    assert_type(lockstep.DistributedDataParallel(net).no_sync(), AbstractContextManager[None])
    assert_type(lockstep.no_sync(net), AbstractContextManager[None])
    assert_type(lockstep.join(net, net), AbstractContextManager[None])
    with lockstep.accumulate(net) as nothing:
        assert_type(nothing, None)
    assert_type(lockstep.mean(x, weight=x), Tensor)
    assert_type(lockstep.shards(net, x, 2).loss, float | None)
    assert_type(lockstep.SyncBatchNorm.convert_sync_batchnorm(net), nn.Module)
    lockstep.average_gradients(net, weight=2)
    lockstep.sync_buffers(net)


def replicas(net: Net, x: Tensor) -> None:
    devices: list[int | str | torch.device] = ["cpu", torch.device("cpu"), 0]
    wrapper: nn.DataParallel[nn.Module] = lockstep.DataParallel(net, devices)
    assert_type(wrapper.module, nn.Module)
    assert_type(lockstep.data_parallel(net, x, devices), Any)
    assert_type(lockstep.replicate(net, devices), list[Net])
    assert_type(lockstep.scatter(x, devices), tuple[Tensor, ...])
    assert_type(lockstep.scatter({"image": x}, devices), list[dict[str, Tensor]])
    assert_type(lockstep.gather([x, x], "cpu"), Tensor)
    assert_type(lockstep.parallel_apply([net, net], [x, x]), list[Any])
    inputs, kwargs = lockstep.scatter_kwargs((x,), {"scale": 2.0}, devices)
    assert_type(inputs, tuple[tuple[object, ...], ...])
    assert_type(kwargs, tuple[dict[str, object], ...])


def optimizers(net: Net) -> None:
    sharded = lockstep.shard_optimizer(torch.optim.AdamW(net.parameters()))
    guard = lockstep.guard(net, sharded)
    with guard as step:
        assert_type(step.blame, lockstep.Blame | None)
        assert_type(step.watch(torch.ones(())), None)
        guard.watch("1")  # type: ignore[arg-type]
    assert_type(lockstep.check_replicas(net, sharded), list[lockstep.ReplicaDifference])
    assert_type(sharded, torch.optim.AdamW)
    as_torchs: torch.optim.Optimizer = lockstep.ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=0.1
    )
    lockstep.shard_optimizer(as_torchs, undivided="ignored")  # type: ignore[arg-type]
    assert_type(lockstep.clip_grad_norm_(net.parameters(), max_norm=1.0), Tensor)


def data(tensors: TensorDataset) -> None:
    assert_type(lockstep.partition(Words(), [0.9, 0.1]), list[lockstep.Partition[str]])
    assert_type(lockstep.partition([1, 2], [1, 1])[0][0], int)
    assert_type(lockstep.DataPartitioner(Words()).use(0), lockstep.Partition[str])
    loader: torch.utils.data.DataLoader[Any] = lockstep.DataLoader(tensors, batch_size=128)
    assert_type(lockstep.DataLoader(tensors, batch_size=128).num_samples, int)
    indices: Iterable[Any] = lockstep.DistributedSampler(tensors)
    del loader, indices


def files(net: Net, folder: Path) -> None:
    assert_type(lockstep.save(folder, model=net, epoch=1), Path)
    assert_type(lockstep.load("run", model=net, epoch=0), dict[str, Any])
    assert_type(lockstep.checkpoint.load(folder), dict[str, Any])
    with lockstep.trace(folder) as nothing:
        assert_type(nothing, None)
    lockstep.log_to("log.csv", folder / "log.jsonl", lambda step, values: None)
    lockstep.log({"val/accuracy": 0.5}, step=3)
    lockstep.log(loss=torch.tensor(0.5), total=9)
    assert_type(lockstep.explain(net, torch.empty(3)), Explanation)


def loops(net: Net, loader: lockstep.DataLoader[tuple[Tensor, Tensor]], folder: Path) -> None:
    steps = lockstep.steps(loader, folder, epochs=3, save_every=timedelta(minutes=1), model=net)
    for x, y in steps:
        assert_type((x, y), tuple[Any, Any])
        assert_type((steps.step, steps.epoch, steps.restarts), tuple[int, int, int])
        assert_type(steps.is_last_of_epoch, bool)
        assert_type(steps.best(0.5, higher=True), bool)
    for x, y in steps.rest_of_epoch():
        assert_type((x, y), tuple[Any, Any])
    for number in lockstep.steps(100, model=net):
        assert_type(number, int)
    lockstep.steps(loader, epochs=1.5)  # type: ignore[call-overload]


def numbers(correct: Tensor) -> None:
    assert_type(lockstep.reduce({"correct": correct}, "sum"), dict[str, Tensor])
    assert_type(lockstep.reduce(0.5, weight=3), float)
    assert_type(lockstep.any(correct), bool)
    assert_type(lockstep.all_gather(correct), Tensor)
    lockstep.all_gather([correct])  # type: ignore[arg-type]
    assert_type(lockstep.broadcast({"correct": correct}, 1, allow_pickle=True), dict[str, Tensor])
    lockstep.reduce(0.5, "average")  # type: ignore[arg-type]


def errors() -> None:
    try:
        lockstep.init()
    except lockstep.errors.PeerLost as error:
        caught: lockstep.LockstepError = error
        raise caught from None
