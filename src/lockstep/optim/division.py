"""The parameters of an optimizer and their state, as they are divided among the ranks."""

from __future__ import annotations

import json
import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm import any_rank, can_overlap, have_same
from lockstep.errors import ModelMismatch
from lockstep.grad import MIB, assign_buckets
from lockstep.nn import defer_gradients, finish_failed
from lockstep.optim.blocks import in_order
from lockstep.optim.divided import DividedState, State, without
from lockstep.optim.flat import FlatParameters, shares_memory, with_memory_of_others
from lockstep.optim.known import ELEMENTWISE, KNOWN, updating_class
from lockstep.optim.partial import state_to_come
from lockstep.optim.repeats import Repeats
from lockstep.optim.shard import MASTER, OptimizerShard, make_shards
from lockstep.optim.state import LocalState, gather_state, local_states, put_state
from lockstep.optim.whole import whole_parameters

_log = logging.getLogger(__name__)

# The size from which parameters that overlap have another memory.
_CAP_BYTES = 25 * MIB
# Returns for each parameter the ranks that keep it in step; None for one that isn't divided.
GroupsOf = Callable[[Sequence[nn.Parameter]], Sequence[dist.ProcessGroup | None]]


class DivisionOptions(NamedTuple):
    """How an optimizer is to be divided."""

    groups_of: GroupsOf
    master_dtype: torch.dtype | None
    overlaps: bool


class Division:
    """The parameters that an optimizer has now, of which each rank updates a part.

    Every rank of the parameters' groups creates it; it blocks.

    Attributes:
        flats: The memories of the divided parameters.
        shards: What this rank updates.
        parameters: For each group of the optimizer, its parameters.
        local: For each group, those that are not divided.
        repeats: Updates that two ranks make, to compare them; none of a known class.
        state: The optimizer's state, once it has been set.
    """

    def __init__(self, optimizer: Optimizer, options: DivisionOptions) -> None:
        self._optimizer, self._master_dtype = optimizer, options.master_dtype
        groups = optimizer.param_groups
        number = in_order(groups)
        parameters = [*number]
        together: dict[Any, list[nn.Parameter]] = defaultdict(list)
        local = with_memory_of_others(parameters)
        for parameter, process_group in zip(parameters, options.groups_of(parameters), strict=True):
            if process_group is None or parameter in local:
                local.add(parameter)
            else:
                together[process_group, parameter.dtype, parameter.device].append(parameter)
        keeps_whole = type(optimizer) not in ELEMENTWISE
        make = whole_parameters if keeps_whole else make_shards
        self.flats: list[FlatParameters] = []
        self.shards: list[OptimizerShard] = []
        for (process_group, *_), alike in together.items():
            finish_failed(process_group)
            self._check_same(process_group, alike, [number[parameter] for parameter in alike])
            shared = any_rank(process_group, [*map(shares_memory, alike)])
            local.update(self._left_whole(alike, shared))
            alike = [p for p in alike if p not in local]
            if not alike:
                continue
            overlaps = options.overlaps and can_overlap(process_group)
            for part in _by_bucket(alike) if overlaps and not keeps_whole else [alike]:
                flat = FlatParameters(
                    process_group, part, keeps_whole=keeps_whole, overlaps=overlaps
                )
                self.flats.append(flat)
                self.shards += make(flat, [number[p] for p in part], options.master_dtype)
        for flat in self.flats:
            defer_gradients(flat.in_order(), flat.bucket_kind)
        self.local = [[p for p in group["params"] if p in local] for group in groups]
        self.parameters = [[*group["params"]] for group in groups]
        watched = [] if updating_class(type(optimizer)) in KNOWN else self.flats
        self.repeats = Repeats(optimizer, watched, self.shards, number, options.master_dtype)
        self.state: DividedState

    def _left_whole(
        self, parameters: Sequence[nn.Parameter], are_shared: Sequence[bool]
    ) -> list[nn.Parameter]:
        """Return those of ``parameters`` that share memory, and so aren't moved; tell of them."""
        shared = [*compress(parameters, are_shared)]
        if shared:
            _log.warning(
                "%s of the parameters of this %s, such as one of shape %s, share their memory with "
                "another tensor (a buffer, a kept state_dict(), share_memory()), which a sharded "
                "optimizer would leave behind. So every rank updates them whole. Drop or clone "
                "that tensor before the optimizer is sharded to have them divided.",
                len(shared),
                type(self._optimizer).__name__,
                tuple(shared[0].shape),
            )
        return shared

    def _check_same(
        self,
        process_group: dist.ProcessGroup,
        parameters: Sequence[nn.Parameter],
        numbers: Sequence[int],
    ) -> None:
        kind = type(self._optimizer).__name__
        shapes = [list(parameter.shape) for parameter in parameters]
        dtypes = [str(parameters[0].dtype), str(self._master_dtype)]
        description = json.dumps([kind, dtypes, shapes, list(numbers)])
        if not have_same(process_group, description.encode(), parameters[0].device):
            raise ModelMismatch(
                f"The ranks' {kind}s differ in their class, or in the order, shapes or groups of "
                "their parameters. Make the same optimizer on every rank before it is sharded."
            )

    def divided(self) -> list[nn.Parameter]:
        """Return the divided parameters."""
        return [parameter for flat in self.flats for parameter in flat.parameters]

    def is_of(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the optimizer's groups have the same parameters as when they were divided."""
        return len(groups) == len(self.parameters) and all(
            len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
            for group, known in zip(groups, self.parameters, strict=True)
        )

    def take_back(self) -> bool:
        """Move parameters back whose data the program has replaced.

        Returns False if some can't be: they have another shape, dtype or device, or are tied.
        """
        moved = [flat for flat in self.flats if flat.has_moved()]
        if not moved:
            return True
        tied = with_memory_of_others([*chain(*self.parameters)])
        is_free = tied.isdisjoint(chain(*(flat.parameters for flat in moved)))
        is_free = is_free and all(flat.can_take_back() for flat in moved)
        return is_free and all([*map(FlatParameters.take_back, moved)])

    def set_state(self, state: Mapping[Any, State]) -> None:
        """Set the optimizer's state to this rank's part of ``state``, which is by parameter."""
        whole = {**state}
        local: Any = self._optimizer.state
        if not isinstance(local, DividedState):
            local = DividedState(type(self._optimizer).__name__)
        local.reset({p: owner for flat in self.flats for p, owner in flat.owners().items()})
        local.update(without(whole, self.divided()))
        local.set_marked(bool(whole))
        self.shards = [part for shard in self.shards for part in put_state(shard, whole, local)]
        self.state = self._optimizer.state = local
        self.repeats.doubt()

    def whole_state(self) -> dict[Any, State]:
        """Return the state of all parameters. Every rank must call it; it blocks."""
        state = self._optimizer.state
        found: dict[Any, State] = {}
        for flat in self.flats:
            found |= gather_state(flat, [s for s in self.shards if s.flat is flat], state)
        return self.local_state() | found

    def local_state(self) -> dict[Any, State]:
        """Return the state of what isn't divided."""
        return without(self._optimizer.state, (shard.tensor for shard in self.shards))

    def states_to_come(self) -> list[LocalState]:
        """Return what a step would make of state that this rank's part doesn't have yet.

        The values say nothing.
        """
        made: dict[Any, State] = {}
        for shard in self.shards:
            parameters = [shard.flat.parameters[piece.parameter] for piece in shard.pieces]
            is_trained = any(parameter.requires_grad for parameter in parameters)
            if is_trained and shard.state_in(self._optimizer.state) is None:
                made[shard.tensor] = state_to_come(self._optimizer, shard.group, shard.tensor)
                if shard.has_master:
                    made[shard.tensor][MASTER] = torch.empty_like(shard.tensor)
        parts = local_states(self.shards, made)
        return [part for part in parts if part.parameter.requires_grad]


def _by_bucket(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters, in the order in which gradients become ready, as buckets are."""
    sizes, order = [parameter.nbytes for parameter in parameters], range(len(parameters))
    parts = assign_buckets(sizes, [None] * len(sizes), order, cap_bytes=_CAP_BYTES)
    return [[parameters[index] for index in part] for part in parts]
