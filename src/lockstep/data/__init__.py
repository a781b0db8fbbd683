"""Data: the ranks' parts of a dataset and of its global batches, each sample in exactly one."""

from lockstep.data.fingerprint import of_batch
from lockstep.data.loader import DataLoader
from lockstep.data.partition import (
    DataPartitioner,
    Partition,
    SizedDataset,
    batch_share,
    batch_slice,
    cuts,
    epoch_shares,
    partition,
)
from lockstep.data.sampler import DistributedSampler

__all__ = [
    "DataLoader",
    "DataPartitioner",
    "DistributedSampler",
    "Partition",
    "SizedDataset",
    "batch_share",
    "batch_slice",
    "cuts",
    "epoch_shares",
    "of_batch",
    "partition",
]
