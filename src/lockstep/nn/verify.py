"""Verifies that all ranks have the same model and the same options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.arguments import divided_by_torch
from lockstep.comm import carrier, device_of_facts, differing_facts
from lockstep.errors import AlreadyParallel, ModelError, ModelMismatch
from lockstep.grad import gradient_dtype
from lockstep.world import device_in

_REMEDIES = {
    "tensors": "Build the same model on every rank before making it parallel.",
    "options": "Give the same options on every rank.",
}


def check_same_model(
    module: nn.Module,
    group: dist.ProcessGroup,
    options: Mapping[str, object] | None = None,
    refusal: ModelError | None = None,
    left_out: Collection[str] = (),
    *,
    new: Collection[str] = (),
) -> None:
    """Raise on every rank unless all have the same model, the same options, and no refusal.

    The same model means the same names, shapes, dtypes, memory layouts and frozen parameters. All
    ranks must call it; it blocks. If nothing differs, it costs one all-reduce of 64 bytes. A model
    that torch has divided among ranks is refused, on every rank.

    Args:
        module: The model.
        group: The ranks.
        options: Further values that must be the same.
        refusal: The reason why this rank can't go on, and so no rank can.
        left_out: Names of parameters and buffers that may differ.
        new: Names of parameters that were put in place since ranks had the same model.

    Raises:
        ModelMismatch: Naming the first difference with both sides, or another rank's refusal.
        ModelError: This rank's ``refusal``, if there was one.
        AlreadyParallel: If torch has divided the model.
    """
    refusal = refusal or refusal_of_divided(module, left_out)
    refusal = refusal or _refusal_of_devices(module, group, left_out)
    facts = {
        "refusal": str(refusal or ""),
        "tensors": _descriptions(module, group, left_out, new),
        "options": {name: str(value) for name, value in (options or {}).items()},
    }
    # The same kind on every rank, wherever their models are.
    device = device_of_facts(group)
    devices = {tensor.device for _, tensor in _kept_in_step(module, left_out)}
    alike = [each for each in devices if each.type == device.type]
    by_rank = differing_facts(group, facts, alike[0] if alike and refusal is None else device)
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(by_rank):
        if theirs["refusal"]:
            raise ModelMismatch(f"Rank {rank} can't go on, so no rank can: {theirs['refusal']}")
    for subject, remedy in _REMEDIES.items():
        for rank, theirs in enumerate(by_rank):
            first, other = by_rank[0][subject], theirs[subject]
            if [*other.items()] != [*first.items()]:
                raise ModelMismatch(f"{_first_difference(first, other, rank)}.\n{remedy}")


def _first_difference(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    for name in [*first, *other]:
        if first.get(name) != other.get(name):
            return (
                f"{name!r} is {other.get(name, 'not there')} on rank {rank} and "
                f"{first.get(name, 'not there')} on rank 0"
            )
    return f"rank {rank} registers its parameters and buffers in another order than rank 0"


def refusal_of_divided(module: nn.Module, left_out: Collection[str] = ()) -> AlreadyParallel | None:
    """Return why lockstep can't keep ``module`` in step, if torch has divided its tensors.

    FSDP2 and tensor parallelism make DTensors of them; torch's first FSDP has plain tensors, of
    other values on each rank.
    """
    named = dict(_kept_in_step(module, left_out))
    reasons = [f"{name!r} is {form}" for name, t in named.items() if (form := divided_by_torch(t))]
    for name, submodule in module.named_modules():
        kinds = [kind.__name__ for kind in type(submodule).__mro__]
        if "FullyShardedDataParallel" in kinds and any(one.startswith(name) for one in named):
            where = f"its part {name!r}" if name else "it"
            reasons.append(f"{where} is divided among ranks, as a {kinds[0]}")
    if not reasons:
        return None
    return AlreadyParallel(
        f"lockstep can't keep this {type(module).__name__} in step: {reasons[0]}. torch does it "
        "(fully_shard(), tensor parallelism): train it as it is. For replicas of it, give "
        "fully_shard() a mesh with a dimension for them. lockstep.DataLoader and lockstep.mean go "
        "with that; where ranks have the same samples, as in tensor parallelism, give both "
        "process_group=mesh.get_group(NAME), with the dimension of the replicas."
    )


def _refusal_of_devices(
    module: nn.Module, group: dist.ProcessGroup, left_out: Collection[str]
) -> ModelError | None:
    """Return why ``group`` can't keep ``module`` in step where it is."""
    local = device_in(group)
    advice = "Move the model before it is made parallel"
    if local is not None and carrier(group, local) is not None:
        advice += f": model.to({str(local)!r}), the device of this rank's World"
    tensors = dict(_kept_in_step(module, left_out))
    for name, tensor in tensors.items():
        device = tensor.device
        if device.type != "meta" and carrier(group, device) is None:
            return ModelError(
                f"{name!r} is on {device}, and the backends of the process group carry no tensors "
                f"of {device.type} between ranks. {advice}; or leave 'backend' out of init()."
            )
    devices = {tensor.device for tensor in tensors.values()}
    others = sorted(str(each) for each in devices if local is not None and each.type == local.type)
    if local is not None and others and local not in devices:
        name = next(name for name, tensor in tensors.items() if str(tensor.device) == others[0])
        return ModelError(
            f"{name!r} is on {others[0]}, and this rank computes on {local}: two ranks that share "
            f"a device may wait for each other for ever. {advice}; or give init(device="
            f"{others[0]!r}); or, for a part of a model whose other parts are on {local}, a "
            "process_group of its own."
        )
    return None


def _kept_in_step(
    module: nn.Module, left_out: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if name not in left_out:
            yield name, tensor


def _descriptions(
    module: nn.Module, group: dist.ProcessGroup, left_out: Collection[str], new: Collection[str]
) -> dict[str, str]:
    """Describe what must be the same, as ``{"fc.weight": "a parameter (50, 320) float32"}``.

    The kind of device is told if another backend carries its tensors than those of the CPU.
    """
    on_cpu = carrier(group, torch.device("cpu"))
    buffers = {name for name, _ in module.named_buffers()}
    found = {}
    for name, tensor in _kept_in_step(module, left_out):
        sent_by = carrier(group, tensor.device)
        place = "" if sent_by in (None, on_cpu) else f" on {tensor.device.type}"
        found[name] = f"a buffer {_form(tensor)}{place}"
        if name in buffers:
            continue
        kind = "a new parameter" if name in new else "a parameter"
        kind = kind if tensor.requires_grad else kind.replace("parameter", "frozen parameter")
        found[name] = f"{kind} {_form(tensor)}{place}"
        dtype = tensor.dtype if is_lazy(tensor) else gradient_dtype(tensor)
        if tensor.requires_grad and dtype != tensor.dtype:
            found[name] += f" with a gradient of {_name_of(dtype)}"
    return found


def _form(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "of no shape yet"
    form = f"{tuple(tensor.shape)} {_name_of(tensor.dtype)}"
    # A gradient has the memory layout of its parameter, and an all-reduce sums memory.
    is_dense = tensor.layout is not torch.strided or tensor.is_contiguous()
    return form if is_dense else f"{form} with strides {tensor.stride()}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
