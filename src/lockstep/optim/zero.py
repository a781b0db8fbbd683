"""The drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from lockstep.arguments import divided_by_torch, refusal
from lockstep.comm import global_rank
from lockstep.optim.probe import Treatment
from lockstep.optim.sharding import Sharding
from lockstep.optim.undivided import draw_alike
from lockstep.optim.verdict import judge
from lockstep.world import group_or_all, parameters_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of its own torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer as _TorchZeRO


class ZeroRedundancyOptimizer(_TorchZeRO):
    """An optimizer whose work and state are divided among the ranks.

    It has torch's signature, and is an instance of torch's class. For a new program
    :func:`lockstep.shard_optimizer` is simpler: it keeps the optimizer's own class. ::

        optimizer = lockstep.ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        )

    Every rank must call it, and then ``step()``, ``consolidate_state_dict()`` and
    ``load_state_dict()``, which block. Gradients must be the same on all ranks, as those of
    parallel models are after a backward.

    Args:
        params: The parameters, or groups of them, as for any optimizer.
        optimizer_class: The class of the optimizer, such as ``torch.optim.AdamW``.
        process_group: The ranks; by default all of ``lockstep.init()``.
        parameters_as_bucket_view: Without effect: parameters always lie side by side in one memory.
        overlap_with_ddp: Must be False.
        defaults: DivisionOptions of ``optimizer_class``.

    Raises:
        TypeError: If ``optimizer_class`` isn't a class of optimizers.
        ValueError: If ``overlap_with_ddp`` is set, or a parameter is a sparse tensor or a DTensor.

    Source: ``torch.distributed.optim.ZeroRedundancyOptimizer``.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(refusal("optimizer_class", optimizer_class, "a class of optimizers"))
        if overlap_with_ddp:
            raise ValueError(
                "overlap_with_ddp is for torch's communication hooks, which take a bucket's step "
                "in backward. Leave it out, and the hook too: step() is divided among the ranks."
            )
        # Not torch's constructor, which makes an optimizer for a part of the parameters.
        self.optim = optimizer_class(params, **defaults)
        each = parameters_of(self.optim)
        if divided := next(filter(None, map(divided_by_torch, each)), ""):
            raise ValueError(
                f"A parameter is {divided}, of which each rank updates its own part already. Use "
                f"{optimizer_class.__name__} itself."
            )
        if any(parameter.layout is not torch.strided for parameter in each):
            raise ValueError(
                "A parameter is sparse, and such ones aren't divided among ranks. Give it to an "
                "optimizer of its own."
            )
        self.initialized = False
        Optimizer.__init__(self, self.optim.param_groups, defaults)
        Joinable.__init__(self)
        self.initialized = True
        self.param_groups, self.state = self.optim.param_groups, self.optim.state
        group = group_or_all(process_group)
        self.process_group = group
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        self.global_rank = self.rank if group is None else global_rank(group, self.rank)
        self._default_device = self.param_groups[0]["params"][0].device
        self._sharding: Sharding | None = None
        if group is not None and group.size() > 1:
            self._divide(group)
        self._whole: dict[str, Any] | None = None

    def _divide(self, group: dist.ProcessGroup) -> None:
        verdict = judge(self.optim, [group])
        if verdict.treatment is Treatment.DIVIDE:
            self._sharding = Sharding(
                self.optim,
                lambda ps: [group] * len(ps),
                is_joinable=True,
                updates_all=verdict.updates_all,
                drops_gradients=verdict.drops_gradients,
            )
            self.state = self.optim.state
        elif verdict.may_draw:
            draw_alike(self.optim, [group])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, on every rank alike."""
        if self.initialized:
            self.optim.add_param_group(param_group)
        else:
            Optimizer.add_param_group(self, param_group)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters on all ranks. Every rank must call it; it blocks.

        Args:
            closure: Computes the loss and its gradients; it is called once, before the update.
            kwargs: Further arguments of the optimizer's ``step()``.

        Returns:
            The result of ``closure``, if it was given.
        """
        return self.optim.step(closure, **kwargs)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on rank ``to``. Every rank must call it; it blocks."""
        if not 0 <= to < self.world_size:
            raise ValueError(f"There is no rank {to}: there are ranks 0 to {self.world_size - 1}.")
        whole = self.optim.state_dict()
        self._whole = whole if to == self.rank else None

    def state_dict(self) -> dict[str, Any]:
        """Return the ordinary state dict that ``consolidate_state_dict()`` has collected.

        Raises:
            RuntimeError: On a rank to which it has not been collected.
        """
        if self._sharding is None:
            return dict(self.optim.state_dict())
        if self._whole is None:
            raise RuntimeError(
                f"The state of this optimizer is divided among the ranks, and rank {self.rank} "
                "doesn't have all of it. Let every rank call consolidate_state_dict(to="
                f"{self.rank}) before."
            )
        return self._whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an ordinary state dict, and keep this rank's part. Every rank must call it."""
        self.optim.load_state_dict(state_dict)
        self.param_groups, self.state = self.optim.param_groups, self.optim.state
