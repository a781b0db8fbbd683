from . import errors as errors
from .nn import DistributedDataParallel as DistributedDataParallel
from .nn import no_sync as no_sync
from .nn import parallelize as parallelize
from .world import World as World
from .world import init as init
