"""The process group of ranks that reach each other's memory: the operations that torch calls."""

# The stubs of torch name some parameters otherwise than torch calls them by.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from lockstep.comm.arguments import (
    Call,
    TensorLists,
    Tensors,
    check_count,
    check_dtypes,
    check_multiple,
    check_rank,
    check_sizes,
    flattened,
    listed,
    operation,
    overlap,
    put_back,
    split_numels,
)
from lockstep.comm.base_group import BaseGroup
from lockstep.comm.collectives import Collectives, reduction_for, sum_sparse
from lockstep.comm.dynamo import uncompiled
from lockstep.comm.transport import Signature, Transport
from lockstep.comm.work import Run
from lockstep.deadline import Deadline
from lockstep.torch_private import AllgatherOptions

# Calls a collective, with flat outputs and inputs.
_Collective = Callable[[Collectives, list[Tensor], list[Tensor]], None]


@uncompiled
class SharedMemoryGroup(BaseGroup):
    """The process group behind the backends ``"shm"`` and ``"threads"``, for CPU tensors.

    It has the methods of :class:`torch.distributed.ProcessGroup`, so that ``torch.distributed``
    and everything built on it runs over it, and :meth:`empty`. Every sum is taken in rank order,
    so all ranks get the same bits, and the same bits in every run.

    Any number of threads may call it. Ranks must make the same calls in the same order; a call
    that doesn't match raises CollectiveMismatch on every rank.

    Args:
        transport: The connected ranks.
        backend: The name of the backend.
        timeout: The time for which each call waits for the other ranks.
        store: The store through which the ranks have met, for tensors on other devices.
        collectives: The collectives over ``transport``, created for each call.
    """

    transport: Transport  # over several hosts a HostsTransport, which has all that is used here

    # For so many calls of exchange_buffers() it keeps tensors that were shared.
    NUM_KEPT = 8

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host: SharedMemoryGroup | None = None
        self.num_exchanges = 0  # calls of exchange_buffers()
        # Tensors that other ranks may read although they were dropped here, since each of the last
        # calls of exchange_buffers().
        self._kept: deque[list[Tensor]] = deque([[]], maxlen=self.NUM_KEPT)

    def empty(
        self, *size: Any, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return an uninitialised tensor that all-reduce sums in place, without a copy.

        It is in memory that all ranks of this group reach, and otherwise an ordinary tensor; so
        are its views. Only this rank need call it; whether the others use such tensors too is
        their choice, but copies are saved only if all do. While an all-reduce of it runs, other
        ranks write to it. If that fails, its values mean nothing, and a rank that was only
        stopped may still write to it: drop it with the group.

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
        memory = self.transport.empty(form.nbytes)
        return memory[: form.nbytes].view(form.dtype).view(form.shape)

    def of_this_host(self) -> SharedMemoryGroup:
        """Return the group of this host's ranks: this one, if hosts differ in how many they have.

        All ranks make the first call together, which blocks. It ends with this group.
        """
        if not getattr(self.transport, "is_even", False):
            return self
        if self._host is None:
            timeout = self._queue.timeout
            transport = self.transport.connect_host("again", timeout.total_seconds())  # type: ignore[attr-defined]
            self._host = SharedMemoryGroup(transport, self._backend, timeout)
        return self._host

    def shutdown(self) -> None:
        """Carry out all submitted calls, each within its own timeout, and leave the group."""
        super().shutdown()
        if self._host is not None:
            self._host.shutdown()

    def keep(self, tensors: Tensors) -> None:
        """Keep the memory of ``tensors`` for the next ``NUM_KEPT`` :meth:`exchange_buffers`."""
        self._kept[-1].extend(tensors)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether :meth:`allocate_tensor` can allocate on ``device``; FSDP2 asks."""
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As :meth:`empty`."""
        return self.empty(size, dtype=dtype, device=device)

    def _run(
        self, signature: Signature, outputs: Tensors, inputs: Tensors, collective: _Collective
    ) -> Run:
        """Return a function that flattens the tensors, calls ``collective``, and puts back."""
        if signature.root is not None:
            to_or_from = "to" if signature.operation in ("reduce", "gather") else "from"
            check_rank(self._size, signature.root, f"{signature.operation} {to_or_from}")
        if inputs:
            check_dtypes(signature.operation, [*inputs, *outputs])

        def run(deadline: Deadline) -> None:
            flats = [flattened(output) for output in outputs]
            parts = [flattened(part) for part in inputs]
            collective(self._collectives(self.transport, signature, deadline), flats, parts)
            for flat, output in zip(flats, outputs, strict=True):
                put_back(flat, output)

        return run

    # One tensor, the same on all ranks.

    @operation(dist.AllreduceOptions, "tensors|tensor")
    def allreduce(self, tensors: Tensors, op: dist.ReduceOp) -> Call:
        """Combine the ranks' tensors; every rank gets the result."""
        return self._all_reduce_each(listed(tensors), op)

    @operation(dist.AllreduceCoalescedOptions, "tensors")
    def allreduce_coalesced(self, tensors: Tensors, op: dist.ReduceOp) -> Call:
        """As :meth:`allreduce`, for each of ``tensors``."""
        return self._all_reduce_each(tensors, op)

    def _all_reduce_each(self, tensors: Tensors, op: dist.ReduceOp) -> Call:
        runs: list[Run] = [self._all_reduce(tensor, op) for tensor in tensors]
        if len(tensors) > 1 and overlap(tensors):
            runs = [partial(self._all_reduce_copies, tensors, op)]
        return tensors, runs

    def _all_reduce_copies(self, tensors: Tensors, op: dist.ReduceOp, deadline: Deadline) -> None:
        """Read every tensor before any that overlaps it is written."""
        copies = [tensor.clone() for tensor in tensors]
        for copy in copies:
            self._all_reduce(copy, op)(deadline)
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.data.copy_(copy)

    def sum_at(self, operation: str, tensor: Tensor) -> None:
        """Sum the ranks' tensors in place, at an ``operation`` that errors name."""
        self._queue.run(self._all_reduce(tensor, dist.ReduceOp(dist.ReduceOp.SUM), operation))

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp, operation: str = "all_reduce") -> Run:
        reduction = reduction_for(op, tensor.dtype)
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, reduction.name)
        signature = Signature(operation, tensor.dtype, tensor.shape, reduction.name)

        def run(deadline: Deadline) -> None:  # as _run() does, for the most frequent operation
            flat = flattened(tensor)
            self._collectives(self.transport, signature, deadline).all_reduce(flat, reduction)
            put_back(flat, tensor)

        return run

    def _all_reduce_sparse(self, tensor: Tensor, op: str) -> Run:
        if tensor.layout is not torch.sparse_coo or op not in ("SUM", "AVG"):
            raise TypeError(
                f"all_reduce of a {tensor.layout} tensor by {op}: of sparse tensors it can sum or "
                "average those in COO layout. Use to_sparse_coo() or to_dense()."
            )
        signature = Signature("sparse all_reduce", tensor.dtype, tensor.shape, op)

        def run(deadline: Deadline) -> None:
            collectives = self._collectives(self.transport, signature, deadline)

            def all_gather(local: Tensor) -> list[Tensor]:
                rows = local.new_empty(self._size, *local.shape)
                collectives.all_gather([row.view(-1) for row in rows], local.view(-1))
                return list(rows)

            total = sum_sparse(all_gather, tensor.data.coalesce())
            if op == "AVG":
                total = total / self._size
            # Not through `.data`, which has indices and values of its own; and the copy is to be
            # an ordinary tensor, although this runs in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                tensor.copy_(total)

        return run

    def exchange_buffers(self, tensor: Tensor) -> list[Tensor]:
        """Wait until all ranks have called it, and return each one's flat ``tensor``, by rank.

        The list is empty if any rank's tensor isn't in memory that all ranks reach: :meth:`empty`
        makes it. Another rank may read it until that rank makes its second call after this one,
        and longer if it knows that nobody has written to it: see :meth:`keep`.
        """
        buffers = list[Tensor]()
        self._queue.run(self._exchange_buffers(tensor, buffers))
        return buffers

    def start_exchange_of_buffers(self, tensor: Tensor) -> Work:
        """Let the others' calls of :meth:`exchange_buffers` have ``tensor``, and return at once."""
        return self._queue.submit([self._exchange_buffers(tensor, [])], [], is_async=True)

    def _exchange_buffers(self, tensor: Tensor, buffers: list[Tensor]) -> Run:
        self.num_exchanges += 1
        signature = Signature("exchange", tensor.dtype, tensor.shape)

        def run(deadline: Deadline) -> None:
            collectives = self._collectives(self.transport, signature, deadline)
            buffers.extend(collectives.exchange_buffers(tensor))
            self._kept.append([])

        return run

    def named_barrier(self, operation: str) -> None:
        """Wait until all ranks have called it, with the same ``operation``."""
        signature = Signature(operation)
        self._queue.run(lambda end: self._collectives(self.transport, signature, end).barrier())

    @operation(dist.BroadcastOptions, "tensors|tensor")
    def broadcast(self, tensors: Tensors, root: int) -> Call:
        """Copy the root's tensor to every rank."""
        outputs = listed(tensors)
        signatures = [Signature("broadcast", each.dtype, each.shape, root=root) for each in outputs]
        return outputs, [
            self._run(signature, [output], [], lambda c, o, _: c.broadcast(o[0], root))
            for signature, output in zip(signatures, outputs, strict=True)
        ]

    @operation(dist.ReduceOptions, "tensors|tensor")
    def reduce(self, tensors: Tensors, root: int, op: dist.ReduceOp) -> Call:
        """Combine the ranks' tensors; the root gets the result."""
        (tensor,) = listed(tensors)
        reduction = reduction_for(op, tensor.dtype)
        signature = Signature("reduce", tensor.dtype, tensor.shape, reduction.name, root)
        # Only the root's tensor is written to.
        outputs, inputs = ([tensor], []) if self._rank == root else ([], [tensor])
        run = self._run(
            signature, outputs, inputs, lambda c, o, i: c.reduce((o or i)[0], reduction, root)
        )
        return [tensor], [run]

    @operation(dist.BarrierOptions)
    def barrier(self) -> Call:
        """Wait until every rank has called it."""
        return [], [self._run(Signature("barrier"), [], [], lambda c, _, __: c.barrier())]

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names the absent ranks; here every barrier's names all of them."""
        self.barrier(timeout=timeout).wait()

    # One tensor of each rank.

    @operation(AllgatherOptions, "output_tensors", "input_tensors|input_tensor")
    def allgather(self, output_lists: TensorLists, inputs: Tensors) -> Call:
        """Copy every rank's tensor to every rank; they may differ in size."""
        outputs, (tensor,) = listed(output_lists), listed(inputs)
        check_count(self._size, outputs, "output tensors of all_gather")
        return outputs, [self._all_gather(outputs, tensor)]

    @operation(AllgatherOptions, "output_lists", "input_list")
    def allgather_coalesced(self, outputs: TensorLists, inputs: Tensors) -> Call:
        """As :meth:`allgather`, for each of ``inputs``; the j-th of rank i to ``outputs[i][j]``."""
        check_count(self._size, outputs, "lists of outputs of allgather_coalesced")
        columns = zip(*outputs, inputs, strict=True)
        return listed(outputs), [self._all_gather(column, tensor) for *column, tensor in columns]

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor) -> Run:
        check_dtypes("all_gather", [tensor, *outputs])
        if all(output.numel() == tensor.numel() for output in outputs):
            signature = Signature("all_gather", tensor.dtype, tensor.shape)
            return self._run(signature, outputs, [tensor], lambda c, o, i: c.all_gather(o, i[0]))
        signature = Signature("uneven all_gather", tensor.dtype)
        return self._run(signature, outputs, [tensor], lambda c, o, i: c.all_gather_uneven(o, i[0]))

    @operation(AllgatherOptions, "output", "input")
    def all_gather_single(self, output: Tensor, input: Tensor) -> Call:
        """Copy every rank's tensor, one after the other, to one tensor on every rank."""
        return [output], [self._all_gather_single(output, input)]

    @operation(AllgatherOptions, "outputs", "inputs")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors) -> Call:
        """As :meth:`all_gather_single`, for each of ``inputs``."""
        pairs = zip(outputs, inputs, strict=True)
        return outputs, [self._all_gather_single(output, tensor) for output, tensor in pairs]

    def _all_gather_single(self, output: Tensor, tensor: Tensor) -> Run:
        check_multiple(self._size, "all_gather_single", output, tensor)
        signature = Signature("all_gather_single", tensor.dtype, (tensor.numel(),))
        return self._run(
            signature, [output], [tensor], lambda c, o, i: c.all_gather(self._parts(o[0]), i[0])
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _parts(self, flat: Tensor) -> Tensors:
        """Split a flat tensor into equal parts, one for each rank."""
        return flat.split(len(flat) // self._size) if len(flat) else [flat] * self._size

    @operation(dist.GatherOptions, "output_tensors", "input_tensors|input_tensor")
    def gather(self, output_lists: TensorLists, inputs: Tensors, root: int) -> Call:
        """Copy every rank's tensor to the root."""
        (tensor,) = listed(inputs)
        outputs = self._on_root(root, output_lists, "tensors to gather into, on the root,")
        signature = Signature("gather", tensor.dtype, tensor.shape, root=root)
        run = self._run(signature, outputs, [tensor], lambda c, o, i: c.gather(o, i[0]))
        check_sizes("gather", [tensor, *outputs])
        return outputs, [run]

    def _on_root(self, root: int, given: TensorLists, what: str) -> list[Tensor]:
        """Return the tensors, one for each rank, that the root gives; other ranks give none."""
        if self._rank != root:
            return []
        tensors = listed(given)
        check_count(self._size, tensors, what)
        return tensors

    # One tensor for each rank.

    @operation(dist.ScatterOptions, "output_tensors|output_tensor", "input_tensors")
    def scatter(self, outputs: Tensors, input_lists: TensorLists, root: int) -> Call:
        """Copy the i-th tensor of the root to rank i."""
        (output,) = listed(outputs)
        inputs = self._on_root(root, input_lists, "tensors to scatter, on the root,")
        signature = Signature("scatter", output.dtype, output.shape, root=root)
        run = self._run(signature, [output], inputs, lambda c, o, i: c.scatter(o[0], i, root))
        check_sizes("scatter", [output, *inputs])
        return [output], [run]

    @operation(dist.ReduceScatterOptions, "output_tensors|output", "input_tensors|input")
    def reduce_scatter(self, outputs: Tensors, inputs: TensorLists, op: dist.ReduceOp) -> Call:
        """Combine the ranks' i-th tensors; rank i gets the result. Sizes may differ by i."""
        (output,), parts = listed(outputs), listed(inputs)
        check_count(self._size, parts, "input tensors of reduce_scatter")
        return [output], [self._reduce_scatter(op, output, parts)]

    def _reduce_scatter(self, op: dist.ReduceOp, output: Tensor, inputs: Tensors) -> Run:
        local_part = inputs[self._rank]
        if local_part.numel() != output.numel():
            raise ValueError(
                f"reduce_scatter's output has {output.numel()} elements, but the input for this "
                f"rank has {local_part.numel()}. Make them equal."
            )
        reduction = reduction_for(op, output.dtype)
        sizes = tuple(part.numel() for part in inputs)
        signature = Signature("reduce_scatter", output.dtype, sizes, reduction.name)
        return self._run(
            signature, [output], inputs, lambda c, o, i: c.reduce_scatter(o[0], i, reduction)
        )

    @operation(dist.ReduceScatterOptions, "output|outputTensor", "input|inputTensor")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, op: dist.ReduceOp) -> Call:
        """Combine the i-th of equal parts of the ranks' tensors; rank i gets the result."""
        return [output], [self._reduce_scatter_single(op, output, input)]

    @operation(dist.ReduceScatterOptions, "outputs", "inputs")
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, op: dist.ReduceOp
    ) -> Call:
        """As :meth:`reduce_scatter_single`, for each of ``inputs``."""
        pairs = zip(outputs, inputs, strict=True)
        return outputs, [self._reduce_scatter_single(op, *pair) for pair in pairs]

    def _reduce_scatter_single(self, op: dist.ReduceOp, output: Tensor, tensor: Tensor) -> Run:
        check_multiple(self._size, "reduce_scatter_single", tensor, output)
        return self._reduce_scatter(op, output, self._parts(tensor.reshape(-1)))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # From each rank to each.

    @operation(dist.AllToAllOptions, "output_tensors", "input_tensors")
    def alltoall(self, outputs: Tensors, inputs: Tensors) -> Call:
        """Copy rank i's j-th input to rank j's i-th output."""
        check_count(self._size, outputs, "output tensors of all_to_all")
        check_count(self._size, inputs, "input tensors of all_to_all")
        signature = Signature("all_to_all", inputs[0].dtype)
        run = self._run(signature, outputs, inputs, lambda c, o, i: c.all_to_all(o, i))
        return outputs, [run]

    @operation(dist.AllToAllOptions, "output", "input", "output_split_sizes", "input_split_sizes")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Call:
        """As :meth:`alltoall`, with parts of one tensor along its first dimension.

        Without split sizes the parts are equal.
        """
        outgoing = split_numels(self._size, "input", input, input_sizes)
        incoming = split_numels(self._size, "output", output, output_sizes)

        def all_to_all(c: Collectives, o: list[Tensor], i: list[Tensor]) -> None:
            c.all_to_all(o[0].split(incoming), i[0].split(outgoing))

        signature = Signature("all_to_all_single", input.dtype)
        return [output], [self._run(signature, [output], [input], all_to_all)]

    alltoall_base = all_to_all_single

    # From one rank to another.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """Send a tensor; it is copied at once and may be written to again."""
        (tensor,) = listed(tensors)
        if not tensor.is_cpu:
            return self._group_for(tensor.device.type).send([tensor], dst, tag)
        check_rank(self._size, dst, "send to")
        self.transport.check_open()
        return self.transport.mailbox.start_send(tensor, dst, tag, self._queue.timeout)

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Work:
        """Receive the next tensor that rank ``src`` sends with this tag."""
        (tensor,) = listed(tensors)
        if not tensor.is_cpu:
            other = self._group_for(tensor.device.type)
            return (
                other.recv_anysource([tensor], tag)
                if src is None
                else other.recv([tensor], src, tag)
            )
        if src is not None:
            check_rank(self._size, src, "receive from")
        self.transport.check_open()
        return self.transport.mailbox.start_receive(tensor, src, tag, self._queue.timeout)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive the next tensor that any rank sends with this tag; the work names the sender."""
        return self.recv(tensors, None, tag)
