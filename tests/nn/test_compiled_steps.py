"""Compiled functions with our calls, or a whole training step, in them; and compiled autograd."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ModelError, ParameterChanged, RankFailed
from tests.processes import Processes, processes

# What torch warns of is its own: dynamo looks at tensors and optimizers, compiled or not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]

STEPS = 3
TWO = ["cpu", "cpu"]
OVER_GLOO = pytest.param("wrapped", "gloo", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with processes(2) as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    _kept.clear()
    torch._dynamo.reset()


class Net(nn.Module):
    """Some layers, of which one is used or another, as the data has it."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.norm = norm or nn.Identity()
        self.last, self.other = nn.Linear(6, 1), nn.Linear(6, 1)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.double().parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.norm(torch.tanh(self.first(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(x))


class Branching(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last if x[0, 0] > 0 else self.other)(self.hidden(x))


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return self.last(checkpoint(self.hidden, x, use_reentrant=True))


def batch(step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    """The same batch of every step, whoever takes it, or a rank's part of it."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, dtype=torch.float64, generator=generator).chunk(size)[rank]


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def exact(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return lockstep.mean(model(x).square())


# What was compiled, and the models.
_kept: list[object] = []


def trained(
    model: nn.Module,
    forward_backward: Callable[[torch.Tensor], object],
    parts: Callable[[int], torch.Tensor],
    *,
    compiles_step: bool = False,
) -> list[torch.Tensor]:
    """The parameters after some steps of SGD with momentum, the whole of each compiled or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        forward_backward(x)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    run = torch.compile(step, backend="eager") if compiles_step else step
    if compiles_step:
        _kept.append((run, model))
    for number in range(STEPS):
        run(parts(number))
    return [p.detach() for p in model.parameters()]


def alone(model: nn.Module) -> list[torch.Tensor]:
    """The same by one process on whole batches, nothing compiled."""
    return trained(model, lambda x: plain(model, x).backward(), batch)


def branching_alone() -> list[torch.Tensor]:
    model = Branching()

    def forward_backward(x: torch.Tensor) -> None:
        torch.stack([plain(model, part) for part in x.chunk(2)]).mean().backward()

    return trained(model, forward_backward, batch)


# What is trained: a model of each kind, made parallel on two ranks, and in one process.

Way = Callable[[int, int], list[torch.Tensor]]


def whole(make: Callable[[], nn.Module], parallel: Callable[..., nn.Module], loss: Loss) -> Way:
    def way(rank: int, size: int) -> list[torch.Tensor]:
        model = parallel(make())

        def forward_backward(x: torch.Tensor) -> None:
            loss(model, x).backward()

        parts = [batch(step, rank, size) for step in range(STEPS)]
        return trained(model, forward_backward, parts.__getitem__, compiles_step=True)

    return way


def with_norm() -> nn.Module:
    return Net(nn.BatchNorm1d(6))


def with_synced_norm() -> nn.Module:
    return lockstep.SyncBatchNorm.convert_sync_batchnorm(with_norm())


def of_torch(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def model_compiled(model: nn.Module) -> nn.Module:
    return torch.compile(lockstep.DistributedDataParallel(model), backend="aot_eager")


def blocks_compiled(model: nn.Module) -> nn.Module:
    for part in model.children():
        part.compile(backend="eager")
    return lockstep.parallelize(model)


def by_hand(rank: int, size: int) -> list[torch.Tensor]:
    model = Net()

    def forward_backward(x: torch.Tensor) -> None:
        plain(model, x).backward()
        lockstep.average_gradients(model, weight=len(x))

    parts = [batch(step, rank, size) for step in range(STEPS)]
    return trained(model, forward_backward, parts.__getitem__, compiles_step=True)


def in_micro_batches(rank: int, size: int) -> list[torch.Tensor]:
    model = lockstep.parallelize(Net())

    def forward_backward(x: torch.Tensor) -> None:
        with lockstep.accumulate(model):
            exact(model, x[:1]).backward()
        exact(model, x[1:]).backward()

    parts = [batch(step, rank, size) for step in range(STEPS)]
    return trained(model, forward_backward, parts.__getitem__, compiles_step=True)


def on_one_rank(rank: int, size: int) -> list[torch.Tensor]:
    """The other has no samples, and no gradient of its own."""
    model = lockstep.parallelize(Net())

    def forward_backward(x: torch.Tensor) -> None:
        values = model(x).square() if len(x) else torch.zeros(0, dtype=x.dtype)
        lockstep.mean(values).backward()

    parts = [batch(step) if rank == 0 else batch(step)[:0] for step in range(STEPS)]
    return trained(model, forward_backward, parts.__getitem__, compiles_step=True)


def after_a_failure(rank: int, size: int) -> list[torch.Tensor]:
    model = lockstep.parallelize(Net())
    fails = [True]

    def fail(_: torch.Tensor) -> None:
        if fails[0]:
            raise ZeroDivisionError

    model.first.bias.register_hook(fail)

    @torch.compile(backend="eager")
    def forward_backward(x: torch.Tensor) -> None:
        plain(model, x).backward()

    with pytest.raises(ZeroDivisionError):
        forward_backward(batch(0, rank, size))
    fails[0] = False
    return trained(model, forward_backward, lambda step: batch(step, rank, size))


def joined(rank: int, size: int) -> list[torch.Tensor]:
    model = lockstep.parallelize(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        exact(model, x).backward()
        optimizer.step()

    with lockstep.join(model):
        for number in range(2 + rank):
            step(batch(number, rank, size))
    return [p.detach() for p in model.parameters()]


def joined_alone() -> list[torch.Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in (batch(0), batch(1), batch(2, 1, 2)):
        optimizer.zero_grad()
        plain(model, x).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


Wrapper = lockstep.DistributedDataParallel
WAYS: dict[str, tuple[Way, Callable[[], list[torch.Tensor]]]] = {
    "in place": (whole(Net, lockstep.parallelize, plain), lambda: alone(Net())),
    "wrapped": (whole(Net, Wrapper, exact), lambda: alone(Net())),
    "model compiled": (whole(Net, model_compiled, exact), lambda: alone(Net())),
    "blocks compiled": (whole(Net, blocks_compiled, plain), lambda: alone(Net())),
    "norm": (whole(with_synced_norm, Wrapper, plain), lambda: alone(with_norm())),
    "branching": (whole(Branching, lockstep.parallelize, plain), branching_alone),
    "checkpointed": (whole(Checkpointed, Wrapper, plain), lambda: alone(Checkpointed())),
    "micro-batches": (in_micro_batches, lambda: alone(Net())),
    "one rank": (on_one_rank, lambda: alone(Net())),
    "failure": (after_a_failure, lambda: alone(Net())),
    "joined": (joined, joined_alone),
    "by hand": (by_hand, lambda: alone(Net())),
    "torch's": (whole(Net, of_torch, plain), lambda: alone(Net())),
}
COMPILED_AUTOGRAD = ["wrapped", "norm", "branching", "micro-batches", "one rank", "failure"]
# Compiling takes seconds, so `make test` does the one that has most in common with the others.
SOON = ["in place"]


def over_shm(names: Iterable[str], soon: Sequence[str]) -> list[object]:
    marks = {name: [] if name in soon else [pytest.mark.long] for name in names}
    return [pytest.param(name, "shm", marks=marks[name]) for name in names]


def run(name: str, compiles_autograd: bool = False) -> list[torch.Tensor]:
    with torch._dynamo.config.patch(compiled_autograd=compiles_autograd):
        try:
            return WAYS[name][0](dist.get_rank(), dist.get_world_size())
        finally:
            _kept.clear()
            torch._dynamo.reset()


def assert_those_of_one_process(name: str, results: list[list[torch.Tensor]]) -> None:
    expected = WAYS[name][1]()
    for parameters in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "backend"), [*over_shm(WAYS, SOON), OVER_GLOO])
def test_a_compiled_step_is_that_of_one_process(ranks: Processes, name: str, backend: str) -> None:
    assert_those_of_one_process(name, ranks.run(run, backend, 2, name))


@pytest.mark.parametrize(
    "name",
    ["joined", *(pytest.param(name, marks=pytest.mark.long) for name in ("wrapped", "norm"))],
)
def test_a_compiled_step_of_ranks_that_are_threads(name: str) -> None:
    try:
        results = lockstep.launch(lambda world: WAYS[name][0](world.rank, 2), 2, ranks="threads")
    finally:
        # When no thread runs compiled code any more: torch has one list of it for all threads, from
        # which it takes what is dropped, and crashes if another thread is at it then.
        _kept.clear()
        torch._dynamo.reset()
    assert_those_of_one_process(name, results)


@pytest.mark.parametrize(("name", "backend"), [*over_shm(COMPILED_AUTOGRAD, []), OVER_GLOO])
def test_compiled_autograd(ranks: Processes, name: str, backend: str) -> None:
    assert_those_of_one_process(name, ranks.run(run, backend, 2, name, True))


def train_in_context(backend: str) -> list[torch.Tensor]:
    model = torch.compile(lockstep.DistributedDataParallel(Net()), backend=backend)

    def forward_backward(x: torch.Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            plain(model, x).backward()

    return trained(
        model, forward_backward, lambda step: batch(step, dist.get_rank(), dist.get_world_size())
    )


@pytest.mark.long
def test_compiled_autograd_as_a_context(ranks: Processes) -> None:
    for parameters in ranks.run(train_in_context, "shm", 2, "eager"):
        torch.testing.assert_close(parameters, alone(Net()), rtol=1e-9, atol=1e-12)


def test_compiled_autograd_of_ranks_that_are_threads_is_refused() -> None:
    def body(world: lockstep.World) -> None:
        with torch._dynamo.config.patch(compiled_autograd=True):
            lockstep.parallelize(Net())

    with pytest.raises(RankFailed, match="one backward at a time"):
        lockstep.launch(body, 2, ranks="threads")


def train_with_traced_backward() -> None:
    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        pytest.raises(ModelError, match="trace_autograd_ops"),
    ):
        WAYS["in place"][0](dist.get_rank(), dist.get_world_size())
    torch._dynamo.reset()


def test_a_backward_that_is_traced_is_refused(ranks: Processes) -> None:
    ranks.run(train_with_traced_backward, "shm", 2)


def replace_a_layer(is_same: bool) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = lockstep.parallelize(Net())

    @torch.compile(backend="eager")
    def forward_backward(x: torch.Tensor) -> None:
        plain(model, x).backward()

    for step in range(2):
        forward_backward(batch(step, rank, size))
    model.zero_grad()
    model.last.weight = nn.Parameter(model.last.weight.detach() * (2 if is_same else 2 + rank))
    with contextlib.nullcontext() if is_same else pytest.raises(ParameterChanged, match="last"):
        forward_backward(batch(0, rank, size))
    model.zero_grad()
    forward_backward(batch(0, rank, size))
    torch._dynamo.reset()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("is_same", [False, True])
def test_a_parameter_that_compiled_code_has_used_too_early(ranks: Processes, is_same: bool) -> None:
    model = Net()
    with torch.no_grad():
        model.last.weight *= 2
    plain(model, batch(0)).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for gradients in ranks.run(replace_a_layer, "shm", 2, is_same):
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(lockstep.DataParallel(model, TWO), backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    replicated = lockstep.DataParallel(model, TWO)
    replicated.compile(backend="eager")
    return replicated


def compiled_inside(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return lockstep.DataParallel(model, TWO)


@pytest.mark.parametrize(
    ("make", "compiles_step"),
    [
        (compiled, False),
        pytest.param(compiled, True, marks=pytest.mark.long),
        (compiled_in_place, False),
        (compiled_inside, False),
    ],
)
def test_compiled_replicas(make: Callable[[nn.Module], nn.Module], compiles_step: bool) -> None:
    model = make(Net())
    parameters = trained(
        model, lambda x: plain(model, x).backward(), batch, compiles_step=compiles_step
    )
    torch.testing.assert_close(parameters, alone(Net()), rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_dynamo_is_not_imported() -> None:
    code = (
        "import sys, lockstep, lockstep.nn, lockstep.comm.hosts;"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
