"""The collectives among the ranks of several hosts, on two levels.

Ranks of one host combine their tensors in shared memory. Then the first rank of each host, its
leader, exchanges the result with the other leaders, so that a host sends each byte once; the other
ranks take the result from the leader's memory. Collectives between single ranks (gather, scatter,
reduce-scatter, all-to-all) go straight through the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllToAllOptions, BroadcastOptions

from lockstep.comm.base_group import Options
from lockstep.comm.collectives import Collectives, pieces
from lockstep.comm.dynamo import uncompiled
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.hosts.transport import HostsTransport, Network
from lockstep.comm.reduction import Reduction, reduction_for
from lockstep.comm.transport import Signature
from lockstep.comm.work import GroupWork, Run
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from lockstep.torch_private import AllgatherOptions

# Leaders exchange pieces of this size, which bounds the memory for the other hosts' data.
_PIECE_BYTES = 32 * 1024 * 1024
# Ranks wait for their leader a little longer than it waits for other hosts: then it tells them
# which rank is late, before they take it for the late one.
_PATIENCE_SECONDS = 2.0


class HostsCollectives(Collectives):
    """The collectives among the ranks of several hosts."""

    def __init__(self, ranks: HostsTransport, signature: Signature, timeout: float) -> None:
        self._ranks = ranks
        self._signature = signature
        self._timeout = timeout
        self._local = Collectives(ranks.local, signature, timeout)
        self._after_leader = Collectives(ranks.local, signature, timeout + _PATIENCE_SECONDS)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._local.barrier()
        self._leaders()
        self._after_leader.barrier()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Combine all ranks' tensors, in rank order on each host and then in the hosts' order."""
        if reduction.name == "AVG" and reduction.accumulate_in is not None:
            # The sum of narrow numbers may not fit, and is to be rounded once.
            wide = tensor.to(reduction.accumulate_in)
            self.all_reduce(wide, reduction_for(dist.ReduceOp.AVG, wide.dtype))
            tensor.copy_(wide)
            return
        step = reduction._replace(name="SUM") if reduction.name == "AVG" else reduction
        self._local.all_reduce(tensor, step)
        if leaders := self._leaders():
            for piece in pieces(tensor.numel(), _PIECE_BYTES // tensor.element_size()):
                self._all_reduce_between(leaders, tensor[piece], step._replace(factor=None))
        self._after_leader.broadcast(tensor, 0)
        if reduction.name == "AVG":
            reduction.divide(tensor, self._ranks.size)

    def _all_reduce_between(self, leaders: Network, part: Tensor, reduction: Reduction) -> None:
        """Each leader combines its share of the elements, and sends that to all."""
        each = -(-part.numel() // leaders.size)
        sizes = [len(part[i * each : (i + 1) * each]) for i in range(leaders.size)]
        own = sizes[leaders.rank]
        received = self._all_to_all(leaders, part, sizes, [own] * leaders.size)
        result = part.new_empty(each)
        reduction.into(result[:own], received)
        gathered = part.new_empty(each * leaders.size)
        self._all_gather(leaders, gathered, result)
        part.copy_(gathered[: part.numel()])

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> None:
        """Combine all ranks' tensors; rank ``root`` gets the result, in place."""
        result = tensor.clone()
        self.all_reduce(result, reduction)
        if self._ranks.rank == root:
            tensor.copy_(result)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the tensor of rank ``root`` to every rank."""
        host, index = self._ranks.positions[root]
        if host == self._ranks.host:
            self._local.broadcast(tensor, index)
        else:
            self._local.barrier()
        if leaders := self._leaders():
            options = BroadcastOptions()
            options.rootRank = host
            self._run(leaders, "broadcast", [_bytes(tensor)], options)
        if host == self._ranks.host:
            self._after_leader.barrier()
        else:
            self._after_leader.broadcast(tensor, 0)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy rank i's tensor, all of one length, to every rank's i-th output."""
        ranks, numel = self._ranks, tensor.numel()
        # Gloo gathers equal sizes: as many rows for each host as the largest host has ranks.
        most = max(map(len, ranks.hosts))
        block = tensor.new_empty(most, numel)
        everything = tensor.new_empty(len(ranks.hosts), most, numel)
        own_rows = list(block[: ranks.local.size]) if ranks.leaders is not None else []
        self._local.gather(own_rows, tensor)
        if leaders := self._leaders():
            self._all_gather(leaders, everything.view(-1), block.view(-1))
        self._after_leader.broadcast(everything.view(-1), 0)
        for rank, output in enumerate(outputs):
            output.copy_(everything[ranks.positions[rank]])

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """As :meth:`all_gather`, on the root alone, which gives ``outputs``."""
        self.barrier()
        root = self._signature.root or 0
        sizes = [tensor.numel() * (rank == root) for rank in range(self._ranks.size)]
        self._send_parts(outputs or [tensor[:0]] * self._ranks.size, tensor, sizes)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Copy the i-th input of rank ``root``, all of one length, to rank i's output."""
        self.barrier()
        given = list(inputs) or [output[:0]] * self._ranks.size
        outputs = [output if rank == root else output[:0] for rank in range(self._ranks.size)]
        self._send_parts(outputs, torch.cat(given), list(map(len, given)))

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction
    ) -> None:
        """Combine all ranks' i-th inputs, which differ in length by i, into rank i's output."""
        self.barrier()
        outgoing = torch.cat(list(inputs))
        if reduction.factor is not None:
            outgoing.mul_(reduction.factor)
        sizes, incoming = list(map(len, inputs)), [output.numel()] * self._ranks.size
        reduction.into(output, self._all_to_all(self._ranks.everyone, outgoing, sizes, incoming))

    def all_gather_uneven(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """As :meth:`all_gather`, for tensors of different lengths."""
        self._check_lengths([tensor] * len(outputs), outputs)
        longest = max(map(len, outputs))
        padded = tensor.new_empty(longest)
        padded[: tensor.numel()].copy_(tensor)
        everyone = tensor.new_empty(self._ranks.size, longest)
        self.all_gather(list(everyone), padded)
        for output, theirs in zip(outputs, everyone, strict=True):
            output.copy_(theirs[: output.numel()])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Copy rank i's j-th input to rank j's i-th output; lengths may differ."""
        self._check_lengths(inputs, outputs)
        self._send_parts(outputs, torch.cat(list(inputs)), list(map(len, inputs)))

    def _leaders(self) -> Network | None:
        """Return the leaders' network once all leaders have made this call; None on other ranks."""
        leaders = self._ranks.leaders
        if leaders is not None:
            leaders.agree(self._signature, self._timeout)
        return leaders

    def _all_gather(self, network: Network, output: Tensor, tensor: Tensor) -> None:
        options = AllgatherOptions()
        self._run(network, "_allgather_base", _bytes(output), _bytes(tensor), options)

    def _send_parts(self, outputs: Sequence[Tensor], tensor: Tensor, sizes: Sequence[int]) -> None:
        """Send the i-th part of ``tensor`` to rank i, and copy the part from rank i to output i."""
        incoming = list(map(len, outputs))
        received = self._all_to_all(self._ranks.everyone, tensor, sizes, incoming)
        for output, part in zip(outputs, received, strict=True):
            output.copy_(part)

    def _all_to_all(
        self, network: Network, tensor: Tensor, sizes: Sequence[int], incoming: Sequence[int]
    ) -> Sequence[Tensor]:
        """Send the i-th part of ``tensor`` to rank i; return a part from each, of these sizes."""
        received = tensor.new_empty(sum(incoming))
        num_bytes = [[n * tensor.element_size() for n in each] for each in (incoming, sizes)]
        options = AllToAllOptions()
        self._run(network, "alltoall_base", _bytes(received), _bytes(tensor), *num_bytes, options)
        parts: Sequence[Tensor] = received.split(list(incoming))
        return parts

    def _run(self, network: Network, method: str, *arguments: Any) -> None:
        network.run(method, *arguments, signature=self._signature, timeout=self._timeout)


@uncompiled
class HostsGroup(SharedMemoryGroup):
    """The process group behind the backend ``"shm"`` where ranks are on several hosts."""

    _transport: HostsTransport  # type: ignore[assignment]

    def _collectives(self, signature: Signature, timeout: float) -> HostsCollectives:
        return HostsCollectives(self._transport, signature, timeout)

    def _submit(self, results: Sequence[Tensor], opts: Options, *runs: Run) -> GroupWork:
        return super()._submit(results, opts, *(partial(self._fail_together, run) for run in runs))

    def _fail_together(self, run: Run, timeout: float) -> None:
        """Carry out a call; if it fails, tell all other ranks."""
        try:
            run(timeout)
        except (PeerLost, CollectiveTimeout, CollectiveMismatch) as error:
            self._transport.break_off(error)
            raise


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
