"""Steps in shards, with the same bits at any number of ranks."""

from lockstep.same_bits.batch import ShardedBatch, bounds_of
from lockstep.same_bits.step import Shards, shards
from lockstep.same_bits.turns import exclusive

__all__ = ["ShardedBatch", "Shards", "bounds_of", "exclusive", "shards"]
