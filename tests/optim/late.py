"""Updates that arrive as late as can be."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm import start_all_gather_in_place


class Late:
    """An all-gather that takes place when it is waited for: whatever doesn't wait sees the past."""

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor) -> None:
        self.group, self.memory, self.was_waited_for = group, memory, False

    def wait(self) -> None:
        self.was_waited_for = True
        start_all_gather_in_place(self.group, self.memory).wait()
