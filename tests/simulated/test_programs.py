"""Programs as users write them, with streams and copies of their own, against one process.

All of them run in one process of each rank, on devices that do nothing unasked.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.simulated.control import KIND

pytestmark = pytest.mark.forks

NUM_RANKS, NUM_STEPS, WIDTH = 2, 4, 8


class Place(NamedTuple):
    """Where a program runs: on a rank's device, or alone on the CPU."""

    rank: int
    num_ranks: int
    device: torch.device

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    def make(self, model: nn.Module, **options: object) -> nn.Module:
        model = model.to(self.device)
        return model if self.is_alone else lockstep.parallelize(model, **options)

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows: 5 of 8, and the other 3."""
        return batch if self.is_alone else batch.split([5, 3])[self.rank]

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean() if self.is_alone else lockstep.mean(losses)

    def clip(self, model: nn.Module, most: float) -> torch.Tensor:
        clip = nn.utils.clip_grad_norm_ if self.is_alone else lockstep.clip_grad_norm_
        return clip(model.parameters(), most)

    def stream(self) -> torch.Stream | None:
        return None if self.is_alone else torch.Stream(self.device)


class On:
    """Work on a stream behind the current one; nothing waits for it but what calls join()."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
            self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)


def join(stream: torch.Stream | None, *tensors: torch.Tensor) -> None:
    if stream is not None:
        current = torch.accelerator.current_stream()
        current.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(current)


def small_net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()


def batches(num: int = NUM_STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, WIDTH, dtype=torch.float64, generator=generator) for _ in range(num)]


def losses_of(model: Callable, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1)


def values(*models: nn.Module) -> list[torch.Tensor]:
    return [each.detach().cpu() for model in models for each in model.state_dict().values()]


def prefetched(place: Place) -> list[torch.Tensor]:
    """The next batch is copied from pinned memory on a stream of its own, and its memory reused."""
    model = place.make(small_net(), bucket_cap_mb=0.0005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stream = place.stream()

    def copied() -> Iterator[torch.Tensor]:
        for batch in batches():
            part = place.part(batch)
            if stream is None:
                yield part
                continue
            pinned = part.pin_memory()
            with stream:
                x = pinned.to(place.device, non_blocking=True)
            join(stream, x)
            yield x

    for x in copied():
        place.mean(losses_of(model, x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


class Towers(nn.Module):
    """Two branches, each on a stream of its own, and a third that only some steps use."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.first, self.second, self.third = small_net(1), small_net(2), small_net(3)
        self.streams = place.stream(), place.stream()

    def forward(self, x: torch.Tensor, third: bool) -> torch.Tensor:
        with On(self.streams[0]):
            first = self.first(x)
        with On(self.streams[1]):
            second = self.second(x)
            if third:
                second = second + self.third(x)
        join(self.streams[0], first)
        join(self.streams[1], second)
        return first * second


def towers(place: Place) -> list[torch.Tensor]:
    model = place.make(Towers(place), bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(batches()):
        x = place.part(batch).to(place.device)
        place.mean(losses_of(lambda x, n=number: model(x, n % 2 == 1), x)).backward()
        place.clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def scaled(place: Place) -> list[torch.Tensor]:
    """A scaler that meets infinity on one rank in one step, with clipping between."""
    model = place.make(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(place.device.type, init_scale=8.0, growth_interval=2)
    scales = []
    for number, batch in enumerate(batches(6)):
        x = place.part(batch).to(place.device)
        losses = losses_of(model, x)
        if number == 2 and place.rank == 0:
            losses = losses * torch.tensor([float("inf")] + [1.0] * (len(x) - 1)).to(x)
        scaler.scale(place.mean(losses)).backward()
        scaler.unscale_(optimizer)
        place.clip(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        scales.append(scaler.get_scale())
    return [*values(model), torch.tensor(scales)]


def recomputed(place: Place) -> list[torch.Tensor]:
    """Checkpoints of activations, reentrant and not, on a stream of the program's."""
    model, stream = place.make(small_net(), bucket_cap_mb=0.0005), place.stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches()):
        x = place.part(batch).to(place.device).requires_grad_()
        with On(stream):
            hidden = checkpoint(model[:2], x, use_reentrant=number % 2 == 0)
            out = checkpoint(model[2:], hidden, use_reentrant=number > 1)
        join(stream, out)
        place.mean(out.square().sum(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def adversaries(place: Place) -> list[torch.Tensor]:
    """Two models in turns, of which one's loss goes through the other."""
    maker, judge = (
        place.make(small_net(1)),
        place.make(small_net(2)[:1].append(nn.Linear(WIDTH, 1).double())),
    )
    widen = place.make(nn.Linear(3, WIDTH).double())
    makers = torch.optim.Adam([*maker.parameters(), *widen.parameters()], lr=0.01)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    for batch in batches():
        x = place.part(batch).to(place.device)
        made = widen(maker(x))
        judges.zero_grad()
        place.mean(
            F.softplus(judge(made.detach())).sum(1) + F.softplus(-judge(x)).sum(1)
        ).backward()
        judges.step()
        makers.zero_grad()
        place.mean(F.softplus(-judge(made)).sum(1)).backward()
        makers.step()
    return values(maker, widen, judge)


def averaged_aside(place: Place) -> list[torch.Tensor]:
    """A sharded step that overlaps with others, and a moving average on a side stream."""
    model, stream = place.make(small_net()), place.stream()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if not place.is_alone:
        lockstep.shard_optimizer(optimizer, overlap=True)
    for batch in batches():
        x = place.part(batch).to(place.device)
        place.mean(losses_of(model, x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with On(stream), torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.3)
        join(stream)
    return values(model, average)


def micro_batches(place: Place) -> list[torch.Tensor]:
    model = place.make(small_net(), bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        first, second = (half.to(place.device) for half in place.part(batch).tensor_split(2))
        if place.is_alone:
            place.mean(torch.cat([losses_of(model, first), losses_of(model, second)])).backward()
        else:
            with lockstep.accumulate(model):
                lockstep.mean(losses_of(model, first)).backward()
            lockstep.mean(losses_of(model, second)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def steps_in_backward(place: Place) -> list[torch.Tensor]:
    """An optimizer for each parameter, which steps when its gradient is there."""
    model = place.make(small_net(), bucket_cap_mb=0.0005)
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in batches():
        place.mean(losses_of(model, place.part(batch).to(place.device))).backward()
    return values(model)


def searched(place: Place) -> list[torch.Tensor]:
    model = place.make(small_net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for batch in batches(2):
        x = place.part(batch).to(place.device)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = place.mean(losses_of(model, x))
            loss.backward()
            return loss

        optimizer.step(closure)
    return values(model)


def normalised(place: Place) -> list[torch.Tensor]:
    """Batch norms over all ranks, with an evaluation after each step."""
    model = small_net()
    model.insert(1, nn.BatchNorm1d(WIDTH).double())
    if not place.is_alone:
        model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)
    model = place.make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluated = []
    for batch in batches():
        x = place.part(batch).to(place.device)
        place.mean(losses_of(model, x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            evaluated.append(model(batches()[0].to(place.device)).cpu())
        model.train()
    return [*values(model), *evaluated]


def thawed(place: Place) -> list[torch.Tensor]:
    """A part that is frozen at first, a new head, and a move to the CPU and back between."""
    model = place.make(small_net(), bucket_cap_mb=0.0005)
    model[0].requires_grad_(False)
    for number, batch in enumerate(batches(6)):
        if number == 2:
            model[0].requires_grad_(True)
        if number == 3:
            model.to("cpu").to(place.device)
        if number == 4:
            torch.manual_seed(5 if place.rank == 0 else 6)
            model[4] = nn.Linear(WIDTH, 3).double().to(place.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        place.mean(losses_of(model, place.part(batch).to(place.device))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def read_aside(place: Place) -> list[torch.Tensor]:
    """Gradients that a side stream reads behind backward, and the program keeps."""
    model, stream, kept = place.make(small_net(), bucket_cap_mb=0.0005), place.stream(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        place.mean(losses_of(model, place.part(batch).to(place.device))).backward()
        with On(stream):
            norms = torch.stack([p.grad.norm() for p in model.parameters()])
        kept += [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        join(stream, norms)
        kept.append(norms)
    return [*values(model), *(each.cpu() for each in kept)]


def by_hand(place: Place) -> list[torch.Tensor]:
    """No parallel model: gradients are averaged between backward and step."""
    model = small_net().to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        x = place.part(batch).to(place.device)
        losses_of(model, x).mean().backward()
        if not place.is_alone:
            lockstep.average_gradients(model, weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def saved(place: Place) -> list[torch.Tensor]:
    """Saved after two steps with a sharded optimizer, and loaded into other objects."""
    kept = None
    for number, batch in enumerate(batches()):
        if number in (0, 2):
            model = place.make(small_net(number + 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if not place.is_alone:
                lockstep.shard_optimizer(optimizer, overlap=True)
            if number and place.is_alone:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            elif number:
                lockstep.load(kept, model=model, optimizer=optimizer)
        place.mean(losses_of(model, place.part(batch).to(place.device))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and place.is_alone:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        elif number == 1:
            kept = lockstep.broadcast(tempfile.mkdtemp())
            lockstep.save(kept, model=model, optimizer=optimizer)
    return values(model)


def looped(place: Place) -> list[torch.Tensor]:
    """A loop over steps(), which takes snapshots of what is on the device."""
    model = place.make(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if place.is_alone:
        numbers: object = range(NUM_STEPS)
    else:
        numbers = lockstep.steps(NUM_STEPS, model=model, optimizer=optimizer)
    for number in numbers:
        x = place.part(batches()[number]).to(place.device)
        place.mean(losses_of(model, x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def half_on_the_cpu(place: Place) -> list[torch.Tensor]:
    """A model whose head stays on the CPU, beside streams of the program's."""
    model, stream = nn.Module(), place.stream()
    model.body, model.head = small_net().to(place.device), nn.Linear(3, 2).double()
    if not place.is_alone:
        model = lockstep.parallelize(model, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        x = place.part(batch).to(place.device)
        with On(stream):
            hidden = model.body(x)
        join(stream, hidden)
        place.mean(losses_of(model.head, hidden.cpu())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


PROGRAMS = [
    prefetched,
    towers,
    scaled,
    recomputed,
    adversaries,
    averaged_aside,
    micro_batches,
    steps_in_backward,
    searched,
    normalised,
    thawed,
    read_aside,
    by_hand,
    saved,
    looped,
    half_on_the_cpu,
]


def run_each(world: lockstep.World) -> dict[str, list[torch.Tensor]]:
    found = {}
    for program in PROGRAMS:
        print("runs", program.__name__, flush=True)
        found[program.__name__] = program(Place(world.rank, world.world_size, world.device))
    return found


@pytest.fixture(scope="module")
def of_ranks() -> list[dict]:
    return lockstep.launch(run_each, NUM_RANKS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_on_devices_that_do_nothing_unasked_is_that_of_one_process(
    program: Callable, of_ranks: list[dict]
) -> None:
    expected = program(Place(0, 1, torch.device("cpu")))
    for found in of_ranks:
        torch.testing.assert_close(found[program.__name__], expected, rtol=1e-9, atol=1e-9)


def replicated(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches():
        losses_of(model, batch.to(device)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.3)
    return values(model, average)


@pytest.mark.parametrize("devices", [[1, 0, "cpu"], ["cpu", 1]])
def test_replicas_beside_the_cpu_are_clipped_and_averaged_as_in_one_process(devices: list) -> None:
    first = torch.device("cpu") if devices[0] == "cpu" else torch.device(KIND, devices[0])
    found = replicated(lockstep.DataParallel(small_net().to(first), devices), first)
    expected = replicated(small_net(), torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
