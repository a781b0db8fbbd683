"""``ShardedState``: an optimizer for ``torch.distributed.checkpoint``, without gathering."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from lockstep.arguments import check_type
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.things import unwrapped
from lockstep.errors import CheckpointMismatch
from lockstep.optim import MASTER, LocalState, PartialTensor, sharding_of, state_to_come
from lockstep.tree import Header, check_tensor, flat_elements, from_flat, header_of
from lockstep.world import parameters_of


class ShardedState:
    """The state of an optimizer, of which each rank saves and loads its own part. ::

        state = {"model": model, "optimizer": ShardedState(optimizer), "epoch": epoch}
        torch.distributed.checkpoint.save(state, checkpoint_id="run")
        ...
        torch.distributed.checkpoint.load(state, checkpoint_id="run")

    Without it, ``{"optimizer": optimizer}`` gathers all state on each rank. The checkpoint is the
    same in both cases: either loads into an optimizer that is sharded or not, at any number of
    ranks. :func:`lockstep.save` does the same without torch's planners.

    A parameter that had no state yet when the checkpoint was saved, as it had no gradient, is
    missing there, which is an error, unless ``load`` is told by
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``: then it keeps the state that it has.
    The same holds for master values that weren't saved; the parameters' values take their place.
    Freeze parameters after loading: a frozen one gets no state if it has none yet.

    Args:
        optimizer: Any optimizer, whether sharded or not.

    Raises:
        TypeError: If it isn't an optimizer.

    Source: ``torch.distributed.checkpoint.stateful.Stateful``, whose methods it has.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_type("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        self._optimizer: Optimizer = unwrapped(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with this rank's part of the state. Every rank must call it.

        It has no copies of state. Parameters are numbered as in any state dict, but by strings.

        Raises:
            TypeError: If state is a sparse tensor, or if a parameter has no state yet and the
                optimizer takes no step without a closure.
        """
        parameters, sharding = parameters_of(self._optimizer), sharding_of(self._optimizer)
        if sharding is None:
            state, parts = self._optimizer.state_dict(), list[LocalState]()
            to_come = list[LocalState]()
        else:
            state, parts = sharding.local_state_dict(on_all_hosts=True)
            to_come = sharding.states_to_come()
        index_of = {parameter: index for index, parameter in enumerate(parameters)}
        found: dict[str, dict[str, Any]] = {}
        for index, values in state["state"].items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    check_tensor(value, f"state.{index}.{name}")
            found[str(index)] = {name: _entry(value) for name, value in values.items()}
        for each, is_to_come in [*((p, False) for p in parts), *((p, True) for p in to_come)]:
            values = found.setdefault(str(index_of[each.parameter]), {})
            values |= {name: _entry(value, is_to_come) for name, value in each.once.items()}
            for name, elements in each.by_element.items():
                if name in values:
                    values[name].ranges.append((each.start, elements))
                else:
                    values[name] = _local_tensor(each.parameter, each.start, elements, is_to_come)
        divided = set() if sharding is None else sharding.owned().keys()
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                index = str(index_of[parameter])
                if index not in found and parameter not in divided and parameter.requires_grad:
                    made = state_to_come(self._optimizer, number, parameter)
                    found[index] = {name: _entry(value, True) for name, value in made.items()}
        # Options that are tensors are loaded in place.
        return {"state": found, "param_groups": deepcopy(state["param_groups"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned and has been filled. Every rank must call it.

        Raises:
            CheckpointMismatch: If a parameter has got a part of its state only.
        """
        failure, state = None, {}
        try:
            for index, values in state_dict["state"].items():
                if there := self._loaded_of(index, values):
                    state[int(index)] = {name: _loaded(value) for name, value in there.items()}
        except CheckpointMismatch as error:
            failure = error
        sharding = sharding_of(self._optimizer)
        for group in () if sharding is None else sharding.groups:
            Ranks(group).gather(failure)
        if failure is not None:
            raise failure
        self._optimizer.load_state_dict(
            {"state": state, "param_groups": state_dict["param_groups"]}
        )

    def _loaded_of(self, index: str, entries: dict[str, Any]) -> dict[str, Any]:
        """Return those entries of a parameter that have been loaded, or were there and stay."""
        is_loaded = any(
            isinstance(value, _LocalTensor) and value.is_filled for value in entries.values()
        )
        there = {
            name: value for name, value in entries.items() if not _is_missing(value, is_loaded)
        }
        # Where no master values were saved, those of the parameters are.
        lacking = entries.keys() - there.keys() - {MASTER}
        if there and lacking:
            raise CheckpointMismatch(
                f"The checkpoint has {', '.join(sorted(there))} of parameter {index} of this "
                f"{type(self._optimizer).__name__}, and no {', '.join(sorted(lacking))}. Make "
                "the optimizer that was saved."
            )
        return there


class _LocalTensor(PartialTensor):
    """A tensor of which torch.distributed.checkpoint saves and loads the elements of this rank.

    What it saves are boxes of consecutive elements. Loading goes to memory of its own, so that the
    optimizer stays as it is if that fails.
    """

    is_to_come = False  # whether it isn't there yet, so that it isn't saved
    is_filled = False  # whether it is being loaded, or has been
    order: tuple[int, ...]  # its dimensions, from the one with the largest stride on
    boxes: dict[torch.Size, torch.Tensor]  # by the index of the first element; in their shapes

    def make_boxes(self) -> None:
        """Divide the elements into :attr:`boxes`, which are views."""
        shape = [self.shape[dim] for dim in self.order]
        inverse = [self.order.index(dim) for dim in range(self.dim())]
        self.boxes = {}
        for first, elements in self.ranges:
            at = 0
            for offsets, sizes in boxes_of(shape, first, first + len(elements)):
                numel = math.prod(sizes)
                box = elements[at : at + numel].view(sizes).permute(inverse)
                self.boxes[torch.Size([offsets[dim] for dim in inverse])] = box
                at += numel

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Describe what this rank saves."""
        if self.is_to_come:
            return []
        self.make_boxes()
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, box.shape),
                    TensorProperties.create_from_tensor(box),
                    self.shape,
                ),
            )
            for offsets, box in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Describe what this rank loads."""
        if not self.is_to_come:
            self.ranges = [(start, torch.empty_like(elements)) for start, elements in self.ranges]
        self.is_filled = True
        self.make_boxes()
        return [ChunkStorageMetadata(offsets, box.shape) for offsets, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of a box, to be read or written."""
        assert index.offset is not None
        return self.boxes[index.offset]


def boxes_of(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the offsets and sizes of the boxes of which a range of elements consists, in order."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = (start // row, -(-stop // row)) if row else (0, shape[0])
    if start == first * row and stop == last * row:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    elif last - first == 1:
        for offsets, sizes in boxes_of(shape[1:], start - first * row, stop - first * row):
            yield (first, *offsets), (1, *sizes)
    else:
        cuts = start, -(-start // row) * row, stop // row * row, stop
        for begin, end in pairwise(cuts):
            if begin < end:
                yield from boxes_of(shape, begin, end)


def _local_tensor(
    like: torch.Tensor, start: int, elements: torch.Tensor, is_to_come: bool
) -> _LocalTensor:
    part = _LocalTensor(like, [(start, elements)])
    part.is_to_come, part.order = is_to_come, header_of(like).order
    return part


def _entry(value: Any, is_to_come: bool = False) -> Any:
    if is_to_come and not isinstance(value, torch.Tensor):
        value = torch.empty(())  # in whose place a number or the like will be put
    if isinstance(value, torch.Tensor):
        return _local_tensor(value, 0, flat_elements(value), is_to_come)
    return value


def _is_missing(value: object, is_loaded: bool) -> bool:
    """Whether there is no value, or one from before a load of the parameter's other state."""
    if not isinstance(value, _LocalTensor) or value.is_filled:
        return False
    return value.is_to_come or is_loaded


def _loaded(value: Any) -> Any:
    """Return a whole tensor if this rank has all of its elements."""
    if (
        isinstance(value, _LocalTensor)
        and sum(len(elements) for _, elements in value.ranges) == value.numel()
    ):
        header = Header(str(value.dtype), tuple(value.shape), value.order)
        return from_flat(value.elements(0, value.numel()), header)
    return value
