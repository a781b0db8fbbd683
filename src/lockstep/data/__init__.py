"""Data: which samples of a dataset, and of a global batch, are this rank's."""

from lockstep.data.batches import batch_share, batch_slice, epoch_shares
from lockstep.data.partition import DataPartitioner, Partition, SizedDataset, partition

__all__ = [
    "DataPartitioner",
    "Partition",
    "SizedDataset",
    "batch_share",
    "batch_slice",
    "epoch_shares",
    "partition",
]
