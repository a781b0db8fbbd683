from .shard_optimizer import shard_optimizer as shard_optimizer
from .zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
