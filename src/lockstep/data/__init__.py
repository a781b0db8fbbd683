"""Data: the parts of a dataset, and of a global batch, that belong to each rank."""

from lockstep.data.partition import (
    DataPartitioner,
    Partition,
    SizedDataset,
    batch_share,
    batch_slice,
    epoch_shares,
    partition,
)

__all__ = [
    "DataPartitioner",
    "Partition",
    "SizedDataset",
    "batch_share",
    "batch_slice",
    "epoch_shares",
    "partition",
]
