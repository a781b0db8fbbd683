"""A process group of torch.distributed whose ranks reach each other's memory."""

# The stubs of torch name some parameters otherwise than torch calls them by.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from lockstep.comm.algorithms import Collectives
from lockstep.comm.arguments import (
    check_count,
    check_dtypes,
    check_multiple,
    check_rank,
    check_sizes,
    flattened,
    listed,
    put_back,
    row,
    split_numels,
)
from lockstep.comm.call import Call
from lockstep.comm.hosts.collectives import HostsCollectives
from lockstep.comm.named_group import NamedGroup
from lockstep.comm.operation import of_any_device, operation
from lockstep.comm.reduction import reduction_for
from lockstep.comm.sparse import all_reduce_sparse
from lockstep.comm.transport import Transport
from lockstep.comm.uncompiled import uncompiled
from lockstep.comm.work import GroupWork, Run, in_turn, reading_first
from lockstep.torch_private import AllgatherOptions

# What torch calls these options where they are given without the others.
_OP = {"op": "reduceOp"}
_ROOT = {"root": "rootRank"}


@uncompiled
class SharedMemoryGroup(NamedGroup):
    """The process group behind the backends ``"shm"`` and ``"threads"``, for CPU tensors.

    It offers what :class:`torch.distributed.ProcessGroup` does, under the names that torch calls
    it by, so that ``torch.distributed``, and what is built on it, runs over it. Beyond that it
    offers :meth:`empty`. Every sum is taken in rank order, so all ranks get the same bits, and
    the same bits in every run.

    Any number of threads may call it. Ranks must make the same calls in the same order; a call
    that doesn't match raises CollectiveMismatch on every rank.

    Args:
        team: The ranks, connected.
        backend: The name that it is registered by.
        timeout: How long to wait for the other ranks, in each call.
        store: What the ranks met through, if others may want it.
    """

    _team: Transport

    def _collectives(self, call: Call, timeout: float) -> Collectives | HostsCollectives:
        return Collectives(self._team, call, timeout)

    def empty(
        self, *size: Any, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return an uninitialised tensor that all-reduce sums where it is, with no copy.

        It is in memory that all ranks of this group reach; apart from that it is a tensor like
        any other, and so are its views. Only this rank need call it; whether the others use
        such tensors too is theirs to choose, but the copies are saved only if all do. While an
        all-reduce of it is under way, other ranks write to it. If that fails, what is in it means
        nothing, and a rank that was only stopped may write to it yet: drop it with the group.

        Args:
            size: Its shape, as in :func:`torch.empty`; a dtype may follow.
            dtype: Its dtype, by default torch's default.
            device: The CPU.

        Raises:
            SharedMemoryFull: If there is no room for it.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"{device!r} has no memory that ranks share; leave out the device.")
        if size and isinstance(size[-1], torch.dtype):
            *size, dtype = size
        form = torch.empty(*size, dtype=dtype, device="meta")
        memory = self._team.empty(form.nbytes)
        return memory[: form.nbytes].view(form.dtype).view(form.shape)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether :meth:`allocate_tensor` does; FSDP2 asks."""
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As :meth:`empty`."""
        return self.empty(size, dtype=dtype, device=device)

    # One tensor, the same on all ranks.

    @operation(AllreduceOptions, "tensors|tensor", values=_OP)
    def allreduce(self, tensors: Sequence[torch.Tensor], opts: AllreduceOptions) -> GroupWork:
        """Combine the ranks' tensors, and have the result in each."""
        return self._all_reduce_each(listed(tensors), opts)

    def _all_reduce_each(
        self, tensors: Sequence[torch.Tensor], opts: AllreduceOptions | AllreduceCoalescedOptions
    ) -> GroupWork:
        def prepare(given: Sequence[torch.Tensor]) -> Run:
            return in_turn([self._all_reduce(tensor, opts.reduceOp) for tensor in given])

        return self._submit(reading_first(tensors, prepare), list(tensors), opts)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> Run:
        if tensor.layout is not torch.strided:
            return all_reduce_sparse(self._collectives, self._team.size, tensor, op)
        reduction = reduction_for(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tensor.shape, reduction.name)

        def run(timeout: float) -> None:
            flat = flattened(tensor)
            self._collectives(call, timeout).all_reduce(flat, reduction)
            put_back(flat, tensor)

        return run

    @operation(AllreduceCoalescedOptions, "tensors")
    def allreduce_coalesced(
        self, tensors: Sequence[torch.Tensor], opts: AllreduceCoalescedOptions
    ) -> GroupWork:
        """As :meth:`allreduce`, for each of ``tensors``."""
        return self._all_reduce_each(tensors, opts)

    @operation(BroadcastOptions, "tensors|tensor", values=_ROOT)
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: BroadcastOptions) -> GroupWork:
        """Have what the root has on every rank."""
        root = opts.rootRank
        check_rank(self._team.size, root, "broadcast from")

        def run(timeout: float) -> None:
            for tensor in listed(tensors):
                call = Call("broadcast", tensor.dtype, tensor.shape, root=root)
                flat = flattened(tensor)
                self._collectives(call, timeout).broadcast(flat, root)
                put_back(flat, tensor)

        return self._submit(run, listed(tensors), opts)

    @operation(ReduceOptions, "tensors|tensor", values=_ROOT | _OP)
    def reduce(self, tensors: Sequence[torch.Tensor], opts: ReduceOptions) -> GroupWork:
        """Combine the ranks' tensors, and have the result on the root."""
        (tensor,) = listed(tensors)
        root = opts.rootRank
        check_rank(self._team.size, root, "reduce to")
        reduction = reduction_for(opts.reduceOp, tensor.dtype)
        call = Call("reduce", tensor.dtype, tensor.shape, reduction.name, root)

        def run(timeout: float) -> None:
            flat = flattened(tensor)
            self._collectives(call, timeout).reduce(flat, reduction, root)
            if self._team.rank == root:
                put_back(flat, tensor)

        return self._submit(run, [tensor], opts)

    @operation(BarrierOptions)
    def barrier(self, opts: BarrierOptions) -> GroupWork:
        """Wait until every rank is here."""
        call = Call("barrier")
        return self._submit(lambda seconds: self._collectives(call, seconds).barrier(), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that tells who didn't come; here every barrier does, naming all of them."""
        opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # One tensor of each rank.

    @operation(AllgatherOptions, "output_tensors", "input_tensors|input_tensor")
    def allgather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: AllgatherOptions,
    ) -> GroupWork:
        """Have every rank's tensor on every rank; they may differ in size."""
        outputs, (tensor,) = row(output_tensors), listed(input_tensors)
        check_count(self._team.size, outputs, "output tensors of all_gather")
        run = self._all_gather(outputs, tensor)
        return self._submit(run, outputs, opts)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Run:
        check_dtypes("all_gather", [tensor, *outputs])
        is_even = all(output.numel() == tensor.numel() for output in outputs)
        shape = tuple(tensor.shape) if is_even else ()
        call = Call("all_gather" if is_even else "uneven all_gather", tensor.dtype, shape)

        def run(timeout: float) -> None:
            flats = [flattened(output) for output in outputs]
            collectives = self._collectives(call, timeout)
            gather = collectives.all_gather if is_even else collectives.all_gather_uneven
            gather(flats, flattened(tensor))
            for flat, output in zip(flats, outputs, strict=True):
                put_back(flat, output)

        return run

    @operation(AllgatherOptions, "output_lists", "input_list")
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: AllgatherOptions,
    ) -> GroupWork:
        """As :meth:`allgather`, for each of ``input_list``.

        ``output_lists[i][j]`` is what rank i gave as the j-th.
        """
        check_count(self._team.size, output_lists, "lists of outputs of allgather_coalesced")
        runs = [
            self._all_gather(list(outputs), tensor)
            for *outputs, tensor in zip(*output_lists, input_list, strict=True)
        ]
        outputs = [output for outputs in output_lists for output in outputs]
        return self._submit(in_turn(runs), outputs, opts)

    @operation(AllgatherOptions, "output", "input")
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions
    ) -> GroupWork:
        """Have every rank's tensor, one after the other, in one tensor on every rank."""
        run = self._all_gather_single(output, input)
        return self._submit(run, [output], opts)

    _allgather_base = all_gather_single

    def _all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Run:
        check_dtypes("all_gather_single", [tensor, output])
        check_multiple(self._team.size, "all_gather_single", output, tensor)
        call = Call("all_gather_single", tensor.dtype, (tensor.numel(),))

        def run(timeout: float) -> None:
            flat = flattened(output)
            parts = flat.split(tensor.numel()) if flat.numel() else [flat] * self._team.size
            self._collectives(call, timeout).all_gather(parts, flattened(tensor))
            put_back(flat, output)

        return run

    @operation(AllgatherOptions, "outputs", "inputs")
    def all_gather_single_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: AllgatherOptions,
    ) -> GroupWork:
        """As :meth:`all_gather_single`, for each of ``inputs``."""
        runs = [
            self._all_gather_single(output, tensor)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._submit(in_turn(runs), list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @operation(GatherOptions, "output_tensors", "input_tensors|input_tensor", values=_ROOT)
    def gather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: GatherOptions,
    ) -> GroupWork:
        """Have every rank's tensor on the root."""
        (tensor,), root = listed(input_tensors), opts.rootRank
        check_rank(self._team.size, root, "gather to")
        outputs = row(output_tensors) if self._team.rank == root else []
        if self._team.rank == root:
            check_count(self._team.size, outputs, "tensors to gather into, on the root,")
            check_dtypes("gather", [tensor, *outputs])
            check_sizes("gather", [tensor, *outputs])
        call = Call("gather", tensor.dtype, tensor.shape, root=root)

        def run(timeout: float) -> None:
            flats = [flattened(output) for output in outputs]
            self._collectives(call, timeout).gather(flats, flattened(tensor))
            for flat, output in zip(flats, outputs, strict=True):
                put_back(flat, output)

        return self._submit(run, outputs, opts)

    # One tensor for each rank.

    @operation(ScatterOptions, "output_tensors|output_tensor", "input_tensors", values=_ROOT)
    def scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: ScatterOptions,
    ) -> GroupWork:
        """Have on each rank what the root gives for it."""
        (output,), root = listed(output_tensors), opts.rootRank
        check_rank(self._team.size, root, "scatter from")
        inputs = row(input_tensors) if self._team.rank == root else []
        if self._team.rank == root:
            check_count(self._team.size, inputs, "tensors to scatter, on the root,")
            check_dtypes("scatter", [output, *inputs])
            check_sizes("scatter", [output, *inputs])
        call = Call("scatter", output.dtype, output.shape, root=root)

        def run(timeout: float) -> None:
            flat = flattened(output)
            parts = [flattened(part) for part in inputs]
            self._collectives(call, timeout).scatter(flat, parts, root)
            put_back(flat, output)

        return self._submit(run, [output], opts)

    @operation(ReduceScatterOptions, "output_tensors|output", "input_tensors|input", values=_OP)
    def reduce_scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: ReduceScatterOptions,
    ) -> GroupWork:
        """Combine, on rank i, the i-th of each rank's tensors; those may differ in size."""
        (output,), inputs = listed(output_tensors), row(input_tensors)
        check_count(self._team.size, inputs, "input tensors of reduce_scatter")
        run = self._reduce_scatter(output, inputs, opts.reduceOp)
        return self._submit(run, [output], opts)

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: list[torch.Tensor], op: dist.ReduceOp
    ) -> Run:
        check_dtypes("reduce_scatter", [output, *inputs])
        own = inputs[self._team.rank]
        if own.numel() != output.numel():
            raise ValueError(
                f"reduce_scatter's output has {output.numel()} elements, but the input for this "
                f"rank has {own.numel()}. Make them equal."
            )
        reduction = reduction_for(op, output.dtype)
        sizes = tuple(part.numel() for part in inputs)
        call = Call("reduce_scatter", output.dtype, sizes, reduction.name)

        def run(timeout: float) -> None:
            flat, parts = flattened(output), [flattened(part) for part in inputs]
            self._collectives(call, timeout).reduce_scatter(flat, parts, reduction)
            put_back(flat, output)

        return run

    @operation(ReduceScatterOptions, "output|outputTensor", "input|inputTensor", values=_OP)
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions
    ) -> GroupWork:
        """Combine, on rank i, the i-th of equal parts of each rank's tensor."""
        run = self._reduce_scatter_single(output, input, opts.reduceOp)
        return self._submit(run, [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: dist.ReduceOp
    ) -> Run:
        check_multiple(self._team.size, "reduce_scatter_single", tensor, output)
        flat = tensor.reshape(-1)
        parts = list(flat.split(output.numel())) if flat.numel() else [flat] * self._team.size
        return self._reduce_scatter(output, parts, op)

    @operation(ReduceScatterOptions, "outputs", "inputs")
    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: ReduceScatterOptions,
    ) -> GroupWork:
        """As :meth:`reduce_scatter_single`, for each of ``inputs``."""
        runs = [
            self._reduce_scatter_single(output, tensor, opts.reduceOp)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._submit(in_turn(runs), list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # From each rank to each.

    @operation(AllToAllOptions, "output_tensors", "input_tensors")
    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: AllToAllOptions,
    ) -> GroupWork:
        """Have the j-th rank's i-th input as the i-th rank's j-th output."""
        outputs, inputs = list(output_tensors), list(input_tensors)
        check_count(self._team.size, outputs, "output tensors of all_to_all")
        check_count(self._team.size, inputs, "input tensors of all_to_all")
        check_dtypes("all_to_all", [*inputs, *outputs])
        call = Call("all_to_all", inputs[0].dtype)

        def run(timeout: float) -> None:
            flats, parts = [flattened(o) for o in outputs], [flattened(i) for i in inputs]
            self._collectives(call, timeout).all_to_all(flats, parts)
            for flat, output in zip(flats, outputs, strict=True):
                put_back(flat, output)

        return self._submit(run, outputs, opts)

    @operation(AllToAllOptions, "output", "input", "output_split_sizes", "input_split_sizes")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions,
    ) -> GroupWork:
        """As :meth:`alltoall`, with parts of one tensor along its first dimension.

        If there are no split sizes, the parts are equal.
        """
        check_dtypes("all_to_all_single", [input, output])
        outgoing = split_numels(self._team.size, "input", input, input_split_sizes)
        incoming = split_numels(self._team.size, "output", output, output_split_sizes)
        call = Call("all_to_all_single", input.dtype)

        def run(timeout: float) -> None:
            flat = flattened(output)
            collectives = self._collectives(call, timeout)
            collectives.all_to_all(flat.split(incoming), flattened(input).split(outgoing))
            put_back(flat, output)

        return self._submit(run, [output], opts)

    alltoall_base = all_to_all_single

    # From one rank to another.

    @of_any_device
    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send a tensor; it is copied at once and may be written to again."""
        (tensor,) = listed(tensors)
        check_rank(self._team.size, dst, "send to")
        self._team.check_open()
        return self._team.mailbox.start_send(tensor, dst, tag, self._queue.timeout)

    @of_any_device
    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive what rank ``src`` sends with this tag."""
        (tensor,) = listed(tensors)
        check_rank(self._team.size, src, "receive from")
        self._team.check_open()
        return self._team.mailbox.start_receive(tensor, src, tag, self._queue.timeout)

    @of_any_device
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """Receive what the first rank sends with this tag, and tell which that was."""
        (tensor,) = listed(tensors)
        self._team.check_open()
        return self._team.mailbox.start_receive(tensor, None, tag, self._queue.timeout)
