"""What a parallel model tells of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.nn.engine import Engine


def logging_data(
    module: nn.Module, engines: Sequence[Engine], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """How ``module`` is kept in step: numbers and names to log."""
    reducers = [engine.reducer for engine in engines]
    parameters = list(module.parameters())
    return {
        "module_name": type(module).__name__,
        "world_size": group.size() if group is not None else 1,
        "rank": group.rank() if group is not None else 0,
        "backend_name": group.name() if group is not None else None,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "bucket_sizes": [size for reducer in reducers for size in reducer.bucket_bytes],
        "num_backwards": sum(engine.num_backwards for engine in engines),
        "unused_parameters": [name for reducer in reducers for name in reducer.unused],
        "comm_hook": next((r.comm_hook.name for r in reducers if r.comm_hook), None),
    }
