"""Training in step on a GPU: two ranks share one over Gloo, which carries those of CUDA."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F

import lockstep
from tests.gpu.accelerator import IS_CUDA, KIND, NEEDED, NUM_DEVICES
from tests.gpu.sharing import launch_sharing

pytestmark = [
    *NEEDED,
    pytest.mark.skipif(not IS_CUDA and NUM_DEVICES < 2, reason="Gloo carries no tensors of it"),
    pytest.mark.timeout(300),
    pytest.mark.forks,
]

# The one of the rank.
GPU = torch.device(KIND)


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (20,), generator=generator)


def oracle() -> list[torch.Tensor]:
    model, (x, y) = classifier(), samples()
    F.cross_entropy(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def rows_of(rank: int) -> slice:
    return slice(0, 3) if rank == 0 else slice(3, 20)


def losses_of(model: nn.Module, rows: slice | list[int]) -> torch.Tensor:
    x, y = samples()
    return F.cross_entropy(model(x[rows].to(GPU)), y[rows].to(GPU), reduction="none")


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    torch.accelerator.synchronize()
    return [p.grad.cpu() for p in model.parameters()]


def assert_close(mine: list, theirs: list, tolerance: float = 1e-10) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def mean_of_uneven_parts(world: lockstep.World) -> list[torch.Tensor]:
    model = lockstep.parallelize(classifier().to(GPU))
    for _ in range(3):
        model.zero_grad()
        lockstep.mean(losses_of(model, rows_of(world.rank))).backward()
    return gradients_of(model)


def micro_batches(world: lockstep.World) -> list[torch.Tensor]:
    model = lockstep.DistributedDataParallel(classifier().to(GPU))
    local = range(20)[rows_of(world.rank)]
    for rows in (range(5), range(5, 6), range(6, 20)):
        is_last = rows.stop == 20
        with contextlib.nullcontext() if is_last else lockstep.accumulate(model):
            lockstep.mean(losses_of(model, [row for row in rows if row in local])).backward()
    return gradients_of(model)


@pytest.mark.parametrize("train", [mean_of_uneven_parts, micro_batches])
def test_mean_gives_the_gradients_of_one_process(
    train: Callable[[lockstep.World], list[torch.Tensor]],
) -> None:
    for mine in launch_sharing(train, 2):
        assert_close(mine, oracle())


def with_hook(world: lockstep.World, name: str) -> list[list[torch.Tensor]]:
    """The gradients of three steps, of ours and of torch's."""
    every = []
    for wrap in (lockstep.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = wrap(classifier().float().to(world.device))
        if name == "powerSGD":
            state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, name))
        x, y = samples()
        rows = rows_of(world.rank)
        for _ in range(3):
            model.zero_grad()
            F.cross_entropy(
                model(x[rows].float().to(world.device)), y[rows].to(world.device)
            ).backward()
        every.append(gradients_of(model))
    return every


@pytest.mark.skipif(NUM_DEVICES < 2, reason="needs a GPU for each rank")
@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "powerSGD"])
def test_torchs_hooks_do_what_they_do_in_torch(name: str) -> None:
    for ours, theirs in lockstep.launch(with_hook, 2, (name,)):
        assert_close(ours, theirs, 1e-5)


class OnBoth(nn.Module):
    """An embedding that stays on the CPU, and the rest on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.rest = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rest(self.embed(tokens).to(self.rest.weight.device))


def tokens() -> torch.Tensor:
    return torch.arange(12).remainder(10)


def on_both_devices(world: lockstep.World) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = OnBoth().double()
    model.rest.to(GPU)
    lockstep.parallelize(model, bucket_cap_mb=0.0001)
    for _ in range(4):
        model.zero_grad()
        model(tokens().chunk(2)[world.rank]).square().sum().backward()
    return gradients_of(model)


def test_a_model_on_two_devices() -> None:
    torch.manual_seed(5)
    model = OnBoth().double()
    (model(tokens()).square().sum() / 2).backward()
    for mine in launch_sharing(on_both_devices, 2):
        assert_close(mine, [p.grad for p in model.parameters()])


def normalised(world: lockstep.World) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().to(GPU)
    torch.manual_seed(6)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64).to(GPU)
    model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)
    wrapped = lockstep.DistributedDataParallel(model)
    with wrapped.join():
        for _ in range(1 + world.rank):
            wrapped.zero_grad()
            lockstep.mean(losses_of(wrapped, rows_of(world.rank))).backward()
    return gradients_of(model)


def test_a_loop_that_ends_earlier_on_one_rank() -> None:
    _, mine = launch_sharing(normalised, 2)
    assert all(gradient.isfinite().all() for gradient in mine)


def in_low_precision(world: lockstep.World) -> list[torch.Tensor]:
    model = lockstep.DistributedDataParallel(classifier().float().to(GPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(KIND)
    x, y = samples()
    rows = rows_of(world.rank)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast(KIND, torch.float16):
            loss = F.cross_entropy(model(x[rows].float().to(GPU)), y[rows].to(GPU))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().cpu() for p in model.parameters()]


def test_autocast_and_a_gradient_scaler_keep_ranks_together() -> None:
    first, second = launch_sharing(in_low_precision, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def moved(world: lockstep.World) -> bool:
    """A wrapper around a model on the CPU that goes to the GPU afterwards."""
    model = lockstep.DistributedDataParallel(classifier())
    model.to(GPU)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        lockstep.mean(losses_of(one, rows_of(world.rank))).backward()
    theirs = [torch.empty_like(model.module[0].weight.grad) for _ in range(2)]
    dist.all_gather(theirs, model.module[0].weight.grad)
    return torch.equal(*theirs)


def test_a_wrapper_that_moves_to_the_gpu() -> None:
    assert launch_sharing(moved, 2) == [True, True]


def tagger() -> nn.Module:
    torch.manual_seed(3)
    table = nn.Embedding(9, 4, max_norm=0.7)
    return nn.Sequential(table, nn.Flatten(), nn.Linear(8, 1)).double()


def train_tagger(model: nn.Module, steps: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for words in steps:
        model(words).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


def train_tagger_in_step(world: lockstep.World, steps: list[torch.Tensor]) -> list[torch.Tensor]:
    model = lockstep.parallelize(tagger().to(GPU))
    return train_tagger(model, [words.to(GPU).chunk(2)[world.rank] for words in steps])


def test_rows_that_lookups_scale_are_those_of_one_process() -> None:
    """On a GPU a rank doesn't know whether lookups on others have changed rows."""
    generator = torch.Generator().manual_seed(5)
    steps = [torch.randint(9, (2 if step % 2 else 8, 2), generator=generator) for step in range(6)]
    expected = train_tagger(tagger(), steps)
    first, second = launch_sharing(train_tagger_in_step, 2, (steps,))
    assert_close(first, expected, 1e-12)
    assert all(map(torch.equal, first, second))
