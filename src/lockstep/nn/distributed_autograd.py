"""Refusing backwards over several processes' graphs, which lockstep can't reduce."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.comm.uncompiled import uncompiled
from lockstep.errors import ModelError


def refuse_distributed_autograd(is_parallel: Callable[[nn.Module], bool]) -> RemovableHandle | None:
    """From now on refuse forwards of parallel models for ``torch.distributed.autograd``.

    It gathers gradients in a context of its own, calls no hook of a parameter, and tells nobody
    who the context belongs to. What can be seen is that a forward runs in such a context.

    Args:
        is_parallel: Whether a module is, or is in, a parallel model.

    Returns:
        What takes it back; None in programs without RPC, where nothing is done and nothing costs.
    """
    rpc = sys.modules.get("torch.distributed.rpc.api")
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return None

    @uncompiled
    def before_forward(module: nn.Module, _: object) -> None:
        if torch.is_grad_enabled() and is_parallel(module) and _is_in_context():
            raise ModelError(
                f"A parallel {type(module).__name__} runs in a context of "
                "torch.distributed.autograd, which keeps gradients to itself, so that lockstep "
                "can't reduce them. Train it with loss.backward(), or wrap it in "
                "torch.nn.parallel.DistributedDataParallel instead."
            )

    return register_module_forward_pre_hook(before_forward)


def _is_in_context() -> bool:
    from torch.distributed import autograd  # which RPC has imported

    try:
        autograd._current_context()
    except RuntimeError:
        return False
    return True
