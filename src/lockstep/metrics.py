"""Metrics of all ranks together: sums, means, minima, maxima and concatenations of nestings."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arguments import as_finite_number, check_not_divided, refusal
from lockstep.comm import (
    SingleRankGroup,
    all_gather,
    all_gather_json,
    check_same_facts,
    device_of_facts,
    flattened,
    join_state_of,
    uncompiled,
)
from lockstep.errors import CollectiveFailed
from lockstep.nn import finish_failed, refuse_in_replica, refuse_in_shard, refuse_transforms
from lockstep.world import group_or_all

__all__ = ["gather_all_tensors", "reduce"]

Op = Literal["sum", "mean", "min", "max", "cat"]

_T = TypeVar("_T")
_Leaf = Tensor | int | float


@uncompiled
def reduce(
    tree: _T,
    op: Op = "mean",
    *,
    weight: Tensor | float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> _T:
    """Combine the numbers and tensors of all ranks, such as the metrics of an evaluation. ::

        counts = lockstep.reduce({"correct": correct, "samples": samples}, "sum")
        loss = lockstep.reduce(loss_of_batch, weight=len(batch))

    Every rank must call it, with the same ``op`` and a tree of the same paths, shapes and dtypes;
    it blocks until all have. The results have the same bits on every rank, are detached from
    autograd's graph, and on the device of what they replace. On one rank nothing is sent.

    Args:
        tree: A number of Python, a tensor, or a nesting of them in dicts, lists, tuples and
            dataclasses.
        op: ``"sum"``: whole numbers of Python stay exact; tensors of integers and bools become
            int64. ``"mean"``: of numbers a float, of tensors of integers and bools float64.
            ``"min"``, ``"max"``: NaN if any value is. ``"cat"``: tensors along dimension 0, where
            their lengths may differ, in rank order; one without dimensions counts as one row.
            Floating-point numbers are added up in float64.
        weight: For the mean, how much this rank's values count: the number of samples of which
            they are the mean, or a tensor that can be broadcast to each value. Values of weight 0
            count nothing, even NaN. By default all ranks count the same.
        process_group: The ranks; by default all of ``lockstep.init()``.

    Returns:
        The same nesting, with the result in place of each value.

    Raises:
        CollectiveMismatch: On every rank, naming one that asks for something else, and for what.
        CollectiveFailed: If a rank is lost or late, or inside of ``join()``.
        TypeError: If a value can't be reduced, such as a string.
        ValueError: If there is no such ``op``, or weights are negative, not finite, or all 0.
    """
    group, device = ranks_of_call("reduce", process_group)
    refused: Exception | None = None
    try:
        local = _leaves_of(tree, op, device)
        if op == "mean" or weight is not None:
            local["weight"] = _checked_weight(weight, op, local).to(device)
        facts = {"op": repr(op)} | {path: _fact(leaf) for path, leaf in local.items()}
    except (OverflowError, TypeError, ValueError) as error:
        refused, facts = error, {"op": f"refused ({error})"}
    by_rank = all_gather_json(group, facts, device)
    if refused is not None:
        raise refused
    first_dim = int(op == "cat")
    forms = [{name: _form(x, first_dim) for name, x in theirs.items()} for theirs in by_rank]
    check_same_facts(group, "reduce", forms)
    results = _combined(_all_values(group, local, by_rank), op)

    def result_for(path: str, value: object) -> object:
        result = results[path]
        if isinstance(result, Tensor):
            return result.to(value.device) if isinstance(value, Tensor) else result.item()
        return result

    return cast(_T, _replaced(tree, result_for))


@uncompiled
def gather_all_tensors(result: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's ``result``, in rank order: ``dist_sync_fn`` of torchmetrics. ::

        metric = MulticlassAUROC(10, dist_sync_fn=lockstep.integrations.gather_all_tensors)

    Every rank must call it; it blocks. This rank's own keeps its graph. Shapes may differ in every
    dimension. The state of a rank without data changes nothing: an empty vector gets the dtype and
    the other dimensions of the rest; and where floating-point dtypes differ, or dtypes of numbers
    (tensors without dimensions), all get the one to which torch promotes them, as in one process.

    Raises:
        CollectiveMismatch: On every rank, if dtypes or numbers of dimensions differ otherwise.
    """
    ranks, device = ranks_of_call("gather_all_tensors", group)
    local = {"result": result.detach().to(device)}
    by_rank = all_gather_json(ranks, {"result": _fact(local["result"])}, device)
    gathered = [theirs["result"].to(result.device) for theirs in _all_values(ranks, local, by_rank)]
    gathered[ranks.rank()] = result
    filled = [tensor for tensor in gathered if tensor.shape != (0,)]
    if not filled:
        return gathered
    are_alike = all(each.is_floating_point() for each in filled) or not any(map(Tensor.dim, filled))
    dtype = fold(torch.promote_types, [each.dtype for each in filled]) if are_alike else None
    empty = filled[0].new_empty(0, *filled[0].shape[1:])
    gathered = [(empty if each.shape == (0,) else each).to(dtype) for each in gathered]
    forms = [f"a tensor {each.dtype} of {each.dim()} dimensions" for each in gathered]
    cure = (
        "Give update() tensors of the same on all ranks, with a first dimension of samples; and "
        "tensors without samples on a rank that has none."
    )
    check_same_facts(ranks, "gather_all_tensors", [{"result": form} for form in forms], cure)
    return gathered


def ranks_of_call(
    call: str, process_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, torch.device]:
    """Return the ranks that ``call`` is of, and the device of the tensors that it sends."""
    refuse_in_replica(f"lockstep.{call}")
    refuse_in_shard(f"lockstep.{call}() is called")
    group = group_or_all(process_group)
    if group is None or group.size() == 1:
        return cast(dist.ProcessGroup, SingleRankGroup()), torch.device("cpu")
    if join_state_of(group) is not None:
        raise CollectiveFailed(
            f"{call}() was called inside of join(), where ranks without data don't call it, and "
            "the others would wait for them. Call it after the loop."
        )
    finish_failed(group)
    return group, device_of_facts(group)


def _leaves_of(tree: object, op: object, device: torch.device) -> dict[str, _Leaf]:
    """Return what to reduce by path, in the same order on all ranks; tensors on ``device``."""
    if op not in get_args(Op):
        raise ValueError(refusal("op", op, f"one of {', '.join(map(repr, get_args(Op)))}"))
    leaves: dict[str, _Leaf] = {}

    def add(path: str, value: object) -> None:
        if path in leaves:
            raise ValueError(f"Two values are named {path}. Give keys that print differently.")
        if isinstance(value, Tensor):
            check_not_divided(path, value)
            refuse_transforms(value)
            has_op = not (value.is_complex() and op in ("min", "max"))
            has_op &= op in ("mean", "cat") or value.dtype is not torch.uint64
            if value.layout is not torch.strided or value.is_meta or value.is_nested or not has_op:
                raise TypeError(refusal(path, value, f"a tensor of which there is a {op}"))
            value = value.detach().to(device)
            leaves[path] = value.reshape(1) if op == "cat" and not value.dim() else value
        elif op == "cat" or not isinstance(value, numbers.Real):
            wanted = "a tensor to concatenate" if op == "cat" else "a number or a tensor"
            raise TypeError(refusal(path, value, wanted))
        elif op == "mean":
            leaves[path] = torch.tensor(float(value), dtype=torch.float64, device=device)
        else:
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            leaves[path] = value if isinstance(value, bool) else number

    _replaced(tree, add)
    return dict(sorted(leaves.items()))  # ranks may have filled their dicts in different orders


def _checked_weight(weight: object, op: str, leaves: Mapping[str, Any]) -> Tensor:
    if weight is not None and op != "mean":
        raise ValueError(f"weight is for a mean, and op is {op!r}.")
    found = weight
    if not isinstance(found, Tensor):
        number = as_finite_number("weight", 1 if weight is None else weight)
        found = torch.tensor(number, dtype=torch.float64)
    found = found.detach().double()
    if not (found.isfinite() & (found >= 0)).all():
        raise ValueError(refusal("weight", weight, "a finite number of samples, 0 or more"))
    for path, leaf in leaves.items() if found.dim() else ():
        try:
            found.expand(leaf.shape)
        except RuntimeError as error:
            text = f"weight is {tuple(found.shape)}, which can't be broadcast to {path}, "
            raise ValueError(text + f"{tuple(leaf.shape)}.") from error
    return found


def _replaced(tree: Any, replace: Callable[[str, object], object], path: str = "tree") -> Any:
    """Return a copy of a nesting, of the same types, with ``replace(path, value)`` for values."""
    copied: Any
    if isinstance(tree, dict):
        copied = copy.copy(tree)
        for key, value in tree.items():
            copied[key] = _replaced(value, replace, f"{path}[{key!r}]")
        return copied
    if isinstance(tree, list | tuple):
        values = [_replaced(value, replace, f"{path}[{i}]") for i, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        copied = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = _replaced(getattr(tree, field.name), replace, f"{path}.{field.name}")
            object.__setattr__(copied, field.name, value)  # it may be frozen
        return copied
    return replace(path, tree)


def _fact(leaf: _Leaf) -> object:
    """Return a number itself, or the dtype and shape of a tensor: what JSON takes."""
    return (
        [str(leaf.dtype).removeprefix("torch."), *leaf.shape] if isinstance(leaf, Tensor) else leaf
    )


def _form(fact: object, first_dim: int) -> str:
    """Return what ranks must have in common, of shapes the dimensions from ``first_dim``."""
    if isinstance(fact, list):
        return f"{'rows' if first_dim else 'a tensor'} {(*fact[1 + first_dim :],)} {fact[0]}"
    return fact if isinstance(fact, str) else "a number"


def _all_values(
    group: dist.ProcessGroup, local: Mapping[str, _Leaf], by_rank: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return every rank's values: tensors of any dtypes in one transfer, as the facts say."""
    tensors = {path: leaf for path, leaf in local.items() if isinstance(leaf, Tensor)}
    values = [{path: theirs[path] for path in local} for theirs in by_rank]
    if not tensors:
        return values
    wire = torch.cat([flattened(tensor).view(torch.uint8) for tensor in tensors.values()])
    forms = [[(getattr(torch, theirs[p][0]), theirs[p][1:]) for p in tensors] for theirs in values]
    sizes = [[dtype.itemsize * math.prod(shape) for dtype, shape in each] for each in forms]
    padded = torch.nn.functional.pad(wire, (0, max(map(sum, sizes)) - wire.numel()))
    wires = all_gather(group, padded) if padded.numel() else [padded] * len(values)
    for theirs, wire, size, form in zip(values, wires, sizes, forms, strict=True):
        pieces = wire[: sum(size)].split(size)
        for path, piece, (dtype, shape) in zip(tensors, pieces, form, strict=True):
            theirs[path] = piece.clone().view(dtype).view(shape)  # at an aligned address
    return values


def _combined(by_rank: Sequence[dict[str, Any]], op: str) -> dict[str, _Leaf]:
    """Combine the values of all ranks, in rank order."""
    results: dict[str, _Leaf] = {}
    weights = [theirs.pop("weight") for theirs in by_rank] if op == "mean" else []
    if op == "mean" and not any(weight.any() for weight in weights):
        raise ValueError("All ranks gave a weight of 0. There is nothing to average.")
    for path, first in by_rank[0].items():
        values = [theirs[path] for theirs in by_rank]
        if not isinstance(first, Tensor):
            nan = [value for value in values if value != value]
            results[path] = nan[0] if nan else getattr(builtins, op)(values)
        elif op == "cat":
            results[path] = torch.cat(values)
        else:
            wide = [value.to(_wide(value.dtype)) for value in values]
            pairs = zip(wide, weights, strict=False)
            wide = [torch.where(weight > 0, value * weight, 0) for value, weight in pairs] or wide
            total = fold({"min": torch.minimum, "max": torch.maximum}.get(op, torch.add), wide)
            total = total / sum(weights) if weights else total
            is_whole = _wide(first.dtype) is torch.int64 and op not in ("min", "max")
            results[path] = total if is_whole else total.to(first.dtype)
    return results


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are combined."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
