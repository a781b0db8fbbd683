"""Loaders whose batches are cut into shards."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.errors import SplitError
from tests.ranks import run_ranks
from tests.same_bits.runs import OPTIMIZERS, batch_of, differing, model_of


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws noise for each sample."""

    def __init__(self, length: int = 38) -> None:
        self.x, self.y = batch_of(99, length)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sample with noise of torch and of NumPy."""
        noise = torch.randn(108) * np.random.rand()
        return self.x[index] + 0.1 * noise, self.y[index]


class Training:
    """Trains on a loader's batches; may be saved and go on with other ranks."""

    def __init__(self, group: dist.ProcessGroup | None, **options: Any) -> None:
        self.model = copy.deepcopy(model_of("convnet"))
        lockstep.parallelize(self.model, process_group=group)
        self.optimizer = OPTIMIZERS["AdamW"](self.model)
        self.loader = lockstep.DataLoader(
            Augmented(), 16, shuffle=True, seed=5, shards=4, process_group=group, **options
        )

    def train(self, most: int = 100) -> None:
        """Train on the rest of an epoch, or on as many batches of it."""
        for number, batch in enumerate(self.loader, 1):
            for x, y in lockstep.shards(self.model, batch):
                losses = F.cross_entropy(self.model(x), y, reduction="none")
                lockstep.mean(losses).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if number == most:
                break

    def things(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def bits(self) -> dict[str, bytes]:
        """Of the model."""
        return {name: each.numpy().tobytes() for name, each in self.model.state_dict().items()}


def bits_of_two_epochs(group: dist.ProcessGroup | None, **options: Any) -> dict[str, bytes]:
    training = Training(group, **options)
    training.train()
    training.train()
    return training.bits()


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(2, 0), (3, 0), (2, 2)])
def test_a_loader_gives_the_same_bits(num_ranks: int, num_workers: int) -> None:
    """The last batch has six samples, which are two for two of four shards, and one for two."""
    alone = bits_of_two_epochs(None)
    for bits in run_ranks(
        num_ranks, lambda _, group: bits_of_two_epochs(group, num_workers=num_workers)
    ):
        assert not differing(bits, alone)


def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path: Any) -> None:
    alone = Training(None)
    alone.train()
    alone.train()

    def go_on(
        group: dist.ProcessGroup | None, most: int, *, loads: bool = True
    ) -> dict[str, bytes]:
        training = Training(group)
        if loads:
            lockstep.load(tmp_path, process_group=group, **training.things())
        training.train(most)
        lockstep.save(tmp_path, process_group=group, **training.things())
        return training.bits()

    run_ranks(3, lambda _, group: go_on(group, 2, loads=False))
    go_on(None, 100)
    run_ranks(4, lambda _, group: go_on(group, 1), backend="gloo")
    for bits in run_ranks(2, lambda _, group: go_on(group, 100)):
        assert not differing(bits, alone.bits())


def test_batches_have_the_shards_of_this_rank() -> None:
    data = TensorDataset(torch.arange(11))

    def body(rank: int, group: dist.ProcessGroup) -> list[list[list[int]]]:
        loader = lockstep.DataLoader(data, 8, shards=4, process_group=group)
        assert len(loader) == 2
        return [[shard[0].tolist() for shard in batch] for batch in loader]

    first, second = run_ranks(2, body)
    assert first == [[[0, 1], [2, 3]], [[8], [9]]]
    assert second == [[[4, 5], [6, 7]], [[10]]]
    (third,) = run_ranks(4, body)[3:]
    assert third == [[[6, 7]], []]


def test_loaders_without_shards_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    data = TensorDataset(torch.arange(11))
    for arguments, words in (
        ({"dataset": Stream(), "batch_size": 8}, "needs a dataset that can be indexed"),
        ({"dataset": data, "batch_size": 3}, "A global batch of 3 can't be cut into 4 shards"),
        ({"dataset": data, "batch_size": 8, "shares": "auto"}, "exclude each other"),
        ({"dataset": data, "batch_size": None}, "can't be cut"),
    ):
        with pytest.raises(SplitError, match=words):
            lockstep.DataLoader(shards=4, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shards"):
        lockstep.DataLoader(data, 8, shards=0)
    model = lockstep.parallelize(nn.Linear(1, 1))
    with pytest.raises(SplitError, match="a batch of 4 shards from a loader"):
        lockstep.shards(model, next(iter(lockstep.DataLoader(data, 8, shards=4))), 2)


def test_a_batch_that_is_used_twice_draws_other_numbers() -> None:
    model = lockstep.parallelize(nn.Linear(1, 1))
    for batch in lockstep.DataLoader(TensorDataset(torch.ones(4, 1)), 4, shards=2):
        drawn = [torch.rand(1).item() for _ in range(2) for _ in lockstep.shards(model, batch)]
        assert len({*drawn}) == 4


def test_a_checkpoint_tells_of_other_threads_and_counts_steps(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(model: nn.Module) -> list[float]:
        found = []
        for x in lockstep.shards(model, torch.ones(4, 1), 2):
            found.append(torch.rand(1).item())
            model(x).sum().backward()
        return found

    first = lockstep.parallelize(nn.Linear(1, 1))
    drawn(first)
    lockstep.save(tmp_path, model=first)
    expected = drawn(first)
    second = lockstep.parallelize(nn.Linear(1, 1))
    lockstep.load(tmp_path, model=second)
    assert drawn(second) == expected
    assert not caplog.records
    monkeypatch.setattr("lockstep.same_bits.step.use_threads", lambda: torch.set_num_threads(2))
    lockstep.load(tmp_path, model=second)
    drawn(second)
    assert "with another intra-op threads, 1, and it is 2 now" in caplog.text
