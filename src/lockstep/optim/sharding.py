"""Divides the steps of an optimizer among the ranks of its parameters."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import chain, compress
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep.comm import Announced, add_update, all_gather_json, join_state_of, uncompiled
from lockstep.errors import CollectiveFailed, ModelError
from lockstep.grad import ScatteredBucket, lacks_gradient
from lockstep.nn import Call, finish_failed, refresh_engines_of
from lockstep.optim.divided import State
from lockstep.optim.division import Division, DivisionOptions, GroupsOf
from lockstep.optim.flat import FlatParameters
from lockstep.optim.host_copy import BlockProgress
from lockstep.optim.in_shards import refuse_other_bits
from lockstep.optim.known import divide_base_step, known_base
from lockstep.optim.methods import methods_with_state
from lockstep.optim.shard import GroupsByShard, LocalGroup, OptimizerShard
from lockstep.optim.state import LocalState, local_states, stand_ins
from lockstep.optim.uneven import take_gradients, take_options

_PROGRESS = {
    BlockProgress.BEFORE: "they are still those of the step before.",
    BlockProgress.IN_THE_MIDST: "some are of this step now and some of the one before. Go on from "
    "a checkpoint.",
    BlockProgress.DONE: "they are those of this step now.",
}
_WRONG = (
    "{0} can't be divided among the ranks, which its trial has not shown: in step {1} since it was "
    "sharded, its update of a parameter with equal values, gradients and state differs: {2}. "
    "In earlier steps it didn't. This one is done, with the same parameters on every rank, but not "
    "those of one process. Go on from a checkpoint from before, and leave it undivided: "
    'shard_optimizer(optimizer, undivided="always"). If your program sets what differs, set it '
    "alike on every rank."
)


@uncompiled
class Sharding:
    """Divides the steps of an optimizer among the ranks of its parameters.

    Between steps the optimizer has the program's parameters and options, and the state of this
    rank's shards. During a step its groups hold the shards in place of the parameters, so that the
    arithmetic is that of its own class. Afterwards the ranks publish the values they have updated.

    With ``is_joinable``, the optimizer is in torch's Join context itself, which lets ranks without
    data take its steps. With ``overlaps``, ranks that can't read each other's memory send gradients
    to their owners alone while the backward runs, and parameters while the program goes on. With
    ``updates_all``, steps change parameters without gradient too; with ``drops_gradients``, they
    set all gradients to None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups_of: GroupsOf,
        *,
        is_joinable: bool = False,
        master_dtype: torch.dtype | None = None,
        overlaps: bool = False,
        updates_all: bool = False,
        drops_gradients: bool = False,
    ) -> None:
        self._optimizer, self._is_joinable = optimizer, is_joinable
        self._updates_all, self._drops_gradients = updates_all, drops_gradients
        self._options = DivisionOptions(groups_of, master_dtype, overlaps)
        # Not the code that torch.compile() made of it, which takes no list of another class.
        original_step: Any = optimizer.step
        self._original_step = getattr(original_step, "_torchdynamo_orig_callable", original_step)
        # For each flat memory, the parameters that this step updates.
        self._updated: dict[FlatParameters, Sequence[nn.Parameter]] = {}
        # During a step, the program's groups and their parameters; and the number of nested calls
        # of step(): a class may call that of its base class.
        self._replaced: tuple[list[dict[str, Any]], list[Any]] | None = None
        self._depth, self._num_steps, self._is_announced = 0, 0, True
        # By process group, the number by which ranks announce a step in lockstep.join().
        self._numbers: dict[dist.ProcessGroup, int] = {}
        refresh_engines_of(p for group in optimizer.param_groups for p in group["params"])
        self._arrange(optimizer.state)
        self._step_hooks: tuple[RemovableHandle, ...] = ()
        if (known := known_base(type(optimizer))) is not None:
            divide_base_step(optimizer, known, self._step_of_base)
        else:
            before = optimizer.register_step_pre_hook(self._before_step)
            self._step_hooks = before, optimizer.register_step_post_hook(self._after_step)

        @wraps(self._original_step)  # which a learning rate scheduler may have marked
        def step(_: Optimizer, *args: Any, **options: Any) -> Any:
            return self._step(*args, **options)

        vars(optimizer).update(
            step=MethodType(step, optimizer),
            state_dict=self.state_dict,
            load_state_dict=self.load_state_dict,
        )
        for name in methods_with_state(type(optimizer)):
            method = getattr(optimizer, name)
            vars(optimizer)[name] = wraps(method)(partial(self._run_as_step, method))
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            vars(optimizer).update(zero_grad=self.zero_grad)

    def _arrange(self, state: Mapping[Any, State]) -> None:
        """Divide the parameters that the optimizer has now, and their ``state``."""
        self._division = Division(self._optimizer, self._options)
        for flat in self._division.flats:
            if flat.process_group not in self._numbers:
                self._numbers[flat.process_group] = add_update(flat.process_group, self.follow)
        self._division.set_state(state)

    def _refresh(self) -> None:
        """Divide anew what the program has changed: the state, or the parameters."""
        division = self._division
        if self._optimizer.state is not division.state:
            division.set_state(self._optimizer.state)
        changes = division.state.take_changes()
        stays = division.is_of(self._optimizer.param_groups) and division.take_back()
        if changes or not stays:
            whole = division.whole_state() | changes
            self._arrange({key: each for key, each in whole.items() if each or key not in changes})

    def _step(self, *args: Any, **options: Any) -> Any:
        self._is_announced = False
        if (args[0] if args else options.get("closure")) is None:
            self._announce_step()
        return self._take_step(*args, **options)

    def _announce_step(self) -> None:
        self._is_announced = True
        for process_group, number in self._numbers.items():
            finish_failed(process_group, Call(Announced.UPDATE, number))
            self._announce(process_group, number)

    def _announce_class_closure(self, kind: str) -> None:
        """Announce a step of a derived class that has called the closure itself."""
        if any(join_state_of(process_group) is not None for process_group in self._numbers):
            raise ModelError(
                f"A step of {kind} calls its closure itself, in join(), where ranks without data "
                "can't follow it. Let it pass the closure to super().step(), or let all ranks have "
                "equally many batches, and leave out join()."
            )
        self._announce_step()

    def _run_as_step(self, method: MethodType, *args: Any, **options: Any) -> Any:
        """Call a method that uses the optimizer's state. Every rank must call it; it blocks."""
        if self._depth:
            return method(*args, **options)
        for process_group in self._numbers:
            finish_failed(process_group)
            if join_state_of(process_group) is not None:
                raise ModelError(
                    f"{method.__name__}() of a sharded {type(self._optimizer).__name__} is called "
                    "in join(), where ranks without data don't call it. Call it outside of join()."
                )
        try:
            self._begin_step()
            result = method(*args, **options)
            self._end_step()
        finally:
            self._depth = 0
            self._put_parameters_back()
        if result is not None and result is not self._optimizer:
            raise ModelError(
                f"{method.__name__}() of a sharded {type(self._optimizer).__name__} returns a "
                f"{type(result).__name__}, made from this rank's part of the state. Call it on an "
                "optimizer that isn't sharded."
            )
        return result

    def _take_step(self, *args: Any, **options: Any) -> Any:
        # The program's hooks must see its own parameters: so ours runs last before the step, and
        # first after it.
        pre: Any = self._optimizer._optimizer_step_pre_hooks
        post: Any = self._optimizer._optimizer_step_post_hooks
        if self._step_hooks:
            before, after = self._step_hooks
            pre.move_to_end(before.id)
            post.move_to_end(after.id, last=False)
        self._depth = 0
        self._num_steps += 1
        try:
            return self._original_step(*args, **options)
        finally:
            self._depth = 0
            self._put_parameters_back()

    def _step_of_base(
        self, step: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Divide the step of a known class, which that of the program's class has called."""
        try:
            args, options = self._before_step(self._optimizer, args, options) or (args, options)
            result = step(*args, **options)
            self._end_step()
        finally:
            self._depth = 0
            self._put_parameters_back()
        return result

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Call the closure, which the program's hooks have seen, with the parameters as they are.

        Returns the arguments of the step, with its result in place of the closure.
        """
        if self._depth:  # a class's step() has called that of its base class
            self._depth += 1
            return None
        one, *given = args
        closure = given[0] if given else options.get("closure")
        if closure is None:
            if not self._is_announced:
                self._announce_class_closure(type(one).__name__)
            self._begin_step()
            return None
        with torch.enable_grad():
            loss = closure()
        self._announce_step()
        self._begin_step()
        once = _once(loss, type(one).__name__)
        return ((one, once, *given[1:]), options) if given else (args, {**options, "closure": once})

    def _begin_step(self) -> None:
        self._depth = 1
        self._refresh()
        refuse_other_bits(self._optimizer, self._division.flats)
        groups = self._optimizer.param_groups
        self._replaced = groups, [group["params"] for group in groups]
        parts = [LocalGroup([*local], []) for local in self._division.local]
        self._division.shards = [
            shard for flat in self._division.flats for shard in self._take_gradients(flat, parts)
        ]
        try:
            self._division.repeats.begin(parts, self._division.state)
            for flat in self._division.flats:
                flat.begin_update()
        except CollectiveFailed as error:
            self._tell_progress(error)
            raise
        for shard in self._division.shards:
            shard.read_values()
        self._division.state.set_marked(False)
        self._optimizer.param_groups = GroupsByShard(groups, parts)

    def _take_gradients(
        self, flat: FlatParameters, parts: list[LocalGroup]
    ) -> list[OptimizerShard]:
        """Set the gradients of this rank's shards of ``flat``, and return the shards.

        Their tensors are added to ``parts``, by param_group; of gradients that are unsummed in
        memory that ranks share, the shards themselves, which are summed as they are updated. Every
        rank must call it; it blocks where gradients have to be sent.
        """
        shards = [shard for shard in self._division.shards if shard.flat is flat]
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
        flat.sum_unmatched()
        if flat.keeps_whole:
            for shard in shards:
                shard.take_gradient()
                parts[shard.group].summed.append(shard.tensor)
            self._updated[flat] = [
                p
                for p in flat.parameters
                if not lacks_gradient(p) or (self._updates_all and p.requires_grad)
            ]
            return shards
        lacks = [*map(lacks_gradient, flat.parameters)]
        self._updated[flat] = [*compress(flat.parameters, map(operator.not_, lacks))]
        if any(lacks):
            state = self._optimizer.state
            shards = [part for one in shards for part in one.split(lacks.__getitem__, state)]
        # With "nesterov", torch's step of all tensors at once adds to gradients in place, and a
        # fused one divides them by a GradScaler's scale: so that those of the program stay the same
        # on all ranks, it doesn't get them.
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None
        groups = self._optimizer.param_groups
        may_be_view = [not (is_scaled or group.get("nesterov")) for group in groups]
        for shard in shards:
            if not lacks[shard.pieces[0].parameter]:
                shard.take_gradient(may_be_view=may_be_view[shard.group])
                parts[shard.group].summed.append(shard.tensor)
        return shards

    def _after_step(self, *_: object) -> None:
        self._end_step()
        if self._drops_gradients and not self._depth:
            self.zero_grad()

    def _end_step(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        for shard in self._division.shards:
            shard.write_values()
        self._division.repeats.end()
        self._put_parameters_back()
        self._division.state.set_marked(True)
        try:
            differs = self._division.repeats.compare()
            for flat in reversed(self._division.flats):  # as the next forward needs them
                flat.publish(self._updated.pop(flat), self._tell_progress)
        except CollectiveFailed as error:
            self._tell_progress(error)
            raise
        if differs:
            kind = type(self._optimizer).__name__
            raise ModelError(_WRONG.format(kind, self._num_steps, differs))

    def _tell_progress(self, error: CollectiveFailed) -> None:
        """Note in ``error`` how far the update of the parameters is."""
        progress = {each for flat in self._division.flats for each in flat.progress()}
        told = _PROGRESS[progress.pop() if len(progress) == 1 else BlockProgress.IN_THE_MIDST]
        error.add_note(
            f"It was in a step of {type(self._optimizer).__name__}, in which the ranks update "
            f"parameters together: {told}"
        )

    def _put_parameters_back(self) -> None:
        self._division.repeats.break_off()
        if self._replaced is not None:
            (groups, replaced), self._replaced = self._replaced, None
            self._optimizer.param_groups = groups
            for group, parameters in zip(groups, replaced, strict=True):
                group["params"] = parameters
            for shard in self._division.shards:
                shard.release()

    def _announce(self, process_group: dist.ProcessGroup, number: int) -> None:
        """In join(), let ranks without data take the step too."""
        state = join_state_of(process_group)
        if state is None or (self._is_joinable and not state.follows_updates):
            return
        if not state.follows_updates:
            raise ModelError(
                "A sharded optimizer steps in torch's Join context, where ranks without data don't "
                "know of it, and its work is divided among all. Use lockstep.join(model), or pass "
                "a lockstep.ZeroRedundancyOptimizer to the context, behind the model."
            )
        active = state.call(Announced.UPDATE, number).active
        take_options(self._optimizer, process_group, active[0])
        if len(active) < process_group.size():
            take_gradients(self._parameters_of(process_group), process_group, active[0])

    def follow(self, process_group: dist.ProcessGroup, first: int | None) -> None:
        """Take a step along with other ranks; with options and gradients of ``first``, if any."""
        if first is not None:
            take_options(self._optimizer, process_group, first)
            take_gradients(self._parameters_of(process_group), process_group, first)
        self._is_announced = True
        self._take_step()

    def _parameters_of(self, process_group: dist.ProcessGroup) -> list[nn.Parameter]:
        flats = (flat for flat in self._division.flats if flat.process_group is process_group)
        return [parameter for flat in flats for parameter in flat.parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, to None by default, as torch's does."""
        if not set_to_none or not self._division.is_of(self._optimizer.param_groups):
            type(self._optimizer).zero_grad(self._optimizer, set_to_none)
            return
        others = [*chain(*self._division.local)]
        for flat in self._division.flats:
            if (bucket := flat.deferred_bucket()) is not None:
                bucket.drop_unsummed()
            else:
                others += flat.parameters
        for parameter in others:
            if not lacks_gradient(parameter):
                parameter.grad = None

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the ordinary state dict, of all parameters. Every rank must call it; it blocks.

        With ``rank0_only`` only rank 0's has the state.
        """
        with self._tells("state_dict"):
            self._prepare()
            whole = self._division.whole_state()
        if rank0_only and any(process_group.rank() for process_group in self._numbers):
            whole = {}
        return self._as_state_dict(whole)

    def local_state_dict(
        self, *, on_all_hosts: bool = False
    ) -> tuple[dict[str, Any], list[LocalState]]:
        """Return the state dict without divided state, and this rank's part of the divided state.

        Every rank must call it. If each host has all state, ranks of other hosts than the first
        have no part, unless ``on_all_hosts``.
        """
        self._prepare()
        shards = [shard for shard in self._division.shards if on_all_hosts or shard.flat.is_first]
        parts = [*local_states(shards, self._optimizer.state)]
        return self._as_state_dict(self._division.local_state()), parts

    @property
    def division(self) -> Division:
        """What this rank updates, and the state of it."""
        return self._division

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups among whose ranks it divides steps."""
        return [*self._numbers]

    def states_to_come(self) -> list[LocalState]:
        """Return what a step would make of state that this rank's part doesn't have yet.

        The values say nothing. Call it after :meth:`local_state_dict`.
        """
        return self._division.states_to_come()

    def owned(self) -> dict[torch.Tensor, tuple[int, int]]:
        """Return for each divided parameter the range of elements that this rank updates.

        load_state_dict() reads no other elements on this rank. Every rank must call it.
        """
        self._prepare()
        owned: dict[torch.Tensor, tuple[int, int]]
        owned = {p: (0, 0) for flat in self._division.flats for p in flat.parameters}
        for flat in self._division.flats:
            owned |= {flat.parameters[index]: (start, stop) for index, start, stop in flat.pieces}
        return owned

    @contextmanager
    def _tells(self, method: str) -> Iterator[None]:
        """Note in an error that the ranks wait for each other in ``method``."""
        try:
            yield
        except CollectiveFailed as error:
            error.add_note(
                f"It was in {method}() of a sharded {type(self._optimizer).__name__}, which every "
                "rank must call, as each has a part of the state; also if one rank alone saves it."
            )
            raise

    def _prepare(self) -> None:
        """Finish a failed backward, and divide changed parameters anew. Every rank must call it."""
        for process_group in self._numbers:
            finish_failed(process_group)
        self._refresh()

    def _as_state_dict(self, state: dict[Any, State]) -> dict[str, Any]:
        before, self._optimizer.state = self._optimizer.state, defaultdict(dict, state)
        try:
            return type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._optimizer.state = before

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an ordinary state dict, and keep this rank's part. Every rank must call it."""
        with self._tells("load_state_dict"):
            self._prepare()
        with stand_ins(self._optimizer, self._options.master_dtype) as parameters:
            type(self._optimizer).load_state_dict(self._optimizer, state_dict)
        state: Any = self._optimizer.state
        self._division.set_state({parameters.get(key, key): value for key, value in state.items()})
        # A state dict in parts may have none of this rank's parameters, and yet some of others'.
        for process_group in self._numbers:
            if any(all_gather_json(process_group, len(state))):
                self._division.state.set_marked(True)


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
