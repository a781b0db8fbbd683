"""Groups whose ranks are on several hosts: their transport, networks and collectives.

Ranks of one host combine their tensors in shared memory. Then each rank exchanges its part of the
result with the ranks of the same index on the other hosts, its column, so that a host sends each
byte once, and all its network cards work; small tensors the first column alone, the hosts' leaders.
Last, the ranks of a host take each other's parts. Collectives between single ranks (gather,
scatter, reduce-scatter, all-to-all) go straight through the network of all ranks. Networks are
Gloo's. Tensors travel as bytes: Gloo doesn't know all of torch's dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from lockstep.comm.arguments import Tensors, flattened
from lockstep.comm.collectives import Collectives, Reduction, pieces, reduction_for
from lockstep.comm.failures import STORE_SECONDS, answered, is_of_loader
from lockstep.comm.messages import HEADER, Message, MessageWork, header_of
from lockstep.comm.shm.barrier import Fault
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.transport import (
    FAILURES,
    FINGERPRINT_BYTES,
    WORDS_BYTES,
    ConnectedRanks,
    Signature,
    encoded,
)
from lockstep.deadline import Deadline
from lockstep.errors import (
    CollectiveFailed,
    CollectiveTimeout,
    GroupClosed,
    PeerLost,
)
from lockstep.torch_private import AllgatherOptions

_Answer = TypeVar("_Answer")

# The key of the error that broke a group.
_FAULT = "fault"
# Columns exchange pieces of this size, which bounds the memory for the other hosts' data.
_PIECE_BYTES = 32 * 1024 * 1024
# Up to this size the leaders exchange the whole: more messages would cost more than they save.
_ONE_COLUMN_BYTES = 64 * 1024
# Ranks whose time is up wait a little for others to name the late rank; and ranks wait for those of
# a column twice as much longer, before they take one of their own host for the late one.
_FAULT_SECONDS = 2.0
_POLL_SECONDS = 0.02


class HostsTransport(ConnectedRanks):
    """Ranks of several hosts; those of one host reach each other's memory.

    ``hosts`` are the ranks of each host; the other arguments are those of :class:`ShmTransport`.

    Attributes:
        positions: By rank, the index of its host, and its index among the ranks of that.
        host: The index of this host.
        local: The transport between the ranks of this host.
        everyone: The network of all ranks, which is their mailbox too.
        num_columns: The number of ranks of the smallest host.
        column: The network of the ranks of this rank's index; None if some host has none.
        leaders: The first column, the first ranks of the hosts; None on other ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        hosts: Sequence[Sequence[int]],
        timeout: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self.hosts = hosts
        self.positions = {r: (h, i) for h, ranks in enumerate(hosts) for i, r in enumerate(ranks)}
        self.rank, self.size = rank, len(self.positions)
        names = list(members or range(self.size))
        self._name = names[rank]
        self.host, index = self.positions[rank]
        on_host = [names[r] for r in hosts[self.host]]
        self._here = dist.PrefixStore(f"{self.host}/", store), index, on_host
        self.local = self.connect_host("", timeout)
        self.everyone = self.mailbox = Network("everyone", store, names, self._name, timeout)
        self.num_columns = min(map(len, hosts))
        self.column: Network | None = None
        if index < self.num_columns:
            column = [names[ranks[index]] for ranks in hosts]
            self.column = Network(f"column {index}", store, column, self._name, timeout)
        self.leaders = self.column if index == 0 else None

    def connect_host(self, name: str, timeout: float) -> ShmTransport:
        """Return a transport between the ranks of this host, each of which calls it.

        Each call has another ``name``; ``timeout`` is the seconds to wait for the others.
        """
        store, index, members = self._here
        store_of_host = dist.PrefixStore(name, store)
        return ShmTransport(store_of_host, index, len(members), timeout, members)

    @property
    def is_even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return self.num_columns == max(map(len, self.hosts))

    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory, as bytes, that the ranks of this host reduce in place."""
        return self.local.empty(num_bytes)

    def break_off(self, error: CollectiveFailed) -> CollectiveFailed:
        """Take no further part because of ``error``, which all ranks are to raise."""
        first = self.local.break_off(error)
        self.everyone.tell(error)
        self._close_networks()
        return first

    def call_failed(self, error: BaseException) -> None:
        """Tell all ranks of an error, of which those on other hosts know nothing yet."""
        if isinstance(error, FAILURES) or not isinstance(error, CollectiveFailed):
            self.fail(error)

    def check_open(self) -> None:
        """Raise the error that broke this group, if one did."""
        self.local.check_open()

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and release all resources."""
        self.local.leave()
        self._close_networks()

    def _close_networks(self) -> None:
        # The ranks that wait at the other ends of the connections learn of it.
        self.everyone.gloo = None
        if self.column is not None:
            self.column.gloo = None

    def after_fork(self) -> None:
        """Have later calls raise GroupClosed, in a forked child."""
        self.local.after_fork()


class Network:
    """Gloo's connections between ``ranks``, for flat tensors, and messages between two ranks.

    Ranks are numbered as in the whole run. In ``store``, which is the group's alone, a rank that
    fails leaves the reason; Gloo's keys there begin with ``name``.
    """

    def __init__(
        self, name: str, store: dist.Store, ranks: Sequence[int], rank: int, timeout: float
    ) -> None:
        self._store: dist.Store | None = store  # None once it is gone, or doesn't answer
        self.ranks = list(ranks)
        self.rank, self.size = self.ranks.index(rank), len(ranks)
        gloo_store, limit = dist.PrefixStore(f"{name}/", store), timedelta(seconds=timeout)
        connect = partial(dist.ProcessGroupGloo, gloo_store, self.rank, self.size, timeout=limit)
        self.gloo: Any = answered(connect, timeout + STORE_SECONDS)

    def start_send(self, tensor: Tensor, destination: int, tag: int, timeout: timedelta) -> Work:
        """Start sending a copy of ``tensor``, which Gloo does when the receiver expects it."""
        flat = flattened(tensor)
        header = torch.frombuffer(bytearray(header_of(flat, tag)), dtype=torch.uint8)
        message = torch.cat([header, _bytes(flat)])
        signature = Signature("send", flat.dtype, flat.shape)
        with self._naming(signature, timeout.total_seconds(), [destination]):
            work = self.open().send([message], destination, tag)

        # Gloo reads the message until it is taken, so the work keeps it.
        def complete(deadline: Deadline, message: Tensor = message) -> int:
            self.finish(lambda: work, signature, deadline.seconds, [destination])
            return destination

        return MessageWork(complete, lambda: False, [], timeout)

    def start_receive(
        self, tensor: Tensor, source: int | None, tag: int, timeout: timedelta
    ) -> Work:
        """Receive the next message of ``source``, or of any rank, into ``tensor``."""
        # Gloo matches messages with receives itself, and accepts one that is too short.
        message = torch.empty(HEADER.size + tensor.nbytes, dtype=torch.uint8, device="cpu")
        sources = range(self.size) if source is None else [source]
        signature = Signature("recv", tensor.dtype, (tensor.numel(),))
        with self._naming(signature, timeout.total_seconds(), sources):
            if source is None:
                work = self.open().recv_anysource([message], tag)
            else:
                work = self.open().recv([message], source, tag)

        def complete(deadline: Deadline) -> int:
            self.finish(lambda: work, signature, deadline.seconds, sources)
            sender = int(work._source_rank()) if source is None else source
            _, num_bytes, dtype = HEADER.unpack(bytes(message[: HEADER.size].tolist()))
            contents, dtype = message[HEADER.size :][:num_bytes], dtype.rstrip(b"\0").decode()
            Message(sender, tag, dtype, contents).copy_to(tensor, self.ranks[sender], "recv")
            return sender

        return MessageWork(complete, work.is_completed, [tensor], timeout)

    def finish(
        self, start: Callable[[], Work], signature: Signature, timeout: float, ranks: Sequence[int]
    ) -> None:
        """Start an operation, and wait until ``ranks`` have done their part of it.

        Raises:
            CollectiveFailed: If they don't.
        """
        with self._naming(signature, timeout, ranks):
            start().wait(timedelta(seconds=timeout))

    @contextmanager
    def _naming(self, signature: Signature, timeout: float, ranks: Sequence[int]) -> Iterator[None]:
        """Have Gloo's errors name the ranks to blame, among ``ranks``."""
        try:
            yield
        except CollectiveFailed:
            raise
        except RuntimeError as error:
            if is_of_loader(error):
                raise
            # The rank that failed first has said why before it closed its connections. If time was
            # up, those of other hosts may be waiting for one there, and are about to name that.
            is_late = "timed out" in str(error).lower()
            if (told := self._told_fault(_FAULT_SECONDS if is_late else 0.0)) is not None:
                raise told.error(signature.operation) from error
            names = [self.ranks[rank] for rank in ranks if rank != self.rank]
            kind: type[CollectiveFailed] = PeerLost
            text = (
                f"One of the ranks {names}, on other hosts, was lost in {signature}: what it wrote "
                "last tells why."
            )
            if is_late:
                kind = CollectiveTimeout
                text = (
                    f"Not all of the ranks {names}, on other hosts, came to {signature} within "
                    f"{timeout:g} s. See what they do there."
                )
            raise kind(f"{text} Gloo says: {error}", names, signature.operation) from error

    def tell(self, error: CollectiveFailed) -> None:
        """Tell all ranks the error that broke the group, unless one was told already."""

        def tell(store: dist.Store) -> None:
            if not store.check([_FAULT]):
                store.set(_FAULT, Fault.of(error).encode().decode())

        self._ask(tell)

    def _told_fault(self, seconds: float) -> Fault | None:
        def told(store: dist.Store) -> Fault | None:
            is_told = Deadline(seconds).until(partial(store.check, [_FAULT]), _POLL_SECONDS)
            return Fault.decode(bytes(store.get(_FAULT))) if is_told else None

        return self._ask(told)

    def _ask(self, call: Callable[[dist.Store], _Answer]) -> _Answer | None:
        """Return ``call(store)``, or None if the store is gone with the rank that held it.

        Then it isn't asked again. Shown by test_store_behind_a_cut_link_is_asked_once.
        """
        if (store := self._store) is not None:
            try:
                return answered(partial(call, store), STORE_SECONDS)
            except RuntimeError:
                self._store = None
        return None

    def open(self) -> Any:
        """Return Gloo's group, or raise GroupClosed."""
        if self.gloo is None:
            raise GroupClosed("This process group was destroyed, or has failed before.")
        return self.gloo


class HostsCollectives(Collectives):
    """The collectives among the ranks of several hosts."""

    _transport: HostsTransport  # type: ignore[assignment]

    def __init__(self, transport: HostsTransport, signature: Signature, deadline: Deadline) -> None:
        super().__init__(transport, signature, deadline)  # type: ignore[arg-type]
        self._local = Collectives(transport.local, signature, deadline)
        later = Deadline(deadline.seconds + 2 * _FAULT_SECONDS)
        self._after_network = Collectives(transport.local, signature, later)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._local.barrier()
        self._is_agreed_in(self._transport.leaders)
        self._after_network.barrier()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Combine all ranks' tensors, in rank order on each host and then in the hosts' order."""
        if reduction.name == "AVG" and reduction.accumulate_in is not None:
            # The sum of narrow numbers may not fit, and is to be rounded once.
            wide = tensor.to(reduction.accumulate_in)
            self.all_reduce(wide, reduction_for(dist.ReduceOp.AVG, wide.dtype))
            tensor.copy_(wide)
            return
        local = reduction._replace(name="SUM") if reduction.name == "AVG" else reduction
        self._local.all_reduce(tensor, local)
        between = local._replace(factor=None)
        if tensor.nbytes <= _ONE_COLUMN_BYTES:
            self._all_reduce_in(self._transport.leaders, tensor, between)
            self._after_network.broadcast(tensor, 0)
        else:
            num_columns, index = self._transport.num_columns, self._transport.local.rank
            parts = tensor.split(-(-tensor.numel() // num_columns))
            # A rank that is in no column has none.
            parts += (tensor[:0],) * (self._transport.local.size - len(parts))
            self._all_reduce_in(self._transport.column, parts[index], between)
            self._after_network.gather(parts, parts[index])
        if reduction.name == "AVG":
            reduction.divide(tensor, self._transport.size)

    def _all_reduce_in(self, network: Network | None, tensor: Tensor, reduction: Reduction) -> None:
        """Combine the tensors of the ranks of ``network``, if this rank is in it."""
        if self._is_agreed_in(network):
            for piece in pieces(tensor.numel(), _PIECE_BYTES // tensor.element_size()):
                self._all_reduce_slice(network, tensor[piece], reduction)

    def _all_reduce_slice(self, network: Network, part: Tensor, reduction: Reduction) -> None:
        """Each rank of ``network`` combines its part of the elements, and sends that to all."""
        each = -(-part.numel() // network.size)
        parts = [part[i * each : (i + 1) * each] for i in range(network.size)]
        local_numel = len(parts[network.rank])
        result = part.new_empty(each)
        received = self._all_to_all(network, parts, [local_numel] * network.size)
        reduction.into(result[:local_numel], received)
        part.copy_(self._all_gather(network, result).view(-1)[: part.numel()])

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        """Combine all ranks' tensors; rank ``root`` gets the result, in place."""
        result = tensor.clone()
        self.all_reduce(result, reduction)
        if self._transport.rank == root:
            tensor.copy_(result)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the tensor of rank ``root`` to every rank."""
        host, index = self._transport.positions[root]
        is_roots_host = host == self._transport.host
        if is_roots_host:
            self._local.broadcast(tensor, index)
        else:
            self._local.barrier()
        if self._is_agreed_in(leaders := self._transport.leaders):
            options = dist.BroadcastOptions()
            options.rootRank = host
            self._run(leaders, "broadcast", [_bytes(tensor)], options)
        if is_roots_host:
            self._after_network.barrier()
        else:
            self._after_network.broadcast(tensor, 0)

    def all_gather(self, outputs: Tensors, tensor: Tensor) -> None:
        """Copy rank i's tensor, all of one length, to every rank's i-th output."""
        transport, numel = self._transport, tensor.numel()
        if transport.is_even and tensor.nbytes > _ONE_COLUMN_BYTES:
            self._local.barrier()
            assert self._is_agreed_in(transport.column)
            rows = self._all_gather(transport.column, tensor)
            by_index = tensor.new_empty(transport.local.size, *rows.shape)
            self._after_network.gather(list(by_index.flatten(1)), rows.view(-1))
            for rank, output in enumerate(outputs):
                host, index = transport.positions[rank]
                output.copy_(by_index[index, host])
            return
        # Gloo gathers equal sizes: as many rows for each host as the largest host has ranks.
        most = max(map(len, transport.hosts))
        everything = tensor.new_empty(len(transport.hosts), most, numel)
        block = tensor.new_empty(most, numel)
        self._local.gather(list(block[: transport.local.size]) if transport.leaders else [], tensor)
        if self._is_agreed_in(leaders := transport.leaders):
            everything = self._all_gather(leaders, block.view(-1)).view_as(everything)
        self._after_network.broadcast(everything.view(-1), 0)
        for rank, output in enumerate(outputs):
            output.copy_(everything[transport.positions[rank]])

    def gather(self, outputs: Tensors, tensor: Tensor) -> None:
        """As :meth:`all_gather`, on the root alone, which gives ``outputs``."""
        ranks, root = range(self._transport.size), self._signature.root
        inputs = [tensor if rank == root else tensor[:0] for rank in ranks]
        for _, received in self._exchange_parts(inputs, [list(map(len, inputs)) for _ in ranks]):
            for output, part in zip(outputs, received, strict=False):
                output.copy_(part)

    def all_gather_uneven(self, outputs: Tensors, tensor: Tensor) -> None:
        """As :meth:`all_gather`, for tensors of different lengths."""
        self._check_lengths([tensor] * len(outputs), outputs)
        padded = tensor.new_empty(max(map(len, outputs)))
        padded[: len(tensor)].copy_(tensor)
        rows = padded.new_empty(len(outputs), len(padded))
        self.all_gather(list(rows), padded)
        for output, row in zip(outputs, rows, strict=True):
            output.copy_(row[: len(output)])

    def _exchange_parts(
        self, inputs: Tensors, lengths: Sequence[Sequence[int]]
    ) -> Iterator[tuple[slice, Tensors]]:
        """Yield, as the only piece, every rank's input for this rank."""
        self.barrier()
        incoming = [theirs[self._transport.rank] for theirs in lengths]
        yield slice(None), self._all_to_all(self._transport.everyone, inputs, incoming)

    def _is_agreed_in(self, network: Network | None) -> TypeGuard[Network]:
        """Return whether this rank is in ``network``, once all ranks of that have made this call.

        Raises:
            CollectiveMismatch: On all of them, if they haven't made the same call.
        """
        if network is None:
            return False
        fingerprint, words = encoded(self._signature)
        call = bytearray(fingerprint + words.ljust(WORDS_BYTES))
        rows = self._all_gather(network, torch.frombuffer(call, dtype=torch.uint8))
        others = {
            rank: bytes(row[FINGERPRINT_BYTES:]).decode(errors="replace").strip()
            for rank, row in zip(network.ranks, rows.tolist(), strict=True)
            if bytes(row[:FINGERPRINT_BYTES]) != fingerprint
        }
        if others:
            raise self._signature.mismatch(network.ranks[network.rank], others)
        return True

    def _all_gather(self, network: Network, tensor: Tensor) -> Tensor:
        """Return the rows of the ranks of ``network``, which give flat tensors of one length."""
        rows = tensor.new_empty(network.size, len(tensor))
        self._run(network, "_allgather_base", _bytes(rows), _bytes(tensor), AllgatherOptions())
        return rows

    def _all_to_all(self, network: Network, inputs: Tensors, incoming: Sequence[int]) -> Tensors:
        """Send the i-th input to rank i; return a tensor from each rank, of these lengths."""
        outgoing = torch.cat(list(inputs))
        received = outgoing.new_empty(sum(incoming))
        lengths = incoming, map(len, inputs)
        sizes = [[n * received.element_size() for n in each] for each in lengths]
        options = dist.AllToAllOptions()
        self._run(network, "alltoall_base", _bytes(received), _bytes(outgoing), *sizes, options)
        return list(received.split(list(incoming)))

    def _run(self, network: Network, method: str, *arguments: Any) -> None:
        """Carry out a collective of Gloo's, whose last argument is its options."""
        seconds = self._deadline.seconds
        arguments[-1].timeout = timedelta(seconds=seconds)
        start = partial(getattr(network.open(), method), *arguments)
        network.finish(start, self._signature, seconds, range(network.size))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
