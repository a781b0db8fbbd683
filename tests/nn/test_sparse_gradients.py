"""Embeddings with sparse gradients: only the rows that were looked up travel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep.grad import GradBucket
from tests.comm.ranks_on_hosts import run_hosts
from tests.nn.parallel import BOTH, in_place, wrapped
from tests.ranks import BACKENDS, Backend, run_ranks
from tests.same import assert_same

# Older torch says so once.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
ROWS, WIDTH = 12, 3


class Tagger(nn.Module):
    """Words, their characters, and a layer; the latter may be missing."""

    def __init__(self, *, has_layer: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.letters = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        self.layer = nn.Linear(WIDTH, 1) if has_layer else None
        self.double()

    def forward(self, words: torch.Tensor, letters: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(words)
        if letters is not None:
            x = x + self.letters(letters)
        return x.sum(-1) if self.layer is None else self.layer(x).squeeze(-1)


with torch.random.fork_rng():
    torch.manual_seed(3)
    MODELS = {"with a layer": Tagger(), "embeddings alone": Tagger(has_layer=False)}
KINDS = pytest.mark.parametrize("kind", MODELS)


def indices(step: int, rank: int, *, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    words, *letters = torch.randint(0, ROWS, (3, count), generator=generator)
    return words, torch.stack(letters, dim=1)


def optimizers(model: Tagger) -> list[torch.optim.Optimizer]:
    sparse = [model.words.weight, model.letters.weight]
    dense = [p for p in model.parameters() if all(p is not q for q in sparse)]
    first = torch.optim.SparseAdam(sparse, lr=0.1)
    return [first, torch.optim.Adam(dense, lr=0.1)] if dense else [first]


def step_all(stepping: list[torch.optim.Optimizer]) -> None:
    for optimizer in stepping:
        optimizer.step()
        optimizer.zero_grad()


def dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


@KINDS
@BOTH
@pytest.mark.parametrize("backend", [*BACKENDS, "shm"])
def test_ranks_train_as_one_process_does(parallel, kind: str, backend: str) -> None:
    check_training(parallel, kind, partial(run_ranks, 3, backend=backend))


@KINDS
def test_ranks_of_several_hosts_train_as_one_process_does(kind: str) -> None:
    check_training(in_place, kind, partial(run_hosts, [[0, 1], [2]]))


def check_training(parallel: Callable[..., nn.Module], kind: str, run: Callable[..., Any]) -> None:
    """Each rank looks up other rows, as many as it likes, and some ranks no letters."""
    world_size, num_steps = 3, 5
    one = copy.deepcopy(MODELS[kind])
    stepping = optimizers(one)
    for step in range(num_steps):
        for rank in range(world_size):
            words, letters = indices(step, rank, count=2 + rank)
            output = one(words, letters if (step + rank) % 3 else None)
            (output.square().mean() / world_size).backward()
        step_all(stepping)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODELS[kind])
        steps = optimizers(model)
        train = parallel(model, group, bucket_cap_mb=1e-5)
        for step in range(num_steps):
            words, letters = indices(step, rank, count=2 + rank)
            train(words, letters if (step + rank) % 3 else None).square().mean().backward()
            assert model.words.weight.grad.is_sparse
            step_all(steps)
        assert_same(model.parameters(), one.parameters(), 1e-10)

    run(body)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.keeps_descriptors("torch's DDP keeps the process group that it was given")
@pytest.mark.parametrize("optimizer", [sgd, sparse_adam])
@pytest.mark.parametrize("size", [2, 3])
def test_bits_are_those_of_torchs_over_gloo(size: int, optimizer: Any) -> None:
    """In each step some ranks look up nothing."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        theirs, mine = (copy.deepcopy(MODELS["embeddings alone"]).float() for _ in range(2))
        pairs = [(TorchDDP(theirs, process_group=group), optimizer(theirs))]
        pairs.append((in_place(mine, group), optimizer(mine)))
        for step in range(6):
            words, letters = indices(step, rank, count=0 if (step + rank) % 3 == 0 else 5 + rank)
            for model, stepping in pairs:
                model(words, letters).square().sum().backward()
                assert all(parameter.grad.is_sparse for parameter in model.parameters())
                step_all([stepping])
        for each, its in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(each, its)

    run_ranks(size, body, backend="gloo")


def test_what_no_rank_looks_up_keeps_no_gradient() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODELS["with a layer"])
        wrapped(model, group)(indices(0, rank)[0]).sum().backward()
        assert model.words.weight.grad is not None
        assert model.letters.weight.grad is None

    run_ranks(2, body)


def test_micro_batches_of_different_sizes_are_one_batch() -> None:
    one = copy.deepcopy(MODELS["with a layer"])
    parts = [indices(step, rank, count=1 + rank + step) for step in (0, 1) for rank in (0, 1)]
    words, letters = map(torch.cat, zip(*parts, strict=True))
    one(words, letters).square().mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODELS["with a layer"])
        train = wrapped(model, group)
        with lockstep.accumulate(model):
            losses = train(*parts[rank]).square()
            lockstep.mean(losses, process_group=group).backward()
        lockstep.mean(train(*parts[2 + rank]).square(), process_group=group).backward()
        for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(dense(mine.grad), dense(theirs.grad), rtol=1e-12, atol=1e-12)

    run_ranks(2, body)


@KINDS
def test_torchs_hook_that_compresses_compresses_sparse_gradients_too(kind: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        expected, model = (copy.deepcopy(MODELS[kind]) for _ in range(2))
        train = wrapped(model, group)
        train.register_comm_hook(group, default_hooks.bf16_compress_hook)
        for _ in range(2):
            for of in (expected, model):
                of.zero_grad()
            train(*indices(0, rank)).sum().backward()
        for other in (0, 1):
            (expected(*indices(0, other)).sum() / 2).backward()
        words, theirs = model.words.weight.grad, expected.words.weight.grad
        assert words.is_sparse
        # What travels has eight bits, and so has the sum of two.
        torch.testing.assert_close(dense(words), dense(theirs), rtol=2**-7, atol=0)

    run_ranks(2, body)


@KINDS
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_communication_hook_is_given_sparse_gradients_too(kind: str, backend: Backend) -> None:
    """Each as a bucket of its own, which is the gradient itself, as in torch."""
    calls: list[tuple[int, bool, bool]] = []

    def body(rank: int, group: dist.ProcessGroup) -> None:
        expected, model = (copy.deepcopy(MODELS[kind]) for _ in range(2))
        train = wrapped(model, group)

        def hook(state: object, bucket: GradBucket) -> torch.futures.Future:
            if rank == 0:
                calls.append((bucket.index(), bucket.buffer().is_sparse, bucket.is_last()))
            (parameter, *_), (gradient, *_) = bucket.parameters(), bucket.gradients()
            assert gradient.shape == parameter.shape
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(bucket.buffer() * (rank + 1))
            return future

        train.register_comm_hook(None, hook)
        train(*indices(0, rank)).sum().backward()
        ((rank + 1) * expected(*indices(0, rank)).sum()).backward()
        for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(dense(mine.grad), dense(its.grad), rtol=1e-12, atol=1e-12)
        assert model.words.weight.grad.is_sparse

    run_ranks(2, body, backend=backend)
    last = [] if MODELS[kind].layer is None else [(2, False, True)]
    assert calls == [(0, True, False), (1, True, not last), *last]


def test_a_table_that_is_also_a_layer_has_a_dense_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH, sparse=True).double()

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.table(words) @ self.table.weight.t()

    one = Tied()
    for rank in (0, 1):
        (one(indices(0, rank)[0]).square().mean() / 2).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(copy.deepcopy(one), group)
        model.zero_grad()
        model(indices(0, rank)[0]).square().mean().backward()
        gradient = model.module.table.weight.grad
        torch.testing.assert_close(gradient, one.table.weight.grad, rtol=1e-12, atol=1e-12)

    run_ranks(2, body)


def test_averaging_by_hand_keeps_them_sparse() -> None:
    one = copy.deepcopy(MODELS["with a layer"])
    for rank in (0, 1):
        (one(*indices(0, rank)).sum() / 2).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODELS["with a layer"])
        model(*indices(0, rank)).sum().backward()
        lockstep.average_gradients(model, process_group=group)
        assert model.words.weight.grad.is_sparse
        for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(dense(mine.grad), dense(theirs.grad), rtol=1e-12, atol=1e-12)

    run_ranks(2, body)
