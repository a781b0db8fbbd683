"""Updates that a second rank repeats, to tell at once if they depend on the rank that makes them.

The trial of an unknown class sees some dozens of steps on small stand-ins. Its update of a
parameter may come to depend on others later, as when a norm over all of them crosses a threshold.
So each rank also updates one or two small parameters of another rank, in memory of its own; and in
each step both ranks have to get the same bits.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm import all_gather_json, bytes_of, device_of_facts, global_rank, sum_at
from lockstep.grad import name_of
from lockstep.optim.blocks import Piece
from lockstep.optim.differences import differing_names, have_same_bits, numbers_of
from lockstep.optim.divided import DividedState, State
from lockstep.optim.flat import FlatParameters
from lockstep.optim.shard import LocalGroup, OptimizerShard
from lockstep.optim.state import decoded, encoded, put_state
from lockstep.optim.whole import WholeParameter
from lockstep.world import is_capturing

# Larger parameters aren't repeated.
_NUMEL = 16 * 1024
# Attributes of parameters that are lockstep's own.
_OURS = {"_arrival", "_deferred"}
# What an optimizer may have as an option or attribute without keeping values of each parameter.
_NOT_PER_PARAMETER = (
    *(type(None), bool, int, float, str, torch.dtype, torch.device),
    *(FunctionType, MethodType, partial, type),
)
# A number of 32 bits; or a tensor with one, on a device whose results nobody is to wait for.
_Digest = int | torch.Tensor


class _Repeated(WholeParameter):
    """A parameter of another rank that this rank updates too, in memory of its own."""

    def __init__(
        self, flat: FlatParameters, index: int, group: int, master_dtype: torch.dtype | None
    ) -> None:
        piece = Piece(index, 0, flat.parameters[index].numel())
        super().__init__(flat, [piece], group, master_dtype)
        self.values = self.values.clone()
        self._state: State = {}  # between steps

    def take_state(self, state: State) -> None:
        """Go on from the ``state`` of its owner."""
        taken: dict[Any, State] = {}
        self.values.copy_(self.parameter.detach())
        put_state(self, {self.parameter: state} if state else {}, taken)
        self._state = taken.get(self.tensor, {})

    def begin(self, state: DividedState) -> None:
        """Let the optimizer update it, from the values that this rank sees."""
        self.values.copy_(self.parameter.detach())
        self.read_values()
        self.take_gradient()
        state.admit(self.tensor, self._state)

    def give_back(self, state: DividedState) -> None:
        """Give the parameter its data back, and take its state."""
        self._state = state.dismiss(self.tensor)
        self.release()


class _Pair:
    """An update that two ranks make: the owner of a parameter, and one that repeats it.

    Every rank has all pairs, so that all know what is followed and what differs.

    Attributes:
        parameter: The parameter.
        shard: What this rank updates of it, if it is one of the two.
        is_followed: Whether both have gone on from equal state.
        updated: The values to which this rank has updated it.
    """

    def __init__(
        self, parameter: nn.Parameter, shard: WholeParameter | None, *, is_first: bool
    ) -> None:
        self.parameter, self.shard = parameter, shard
        self.is_followed = self._is_retired = False
        # Whether the owner has taken no step that the other rank hasn't repeated.
        self._is_first = is_first
        self.updated: torch.Tensor | None = None
        # Whether this rank's state may not be what the last step has left.
        self._is_unsure: bool | torch.Tensor = False
        self._start: _Digest = 0
        self._end: _Digest = 0
        # On the owner, a digest of the state that the last step has left.
        self._state: _Digest | None = None
        # With each loss, the number of steps without it afterwards doubles.
        self._num_losses = self._num_waits = 0

    @property
    def repeated(self) -> _Repeated | None:
        """What this rank repeats, if it does."""
        return self.shard if isinstance(self.shard, _Repeated) else None

    def is_due(self) -> bool:
        """Whether the owner is to pass on its state before this step, which it counts."""
        self._num_waits -= 1
        return not (self.is_followed or self._is_retired) and self._num_waits < 0

    def retire(self) -> None:
        """Never follow it again."""
        self.is_followed, self._is_retired = False, True

    def lose(self) -> None:
        """Note that the ranks' values, gradients or state may differ."""
        self.is_followed = self._is_first = False
        self._num_waits, self._num_losses = 2**self._num_losses - 1, self._num_losses + 1

    def state_to_pass_on(self, optimizer: Optimizer, state: DividedState) -> list[Any] | None:
        """Return the owner's state, encoded; None if that can't be all that it keeps."""
        assert self.shard is not None
        if self._is_first or not _keeps_more_than_state(optimizer, self.shard.tensor):
            with suppress(TypeError):
                return encoded(self.shard.state_in(state) or {})
        return None

    def follow(self, state: list[Any] | None) -> None:
        """Go on from the owner's state."""
        if state is None:
            self.retire()
            return
        self.is_followed, self._is_unsure, self._state = True, False, None
        if self.repeated is not None:
            self.repeated.take_state(decoded(state, self.parameter.device))

    def doubt(self) -> None:
        """Note that this rank's state may not be what the last step has left."""
        self._is_unsure = True

    def begin(self, state: DividedState) -> None:
        """Note what this rank starts from."""
        if self.shard is None:
            return
        values: torch.Tensor = self.parameter
        if self.repeated is not None:
            self.repeated.begin(state)
            values = self.repeated.values
        elif self._state is not None:
            # The program may have changed it, which it can on the owner alone.
            self._is_unsure |= self._state != _digest(self.shard.state_in(state))
        tensor = self.shard.tensor
        self._start = _digest([values, tensor.grad, *_attributes(tensor).values()])

    def end(self, state: DividedState) -> None:
        """Note what this rank has updated."""
        if self.shard is None:
            return
        if self.repeated is not None:
            self.repeated.write_values()
        else:
            self._state = _digest(self.shard.state_in(state))
        self.updated = self.shard.tensor.detach()
        self._end = _digest(self.updated)

    def digests(self) -> tuple[_Digest, _Digest, _Digest]:
        """Return what adds up to zeros over the ranks if both of them have the same."""
        if self.shard is None:
            return 0, 0, 0
        sign = -1 if self.repeated is not None else 1
        return self._is_unsure, sign * self._start, sign * self._end


class Repeats:
    """The updates that two ranks make, of an optimizer that updates whole parameters.

    Every rank creates it, for memories that keep parameters whole; it blocks.

    Args:
        optimizer: The optimizer.
        flats: The memories.
        shards: What this rank owns of them.
        groups: By parameter, the index of its group.
        master_dtype: The dtype of values that are updated.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        flats: Sequence[FlatParameters],
        shards: Sequence[OptimizerShard],
        groups: Mapping[nn.Parameter, int],
        master_dtype: torch.dtype | None,
    ) -> None:
        self._optimizer = optimizer
        self._pairs: dict[dist.ProcessGroup, list[_Pair]] = {}
        # During a step, what is updated, and the optimizer's state.
        self._updating: tuple[list[_Pair], DividedState] | None = None
        # Else parameters are divided anew, and what other steps have left may be on one rank alone.
        is_first = not isinstance(optimizer.state, DividedState)
        owned = {shard.parameter: shard for shard in shards if isinstance(shard, WholeParameter)}
        together: dict[dist.ProcessGroup, list[FlatParameters]] = defaultdict(list)
        for flat in flats:
            together[flat.group].append(flat)
        for process_group, of_ranks in together.items():
            machine = _machine(of_ranks[0].parameters[0].device)
            found = all_gather_json(
                process_group, [machine, [_choose(flat, groups) for flat in of_ranks]]
            )
            pairs = self._pairs[process_group] = []
            if any(each != machine for each, _ in found):
                continue  # updates may differ in their last bits
            chosen = found[0][1]  # rank 0's, as programs may train other parameters on each rank
            for flat, indices in zip(of_ranks, chosen, strict=True):
                for index in indices:
                    parameter = flat.parameters[index]
                    shard = owned.get(parameter)
                    if (flat.group.rank() + 1) % flat.group.size() == flat.whole_owners[index]:
                        shard = _Repeated(flat, index, groups[parameter], master_dtype)
                    pairs.append(_Pair(parameter, shard, is_first=is_first))

    def begin(self, parts: Sequence[LocalGroup], state: DividedState) -> None:
        """Let the optimizer repeat updates, as part of ``parts``.

        No rank may have begun to update parameters. Every rank must call it; it may block.
        """
        if is_capturing():  # a CUDA graph, whose replays nobody sees; and nothing may be read
            for pair in self._each():
                pair.lose()
            return
        for process_group, pairs in self._pairs.items():
            due = [(index, pair) for index, pair in enumerate(pairs) if pair.is_due()]
            if due:
                self._pass_on(process_group, due, state)
        followed = [pair for pair in self._each() if pair.is_followed]
        self._updating = followed, state
        for pair in followed:
            pair.begin(state)
            if (repeated := pair.repeated) is not None:
                parts[repeated.group].summed.append(repeated.tensor)

    def end(self) -> None:
        """Note what was updated, and give the parameters back."""
        if self._updating is not None:
            updating, state = self._updating
            for pair in updating:
                pair.end(state)
            self._give_back(updating, state)

    def break_off(self) -> None:
        """Give the parameters back after a step that has failed, if they aren't yet."""
        if self._updating is not None:
            self._give_back(*self._updating)
            self.doubt()

    def _give_back(self, updating: Sequence[_Pair], state: DividedState) -> None:
        self._updating = None
        for pair in updating:
            if pair.repeated is not None:
                pair.repeated.give_back(state)

    def doubt(self) -> None:
        """Don't compare the next step, as this rank's state isn't what the last one has left."""
        for pair in self._each():
            pair.doubt()

    def compare(self) -> str:
        """Return how two ranks' updates of a parameter differ; nothing if none does.

        Every rank must call it after :meth:`end`, and gets the same; it blocks.
        """
        told = ""
        for process_group, pairs in self._pairs.items():
            followed = [pair for pair in pairs if pair.is_followed]
            if not followed:
                continue
            total = _stacked(chain.from_iterable(pair.digests() for pair in followed))
            total = total.to(device_of_facts(process_group))
            sum_at(process_group, "end of an optimizer's step", total)
            differing, totals = [], total.view(-1, 3).tolist()
            for pair, (num_unsure, start, end) in zip(followed, totals, strict=True):
                if num_unsure or start:
                    pair.lose()
                elif end:
                    differing.append(pair)
                    pair.retire()  # it is told, or differs in bits that don't count
            if differing:
                told = told or self._told(process_group, differing)
        return told

    def _each(self) -> Iterator[_Pair]:
        return chain.from_iterable(self._pairs.values())

    def _pass_on(
        self,
        process_group: dist.ProcessGroup,
        due: Sequence[tuple[int, _Pair]],
        state: DividedState,
    ) -> None:
        """Let those who repeat updates go on from the state of the owners."""
        local = {
            str(index): pair.state_to_pass_on(self._optimizer, state)
            for index, pair in due
            if pair.shard is not None and pair.repeated is None
        }
        found: dict[str, Any] = {}
        for each in all_gather_json(process_group, local):
            found |= each
        for index, pair in due:
            pair.follow(found[str(index)])

    def _told(self, process_group: dist.ProcessGroup, pairs: Sequence[_Pair]) -> str:
        """Compare the updates themselves, whose digests differ. Every rank must call it."""
        local = [encoded({"updated": pair.updated} if pair.shard else {}) for pair in pairs]
        told = all_gather_json(process_group, [numbers_of(self._optimizer), local])
        numbers, updates = zip(*told, strict=True)
        for pair, *each in zip(pairs, *updates, strict=True):
            found = {rank: decoded(its).get("updated") for rank, its in enumerate(each)}
            first, *others = (rank for rank, updated in found.items() if updated is not None)
            for other in others:
                if not have_same_bits(found[first], found[other]):
                    names = differing_names(numbers[first], numbers[other])
                    one, two = (global_rank(process_group, rank) for rank in (first, other))
                    return f"{name_of(pair.parameter)} on ranks {one} and {two}" + (
                        f", between which {', '.join(names)} differ" if names else ""
                    )
        return ""


def _choose(flat: FlatParameters, groups: Mapping[nn.Parameter, int]) -> list[int]:
    """Return the indices of parameters to repeat: of each owner's, the smallest of two kinds."""
    chosen: dict[int, dict[Any, int]] = defaultdict(dict)
    if flat.group.size() == 1:
        return []
    for index in sorted(range(len(flat.parameters)), key=lambda i: flat.parameters[i].numel()):
        parameter, of_owner = flat.parameters[index], chosen[flat.whole_owners[index]]
        kind = groups[parameter], parameter.dim() > 1
        if parameter.requires_grad and 0 < parameter.numel() <= _NUMEL and len(of_owner) < 2:
            of_owner.setdefault(kind, index)
    return [index for of_owner in chosen.values() for index in of_owner.values()]


def _machine(device: torch.device) -> list[Any]:
    """Return what the last bits of an update may depend on."""
    name = device.type
    if name != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", lambda _: name)(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return [str(torch.__version__), capability, torch.get_num_threads(), name]


def _keeps_more_than_state(optimizer: Optimizer, tensor: torch.Tensor) -> bool:
    """Whether it may keep values of ``tensor`` elsewhere than in its state, as in attributes."""
    groups = [{**group, "params": None, "param_names": None} for group in optimizer.param_groups]
    known = ("state", "param_groups", "defaults")
    attributes = {
        k: v for k, v in vars(optimizer).items() if k not in known and not k.endswith("_hooks")
    }
    values = chain(attributes.values(), *(group.values() for group in groups))
    return bool(_attributes(tensor)) or not all(map(_is_of_none, values))


def _is_of_none(value: object) -> bool:
    """Whether ``value`` surely isn't, and has none, of a single parameter."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, tuple):
        return all(map(_is_of_none, value))
    if isinstance(value, list | dict | set | deque):
        return not value
    return isinstance(value, _NOT_PER_PARAMETER)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the program or the optimizer has given it."""
    return {name: value for name, value in vars(tensor).items() if name not in _OURS}


def _digest(value: Any) -> _Digest:
    """Return a digest of the bits of the tensors, and of other plain values, in ``value``."""
    if isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        elements = dense.contiguous()
        return _crc(elements) if elements.device.type == "cpu" else _sum_of_bits(elements)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | deque):
        is_plain = isinstance(value, int | float | str | bool)
        return zlib.crc32(repr(value).encode()) if is_plain else 0
    found: _Digest = 0
    for each in value:
        found = found * 31 + _digest(each) & 0xFFFFFFFF
    return found


def _crc(elements: torch.Tensor) -> int:
    return zlib.crc32(bytes_of(elements))


def _sum_of_bits(elements: torch.Tensor) -> torch.Tensor:
    """Return a digest, on the device, so that nobody waits for the device."""
    if elements.is_complex():
        elements = torch.view_as_real(elements)
    integers = {1: torch.int8, 2: torch.int16}.get(elements.element_size(), torch.int32)
    bits = elements.flatten().view(integers).to(torch.int64)
    # Odd numbers, which have inverses: a difference in one element always shows in the sum.
    places = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device).mul_(2).add_(1)
    return (bits * (places * 0x9E3779B1)).sum() % 0xFFFFFFFB  # a prime


def _stacked(digests: Iterable[_Digest]) -> torch.Tensor:
    """Return digests in one tensor, on the device of those that are tensors."""
    each = [*digests]
    tensors = [digest for digest in each if isinstance(digest, torch.Tensor)]
    if not tensors:
        return torch.tensor(each, dtype=torch.int64, device="cpu")
    like = torch.empty((), dtype=torch.int64, device=tensors[0].device)
    # Numbers are filled in, as to copy each to the device would wait for it.
    return torch.stack(
        [d.to(like) if isinstance(d, torch.Tensor) else torch.full_like(like, d) for d in each]
    )
