"""Flat parameters: side by side in one memory, of which each rank owns a block."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import (
    all_gather_in_place,
    any_rank,
    named_barrier,
    ranks_with_one_copy,
    start_all_gather_in_place,
    zero_buffer,
)
from lockstep.errors import CollectiveFailed
from lockstep.grad import (
    DeferredBucket,
    ScatteredBucket,
    UnsummedBucket,
    name_of,
    unsummed_bucket_of,
    view_like,
)
from lockstep.optim.arriving import Arrival
from lockstep.optim.blocks import Blocks, Piece, cut_evenly, keep_whole, owners_of, pieces_of
from lockstep.optim.host_copy import BlockProgress, HostCopy
from lockstep.torch_private import storage_use_count


class FlatParameters:
    """Parameters of one dtype and device, moved to one memory.

    Every rank of ``process_group`` creates it with the same parameters. A block is updated by its
    owner alone. The ranks of a host share one copy of the memory, if the system allows that;
    otherwise each rank has a copy, and ranks send each other their updated blocks. Several hosts
    with the same number of ranks each divide all blocks among the ranks of each host, and send each
    other nothing.

    Attributes:
        process_group: All ranks.
        group: The ranks among which the memory is divided: all, or those of this host.
        is_first: Whether the first of all ranks is in ``group``.
        parameters: The parameters, which are views of the memory from now on.
        keeps_whole: Whether each parameter has one owner; otherwise blocks are cut anywhere.
        bucket_kind: The class of buckets in which gradients stay unsummed.
        pieces: The elements that this rank owns, in the order of the memory.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        parameters: Sequence[nn.Parameter],
        *,
        keeps_whole: bool,
        overlaps: bool = False,
    ) -> None:
        self.process_group, self.parameters = process_group, list(parameters)
        group, self.is_first = ranks_with_one_copy(process_group, parameters[0].device)
        self.group = group
        self.keeps_whole, self._overlaps = keeps_whole, False
        self.bucket_kind: type[UnsummedBucket]
        self.bucket_kind = ScatteredBucket if overlaps and not keeps_whole else DeferredBucket
        numels = [parameter.numel() for parameter in parameters]
        self._blocks: Blocks = (keep_whole if keeps_whole else cut_evenly)(numels, group.size())
        self.pieces = pieces_of(self._blocks, numels, group.rank())
        self._kinds = [_kind(parameter) for parameter in parameters]
        dtype, device = parameters[0].dtype, parameters[0].device
        self._copy: HostCopy | None = None
        if device.type == "cpu":
            self._copy = HostCopy.create(group, self._blocks.size * dtype.itemsize)
        if self._copy is not None:
            self._memory = self._copy.private.view(dtype)
            self._updated = self._copy.shared.view(dtype)
        else:
            self._memory = self._updated = self.new_memory(dtype)
        self._views = self.views_of(self._memory)
        self._pointers = [view.data_ptr() for view in self._views]
        # Of each parameter, as long as its data is in the memory.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._order = self.in_order()
        self._followed: weakref.ref[UnsummedBucket] | None = None
        self._means: torch.Tensor | None = None
        self.take_back()
        self.begin_update()
        self.publish(())
        self._overlaps = overlaps

    def owners(self) -> dict[torch.Tensor, int | None]:
        """Return the parameters whose state isn't here by parameter, and the rank that has it.

        None stands for several ranks, each of which has its part's.
        """
        if not self.keeps_whole:
            return dict.fromkeys(self.parameters)
        pairs = zip(self.parameters, self.whole_owners, strict=True)
        return {p: owner for p, owner in pairs if owner != self.group.rank()}

    @property
    def whole_owners(self) -> list[int]:
        """For each parameter the rank of ``group`` that updates it, if it is kept whole."""
        return owners_of(self._blocks)

    def in_order(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the memory."""
        order = sorted(range(len(self.parameters)), key=self._blocks.offsets.__getitem__)
        return [self.parameters[index] for index in order]

    def new_memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros of the size and on the device of the memory."""
        first, numel = self.parameters[0], self.group.size() * self._blocks.size
        return zero_buffer(self.group, numel, dtype, first.device)

    def memory_for_means(self, numel: int) -> torch.Tensor:
        """Return memory for the gradients of a shard, of ``numel`` elements; the same for all."""
        if self._means is None:  # pages that no shard reaches take no memory
            self._means = self._memory.new_empty(self._blocks.size)
        return self._means[:numel]

    def views_of(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return for each parameter its part of ``memory``, in its shape, with its strides."""
        offsets = self._blocks.offsets
        return [view_like(memory, *pair) for pair in zip(offsets, self.parameters, strict=True)]

    def offset_of(self, piece: Piece) -> int:
        """Return the index of the first element of ``piece`` in the memory."""
        return self._blocks.offsets[piece.parameter] + piece.start

    def part(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the elements of ``memory`` from the first of ``pieces`` to the last."""
        first, last = pieces[0], pieces[-1]
        start = self.offset_of(first)
        return memory[start : self.offset_of(last) + last.stop - last.start].data

    def local_part(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the values that this rank updates; a whole parameter has its own shape."""
        if self.keeps_whole:
            index = pieces[0].parameter
            return view_like(self._updated, self._blocks.offsets[index], self.parameters[index])
        return self.part(self._updated, pieces)

    def deferred_bucket(self) -> UnsummedBucket | None:
        """Return the bucket of all gradients, if they are unsummed, at the parameters' offsets."""
        found = unsummed_bucket_of(self._order[0])
        if found is None:
            return None
        bucket, _ = found
        if self._followed is None or bucket is not self._followed():
            if not self._matches(bucket):
                return None
            self._followed = weakref.ref(bucket)
        return bucket if bucket.are_all_unsummed() else None

    def sum_unmatched(self) -> None:
        """Gather scattered gradients at other offsets than the parameters. Every rank calls it."""
        for bucket, _ in filter(None, map(unsummed_bucket_of, self.parameters)):
            if isinstance(bucket, ScatteredBucket) and not self._matches(bucket):
                bucket.sum_unsummed()

    def _matches(self, bucket: UnsummedBucket) -> bool:
        return bucket.matches(self._order, sorted(self._blocks.offsets))

    def has_moved(self) -> bool:
        """Whether the program has replaced the data of a parameter (``p.data = ...``).

        It waits until parameters have arrived, as it reads their addresses.
        """
        return [*map(torch.Tensor.data_ptr, self.parameters)] != self._pointers

    def take_back(self) -> bool:
        """Move parameters back whose data the program has replaced.

        Returns False if a parameter has got another shape, dtype or device.
        """
        if [*map(_kind, self.parameters)] != self._kinds:
            return False
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.data_ptr() != view.data_ptr():
                data = parameter.detach()
                view.copy_(data)
                if data.device.type != "cpu":  # or its own stream uses the memory again too early
                    data.record_stream(torch.accelerator.current_stream(data.device))
                parameter.data = _with_separate_storage(view)
                self._storages[index] = parameter.untyped_storage()
        return True

    def can_take_back(self) -> bool:
        """Whether no tensor but the parameters has the data to be moved, or its former place.

        On any rank. Every rank must call it, if :meth:`has_moved`.
        """
        pairs = enumerate(zip(self.parameters, self._pointers, strict=True))
        moved = {index: p for index, (p, pointer) in pairs if p.data_ptr() != pointer}
        is_held = any(
            shares_memory(parameter) or storage_use_count(self._storages[index]._cdata) > 1
            for index, parameter in moved.items()
        )
        names = ", ".join(map(name_of, [*moved.values()][:3]))
        try:
            if hasattr(self.process_group, "named_barrier"):  # whose errors have its words
                named_barrier(self.process_group, f"move of {names} back, whose data was replaced")
            return not any_rank(self.process_group, [is_held])[0]
        except CollectiveFailed as error:
            error.add_note(
                f"Since the last step of a sharded optimizer the data of {names} was replaced on "
                "this rank (p.data = ...), so it wanted to move it back with the other ranks. "
                "Replace it on every rank, or write p.copy_(...), under torch.no_grad()."
            )
            raise

    def begin_update(self) -> None:
        """Prepare for an update of this rank's block, from the values that this rank sees there.

        Every rank must call it; it blocks until no rank reads the earlier values any more.
        """
        if self._copy is not None:
            self._copy.begin_update()

    def publish(
        self,
        updated: Sequence[nn.Parameter],
        note_error: Callable[[CollectiveFailed], None] = lambda error: None,
    ) -> None:
        """Make the updated blocks of all ranks visible to each rank.

        Every rank must call it, with the parameters that have been updated. It blocks, unless the
        parameters overlap: then whatever reads one does. See :class:`Arrival`.
        """
        if self._copy is not None:
            self._copy.end_update()
        elif not self._overlaps:
            all_gather_in_place(self.group, self._memory)
        torch.autograd.graph.increment_version(updated)
        if self._overlaps:
            started = start_all_gather_in_place(self.group, self._memory)
            Arrival(started, self.parameters, note_error)

    def progress(self) -> set[BlockProgress]:
        """Return how far the ranks are in an update that has failed on this rank."""
        return {BlockProgress.IN_THE_MIDST} if self._copy is None else self._copy.progress()


def with_memory_of_others(parameters: Sequence[nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters that share memory with others, and so can't be moved one by one."""
    owners: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.layout is torch.strided and parameter.numel():
            owners[parameter.untyped_storage().data_ptr()].append(parameter)
    return {parameter for sharing in owners.values() if len(sharing) > 1 for parameter in sharing}


def shares_memory(parameter: torch.Tensor) -> bool:
    """Whether other tensors have the memory of ``parameter`` too, or other processes."""
    if parameter.layout is not torch.strided or not parameter.numel():
        return False
    storage = parameter.untyped_storage()
    is_shared = parameter.device.type == "cpu" and parameter.is_shared()
    return is_shared or storage_use_count(storage._cdata) > 2  # its own, and Python's


def elements_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor``, flat, in the memory order of ``like``, which is dense."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.detach().as_strided((like.numel(),), (1,))


def _kind(parameter: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return parameter.shape, parameter.dtype, parameter.device


def _with_separate_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same elements in a storage of their own: torch.save() saves whole storages."""
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(
        storage, 0, view.shape, view.stride()
    )
