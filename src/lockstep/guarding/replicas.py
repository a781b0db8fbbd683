"""Whether all ranks have the same model and options, in every bit, and which rank hasn't."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.arguments import as_whole_number, check_flag, check_type
from lockstep.comm import (
    broadcast_tensors,
    bytes_of,
    carrier,
    check_same_facts,
    differing_facts,
    global_rank,
)
from lockstep.errors import ModelError, ReplicasDiffer
from lockstep.guarding.step import common_of
from lockstep.guarding.update import is_nested
from lockstep.metrics import ranks_of_call
from lockstep.nn import state_of
from lockstep.optim import sharding_of
from lockstep.world import options_of, parameters_of

_log = logging.getLogger("lockstep")

# How many differences an error tells, and what stands for a value that a rank doesn't have.
_NUM_TOLD, _MISSING = 8, "missing on this rank"
_CALL = "check_replicas()"


@dataclass(frozen=True)
class ReplicaDifference:
    """What isn't the same on all ranks. ::

        try:
            repaired = lockstep.check_replicas(model, optimizer, repair=True)
        except lockstep.errors.ReplicasDiffer as error:
            print(*(difference.ranks for difference in error.differences))
            raise

    Attributes:
        name: ``"parameter fc.weight"``, ``"buffer bn.running_mean"``, ``"exp_avg of fc.weight"``,
            or ``"lr of group 0"``; the last two with ``"of optimizer 1"`` if that isn't the first.
        ranks: Those that have something else than more than half of the ranks; all of them if
            there is no such value.
        source: The first rank that has what most have; None if there is no such value.
        can_repair: Whether the others can take it: it is there on all, of one shape and dtype.
    """

    name: str
    ranks: tuple[int, ...]
    source: int | None
    can_repair: bool

    def __str__(self) -> str:
        who = ", ".join(map(str, self.ranks))
        if self.source is None:
            return f"{self.name} differs between ranks {who}, of which no majority has the same"
        return f"{self.name} of rank{'s' * (len(self.ranks) > 1)} {who} isn't that of the others"


def check_replicas(
    model: nn.Module, *optimizers: Optimizer, repair: bool = False, every: int | None = None
) -> list[ReplicaDifference]:
    """Raise on every rank unless all have the same parameters, in every bit. ::

        lockstep.check_replicas(model, optimizer, every=100)  # now, and after each 100th step
        for batch in loader:
            ...

    What is compared: parameters, frozen ones too, and buffers that lockstep keeps in step; of
    ``optimizers`` options and state, where they are numbers, text, tensors, and lists and dicts of
    these; of sharded ones options such as ``lr``. Tensors without plain memory (DTensors, sparse,
    quantized, lazy ones) are compared by shape and dtype. A model that isn't parallel is compared
    without its buffers, over all ranks of :func:`init`. Where parts of a model are parallel over
    ranks of their own, it is the ranks of such a group that raise. Replicas part where a program
    changes them on one rank alone, and where hardware
    fails; a wrong gradient comes to all of them alike, and isn't seen here.

    All ranks must call it, between steps: behind ``optimizer.step()``, say. It costs each rank a
    pass over its tensors, on the CPU (from a GPU they are copied there, one at a time), and one
    all-reduce of 64 bytes; the digests of all tensors travel only if they differ.

    Args:
        model: The model that all ranks train.
        optimizers: Its optimizers.
        repair: Give all ranks what more than half of them have. An optimizer's state is repaired
            as well, if it isn't sharded and was given.
        every: Look again after each so many steps of the first optimizer, which is to step on all
            ranks alike, and raise out of its ``step()``. A later call takes the place of an earlier
            one for that optimizer; ``every=0`` ends it. What is repaired then is logged.

    Returns:
        What differed and has been repaired; an empty list if all ranks have the same.

    Raises:
        ReplicasDiffer: Naming what differs and on which ranks; with ``repair``, if some of it has
            no value that most ranks have, which then is the only thing that isn't repaired.
        CollectiveFailed: If a rank is lost or late, or inside of ``join()``.
        CollectiveMismatch: If ranks gave another ``every`` or ``repair``.
        TypeError: If these aren't a module and optimizers, or none of these to count steps of.
        ValueError: If ``every`` is less than 0.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    for optimizer in optimizers:
        check_type("optimizers", optimizer, Optimizer, "a torch.optim.Optimizer")
    check_flag("repair", repair)
    if every is not None:
        as_whole_number("every", every, "a number of steps, 0 or more, or None", at_least=0)
        if not optimizers:
            raise TypeError("check_replicas(every=) counts an optimizer's steps: give it to it.")
    found: list[ReplicaDifference] = []
    for group, tensors in _by_group(model):
        how = {"every": every, "repair": repair}
        found += _Replica(model, tensors, optimizers).compared(group, how)
    if every is not None:
        _look_again(model, optimizers, every, repair=repair)
    wrong = [each for each in found if not (repair and each.can_repair)]
    if wrong:
        told = "".join(f"\n  {each}" for each in wrong[:_NUM_TOLD])
        more = f"\n  and {len(wrong) - _NUM_TOLD} more" if len(wrong) > _NUM_TOLD else ""
        cure = "Load the last checkpoint"
        if any(each.can_repair for each in wrong):
            cure += ", or give all ranks what most of them have: check_replicas(repair=True)"
        elif repair and len(wrong) < len(found):
            cure += ". Everything else that differed is repaired"
        raise ReplicasDiffer(
            f"Ranks don't have the same replicas:{told}{more}\n{cure}.", tuple(wrong)
        )
    return found


def _look_again(
    model: nn.Module, optimizers: Sequence[Optimizer], every: int, *, repair: bool
) -> None:
    """Have each ``every``-th step of the first optimizer followed by a look."""
    common = common_of(optimizers[0])
    if common.look is not None:
        common.look.remove()
        common.look = None
    if not every:
        return
    common.num_updates = 0

    def look(optimizer: Optimizer, *_: object) -> None:
        if is_nested(optimizer):
            return
        common.num_updates += 1
        if common.num_updates % every == 0:
            for difference in check_replicas(model, *optimizers, repair=repair):
                _log.warning("Repaired after a step: %s", difference)

    common.look = optimizers[0].register_step_post_hook(look)


_Named = dict[str, torch.Tensor]


def _by_group(model: nn.Module) -> Iterator[tuple[dist.ProcessGroup | None, _Named]]:
    """The tensors that each group of ranks keeps in step, with their names."""
    names = {id(p): f"parameter {name}" for name, p in model.named_parameters()}
    names |= {id(b): f"buffer {name}" for name, b in model.named_buffers()}
    try:
        engines = state_of(model).engines
    except ModelError:
        yield None, {names[id(p)]: p for p in model.parameters()}
        return
    by_group: dict[dist.ProcessGroup, _Named] = {}
    for engine in engines:
        tensors = by_group.setdefault(engine.process_group, {})
        local = engine.buffers.named("late").values()
        for tensor in engine.tensors_in_step():
            if id(tensor) in names and not any(tensor is each for each in local):
                tensors[names[id(tensor)]] = tensor
    yield from by_group.items()


class _Replica:
    """What this rank has, by name.

    Args:
        model: The model.
        tensors: Those of it that are compared.
        optimizers: What updates them.
    """

    def __init__(self, model: nn.Module, tensors: _Named, optimizers: Sequence[Optimizer]) -> None:
        self._tensors = dict(tensors)
        # Where numbers are: in options of an optimizer's groups, and in its state.
        self._numbers: dict[str, tuple[dict[str, Any], str]] = {}
        # Of what other groups keep in step, each has its own state.
        compared = {id(tensor) for tensor in tensors.values()}
        names = {id(p): name for name, p in model.named_parameters() if id(p) in compared}
        for number, optimizer in enumerate(optimizers):
            whose = f" of optimizer {number}" if number else ""
            is_divided = _is_divided(optimizer)
            groups = zip(optimizer.param_groups, options_of(optimizer), strict=True)
            for index, (group, same) in enumerate(groups):
                if any(id(parameter) in compared for parameter in group["params"]):
                    # Other options may be what an optimizer remembers of its part.
                    keys = same if is_divided else group.keys() - {"params"}
                    self._add(group, sorted(keys), f" of group {index}{whose}")
            for parameter in [] if is_divided else parameters_of(optimizer):
                if (name := names.get(id(parameter))) is not None:
                    state = optimizer.state.get(parameter, {})
                    self._add(state, state, f" of {name}{whose}")

    def _add(self, values: dict[str, Any], keys: Iterable[Any], suffix: str) -> None:
        for key in keys:
            value, name = values[key], f"{key}{suffix}"
            if isinstance(value, torch.Tensor):
                self._tensors[name] = value
            elif _is_plain(value):
                self._numbers[name] = values, key
            elif isinstance(value, dict):
                self._add(value, value, f" of {name}")
            elif isinstance(value, list | tuple):
                tensors = [(n, t) for n, t in enumerate(value) if isinstance(t, torch.Tensor)]
                self._tensors |= {f"{key}[{n}]{suffix}": tensor for n, tensor in tensors}

    def compared(
        self, group: dist.ProcessGroup | None, how: Mapping[str, Any]
    ) -> list[ReplicaDifference]:
        """Return what differs from other ranks of ``group``, after a repair where that can be.

        ``how`` are the arguments of the call.
        """
        group, device = ranks_of_call("check_replicas", group)
        if group.size() == 1:
            return []
        facts = {name: _facts_of(tensor) for name, tensor in self._tensors.items()}
        facts |= {name: values[key] for name, (values, key) in self._numbers.items()}
        by_rank = [dict(each) for each in differing_facts(group, {_CALL: how, **facts}, device)]
        check_same_facts(group, _CALL, [each.pop(_CALL) for each in by_rank] or [{}])
        found = []
        for name in dict.fromkeys(chain.from_iterable(by_rank)):
            by_value: dict[str, list[int]] = defaultdict(list)
            for rank, theirs in enumerate(by_rank):
                by_value[json.dumps(theirs.get(name, _MISSING))].append(rank)
            *others, most = sorted(by_value.values(), key=len)
            if not others:
                continue
            ranks = sorted(chain.from_iterable(others))
            has_majority = len(most) > len(ranks)
            can_repair = has_majority and _are_of_one_form(by_rank, name)
            if can_repair and how["repair"]:
                self._repair(group, device, name, most[0], by_rank[most[0]][name])
            who = ranks if has_majority else [*range(group.size())]
            source = global_rank(group, most[0]) if has_majority else None
            global_ranks = tuple(global_rank(group, rank) for rank in who)
            found.append(ReplicaDifference(name, global_ranks, source, can_repair))
        return found

    def _repair(
        self, group: dist.ProcessGroup, device: torch.device, name: str, source: int, value: Any
    ) -> None:
        if name in self._tensors:
            with torch.no_grad():
                tensor = self._tensors[name].detach()
                # Adam counts steps on the CPU, whose tensors a group of GPUs may not carry.
                is_carried = carrier(group, tensor.device) is not None
                sent = tensor.to(tensor.device if is_carried else device, copy=True).contiguous()
                broadcast_tensors(group, [sent], source)
                tensor.copy_(sent)  # which autograd and others see, as the version is another one
        elif name in self._numbers:
            values, key = self._numbers[name]
            values[key] = tuple(value) if isinstance(values[key], tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_divided(optimizer: Optimizer) -> bool:
    """Whether each rank has the state of its part; torch's own class of that kind counts too."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    return sharding_of(optimizer) is not None or "ZeroRedundancyOptimizer" in names


def _facts_of(tensor: torch.Tensor) -> dict[str, str]:
    if is_lazy(tensor):
        return {"form": "lazy"}
    is_plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    facts = {"form": f"{tensor.dtype} {[*tensor.shape]} {tensor.layout}"}
    is_plain = is_plain and not tensor.is_meta and (tensor.data_ptr() != 0 or not tensor.numel())
    if is_plain and 0 in tensor.stride() and tensor.numel():
        facts["form"] += " expanded"
    if is_plain:
        elements = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        facts["bits"] = blake2b(bytes_of(elements), digest_size=16).hexdigest()
    return facts


def _are_of_one_form(by_rank: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether all ranks have it, of one shape and dtype if it is a tensor that can be written."""
    if not all(name in theirs for theirs in by_rank):
        return False
    values = [theirs[name] for theirs in by_rank]
    forms = {value["form"] if isinstance(value, dict) else "" for value in values}
    return len(forms) == 1 and not forms.pop().endswith("expanded")
