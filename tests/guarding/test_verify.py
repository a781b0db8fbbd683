"""Repeats of a bad step tell whether samples, a device or neither is to blame."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelError, StepSkipped
from lockstep.guarding.repeats import judge
from tests.counts import num_examples
from tests.ranks import run_ranks

Cause = Literal["samples", "device", "unreproducible"]
How = Literal["nan", "exception", "spike", "good"]


class Net(nn.Module):
    """Goes wrong for some samples, on some rank, or differently each time."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        numbers = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=numbers)
        self.is_bad = False  # this rank's device
        self.how: How = "nan"
        self.noise: Any = None
        self.generator = torch.Generator().manual_seed(rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_wrong = self.is_bad or bool((x == 7).any())
        if is_wrong and self.how == "exception":
            raise ArithmeticError(f"planted, in {object()}")
        x = torch.relu(self.first(x))
        x = x * torch.bernoulli(torch.full(x.shape, 0.7), generator=self.generator)
        out = self.last(x)
        if self.noise is not None:
            out = out * (1 + next(self.noise))
        factors = {"nan": float("nan"), "spike": 1e4, "good": 1.0}
        return out * (factors[self.how] if is_wrong else 1.0)


def verdict_of(
    cause: Cause, how: How, culprit: int, rank: int, group: dist.ProcessGroup | None
) -> Any:
    """Take good steps, and one that goes wrong; return what is told of that."""
    torch.set_num_threads(1)
    model = lockstep.parallelize(Net(rank), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    guard = lockstep.guard(model, optimizer, on_skip="verify", spike=6.0)
    data = torch.Generator().manual_seed(rank)

    def body(x: torch.Tensor, *, scale: float) -> None:
        (model(x).square().mean() * scale).backward()
        optimizer.step()

    for _ in range(17 if how == "spike" else 2):
        x = torch.rand(4, 6, generator=data)
        assert not guard.run(body, x, scale=0.5).skipped
        optimizer.zero_grad()
    x, model.how = torch.rand(4, 6, generator=data), how
    if rank == culprit:
        model.is_bad = cause == "device"
        if cause != "device":
            x[1] = 7.0
        if cause == "unreproducible":
            model.noise = itertools.count(1)
    before = [*map(torch.clone, model.parameters()), model.generator.get_state()]
    step = guard.run(body, x, scale=0.5)
    assert step.skipped
    assert all(map(torch.equal, before, [*model.parameters(), model.generator.get_state()]))
    assert (step.blame.rank, step.num_skipped, step.in_a_row) == (culprit, 1, 1)
    return step.blame


CASES = [
    ("samples", "nan"), ("samples", "exception"), ("samples", "spike"),
    ("device", "nan"), ("device", "exception"), ("device", "spike"), ("unreproducible", "spike"),
]  # fmt: skip


def expected(cause: str, how: str, size: int) -> str:
    """With two ranks, or an exception, nothing shows that devices compute the same otherwise."""
    return "rank" if cause == "device" and (size == 2 or how == "exception") else cause


@pytest.mark.parametrize(("cause", "how"), CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_right_one_is_named(size: int, cause: Cause, how: How) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        blame = verdict_of(cause, how, size - 1, rank, group)
        assert blame.verdict == expected(cause, how, size), blame
        assert f"; {blame.verdict}: " in str(blame)

    run_ranks(size, body, backend="shm" if how == "nan" else "threads")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(num_examples(200, 10)))
def test_random_causes_are_named(seed: int) -> None:
    rng = random.Random(seed)
    size, (cause, how) = rng.choice([2, 3, 4]), rng.choice(CASES)
    culprit = rng.randrange(size)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        blame = verdict_of(cause, how, culprit, rank, group)
        assert blame.verdict == expected(cause, how, size), blame

    run_ranks(size, body, backend=rng.choice(["shm", "threads"]))


def test_one_rank_has_no_other_to_compare_with() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        blame = verdict_of("samples", "nan", 0, rank, group)
        assert blame.verdict == "unknown"
        assert "no other rank" in blame.reason
        assert verdict_of("unreproducible", "spike", 0, rank, group).verdict == "unreproducible"

    run_ranks(1, body, backend="threads")


def test_a_failure_of_the_update_is_not_repeated() -> None:
    class Bad(torch.optim.SGD):
        is_bad = False

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.is_bad:
                raise ArithmeticError("planted")

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 1), process_group=group)
        optimizer = Bad(model.parameters(), 0.1)
        optimizer.is_bad = rank == 1

        def take(x: torch.Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()

        before = model.weight.detach().clone()
        step = lockstep.guard(model, optimizer, on_skip="verify").run(take, torch.ones(1, 2))
        assert (step.blame.rank, step.blame.verdict) == (1, "unknown")
        assert "failed in its update" in step.blame.reason
        assert torch.equal(model.weight, before)

    run_ranks(2, body, backend="threads")


@pytest.mark.parametrize(
    ("first", "again", "moved", "verdict"),
    [
        # Rank 1 of three is to blame; its part was moved to rank 2.
        ("abc", "abc", "cab", "samples"),
        ("abc", "abc", "cax", "device"),
        ("abc", "axc", "", "unreproducible"),
        ("abc", "abx", "", "unreproducible"),
        ("abc", "abc", "xax", "unreproducible"),  # rank 2's part has other bits on rank 0
        ("abc", "abc", "ca-", "unknown"),
        ("-b-", "-b-", "-bc", "rank"),  # it came to the same with other samples
        ("-b-", "-b-", "--c", "unknown"),
        ("a-c", "abc", "cab", "unknown"),
    ],
)
def test_verdicts(first: str, again: str, moved: str, verdict: str) -> None:
    told = [[None if each == "-" else each for each in text] for text in (first, again, moved)]
    assert judge(1, *told, ranks=[4, 5, 6])[0] == verdict


def test_a_with_can_not_be_verified() -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(ModelError, match=r'on_skip="verify" repeats the step'),
        lockstep.guard(model, optimizer, on_skip="verify"),
    ):
        pass


@pytest.mark.parametrize("shard", [None, lockstep.shard_optimizer], ids=["plain", "sharded"])
@pytest.mark.parametrize(("size", "culprit"), [(2, 1), (3, 0), (4, 2)])
def test_a_device_that_computes_wrong_gradients_is_found(
    size: int, culprit: int, shard: Any
) -> None:
    """They are finite and of a usual size: no rank would notice."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        torch.set_num_threads(1)
        model = lockstep.parallelize(Net(rank), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        if shard is not None:
            shard(optimizer)
        guard = lockstep.guard(model, optimizer, verify_every=4, max_consecutive=3)
        data = torch.Generator().manual_seed(rank)
        calls: list[int] = []

        def take(x: torch.Tensor) -> None:
            calls.append(1)
            (model(x).square().mean() * (1.001 if model.is_bad else 1)).backward()
            optimizer.step()

        skipped = []
        for _ in range(6):
            step = guard.run(take, torch.rand(4, 6, generator=data))
            optimizer.zero_grad()
            assert not step.skipped
        assert len(calls) == 6 + 2
        model.is_bad = rank == culprit
        model.how = "good"
        with pytest.raises(StepSkipped, match="3 guarded steps in a row") as raised:  # noqa: PT012
            for _ in range(14):
                before = model.first.weight.detach().clone()
                step = guard.run(take, torch.rand(4, 6, generator=data))
                optimizer.zero_grad()
                skipped.append(step.skipped)
                assert torch.equal(before, model.first.weight) == step.skipped
        assert skipped == [False, True, True], "then each step is compared"
        blame = raised.value.blame
        verdict = "rank" if size == 2 else "device"
        assert (blame.kind, blame.verdict, blame.step) == ("wrong", verdict, 9)
        assert blame.rank == (None if size == 2 else culprit)

    run_ranks(size, body, backend="threads")


def test_models_that_are_not_reproducible_accuse_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Net(rank), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        if rank == 1:
            model.noise = itertools.count(1)
        guard = lockstep.guard(model, optimizer, verify_every=2)

        def take(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(6):
            assert not guard.run(take, torch.rand(4, 6)).skipped
            optimizer.zero_grad()

    run_ranks(3, body, backend="threads")
    assert caplog.text.count("verify_every is over") == 3
    assert "a repeat had other bits on rank 1" in caplog.text


def test_a_function_is_told_what_repeats_have_shown() -> None:
    told = []

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 1), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def take(x: torch.Tensor) -> None:
            (model(x).sum() * float("nan")).backward()
            optimizer.step()

        def note(step: Any) -> None:
            told.append(step.blame.origin)

        guard = lockstep.guard(model, optimizer, on_skip=note, trace_nonfinite=True)
        guard.run(take, torch.ones(1, 2))

    run_ranks(2, body, backend="threads")
    assert told == ["behind 'the model' (Linear), as in the loss"] * 2


def verdict_for(
    take: Callable[[int, nn.Module, torch.optim.Optimizer, Any], None],
    batch_of: Callable[[int], Any],
    *,
    size: int = 2,
    make: Callable[[], nn.Module] = lambda: nn.Linear(4, 2),
) -> Any:
    """Take a step that goes wrong, over ranks that are threads; return rank 0's blame."""

    def body(rank: int, group: dist.ProcessGroup) -> Any:
        model = lockstep.parallelize(make(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        guard = lockstep.guard(model, optimizer, on_skip="verify")
        step = guard.run(lambda x: take(rank, model, optimizer, x), batch_of(rank))
        assert step.skipped
        return step.blame

    first, *others = run_ranks(size, body, backend="threads")
    assert all(other == first for other in others)
    return first


def plain(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
    model(x).square().sum().backward()
    optimizer.step()


def bad_batch(rank: int) -> torch.Tensor:
    return torch.full((3, 4), float("nan") if rank == 1 else 1.0)


def test_the_first_step_can_be_compared_although_buckets_are_made_anew_after_it() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    assert verdict_for(plain, bad_batch, make=make, size=3).verdict == "samples"


def test_a_batch_that_is_changed_in_place_is_not_repeated() -> None:
    def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
        plain(rank, model, optimizer, x.div_(3))

    blame = verdict_for(take, bad_batch)
    assert (blame.verdict, "in place" in blame.reason) == ("unknown", True)


def test_a_batch_that_can_not_be_handed_on_is_said_to_be() -> None:
    class Batch:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
        plain(rank, model, optimizer, x.x)

    blame = verdict_for(take, lambda rank: Batch(bad_batch(rank)))
    assert (blame.verdict, "can't be handed" in blame.reason) == ("unknown", True)


def test_sparse_gradients_are_not_compared() -> None:
    def make() -> nn.Module:
        return nn.Embedding(4, 2, sparse=True)

    def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
        factor = float("nan") if rank == 1 else 1.0
        (model(x).sum() * factor).backward()
        optimizer.step()

    blame = verdict_for(take, lambda rank: torch.tensor([0, 1]), make=make)
    assert blame.verdict == "unknown"


def test_what_one_ranks_program_does_is_no_device() -> None:
    def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        plain(rank, model, optimizer, x)

    for size in (2, 3):
        blame = verdict_for(take, lambda rank: torch.ones(3, 4), size=size)
        assert blame.verdict == "rank"
        assert "or what the program has there alone" in blame.reason


def test_an_error_without_words_hangs_nobody() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
        if rank == 1:
            raise Mute
        plain(rank, model, optimizer, x)

    assert verdict_for(take, lambda rank: torch.ones(3, 4)).kind == "exception"


def test_the_second_of_two_updates_is_compared() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = [lockstep.parallelize(nn.Linear(4, 2), process_group=group) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        guard = lockstep.guard(models, optimizers, on_skip="verify", trace_nonfinite=True)

        def take(x: torch.Tensor) -> None:
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                (model(x if number else x.nan_to_num(1.0)).square().sum()).backward()
                optimizer.step()

        before = [p.clone() for model in models for p in model.parameters()]
        step = guard.run(take, bad_batch(rank))
        assert (step.blame.rank, step.blame.verdict) == (1, "samples")
        assert step.blame.origin.startswith("in the forward of 'models[1]' (Linear)")
        after = [p for model in models for p in model.parameters()]
        assert all(map(torch.equal, before, after))

    run_ranks(2, body, backend="threads")


def test_repeats_leave_a_scale_as_the_step_has_left_it() -> None:
    scales = []
    for options in ({}, {"trace_nonfinite": True}, {"on_skip": "verify"}):
        model = lockstep.parallelize(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        guard = lockstep.guard(model, optimizer, scaler, **options)

        def take(x: torch.Tensor, parts: Any = (model, optimizer, scaler)) -> None:
            model, optimizer, scaler = parts
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        assert guard.run(take, bad_batch(1)).skipped
        scales.append(scaler.get_scale())
    assert scales == [0.5] * 3


def test_what_can_not_be_repeated_is_refused() -> None:
    models = [lockstep.parallelize(nn.Linear(2, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    guard = lockstep.guard(models[0], optimizers[0], on_skip="verify")
    with pytest.raises(ModelError, match=r"run\(body, \*batch\)"):
        guard.run(lambda: None)
    with pytest.raises(ValueError, match="leave out undo=False"):
        lockstep.guard(models, optimizers, trace_nonfinite=True, undo=False)
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    with pytest.raises(ValueError, match="one alone"):
        lockstep.guard(models, optimizers, *scalers, spike=6.0)
    other = lockstep.guard(models, optimizers).state_dict()
    with pytest.raises(ValueError, match="of 2 optimizers, and this one has 1"):
        guard.load_state_dict(other)
    guard = lockstep.guard(models[0], optimizers[0], on_skip="retry")

    def take() -> None:
        models[0](torch.ones(1, 2)).sum().backward()
        optimizers[0].step()

    guard.run(take)
    with pytest.raises(ModelError, match="repeats the step"), guard:
        take()


def test_a_batch_that_can_not_be_handed_on_ends_the_comparing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Batch:
        x = torch.ones(3, 4)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(4, 2), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        guard = lockstep.guard(model, optimizer, verify_every=1)

        def take(batch: Batch) -> None:
            (model(batch.x).sum() * (1 + rank)).backward()
            optimizer.step()

        assert not any(guard.run(take, Batch()).skipped for _ in range(3))

    run_ranks(2, body, backend="threads")
    assert caplog.text.count("can't be handed to another rank") == 2
    assert "these ranks compute other" not in caplog.text
