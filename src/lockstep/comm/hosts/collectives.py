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
from torch.distributed import AllToAllOptions, BroadcastOptions

from lockstep.comm.base_group import Options
from lockstep.comm.collectives import Collectives, pieces
from lockstep.comm.dynamo import uncompiled
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.hosts.network import Network
from lockstep.comm.hosts.transport import HostsTransport
from lockstep.comm.reduction import Reduction, reduction_for
from lockstep.comm.transport import Signature
from lockstep.comm.work import GroupWork, Run
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from lockstep.torch_private import AllgatherOptions

# What leaders exchange at a time: it bounds the memory for what comes from the other hosts.
_PIECE_BYTES = 32 * 1024 * 1024
# Ranks wait for their leader, which waits for other hosts, a little longer than it does: so they
# hear from it which rank didn't come, and don't take it for that one.
_PATIENCE_SECONDS = 2.0


class HostsCollectives(Collectives):
    """The collectives among the ranks of several hosts.

    Args:
        ranks: The ranks.
        signature: The call.
        timeout: How many seconds a rank waits for the others, each time that it does.
    """

    def __init__(self, ranks: HostsTransport, signature: Signature, timeout: float) -> None:
        self._ranks = ranks
        self._signature = signature
        self._timeout = timeout
        self._local = Collectives(ranks.local, signature, timeout)
        self._after_leader = Collectives(ranks.local, signature, timeout + _PATIENCE_SECONDS)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._local.barrier()
        self._leaders()
        self._after_leader.barrier()

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Combine all ranks' tensors, and have the result in each.

        In rank order within a host, and then in the order of the hosts.
        """
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

    def _all_reduce_between(
        self, leaders: Network, part: torch.Tensor, reduction: Reduction
    ) -> None:
        """Each leader combines its share of the elements, and sends that to all."""
        each = -(-part.numel() // leaders.size)
        sizes = [len(part[i * each : (i + 1) * each]) for i in range(leaders.size)]
        own = sizes[leaders.rank]
        received = part.new_empty(own * leaders.size)
        self._all_to_all(leaders, received, [own] * leaders.size, part, sizes)
        result = part.new_empty(each)
        if own:
            reduction.into(result[:own], received.split(own))
        gathered = part.new_empty(each * leaders.size)
        self._all_gather(leaders, gathered, result)
        part.copy_(gathered[: part.numel()])

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> None:
        """Combine all ranks' tensors, and have the result on ``root``."""
        result = tensor.clone()
        self.all_reduce(result, reduction)
        if self._ranks.rank == root:
            tensor.copy_(result)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Have ``root``'s tensor on every rank."""
        host, index = self._ranks.position_of(root)
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

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Have every rank's tensor, all of one size, on every rank."""
        ranks, numel = self._ranks, tensor.numel()
        # Gloo gathers equal sizes: as many rows for each host as the largest host has ranks.
        most = max(map(len, ranks.hosts))
        block = tensor.new_empty(most, numel)
        everything = tensor.new_empty(len(ranks.hosts), most, numel)
        self._local.gather(list(block[: ranks.local.size]) if ranks.is_leader else [], tensor)
        if leaders := self._leaders():
            self._all_gather(leaders, everything.view(-1), block.view(-1))
        self._after_leader.broadcast(everything.view(-1), 0)
        for rank, output in enumerate(outputs):
            output.copy_(everything[ranks.position_of(rank)])

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As :meth:`all_gather`, on the root alone, which gives ``outputs``."""
        self.barrier()
        root = self._signature.root or 0
        sizes = [tensor.numel() * (rank == root) for rank in range(self._ranks.size)]
        self._send_parts(outputs or [tensor[:0]] * self._ranks.size, tensor, sizes)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """Have on rank i the i-th of the tensors, all of one size, that ``root`` gives."""
        self.barrier()
        given = list(inputs) or [output[:0]] * self._ranks.size
        outputs = [output if rank == root else output[:0] for rank in range(self._ranks.size)]
        self._send_parts(outputs, torch.cat(given), list(map(len, given)))

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        """Combine, on rank i, the i-th of each rank's tensors, which may differ in size."""
        self.barrier()
        outgoing = torch.cat(list(inputs))
        if reduction.factor is not None:
            outgoing.mul_(reduction.factor)
        parts = [output.new_empty(output.numel()) for _ in range(self._ranks.size)]
        self._send_parts(parts, outgoing, list(map(len, inputs)))
        reduction.into(output, parts)

    def all_gather_uneven(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As :meth:`all_gather`, where the ranks' tensors differ in size."""
        self._check_lengths([tensor] * len(outputs), outputs)
        longest = max(map(len, outputs))
        padded = tensor.new_empty(longest)
        padded[: tensor.numel()].copy_(tensor)
        everyone = tensor.new_empty(self._ranks.size, longest)
        self.all_gather(list(everyone), padded)
        for output, theirs in zip(outputs, everyone, strict=True):
            output.copy_(theirs[: output.numel()])

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Have the i-th rank's j-th input as the j-th rank's i-th output."""
        self._check_lengths(inputs, outputs)
        self._send_parts(outputs, torch.cat(list(inputs)), list(map(len, inputs)))

    def _leaders(self) -> Network | None:
        """On a leader, its network, when all hosts have made the same call; else None."""
        leaders = self._ranks.leaders
        if leaders is not None:
            leaders.agree(self._signature, self._timeout)
        return leaders

    def _all_gather(self, network: Network, output: torch.Tensor, tensor: torch.Tensor) -> None:
        options = AllgatherOptions()
        self._run(network, "_allgather_base", _bytes(output), _bytes(tensor), options)

    def _send_parts(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, sizes: Sequence[int]
    ) -> None:
        """Send the i-th part of ``tensor`` to rank i, and have what rank i sends in output i."""
        incoming = list(map(len, outputs))
        received = tensor.new_empty(sum(incoming))
        self._all_to_all(self._ranks.everyone, received, incoming, tensor, sizes)
        for output, part in zip(outputs, received.split(incoming), strict=True):
            output.copy_(part)

    def _all_to_all(
        self,
        network: Network,
        output: torch.Tensor,
        output_sizes: Sequence[int],
        tensor: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        width = tensor.element_size()
        num_bytes = [[size * width for size in each] for each in (output_sizes, sizes)]
        options = AllToAllOptions()
        self._run(network, "alltoall_base", _bytes(output), _bytes(tensor), *num_bytes, options)

    def _run(self, network: Network, method: str, *arguments: Any) -> None:
        network.run(method, *arguments, signature=self._signature, timeout=self._timeout)


@uncompiled
class HostsGroup(SharedMemoryGroup):
    """The process group behind the backend ``"shm"`` where ranks are on several hosts."""

    _transport: HostsTransport  # type: ignore[assignment]

    def _collectives(self, signature: Signature, timeout: float) -> HostsCollectives:
        return HostsCollectives(self._transport, signature, timeout)

    def _submit(self, results: Sequence[torch.Tensor], opts: Options, *runs: Run) -> GroupWork:
        return super()._submit(results, opts, *(partial(self._fail_together, run) for run in runs))

    def _fail_together(self, run: Run, timeout: float) -> None:
        """Carry out a call; if it fails, tell all ranks of this host, and a leader all hosts."""
        try:
            run(timeout)
        except (PeerLost, CollectiveTimeout, CollectiveMismatch) as error:
            self._transport.break_off(error)
            raise


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)
