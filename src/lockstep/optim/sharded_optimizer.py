"""``shard_optimizer(optimizer)``: the same object, with work and state divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from lockstep.arguments import check_flag, check_type, divided_by_torch, refusal
from lockstep.comm import ALONE
from lockstep.errors import AlreadyParallel, ModelError
from lockstep.nn import are_parallel, groups_of, refuse_in_shard
from lockstep.optim.methods import names_used
from lockstep.optim.probe import Treatment
from lockstep.optim.sharding import Sharding
from lockstep.optim.undivided import draw_alike, is_undivided, leave_undivided
from lockstep.optim.verdict import Undivided, judge
from lockstep.world import parameters_of

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# Packages with wrappers of optimizers that have no state of their own.
_TRAINERS = {"accelerate", "ignite", "lightning", "lightning_fabric", "pytorch_lightning", "ray"}


def shard_optimizer(
    optimizer: OptimizerT,
    *,
    master_dtype: torch.dtype | None = None,
    overlap: bool = False,
    undivided: Undivided = "warn",
) -> OptimizerT:
    """Divide the work and the state of ``optimizer`` among the ranks, in place.

    It stays the same object of the same class, with the same parameter groups, and its steps have
    the same result. But each rank updates only a part of the parameters, and holds the state of
    this part alone. So ``step()`` does less work, and the state of an Adam takes 1/N of the memory.
    On one rank it divides nothing. ::

        model = lockstep.parallelize(model)
        optimizer = lockstep.shard_optimizer(torch.optim.AdamW(model.parameters()))

    Ranks that are processes of one host (the process group ``"shm"``) share one copy of the
    parameters, and don't send updates to each other. If the program changes a parameter on one
    rank, this rank sees the change until the next step, which starts from the values of the ranks
    that update them. Each rank sums only the gradients that it needs; the others are summed when
    the program reads ``parameter.grad``, which is the mean over the ranks as before, and may be
    changed. For that, parameters become instances of a subclass of ``nn.Parameter``; copies and
    unpickled ones are plain parameters. :func:`lockstep.clip_grad_norm_` clips gradients without
    summing all of them on each rank, and the optimizer's ``zero_grad()`` drops them unread, while
    the model's reads them first. ``torch.compile`` with ``fullgraph=True`` can't read them.
    On other process groups, ranks send each other the parameters they have updated; but hosts with
    the same number of ranks each divide all of the work among their own ranks, and send nothing.

    Options may be changed, groups added, and parameters frozen, unfrozen or replaced at any time,
    on every rank alike. Parameters with sparse gradients, and parameters of no parallel module, are
    not divided: each rank updates its own, as before.

    torch's element-wise optimizers (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam,
    RAdam, ASGD, Rprop) update equal parts of the elements on each rank, wherever that cuts a
    parameter. (On a CPU, with ``fused=True`` or in 16 bits, torch computes elements at the end of a
    tensor in another way, so that parameters may differ in their last bit from those of an
    unsharded optimizer.) Any other optimizer updates whole parameters, about the same number of
    elements on each rank. In a step its groups have the parameters that this rank updates, the
    program's own objects. A step leaves ``parameter.grad`` as it was on every rank: what an
    optimizer changes there in place, as to centralize gradients, it changes in a copy. Its public
    methods that torch's optimizers don't have and that use the state, such as Schedule-Free's
    ``eval()`` and ``train()``, are divided as a step is: every rank must call them, and they block.

    Where a class of the program calls the ``step()`` of torch's class that it is derived from, by
    ``super()``, that step alone is divided. What comes before and after it, such as to clamp all
    parameters, has all of them and of their gradients on every rank. (For that, the optimizer
    becomes an instance of a class of the same name, derived from its own.)

    An optimizer of a class that isn't torch's is tried before: rank 0 lets copies of it take some
    steps on small stand-ins of its parameters, all together and divided, and compares their bits
    and what they note in attributes and options. If they differ, as with Prodigy, whose estimate is
    one for all parameters, or if it draws random numbers or can't be tried, the optimizer is left
    undivided, with a warning that has the reason:
    each rank updates all parameters and has all of the state. Its steps draw the random numbers
    that rank 0 draws, and then every rank has to take them; in join() they are refused. Where it is
    divided, each rank also updates one or two small parameters of another rank, in memory of its
    own, and ``step()`` raises a ModelError on every rank of the parameters' process group if these
    updates differ.

    ``optimizer.state`` holds this rank's part of the state: by parameter, or with torch's
    element-wise optimizers by tensors of the optimizer's own. To read other state there raises an
    error. The state of a parameter that every rank puts there, whole, or deletes counts.

    Every rank must call it, with the same optimizer, and from then on its ``step()``,
    ``state_dict()`` and ``load_state_dict()``, which block. ``state_dict()`` returns the ordinary
    state dict, of all parameters, on every rank; with ``rank0_only=True`` only rank 0's has the
    state. ``load_state_dict()`` takes ordinary ones, saved by any number of ranks.
    :func:`lockstep.save`, and torch.distributed.checkpoint with
    :class:`lockstep.checkpoint.ShardedState`, save each rank's part where it is. A closure is
    called once, before the step. Gradients have to be the mean over the ranks: a step after
    :func:`no_sync`, with each rank's own gradients, would mix them.

    Args:
        optimizer: An optimizer whose parameters are those of modules that were given to
            :func:`parallelize`, or are in a wrapper; or what a trainer's ``prepare()`` or
            ``setup()`` made of it, with it as ``.optimizer``.
        master_dtype: The dtype of the values that are updated, and of the optimizer's state, such
            as ``torch.float32`` for parameters in bfloat16. Each rank has these values for its
            part, and the parameters are rounded from them. In a state dict they are each
            parameter's ``"master"``. By default, the parameters' own dtype.
        overlap: For process groups of other libraries, such as NCCL and Gloo: whether ranks send
            each gradient to the rank that updates it alone, while the backward runs, and updated
            parameters while the program goes on. That sends two thirds of the bytes. With other
            than element-wise optimizers, only parameters are sent that way. It has a price:

            - A function of torch that is called with a parameter waits for its update. What doesn't
              get the parameter by such a call reads the value of before: views of it,
              ``parameter.data`` and state dicts that were kept over the step, C++ extensions,
              transforms of ``torch.func``, TorchScript, CUDA graphs, and constructors such as
              ``torch.tensor(parameter)``. Call ``parameter.data_ptr()`` before. On a GPU the stream
              waits that is current in the call, and not the host, unless the call returns a view.
            - To read ``parameter.grad`` between backward and step is a collective, and so is to
              enter :func:`no_sync` before gradients are dropped: every rank has to. So use the
              optimizer's ``zero_grad()``; the model's reads all gradients.
            - The model has to live until the step.

            On lockstep's own groups it changes nothing.

        undivided: What to do with an optimizer that can't be divided: ``"warn"`` to leave it
            undivided with a warning, or ``"error"``, for those who need the memory. With
            ``"always"`` it isn't tried, and is left undivided.

    Returns:
        ``optimizer`` itself.

    Raises:
        ModelError: If no parallel module has any of its parameters; if it is an LBFGS, whose
            update of each parameter depends on all others; if it has another optimizer in it, as
            timm's Lookahead does: shard that one; if it calls its closure several times in a step;
            or if it can't be divided and ``undivided`` is ``"error"``.
        ModelMismatch: If the ranks' optimizers differ.
        AlreadyParallel: If it is sharded already, by torch too (DTensors).
        TypeError: If it isn't an optimizer, or ``master_dtype`` no floating-point dtype.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020), stage 1.
    """
    refuse_in_shard("An optimizer is sharded")
    check_flag("overlap", overlap)
    check_type("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    if master_dtype is not None and not (
        isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point
    ):
        raise TypeError(refusal("master_dtype", master_dtype, "a dtype such as torch.float32"))
    given, optimizer = optimizer, cast(OptimizerT, inner_optimizer(optimizer))
    kind = type(optimizer).__name__
    if is_undivided(optimizer) or sharding_of(optimizer) is not None:
        raise AlreadyParallel(f"This {kind} is sharded already. Go on with it as it is.")
    if isinstance(optimizer, LBFGS):
        raise ModelError(
            "LBFGS computes the update of each parameter from all of them, so its work can't be "
            "divided among ranks. Use it as it is: with a parallel model, it takes the same steps "
            "on every rank."
        )
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer):
            raise ModelError(
                f"{kind} has an optimizer in it, {type(inner).__name__} ({name!r}), which takes "
                f"the steps. Shard that one alone: shard_optimizer(optimizer.{name})."
            )
    parameters: list[Any] = parameters_of(optimizer)
    if not any(are_parallel(parameters)):
        if divided := next(filter(None, map(divided_by_torch, parameters)), ""):
            raise AlreadyParallel(
                f"A parameter of this {kind} is {divided}, of which each rank updates its own part "
                "already. Use it as it is."
            )
        raise ModelError(
            f"No parameter of this {kind} is a parallel module's, so the ranks' gradients differ "
            "and their updates can't be shared. Call lockstep.parallelize(model) before, with the "
            "model whose parameters the optimizer has: moving a model may give it others."
        )
    groups = [*dict.fromkeys(filter(None, groups_of(parameters)))]
    verdict = judge(optimizer, groups, undivided) if groups else None
    if verdict is not None and verdict.treatment is Treatment.DIVIDE:
        Sharding(
            optimizer,
            groups_of,
            master_dtype=master_dtype,
            overlaps=overlap,
            updates_all=verdict.updates_all,
            drops_gradients=verdict.drops_gradients,
        )
        return given
    if master_dtype is not None:
        Sharding(optimizer, _alone, master_dtype=master_dtype, updates_all=True)
    else:
        leave_undivided(optimizer)
    if verdict is not None and verdict.may_draw:
        draw_alike(optimizer, groups)
    return given


def _alone(parameters: Sequence[nn.Parameter]) -> list[dist.ProcessGroup | None]:
    return [cast(Any, ALONE) if is_parallel else None for is_parallel in are_parallel(parameters)]


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose ``step()`` that of ``optimizer``, a trainer's wrapper, calls.

    An optimizer around another one that has state of its own, as a Lookahead has, is no wrapper.
    """
    while not has_more_state(optimizer) and isinstance(
        inner := getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = inner
    return optimizer


def has_more_state(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is around another one, and has more state than that."""
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        return False
    # A class that doesn't call torch's constructor may have no state.
    is_inners = getattr(optimizer, "state", None) is inner.state
    if is_inners and not _saves_more(type(optimizer)):
        return False
    package = type(optimizer).__module__.partition(".")[0]
    return package not in _TRAINERS  # whose wrappers may have an earlier state of the inner one


def _saves_more(kind: type[Optimizer]) -> bool:
    """Whether the state dict of ``kind``, a wrapper, is more than that of the optimizer in it."""
    is_overridden = kind.state_dict is not Optimizer.state_dict
    return is_overridden and not names_used(kind, "state_dict") <= {"optimizer", "state_dict"}


def sharding_of(optimizer: Optimizer) -> Sharding | None:
    """Return the Sharding of ``optimizer``, if it is sharded."""
    owner: object = getattr(inner_optimizer(optimizer).state_dict, "__self__", None)
    return owner if isinstance(owner, Sharding) else None
