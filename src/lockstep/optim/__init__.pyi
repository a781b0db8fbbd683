from .clip import clip_grad_norm_ as clip_grad_norm_
from .partial import PartialTensor as PartialTensor
from .partial import state_to_come as state_to_come
from .shard import MASTER as MASTER
from .shard_optimizer import shard_optimizer as shard_optimizer
from .shard_optimizer import sharding_of as sharding_of
from .state import StatePart as StatePart
from .zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
