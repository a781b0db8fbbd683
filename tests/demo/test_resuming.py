"""The demo's training, stopped after any step and gone on with at another number of ranks."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  (sets environment variables)
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.demo import ConvNet, State, largest_difference, load
from tests.counts import num_examples
from tests.ranks import run_ranks

NUM_STEPS = 12  # of an epoch: 1,500 images in global batches of 128
TRIALS = settings(max_examples=num_examples(100, soon=4))


@functools.cache
def start() -> tuple[ConvNet, TensorDataset]:
    torch.manual_seed(0)
    digits = load()
    return ConvNet(dropout=0).double(), TensorDataset(
        digits.train_images.double(), digits.train_labels
    )


def train_digits(num_ranks: int, folder: Path | None, first: int, last: int) -> State:
    """Take the steps from ``first`` on, before ``last``, of an epoch; save or load in between."""
    net, dataset = start()

    def body(rank: int, group: dist.ProcessGroup) -> State:
        model = lockstep.parallelize(copy.deepcopy(net), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = lockstep.DataLoader(dataset, 128, shuffle=True, seed=7, process_group=group)
        things = {"model": model, "optimizer": optimizer, "loader": loader}
        if first and folder is not None:
            lockstep.load(folder, process_group=group, **things)
        step = first
        # Stopped after the last batch, the epoch is over once the loader is asked for another.
        for images, labels in loader:
            losses = F.nll_loss(model(images), labels, reduction="none")
            optimizer.zero_grad()
            lockstep.mean(losses, process_group=group).backward()
            optimizer.step()
            step += 1
            if step == last and folder is not None:
                break
        if last < NUM_STEPS and folder is not None:
            lockstep.save(folder, process_group=group, **things)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    return run_ranks(num_ranks, body)[0]


@functools.cache
def undisturbed(num_ranks: int) -> State:
    return train_digits(num_ranks, None, 0, NUM_STEPS)


@pytest.mark.long
@TRIALS
@given(stop=st.integers(1, NUM_STEPS - 1), before=st.integers(1, 4), after=st.integers(1, 4))
def test_a_stop_changes_nothing(
    tmp_path_factory: object, stop: int, before: int, after: int
) -> None:
    folder = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    train_digits(before, folder, 0, stop)
    end = train_digits(after, folder, stop, NUM_STEPS)
    assert largest_difference(end, undisturbed(1)) < 1e-9
    if before == after:
        assert largest_difference(end, undisturbed(after)) == 0
