"""Loaders and datasets of others: torchdata's StatefulDataLoader, webdataset's shards."""

from __future__ import annotations

import io
import itertools
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from tests.clients.forks import Forks

LENGTH = 24


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return LENGTH - 3

    def __getitem__(self, index: int) -> int:
        return index


def resume() -> None:
    """Each position in the second epoch, by a loader that saves the sampler's state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    lockstep.init()

    def make() -> Any:
        sampler = lockstep.DistributedSampler(Numbers())
        return StatefulDataLoader(Numbers(), 4, sampler=sampler)

    def batches(loader: Any, number: int | None = None) -> list[Any]:
        return [batch.tolist() for batch in itertools.islice(loader, number)]

    whole = make()
    epochs = [batches(whole) for _ in range(3)]
    assert len(epochs[0]) == 3
    for number in range(4):
        stopped, resumed = make(), make()
        batches(stopped)
        first = batches(stopped, number) if number else []
        if not number:
            iter(stopped)
        resumed.load_state_dict(stopped.state_dict())
        assert first + batches(resumed) == epochs[1]
        assert batches(resumed) == epochs[2]


def test_stateful_loader_goes_on_within_the_epoch(forks: Forks) -> None:
    forks.run(resume, 2)


def samples(folder: str, num_workers: int, splits: bool) -> list[list[int]]:
    """The samples of two epochs on this rank."""
    import webdataset

    lockstep.init()
    split = webdataset.split_by_node if splits else None
    shards = webdataset.WebDataset(f"{folder}/{{0..3}}.tar", nodesplitter=split, shardshuffle=False)
    dataset = shards.decode().to_tuple("cls")
    loader = lockstep.DataLoader(dataset, 5, num_workers=num_workers)
    return [[int(number) for (batch,) in loader for number in batch] for _ in range(2)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("splits", [True, False])
def test_shards_of_webdataset_come_once(
    forks: Forks, tmp_path: Path, num_workers: int, splits: bool
) -> None:
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as file:
            for number in range(shard, LENGTH, 4):
                content = str(number).encode()
                info = tarfile.TarInfo(f"{number:03d}.cls")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    by_rank = forks.run(samples, 2, str(tmp_path), num_workers, splits)
    for epoch in zip(*by_rank, strict=True):
        assert sorted(itertools.chain(*epoch)) == [*range(LENGTH)]
