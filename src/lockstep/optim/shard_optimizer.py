"""``shard_optimizer(optimizer)``: the same object, with work and state divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from lockstep.arguments import check_type, refusal
from lockstep.comm import SingleRankGroup
from lockstep.errors import AlreadyParallel, ModelError
from lockstep.nn import groups_of, is_parallel
from lockstep.optim.sharding import Sharding

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_ALONE = SingleRankGroup()


def shard_optimizer(
    optimizer: OptimizerT, *, master_dtype: torch.dtype | None = None
) -> OptimizerT:
    """Divide the work and the state of ``optimizer`` among the ranks, in place.

    It stays the same object of the same class, with the same parameter groups, and leaves the same
    parameters behind: but each rank updates a part of them, and holds the state of that part alone.
    So ``step()`` does less work, and the state of an Adam takes 1/N of the memory. On one rank it
    changes nothing. ::

        model = lockstep.parallelize(model)
        optimizer = lockstep.shard_optimizer(torch.optim.AdamW(model.parameters()))

    Where the ranks are processes of one host (the process group ``"shm"``), they have one copy of
    the parameters, which none of them sends to another; a rank that changes a parameter itself sees
    that until the next step, for which the value counts that the rank has which updates it. And of
    gradients each rank sums those alone that it needs: the others when the program reads
    ``parameter.grad``, which is the mean over the ranks as ever, and may be changed. The parameters
    are of a subclass of ``nn.Parameter`` then; copies and what is unpickled are plain ones.
    :func:`lockstep.clip_grad_norm_` clips without reading all of them, and the optimizer's
    ``zero_grad()`` drops them unread, where the model's reads them first. ``torch.compile`` with
    ``fullgraph=True`` can't read them. Elsewhere the ranks send each other what they have updated;
    but hosts of equally many ranks each divide all of the work among their own, and send nothing.

    Options may be changed, groups added, and parameters frozen, unfrozen or replaced at any time,
    on every rank alike. Parameters with sparse gradients, and those that no parallel module has,
    are each rank's own, as before.

    torch's element-wise optimizers (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam,
    RAdam, ASGD, Rprop) update equal parts of the elements on each rank, wherever that cuts a
    parameter. (With ``fused=True``, torch computes elements at the end of a tensor in another way,
    so that parameters may differ in their last bit from those of an unsharded optimizer.) Any other
    updates whole parameters, about as many elements on each rank; it has to update a parameter
    without a look at others. ``optimizer.state`` holds this rank's part, by tensors of its own.

    Every rank must call it, with the same optimizer, and from then on its ``step()``,
    ``state_dict()`` and ``load_state_dict()``, which block. ``state_dict()`` is the ordinary one,
    of all parameters, on every rank; with ``rank0_only=True`` the other ranks get one without
    state. Ordinary ones are loaded, of any number of ranks. A closure is called once, before the
    step. Gradients have to be the mean over the ranks: a step on those of :func:`no_sync`, each
    rank's own, would mix them.

    Args:
        optimizer: One whose parameters are those of modules that were given to
            :func:`parallelize`, or are in a wrapper.
        master_dtype: The dtype of the values that are updated, and of the optimizer's state, such
            as ``torch.float32`` for parameters in bfloat16: each rank has them of its part, and
            the parameters are what they round to. In a state dict they are each parameter's
            ``"master"``. By default the parameters' own dtype.

    Returns:
        ``optimizer`` itself.

    Raises:
        ModelError: If none of its parameters is a parallel module's, or it is an LBFGS, whose
            update of each parameter depends on all others.
        ModelMismatch: If the ranks' optimizers differ.
        AlreadyParallel: If it is sharded already.
        TypeError: If it isn't an optimizer, or ``master_dtype`` no floating-point dtype.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020), stage 1.
    """
    check_type("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    if master_dtype is not None and not (
        isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point
    ):
        raise TypeError(refusal("master_dtype", master_dtype, "a dtype such as torch.float32"))
    kind = type(optimizer).__name__
    if sharding_of(optimizer) is not None:
        raise AlreadyParallel(f"This {kind} is sharded already. Go on with it as it is.")
    if isinstance(optimizer, LBFGS):
        raise ModelError(
            "LBFGS computes the update of each parameter from all of them, so its work can't be "
            "divided among ranks. Use it as it is: with a parallel model, it takes the same steps "
            "on every rank."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_parallel, parameters)):
        raise ModelError(
            f"No parameter of this {kind} is a parallel module's, so the ranks' gradients differ "
            "and their updates can't be shared. Call lockstep.parallelize(model) before."
        )
    if any(group is not None for group in groups_of(parameters)):
        Sharding(optimizer, groups_of, master_dtype=master_dtype)
    elif master_dtype is not None:
        Sharding(optimizer, _alone, master_dtype=master_dtype)
    return optimizer


def _alone(parameters: Sequence[nn.Parameter]) -> list[dist.ProcessGroup | None]:
    return [cast(Any, _ALONE) if is_parallel(parameter) else None for parameter in parameters]


def sharding_of(optimizer: Optimizer) -> Sharding | None:
    """Return what divides the steps of ``optimizer`` among ranks, if they are divided."""
    owner: object = getattr(optimizer.state_dict, "__self__", None)
    return owner if isinstance(owner, Sharding) else None
