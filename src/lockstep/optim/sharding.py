"""Divides the steps of an optimizer among the ranks of its parameters."""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain, compress
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm import (
    Step,
    add_update,
    all_gather_bytes,
    broadcast_tensors,
    can_overlap,
    device_of_facts,
    have_same,
    join_state_of,
    uncompiled,
)
from lockstep.errors import CollectiveFailed, ModelError, ModelMismatch
from lockstep.grad import MIB, ScatteredBucket, assign_buckets, lacks_gradient
from lockstep.nn import defer_gradients, finish_failed, refresh_engines_of
from lockstep.optim.flat import FlatParameters, Progress, with_memory_of_others
from lockstep.optim.partial import state_to_come
from lockstep.optim.shard import MASTER, GroupsByShard, Part, Shard, make_shards
from lockstep.optim.state import (
    Divided,
    State,
    StatePart,
    gather_state,
    parts_of_state,
    put_state,
    stand_ins,
)

# Optimizers whose update of an element depends on nothing but the element's value, gradient and
# state, on options, and on the number of steps.
_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
# The size from which parameters that overlap have another memory.
_CAP_BYTES = 25 * MIB
# The key in ``optimizer.state`` of the object that represents divided state.
_DIVIDED = "divided among the ranks"
_PROGRESS = {
    Progress.BEFORE: "they are still those of the step before.",
    Progress.IN_THE_MIDST: "some are of this step now and some of the one before. Go on from a "
    "checkpoint.",
    Progress.DONE: "they are those of this step now.",
}
# Returns for each parameter the ranks that keep it in step; None for one that isn't divided.
GroupsOf = Callable[[Sequence[nn.Parameter]], Sequence[dist.ProcessGroup | None]]


@uncompiled
class Sharding:
    """Divides the steps of an optimizer among the ranks of its parameters.

    Between steps the optimizer has the program's parameters and options, and the state of this
    rank's shards. During a step its groups hold the shards in place of the parameters, so that the
    arithmetic is that of its own class. Afterwards the ranks publish the values they have updated.

    With ``is_joinable``, the optimizer is in torch's Join context itself, which lets ranks without
    data take its steps. With ``overlaps``, ranks that can't read each other's memory send gradients
    to their owners alone while the backward runs, and parameters while the program goes on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups_of: GroupsOf,
        *,
        is_joinable: bool = False,
        master_dtype: torch.dtype | None = None,
        overlaps: bool = False,
    ) -> None:
        self._optimizer, self._groups_of, self._is_joinable = optimizer, groups_of, is_joinable
        self._master_dtype, self._overlaps = master_dtype, overlaps
        # Not the code that torch.compile() made of it, which takes no list of another class.
        own_step: Any = optimizer.step
        self._own_step = getattr(own_step, "_torchdynamo_orig_callable", own_step)
        self._flats: list[FlatParameters] = []
        self._shards: list[Shard] = []
        # For each flat memory, the parameters that this step updates.
        self._updated: dict[FlatParameters, Sequence[nn.Parameter]] = {}
        # For each group, the parameters that are not divided, and all parameters.
        self._local: list[list[nn.Parameter]] = []
        self._parameters: list[list[nn.Parameter]] = []
        # During a step, the program's groups and their parameters; and the number of nested calls
        # of step(): a class may call that of its base class.
        self._replaced: tuple[list[dict[str, Any]], list[Any]] | None = None
        self._depth = 0
        # By process group, the number by which ranks announce a step in lockstep.join().
        self._numbers: dict[dist.ProcessGroup, int] = {}
        refresh_engines_of(p for group in optimizer.param_groups for p in group["params"])
        self._arrange(optimizer.state)
        self._before = optimizer.register_step_pre_hook(self._begin_step)
        self._after = optimizer.register_step_post_hook(self._end_step)

        @wraps(self._own_step)  # which a learning rate scheduler may have marked
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            return self._step(closure, options)

        vars(optimizer).update(
            step=MethodType(step, optimizer),
            state_dict=self.state_dict,
            load_state_dict=self.load_state_dict,
        )
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            vars(optimizer).update(zero_grad=self.zero_grad)

    def _arrange(self, state: Mapping[Any, State]) -> None:
        """Divide the parameters that the optimizer has now, and their ``state``."""
        groups = self._optimizer.param_groups
        number = {p: index for index, group in enumerate(groups) for p in group["params"]}
        # Within each group, in the order in which gradients become ready.
        parameters = [*reversed(number)]
        parameters.sort(key=number.__getitem__)
        together: dict[Any, list[nn.Parameter]] = defaultdict(list)
        local = with_memory_of_others(parameters)
        for parameter, ranks in zip(parameters, self._groups_of(parameters), strict=True):
            if ranks is None or parameter in local:
                local.add(parameter)
            else:
                together[ranks, parameter.dtype, parameter.device].append(parameter)
        keeps_whole = type(self._optimizer) not in _ELEMENTWISE
        flats: list[FlatParameters] = []
        shards: list[Shard] = []
        for (ranks, *_), own in together.items():
            finish_failed(ranks)
            self._check_same(ranks, own, [number[parameter] for parameter in own])
            overlaps = self._overlaps and can_overlap(ranks)
            for part in _parts_of(own) if overlaps and not keeps_whole else [own]:
                flat = FlatParameters(ranks, part, keeps_whole=keeps_whole, overlaps=overlaps)
                flats.append(flat)
                shards += make_shards(flat, [number[p] for p in part], self._master_dtype)
        for flat in flats:
            defer_gradients(flat.in_order(), flat.bucket_kind)
            if flat.ranks not in self._numbers:
                self._numbers[flat.ranks] = add_update(flat.ranks, self.follow)
        self._local = [[p for p in group["params"] if p in local] for group in groups]
        self._parameters = [[*group["params"]] for group in groups]
        self._flats, self._shards = flats, shards
        self._set_state(state)

    def _set_state(self, state: Mapping[Any, State]) -> None:
        """Set the optimizer's state to this rank's part of ``state``, which is by parameter."""
        whole: dict[Any, State] = dict(state)
        own: Any = self._optimizer.state
        own.clear()
        shared = {p for flat in self._flats for p in flat.parameters}
        own.update({key: value for key, value in whole.items() if key not in shared})
        if whole:
            own[_DIVIDED] = Divided()
        self._shards = [part for shard in self._shards for part in put_state(shard, whole, own)]

    def _check_same(
        self, ranks: dist.ProcessGroup, own: Sequence[nn.Parameter], numbers: Sequence[int]
    ) -> None:
        kind = type(self._optimizer).__name__
        shapes = [list(parameter.shape) for parameter in own]
        dtypes = [str(own[0].dtype), str(self._master_dtype)]
        description = json.dumps([kind, dtypes, shapes, list(numbers)])
        if not have_same(ranks, description.encode(), own[0].device):
            raise ModelMismatch(
                f"The ranks' {kind}s differ in their class, or in the order, shapes or groups of "
                "their parameters. Make the same optimizer on every rank before it is sharded."
            )

    def _whole_state(self) -> dict[Any, State]:
        """Return the state of all parameters. Every rank must call it; it blocks."""
        state = self._optimizer.state
        found: dict[Any, State] = {}
        for flat in self._flats:
            found |= gather_state(flat, [s for s in self._shards if s.flat is flat], state)
        return self._local_state() | found

    def _local_state(self) -> dict[Any, State]:
        # Divided parameters are left out too: optimizer.state[parameter] makes an empty state.
        known: set[Any] = {p for flat in self._flats for p in flat.parameters} | {_DIVIDED}
        known |= {shard.tensor for shard in self._shards}
        return {key: v for key, v in self._optimizer.state.items() if key not in known}

    def _has_all(self) -> bool:
        """Whether the optimizer's groups have the same parameters as when they were divided."""
        groups = self._optimizer.param_groups
        return len(groups) == len(self._parameters) and all(
            len(group["params"]) == len(own) and all(map(operator.is_, group["params"], own))
            for group, own in zip(groups, self._parameters, strict=True)
        )

    def _refresh(self) -> None:
        """Divide the parameters anew if the program has changed them."""
        moved = [flat for flat in self._flats if flat.has_moved()]
        tied = with_memory_of_others([*chain(*self._parameters)]) if moved else set()
        can_stay = tied.isdisjoint(chain(*(flat.parameters for flat in moved)))
        if not (self._has_all() and can_stay and all([*map(FlatParameters.take_back, moved)])):
            self._arrange(self._whole_state())

    def _step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            options["closure"] = _once(loss, type(self._optimizer).__name__)
        for ranks, number in self._numbers.items():
            finish_failed(ranks)
            self._announce(ranks, number)
        return self._take_step(options)

    def _take_step(self, options: dict[str, Any]) -> Any:
        # The program's hooks must see its own parameters: so ours runs last before the step, and
        # first after it.
        pre: Any = self._optimizer._optimizer_step_pre_hooks
        post: Any = self._optimizer._optimizer_step_post_hooks
        pre.move_to_end(self._before.id)
        post.move_to_end(self._after.id, last=False)
        self._depth = 0
        try:
            return self._own_step(**options)
        finally:
            self._put_parameters_back()

    def _begin_step(self, *_: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return  # a class's step() has called that of its base class
        self._refresh()
        groups = self._optimizer.param_groups
        parts = [Part([*own], []) for own in self._local]
        self._shards = [
            shard for flat in self._flats for shard in self._take_gradients(flat, parts)
        ]
        try:
            for flat in self._flats:
                flat.begin_update()
        except CollectiveFailed as error:
            self._tell_progress(error)
            raise
        for shard in self._shards:
            shard.read_values()
        self._replaced = groups, [group["params"] for group in groups]
        self._optimizer.param_groups = GroupsByShard(groups, parts)

    def _take_gradients(self, flat: FlatParameters, parts: list[Part]) -> list[Shard]:
        """Set the gradients of the shards of ``flat``; add the shards to ``parts``; return them."""
        shards = [shard for shard in self._shards if shard.flat is flat]
        bucket = None if flat.keeps_whole else flat.deferred_bucket()
        if bucket is not None:
            for shard in shards:
                if isinstance(bucket, ScatteredBucket):
                    shard.take_mean(bucket)
                    parts[shard.group].summed.append(shard.tensor)
                else:
                    parts[shard.group].unsummed.append((shard, bucket))
            self._updated[flat] = flat.parameters
            return shards
        flat.sum_if_laid_out_otherwise()
        lacks = [*map(lacks_gradient, flat.parameters)]
        self._updated[flat] = [*compress(flat.parameters, map(operator.not_, lacks))]
        if any(lacks):
            state = self._optimizer.state
            shards = [part for one in shards for part in one.split(lacks.__getitem__, state)]
        for shard in shards:
            if not lacks[shard.pieces[0].parameter]:
                shard.take_gradient()
                parts[shard.group].summed.append(shard.tensor)
        return shards

    def _end_step(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._put_parameters_back()
        for shard in self._shards:
            shard.tensor.grad = None
            shard.write_values()
        state: Any = self._optimizer.state
        state[_DIVIDED] = Divided()
        try:
            for flat in reversed(self._flats):  # as the next forward needs them
                flat.publish(self._updated.pop(flat), self._tell_progress)
        except CollectiveFailed as error:
            self._tell_progress(error)
            raise

    def _tell_progress(self, error: CollectiveFailed) -> None:
        """Note in ``error`` how far the update of the parameters is."""
        progress = {each for flat in self._flats for each in flat.progress()}
        told = _PROGRESS[progress.pop() if len(progress) == 1 else Progress.IN_THE_MIDST]
        error.add_note(
            f"It was in a step of {type(self._optimizer).__name__}, in which the ranks update "
            f"parameters together: {told}"
        )

    def _put_parameters_back(self) -> None:
        if self._replaced is not None:
            (groups, replaced), self._replaced = self._replaced, None
            self._optimizer.param_groups = groups
            for group, parameters in zip(groups, replaced, strict=True):
                group["params"] = parameters

    def _announce(self, ranks: dist.ProcessGroup, number: int) -> None:
        """In join(), let ranks without data take the step too."""
        state = join_state_of(ranks)
        if state is None or (self._is_joinable and not state.follows_updates):
            return
        if not state.follows_updates:
            raise ModelError(
                "A sharded optimizer steps in torch's Join context, where ranks without data don't "
                "know of it, and its work is divided among all. Use lockstep.join(model), or pass "
                "a lockstep.ZeroRedundancyOptimizer to the context, behind the model."
            )
        active = state.call(Step.UPDATE, number).active
        self._take_options(ranks, active[0])
        if len(active) < ranks.size():
            self._take_gradients_of(ranks, active[0])

    def follow(self, ranks: dist.ProcessGroup, first: int) -> None:
        """Take a step along with ranks that still have data: with options and gradients of one."""
        self._take_options(ranks, first)
        self._take_gradients_of(ranks, first)
        self._take_step({})

    def _take_options(self, ranks: dist.ProcessGroup, first: int) -> None:
        """Copy the options of rank ``first`` that are numbers, such as learning rates."""
        groups = self._optimizer.param_groups
        numbers = [
            {name: float(v) for name, v in group.items() if _is_number(v)} for group in groups
        ]
        for group, own in zip(groups, self._gather(ranks, numbers)[first], strict=True):
            for name, number in own.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(number)
                elif float(group[name]) != number:
                    group[name] = type(group[name])(number)

    def _take_gradients_of(self, ranks: dist.ProcessGroup, first: int) -> None:
        """Copy the gradients of rank ``first``, whose program may have clipped them."""
        flats = (flat for flat in self._flats if flat.ranks is ranks)
        parameters = [parameter for flat in flats for parameter in flat.parameters]
        lacks = self._gather(ranks, [*map(lacks_gradient, parameters)])[first]
        for parameter, has_none in zip(parameters, lacks, strict=True):
            if has_none or lacks_gradient(parameter):
                parameter.grad = None if has_none else torch.empty_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        broadcast_tensors(ranks, [g for g in gradients if g is not None], first)

    def _gather(self, ranks: dist.ProcessGroup, own: Any) -> list[Any]:
        """Return each rank's value, which JSON can represent."""
        own = json.dumps(own).encode()
        return [*map(json.loads, all_gather_bytes(ranks, own, device_of_facts(ranks)))]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, to None by default, as torch's does."""
        if not set_to_none or not self._has_all():
            type(self._optimizer).zero_grad(self._optimizer, set_to_none)
            return
        others = [*chain(*self._local)]
        for flat in self._flats:
            if (bucket := flat.deferred_bucket()) is not None:
                bucket.drop_pending()
            else:
                others += flat.parameters
        for parameter in others:
            if not lacks_gradient(parameter):
                parameter.grad = None

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the ordinary state dict, of all parameters. Every rank must call it; it blocks.

        With ``rank0_only`` only rank 0's has the state.
        """
        self._prepare()
        whole = self._whole_state()
        if rank0_only and any(ranks.rank() for ranks in self._numbers):
            whole = {}
        return self._as_state_dict(whole)

    def own_state_dict(
        self, *, on_all_hosts: bool = False
    ) -> tuple[dict[str, Any], list[StatePart]]:
        """Return the state dict without divided state, and this rank's part of the divided state.

        Every rank must call it. If each host has all state, ranks of other hosts than the first
        have no part, unless ``on_all_hosts``.
        """
        self._prepare()
        shards = [shard for shard in self._shards if on_all_hosts or shard.flat.is_first]
        parts = [*parts_of_state(shards, self._optimizer.state)]
        return self._as_state_dict(self._local_state()), parts

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups among whose ranks it divides steps."""
        return [*self._numbers]

    def parts_to_come(self) -> list[StatePart]:
        """Return what a step would make of state that this rank's part doesn't have yet.

        The values say nothing. Call it after :meth:`own_state_dict`.
        """
        made: dict[Any, State] = {}
        for shard in self._shards:
            parameters = [shard.flat.parameters[piece.parameter] for piece in shard.pieces]
            is_trained = any(parameter.requires_grad for parameter in parameters)
            if is_trained and shard.state_in(self._optimizer.state) is None:
                made[shard.tensor] = state_to_come(self._optimizer, shard.group, shard.tensor)
                if shard.has_master:
                    made[shard.tensor][MASTER] = torch.empty_like(shard.tensor)
        parts = parts_of_state(self._shards, made)
        return [part for part in parts if part.parameter.requires_grad]

    def owned(self) -> dict[torch.Tensor, tuple[int, int]]:
        """Return for each divided parameter the range of elements that this rank updates.

        load_state_dict() reads no other elements on this rank. Every rank must call it.
        """
        self._prepare()
        owned: dict[torch.Tensor, tuple[int, int]]
        owned = {p: (0, 0) for flat in self._flats for p in flat.parameters}
        for flat in self._flats:
            owned |= {flat.parameters[index]: (start, stop) for index, start, stop in flat.pieces}
        return owned

    def _prepare(self) -> None:
        """Finish a failed backward, and divide changed parameters anew. Every rank must call it."""
        for ranks in self._numbers:
            finish_failed(ranks)
        self._refresh()

    def _as_state_dict(self, state: dict[Any, State]) -> dict[str, Any]:
        own, self._optimizer.state = self._optimizer.state, defaultdict(dict, state)
        try:
            return type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._optimizer.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an ordinary state dict, and keep this rank's part. Every rank must call it."""
        self._prepare()
        with stand_ins(self._optimizer, self._master_dtype) as parameters:
            type(self._optimizer).load_state_dict(self._optimizer, state_dict)
        state: Any = self._optimizer.state
        self._set_state({parameters.get(key, key): value for key, value in state.items()})
        # A state dict in parts may have none of this rank's parameters, and yet some of others'.
        for ranks in self._numbers:
            if any(self._gather(ranks, len(state))):
                state[_DIVIDED] = Divided()


def _parts_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters, in the order in which gradients become ready, as buckets are."""
    sizes, order = [parameter.nbytes for parameter in parameters], range(len(parameters))
    parts = assign_buckets(sizes, [None] * len(sizes), order, cap_bytes=_CAP_BYTES)
    return [[parameters[index] for index in part] for part in parts]


def _once(loss: Any, kind: str) -> Callable[[], Any]:
    """Return a closure that returns ``loss``, and raises when it is called again."""
    calls: list[None] = []

    def closure() -> Any:
        if calls:
            raise ModelError(
                f"{kind} calls its closure several times in a step, between changes of the "
                "parameters, of which each rank has a part while the optimizer is sharded. Make it "
                "anew, and don't shard it: with a parallel model, every rank takes the same steps."
            )
        calls.append(None)
        return loss

    return closure


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)
