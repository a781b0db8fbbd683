"""Converts the state of a sharded optimizer: from shards to whole parameters, and back."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from lockstep.comm import all_gather_in_place, all_gather_json, bytes_of
from lockstep.optim.divided import State
from lockstep.optim.flat import FlatParameters, elements_of
from lockstep.optim.partial import elements_from
from lockstep.optim.shard import MASTER, OptimizerShard, is_by_element, update_dtype
from lockstep.tree import Collector, Header, decode, from_flat


class LocalState(NamedTuple):
    """The state of those elements of a parameter that one rank updates."""

    parameter: torch.Tensor
    start: int  # the index of the first element, in the parameter's memory order
    by_element: dict[str, torch.Tensor]  # state with a value per element; of one dimension
    once: dict[str, Any]  # all other state, such as the number of steps


def local_states(
    shards: Iterable[OptimizerShard], state: Mapping[Any, State]
) -> Iterator[LocalState]:
    """Yield this rank's part of the state, by shard and parameter."""
    for shard in shards:
        held = shard.state_in(state) or {}
        by_element = {
            name: elements_of(value, shard.tensor)
            for name, value in held.items()
            if is_by_element(shard.flat, shard.tensor, name, value)
        }
        once = {name: value for name, value in held.items() if name not in by_element}
        for piece in shard.pieces if held else ():
            place = slice(None) if shard.flat.keeps_whole else shard.place_of(piece)
            parts = {name: value[place] for name, value in by_element.items()}
            yield LocalState(shard.flat.parameters[piece.parameter], piece.start, parts, once)


def gather_state(
    flat: FlatParameters, shards: Sequence[OptimizerShard], state: Mapping[Any, State]
) -> dict[torch.Tensor, State]:
    """Return the state of those parameters of ``flat`` that have any.

    Every rank must call it, with its shards of ``flat`` and their ``state``; it blocks.
    """
    # For each shard: the indices of its parameters; the dtypes of state by element, by name; and
    # all other state. Both are encoded, as names may be numbers.
    local: list[tuple[list[int], Any, Any]] = []
    for shard in shards:
        if (whole := shard.state_in(state)) is not None:
            parts, others = {}, {}
            for name, value in whole.items():
                if is_by_element(flat, shard.tensor, name, value):
                    parts[name] = str(value.dtype).removeprefix("torch.")
                else:
                    others[name] = value
            indices = [piece.parameter for piece in shard.pieces]
            local.append((indices, encoded(parts), encoded(others)))
    found: dict[int, State] = {}
    # State by element: index of the parameter, name and dtype.
    divided: set[tuple[int, Any, str]] = set()
    by_rank = all_gather_json(flat.group, local, flat.parameters[0].device)
    for indices, encoded_parts, encoded_others in itertools.chain(*by_rank):
        parts = decoded(encoded_parts)
        divided |= {(index, *part) for index in indices for part in parts.items()}
        for index in indices:
            found.setdefault(index, dict.fromkeys(parts) | decoded(encoded_others))
    # Under one name, parameters may have state of several dtypes, as of eight bits if they are big.
    for name, dtype in sorted({part[1:] for part in divided}, key=repr):
        memory = flat.new_memory(getattr(torch, dtype))
        for shard in shards:
            there: Any = (shard.state_in(state) or {}).get(name)
            if is_by_element(flat, shard.tensor, name, there) and there.dtype is memory.dtype:
                flat.part(memory, shard.pieces).copy_(elements_of(there, shard.tensor))
        all_gather_in_place(flat.group, memory)
        for index, view in enumerate(flat.views_of(memory)):
            if (index, name, dtype) in divided:
                found[index][name] = view.clone()
    return {flat.parameters[index]: found[index] for index in sorted(found)}


@contextmanager
def stand_ins(
    optimizer: Optimizer, master_dtype: torch.dtype | None
) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Let an optimizer have empty tensors in place of its parameters, to load a state dict.

    torch casts loaded state to the dtype of parameters, which may be less than that of updates.
    Yields the parameters by these tensors.
    """
    parameters: dict[torch.Tensor, torch.Tensor] = {}
    # Also of the groups that the optimizer has before, which the program may hold.
    before = [(group, group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        params = group["params"]
        dtypes = [update_dtype(parameter.dtype, master_dtype) for parameter in params]
        group["params"] = [
            torch.empty(0, dtype=dtype, device=parameter.device)
            for dtype, parameter in zip(dtypes, params, strict=True)
        ]
        parameters |= zip(group["params"], params, strict=True)
    try:
        yield parameters
    finally:
        for group, (held, params) in zip(optimizer.param_groups, before, strict=True):
            group["params"] = held["params"] = params


def put_state(
    shard: OptimizerShard, whole: Mapping[Any, State], state: MutableMapping[Any, State]
) -> list[OptimizerShard]:
    """Copy the part of ``shard`` from ``whole``, the state of parameters, to ``state``.

    Returns the shard; or parts of it, if its parameters differ in state that they have once, such
    as the number of steps.
    """
    flat, parameters = shard.flat, shard.flat.parameters

    def once(index: int) -> State | None:
        parameter = parameters[index]
        if parameter not in whole:
            return None
        items = whole[parameter].items()
        return {name: v for name, v in items if not is_by_element(flat, parameter, name, v)}

    def key(index: int) -> str:
        values = once(index)
        if values is None:
            return ""
        items = whole[parameters[index]].items()
        dtypes = {name: str(value.dtype) for name, value in items if name not in values}
        return json.dumps([encoded(dtypes), encoded(values)])

    parts = shard.split(key, {}) if len(shard.pieces) > 1 else [shard]
    for part in parts:
        first = part.pieces[0].parameter
        values = once(first)
        if values is None:
            part.put_master(None)
            continue
        local = deepcopy(values)
        for name, value in whole[parameters[first]].items():
            if name in local:
                continue
            local[name] = torch.zeros_like(part.tensor, dtype=value.dtype)
            target = elements_of(local[name], part.tensor)
            for piece in part.pieces:
                place = slice(None) if flat.keeps_whole else part.place_of(piece)
                parameter = parameters[piece.parameter]
                source = whole[parameter][name], parameter, piece.start, piece.stop
                target[place].copy_(elements_from(*source))
        part.put_master(local.pop(MASTER, None))
        state[part.tensor] = local
    return parts


def encoded(state: State) -> list[Any]:
    """Return ``state`` as JSON can represent it."""
    found = Collector()
    tree = found.encode(state, "state")
    tensors = {}
    for key, header in found.headers.items():
        elements = found.whole[key]
        data = base64.b64encode(bytes(bytes_of(elements.cpu()))).decode()
        tensors[key] = [*header, str(elements.device), data]
    return [tree, tensors]


def decoded(value: Any, device_here: torch.device | None = None) -> Any:
    """Return what :func:`encoded` has represented.

    Tensors on a device of the kind of ``device_here`` are put there: other ranks have another one.
    """
    tree, tensors = value

    def tensor_of(key: str) -> torch.Tensor:
        *parts, device, data = tensors[key]
        if device_here is not None and torch.device(device).type == device_here.type:
            device = device_here
        header, elements = Header(*parts), bytearray(base64.b64decode(data))
        flat = torch.empty(0, dtype=header.torch_dtype)
        if elements:
            flat = torch.frombuffer(elements, dtype=header.torch_dtype)
        return from_flat(flat.to(device), header)

    return decode(tree, tensor_of)
