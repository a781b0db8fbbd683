"""Whether all ranks have the same model and options, in every bit, and which rank hasn't."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.arguments import check_flag, check_type
from lockstep.comm import broadcast_tensors, bytes_of, differing_facts, global_rank
from lockstep.errors import ModelError, ReplicasDiffer
from lockstep.metrics import ranks_of_call
from lockstep.nn import state_of
from lockstep.optim import sharding_of
from lockstep.world import options_of, parameters_of

# How many differences an error tells.
_NUM_TOLD = 8


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
        ranks: Those that have something else than most ranks do; all if no value is that of more
            than half of them, or shapes or dtypes differ.
        source: The first rank that has what most have; None where ``ranks`` are all.
    """

    name: str
    ranks: tuple[int, ...]
    source: int | None

    def __str__(self) -> str:
        who = ", ".join(map(str, self.ranks))
        if self.source is None:
            return f"{self.name} differs between ranks {who}, of which no majority has the same"
        return f"{self.name} of rank{'s' * (len(self.ranks) > 1)} {who} isn't that of the others"


def check_replicas(
    model: nn.Module, *optimizers: Optimizer, repair: bool = False
) -> list[ReplicaDifference]:
    """Raise on every rank unless all have the same parameters, in every bit. ::

        for step, batch in enumerate(loader):
            ...
            if step % 100 == 0:
                lockstep.check_replicas(model, optimizer)

    What is compared: parameters, frozen ones too, and buffers that lockstep keeps in step; of
    ``optimizers`` the options of each group, such as ``lr``, and the state, of sharded ones the
    options. A model that isn't parallel is compared without its buffers, over all ranks of
    :func:`init`. Replicas part where a program changes them on one rank alone, and where hardware
    fails; a wrong gradient comes to all of them alike, and isn't seen here.

    All ranks must call it, between steps: behind ``optimizer.step()``, say. It costs each rank a
    pass over its tensors, on the CPU (from a GPU they are copied there, one at a time), and one
    all-reduce of 64 bytes; the digests of all tensors travel only if they differ.

    Args:
        model: The model that all ranks train.
        optimizers: Its optimizers.
        repair: Give all ranks what more than half of them have. An optimizer's state is repaired
            as well, if it isn't sharded and was given.

    Returns:
        What differed and has been repaired; an empty list if all ranks have the same.

    Raises:
        ReplicasDiffer: Naming what differs and on which ranks; with ``repair``, if some of it has
            no value that most ranks have, which then is the only thing that isn't repaired.
        CollectiveFailed: If a rank is lost or late, or inside of ``join()``.
        TypeError: If these aren't a module and optimizers.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    for optimizer in optimizers:
        check_type("optimizers", optimizer, Optimizer, "a torch.optim.Optimizer")
    check_flag("repair", repair)
    found: list[ReplicaDifference] = []
    for group, tensors in _by_group(model):
        found += _Replica(model, tensors, optimizers).compared(group, repair=repair)
    wrong = [each for each in found if each.source is None or not repair]
    if wrong:
        told = "".join(f"\n  {each}" for each in wrong[:_NUM_TOLD])
        more = f"\n  and {len(wrong) - _NUM_TOLD} more" if len(wrong) > _NUM_TOLD else ""
        cure = "Load the last checkpoint"
        if any(each.source is not None for each in wrong):
            cure += ", or give all ranks what most of them have: check_replicas(repair=True)"
        elif repair and len(wrong) < len(found):
            cure += ". Everything else that differed is repaired"
        raise ReplicasDiffer(
            f"Ranks don't have the same replicas:{told}{more}\n{cure}.", tuple(wrong)
        )
    return found


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
            for index, options in enumerate(options_of(optimizer)):
                self._add(optimizer.param_groups[index], options, f" of group {index}{whose}")
            if sharding_of(optimizer) is None:
                for parameter in parameters_of(optimizer):
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

    def compared(self, group: dist.ProcessGroup | None, *, repair: bool) -> list[ReplicaDifference]:
        """Return what differs from other ranks of ``group``, after a repair where that can be."""
        group, device = ranks_of_call("check_replicas", group)
        if group.size() == 1:
            return []
        facts = {name: _facts_of(tensor) for name, tensor in self._tensors.items()}
        facts |= {name: values[key] for name, (values, key) in self._numbers.items()}
        by_rank = differing_facts(group, facts, device)
        found = []
        for name in dict.fromkeys(chain.from_iterable(by_rank)):
            # A rank may lack state: torch's ZeroRedundancyOptimizer has it on one rank alone.
            is_of_all = name.startswith(("parameter ", "buffer "))
            by_value: dict[str, list[int]] = defaultdict(list)
            for rank, theirs in enumerate(by_rank):
                if name in theirs or is_of_all:
                    by_value[json.dumps(theirs.get(name))].append(rank)
            *others, most = sorted(by_value.values(), key=len)
            if not others:
                continue
            ranks = sorted(chain.from_iterable(others))
            can_repair = len(most) > len(ranks) and _are_of_one_form(by_rank, name)
            if not can_repair:
                ranks = sorted([*ranks, *most])
            elif repair:
                self._repair(group, device, name, most[0], by_rank[most[0]][name])
            who = tuple(global_rank(group, rank) for rank in ranks)
            source = global_rank(group, most[0]) if can_repair else None
            found.append(ReplicaDifference(name, who, source))
        return found

    def _repair(
        self, group: dist.ProcessGroup, device: torch.device, name: str, source: int, value: Any
    ) -> None:
        if name in self._tensors:
            with torch.no_grad():
                tensor = self._tensors[name].detach()
                # Adam counts steps on the CPU, whose tensors a group of GPUs may not carry.
                sent = tensor.to(device) if tensor.device.type == "cpu" else tensor
                broadcast_tensors(group, [sent], source)
                if sent is not tensor:
                    tensor.copy_(sent)
        elif name in self._numbers:
            values, key = self._numbers[name]
            values[key] = tuple(value) if isinstance(values[key], tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _facts_of(tensor: torch.Tensor) -> dict[str, str]:
    facts = {"form": f"{tensor.dtype} {[*tensor.shape]} {tensor.layout}"}
    if tensor.layout is torch.strided and not tensor.is_quantized:
        elements = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        facts["bits"] = blake2b(bytes_of(elements), digest_size=16).hexdigest()
    return facts


def _are_of_one_form(by_rank: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether all ranks have it, of one shape and dtype if it is a tensor."""
    if not all(name in theirs for theirs in by_rank):
        return False
    values = [theirs[name] for theirs in by_rank]
    return len({value["form"] if isinstance(value, dict) else "" for value in values}) == 1
