"""Steps in shards on devices: every bit is that of one rank, whatever the number of ranks.

The kernels are those of the CPU, so that this shows what lockstep does: the order of sums, random
numbers, buffers and streams. What a real device's kernels do is another matter.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed, ModelError, ModelMismatch, RankFailed
from lockstep.nn import current_shard
from lockstep.same_bits import Shards, chunks, local_step, messages, over_ranks, sums
from tests.same_bits.runs import OPTIMIZERS, Counting, Run, batch_of, differing, model_of
from tests.simulated.control import KIND

pytestmark = pytest.mark.forks

NUM_SHARDS = 4
NUM_RANKS = [2, 3]
STEPS = [*range(3)]


def run_of(world: lockstep.World, kind: str, optimizer: str = "SGD", **options: Any) -> Run:
    group = dist.group.WORLD
    return Run(
        model_of(kind), OPTIMIZERS[optimizer], group, NUM_SHARDS, device=world.device, **options
    )


def trained(
    kind: str, optimizer: str, shard_options: dict[str, bool] | None = None, **options: Any
) -> Callable[[lockstep.World], Any]:
    def training(world: lockstep.World) -> dict[str, Any]:
        run = run_of(world, kind, optimizer, **options)
        if shard_options is not None:
            lockstep.shard_optimizer(run.optimizer, **shard_options)
        run.steps(STEPS, autocast=optimizer.endswith("autocast"))
        return run.bits()

    return training


def of_weights(world: lockstep.World) -> dict[str, Any]:
    """Weights that are on the device, and those that a number tells; in two means of a shard."""
    run = run_of(world, "transformer")
    for number in STEPS:
        step = lockstep.shards(run.model, batch_of(number), NUM_SHARDS, step=number)
        for x, y in step:
            weight = (y > 0).to(world.device) * 1.5
            for sign in 1, -1:
                losses = F.cross_entropy(
                    run.model(sign * x.to(world.device)), y.to(world.device), reduction="none"
                )
                lockstep.mean(losses, weight=weight).backward()
        run.numbers.append(step.loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        step = lockstep.shards(run.model, batch_of(number), NUM_SHARDS, step=50 + number)
        for x, y in step:
            loss = F.cross_entropy(run.model(x.to(world.device)), y.to(world.device))
            lockstep.mean(loss, weight=len(x)).backward()
        run.numbers.append(step.loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.bits()


def in_bfloat16(world: lockstep.World) -> dict[str, Any]:
    model = copy.deepcopy(model_of("partly used")).bfloat16()
    run = Run(model, OPTIMIZERS["SGD"], dist.group.WORLD, NUM_SHARDS, device=world.device)
    for number in STEPS:
        for x, y in lockstep.shards(run.model, batch_of(number), NUM_SHARDS, step=number):
            losses = F.cross_entropy(
                run.model(x.to(world.device).bfloat16()), y.to(world.device), reduction="none"
            )
            lockstep.mean(losses, weight=(y + 0.3).to(world.device)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    named = run.model.state_dict().items()
    return {name: each.cpu().view(torch.int16).tolist() for name, each in named}


def with_buffers(policy: str) -> Callable[[lockstep.World], Any]:
    """Buffers that each forward changes, and some that none does, on the device and on the CPU."""

    def training(world: lockstep.World) -> dict[str, Any]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(108, 6), Counting(), nn.BatchNorm1d(6), nn.Linear(6, 5))
        model.register_buffer("table", torch.randn(7))
        model.register_buffer("flag", torch.tensor(True))
        run = Run(
            model,
            OPTIMIZERS["AdamW"],
            dist.group.WORLD,
            NUM_SHARDS,
            device=world.device,
            broadcast_buffers={"*": policy},
        )
        run.model.register_buffer("on_host", torch.randn(3, generator=torch.Generator()))
        run.steps(STEPS)
        assert torch.equal(run.model.table.cpu(), model.table)  # type: ignore[operator, union-attr]
        return run.bits()

    return training


def drawn(world: lockstep.World) -> dict[str, Any]:
    """The numbers that each shard draws on the device and on the CPU; those after the loop."""
    run = run_of(world, "partly used")
    found: dict[int, list[float]] = {}
    after = []
    for number in STEPS:
        for x, _ in lockstep.shards(run.model, batch_of(number), NUM_SHARDS, step=number):
            shard = current_shard()
            assert shard is not None
            found[10 * number + shard.number] = [
                torch.rand((), device=world.device).item(),
                torch.rand(()).item(),
            ]
            run.model(x.to(world.device)).sum().backward()
        after.append([torch.rand((), device=world.device).item(), torch.rand(()).item()])
    every: list[Any] = [found]
    if dist.is_initialized():
        every = [None] * world.world_size
        dist.all_gather_object(every, found)
    merged = {key: value for each in every for key, value in each.items()}
    assert len({repr(value) for value in merged.values()}) == NUM_SHARDS * len(STEPS)
    return {"shards": sorted(merged.items()), "after": after}


def left_early(world: lockstep.World) -> dict[str, Any]:
    """Gradients that leave in the backward of the last shard, in chunks of a few."""
    in_turn: list[bool] = []
    start = messages.Messages.start

    def noting(self: messages.Messages, rows: torch.Tensor) -> messages.Sent:
        is_of_autograd = threading.current_thread() is not threading.main_thread()
        in_turn.append(is_of_autograd and current_shard() is not None)
        return start(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CAP_BYTES", 1024)
        patch.setattr(messages.Messages, "start", noting)
        run = run_of(world, "transformer")
        run.steps([*range(4)])
    if world.world_size > 1:
        assert in_turn.count(True) >= len(in_turn) // 2
    return run.bits()


class OnStreams(nn.Module):
    """Two branches, each on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(108, 5), nn.Linear(108, 5)
        self.streams = torch.Stream(device), torch.Stream(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        here = torch.accelerator.current_stream()
        found = []
        for layer, stream in zip((self.one, self.other), self.streams, strict=True):
            stream.wait_stream(here)
            with stream:
                found.append(layer(x))
            here.wait_stream(stream)
            found[-1].record_stream(here)
        return found[0] * found[1]


def on_streams(world: lockstep.World) -> dict[str, Any]:
    torch.manual_seed(5)
    model = OnStreams(world.device).to(world.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CAP_BYTES", 1024)
        model = lockstep.parallelize(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            batch = [each.to(world.device) for each in batch_of(number)]
            for x, y in lockstep.shards(model, batch, NUM_SHARDS, step=number):
                lockstep.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: each.cpu().numpy().tobytes() for name, each in model.state_dict().items()}


def failed_step(world: lockstep.World) -> dict[str, Any]:
    """A step that fails on the last rank is left out on all."""
    run = run_of(world, "convnet")
    run.steps([0, 1])
    with pytest.raises((ZeroDivisionError, CollectiveFailed)):
        failing(run, world)
    assert all(p.grad is None for p in run.model.parameters())
    run.steps([3, 4])
    return run.bits()


def failing(run: Run, world: lockstep.World) -> None:
    for x, y in lockstep.shards(run.model, batch_of(2), NUM_SHARDS, step=2):
        F.cross_entropy(run.model(x.to(world.device)), y.to(world.device)).backward()
        shard = current_shard()
        assert shard is not None
        if shard.number == NUM_SHARDS - 1:
            raise ZeroDivisionError


def over_gloo(world: lockstep.World) -> dict[str, Any]:
    """A group that has no all-to-all of a device's memory."""
    group = dist.new_group(backend="gloo")
    run = Run(model_of("convnet"), OPTIMIZERS["SGD"], group, NUM_SHARDS, device=world.device)
    run.steps(STEPS)
    return run.bits()


PROGRAMS: dict[str, Callable[[lockstep.World], Any]] = {
    "convnet, SGD": trained("convnet", "SGD"),
    "convnet, AdamW": trained("convnet", "AdamW"),
    "partly used": trained("partly used", "AdamW"),
    "transformer": trained("transformer", "SGD"),
    "autocast": trained("transformer", "AdamW under autocast"),
    "sharded optimizer": trained("transformer", "AdamW", {}),
    "sharded optimizer, overlap": trained("partly used", "SGD", {"overlap": True}),
    "bfloat16": in_bfloat16,
    "weights": of_weights,
    "buffers of shard 0": with_buffers("rank0"),
    "means of buffers": with_buffers("mean"),
    "numbers that are drawn": drawn,
    "left early": left_early,
    "streams": on_streams,
    "a step that fails": failed_step,
}
if KIND == "cuda":
    PROGRAMS["over Gloo"] = over_gloo


def all_programs(world: lockstep.World) -> dict[str, Any]:
    found = {}
    for name, program in PROGRAMS.items():
        lockstep.seed(3)
        found[name] = program(world)
    return found


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    """What all ranks have of each program, by the number of ranks."""
    return {number: lockstep.launch(all_programs, number) for number in (1, *NUM_RANKS)}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_end_with_the_bits_of_one(name: str, num_ranks: int, results: Any) -> None:
    alone = results[1][0][name]
    for rank in results[num_ranks]:
        assert not differing(rank[name], alone)


class _RankFirst(sums.LocalSums):
    """Adds up all shards of a rank first, as they come."""

    def add(self, shard: int, gradients: sums.Gradients) -> None:
        if self._stack:
            self._next = shard + 1
            (first, _), left = self._stack[0]
            self._stack = [((first, shard + 1), sums._sum(left, gradients))]
        else:
            super().add(shard, gradients)


def in_turn(root: Any, values: Any, add: Any) -> Any:
    first, *others = values.values()
    for each in others:
        first = add(first, each)
    return first


def by_rank(self: Any, number: int) -> int:
    return hash((self._place, self._rank, number - self._mine.start)) % 2**62


def without_a_rule(world: lockstep.World) -> dict[str, Any]:
    """Runs without the tree's order, and without seeds by shard."""

    def cover(shards: range, root: object) -> list[tuple[int, int]]:
        return [(shards.start, shards.stop)]

    patches: dict[str, list[tuple[Any, str, Any]]] = {
        "order": [
            (local_step, "LocalSums", _RankFirst),
            (over_ranks, "cover", cover),
            (sums, "cover", cover),
            (messages, "fold", in_turn),
        ],
        "seeds": [(Shards, "_seed", by_rank)],
    }
    found = {}
    for name, its in patches.items():
        lockstep.seed(3)
        with pytest.MonkeyPatch.context() as patch:
            for place, attribute, value in its:
                patch.setattr(place, attribute, value)
            found[name] = trained("transformer", "SGD")(world)
    return found


def test_without_one_of_the_rules_the_bits_differ() -> None:
    """A control: the comparison finds sums of ranks in their order, and seeds by rank."""
    (alone,) = lockstep.launch(without_a_rule, 1)
    for found in lockstep.launch(without_a_rule, 3):
        for name, bits in found.items():
            assert differing(bits, alone[name]), name


def refusals(world: lockstep.World) -> None:
    lockstep.seed(3)
    x, device = torch.ones(4, 3, device=world.device), world.device

    def step_of(model: nn.Module, body: Callable[[torch.Tensor], object]) -> None:
        for part in lockstep.shards(model, x, NUM_SHARDS):
            body(part)

    model, other = (lockstep.parallelize(nn.Linear(3, 2).to(device)) for _ in range(2))
    with pytest.raises(ModelError, match="A backward reaches another parallel model"):
        step_of(model, lambda part: other(part).sum().backward())

    def two_means(part: torch.Tensor) -> None:
        for weight in 1.0, 2.0:
            losses = model(part).sum(1)
            lockstep.mean(losses, weight=torch.full_like(losses, weight).detach()).backward()

    with pytest.raises(ValueError, match=r"Shard . has two means, over 2 and over 1 samples"):
        step_of(model, two_means)
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device).eval()
    local = lockstep.parallelize(layers, broadcast_buffers=False)

    def count(_: torch.Tensor) -> None:
        local[1].num_batches_tracked += 1  # type: ignore[index]

    with pytest.raises(ModelError, match=r"has changed the buffer '1.num_batches_tracked'"):
        step_of(local, count)
    assert local[1].num_batches_tracked == 0  # type: ignore[index]
    means = lockstep.parallelize(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device))
    means[1].running_mean.neg_() if world.rank else None
    step_of(means.eval(), lambda part: means(part).sum().backward())  # -0.0 and 0.0 differ
    if world.world_size > 1:
        raise AssertionError("the ranks' buffers differ, and nobody has said so")


def test_what_devices_know_late_is_refused_by_name() -> None:
    with pytest.raises(RankFailed) as failure:
        lockstep.launch(refusals, 2)
    assert ModelMismatch.__name__ in str(failure.value)
    assert "digest of the buffers" in str(failure.value)
