"""Whether the ranks have the same dataset, of which each is to get a part of every batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lockstep.comm import differing_facts
from lockstep.data.batches import LocalBatch, Reader
from lockstep.data.fingerprint import of_dataset, of_sample
from lockstep.errors import SplitError


def check_same_dataset(
    group: dist.ProcessGroup, reader: Reader, batches: Sequence[Any], seed: int
) -> None:
    """Compare samples of the first and the last of ``batches``, if the datasets may differ.

    Every rank must call it, with the same indices in ``batches``; it blocks.

    Raises:
        SplitError: If the ranks have other samples, the same ones each time that they are read.
    """
    if not batches or not differing_facts(group, {"dataset": of_dataset(reader.dataset)}):
        return
    found: dict[str, list[int]] = {}
    for batch, place in ((batches[0], 0), (batches[-1], -1)):
        is_list = hasattr(batch, "__len__") and not (hasattr(batch, "dim") and not batch.dim())
        index = batch[place] if is_list and len(batch) else batch
        index = index.item() if hasattr(index, "item") else index
        part = LocalBatch([index], seed, 0, is_one=not is_list)
        found[repr(index)] = [of_sample(reader[part]) for _ in range(2)]
    by_rank = differing_facts(group, found)
    is_repeatable = all(first == again for samples in by_rank for first, again in samples.values())
    for rank, samples in enumerate(by_rank if is_repeatable else []):
        for index, checksums in samples.items():
            if checksums != by_rank[0][index]:
                raise SplitError(
                    f"The ranks' datasets differ: sample {index} is another one on rank {rank} "
                    "than on rank 0. This loader gives each rank its part of every batch, so "
                    "give all ranks the whole dataset, and draw what is random of it, or split it, "
                    "before parallelize(). What is divided among the ranks would lose samples."
                )
