"""Steps in shards, with the same bits at any number of ranks."""

from lockstep.same_bits.batch import ShardedBatch, bounds_of
from lockstep.same_bits.between_steps import (
    StepsInShards,
    continue_steps,
    fingerprint_of,
    steps_of,
    use_threads,
)
from lockstep.same_bits.step import Shards, check_num_shards, shards
from lockstep.same_bits.sums import shards_of
from lockstep.same_bits.turns import exclusive

__all__ = [
    "ShardedBatch",
    "Shards",
    "StepsInShards",
    "bounds_of",
    "check_num_shards",
    "continue_steps",
    "exclusive",
    "fingerprint_of",
    "shards",
    "shards_of",
    "steps_of",
    "use_threads",
]
