from .clip import clip_grad_norm_ as clip_grad_norm_
from .shard_optimizer import shard_optimizer as shard_optimizer
from .shard_optimizer import sharding_of as sharding_of
from .zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
