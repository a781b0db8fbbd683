"""One process, many devices: a batch is cut up among them, and their outputs are joined again."""

from lockstep.nn.data_parallel.gather import gather
from lockstep.nn.data_parallel.scatter import scatter, scatter_kwargs

__all__ = ["gather", "scatter", "scatter_kwargs"]
