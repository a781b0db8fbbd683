"""A limit for the first step: programs compile in it, and read data for the first time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.comm import uncompiled


def limit_calls(timeout: timedelta, first: timedelta | None) -> None:
    """Let calls over the group of all ranks wait ``timeout`` for others.

    Until an optimizer has stepped on this rank they wait ``first``, if that is given.
    """
    group: Any = dist.group.WORLD
    _set_timeout(group, first or timeout)
    if first is None:
        return

    @uncompiled
    def after_step(*_: object) -> None:
        nonlocal group
        if group is not None and dist.group.WORLD is group:  # ranks that are threads have others
            _set_timeout(group, timeout)
            group = None

    # It stays: torch may be calling the hooks, in this thread or another, and can't lose one then.
    register_optimizer_step_post_hook(after_step)


def _set_timeout(group: Any, timeout: timedelta) -> None:
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)
