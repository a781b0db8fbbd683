"""The collectives among the ranks of several hosts, on two levels.

Within a host ranks combine in the memory that they share; then the first rank of each host, its
leader, exchanges the result with the other leaders, so that a host sends each byte once; then
the others take it from the leader's memory. What goes from single ranks to single ranks anyway
(gather, scatter, reduce-scatter, all-to-all) goes straight through the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm.collectives import Collectives, pieces
from lockstep.comm.hosts.network import Network
from lockstep.comm.hosts.transport import HostsTransport
from lockstep.comm.reduction import Reduction, reduction_for
from lockstep.comm.transport import Signature
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed, PeerLost

_Collective = TypeVar("_Collective", bound=Callable[..., None])

# What leaders exchange at a time: it bounds the memory for what comes from the other hosts.
_PIECE_BYTES = 32 * 1024 * 1024
# The leader waits for other hosts and the others wait for it. They wait a little longer, so that
# they hear from it who didn't come, and don't take it for the one.
_PATIENCE_SECONDS = 2.0


def _failing_together(collective: _Collective) -> _Collective:
    """Have a rank that can't go on tell all others of its host, and as leader all other hosts."""

    @wraps(collective)
    def telling(self: HostsCollectives, *args: Any, **kwargs: Any) -> None:
        try:
            collective(self, *args, **kwargs)
        except (PeerLost, CollectiveTimeout, CollectiveMismatch) as error:
            self.team.break_off(error)
            raise
        except GroupClosed:
            raise
        except Exception as error:
            name = self.team.name
            text = f"Rank {name} could not go on with {self._signature.operation}: {error!r}"
            self.team.break_off(PeerLost(text, [name], self._signature.operation))
            raise

    return telling  # type: ignore[return-value]


class HostsCollectives(Collectives):
    """The collectives among the ranks of several hosts.

    Args:
        team: The ranks.
        signature: What they have called.
        timeout: How many seconds a rank waits for the others, each time that it does.
    """

    def __init__(self, team: HostsTransport, signature: Signature, timeout: float) -> None:
        self.team = team
        self._signature = signature
        self._timeout = timeout
        self._local = Collectives(team.local, signature, timeout)
        self._after_leader = Collectives(team.local, signature, timeout + _PATIENCE_SECONDS)

    @_failing_together
    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._local.barrier()
        self._between_leaders(lambda network: None)
        self._after_leader.barrier()

    @_failing_together
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Combine all ranks' tensors, in rank order, and have the result in each.

        In rank order within a host, and then in the order of the hosts.
        """
        if reduction.name == "AVG" and reduction.accumulate_in is not None:
            # Of narrow numbers the sum may not fit, and is to be rounded once.
            wide = tensor.to(reduction.accumulate_in)
            self.all_reduce(wide, reduction_for(dist.ReduceOp.AVG, wide.dtype))
            tensor.copy_(wide)
            return
        step = reduction._replace(name="SUM") if reduction.name == "AVG" else reduction
        self._local.all_reduce(tensor, step)
        across = step._replace(factor=None)
        self._between_leaders(lambda network: self._all_reduce_leaders(network, tensor, across))
        self._after_leader.broadcast(tensor, 0)
        if reduction.name == "AVG":
            reduction.divide(tensor, self.team.size)

    def _all_reduce_leaders(
        self, network: Network, tensor: torch.Tensor, reduction: Reduction
    ) -> None:
        """Each leader combines its share of the elements, and sends that to all."""
        for piece in pieces(tensor.numel(), _PIECE_BYTES // tensor.element_size()):
            part = tensor[piece]
            each = -(-part.numel() // network.size)
            shares = [part[i * each : (i + 1) * each] for i in range(network.size)]
            sizes = [share.numel() for share in shares]
            own = sizes[network.rank]
            received = part.new_empty(own * network.size)
            come = [own] * network.size
            network.all_to_all(received, come, part, sizes, self._signature, self._timeout)
            result = part.new_empty(each)
            if own:
                reduction.into(result[:own], received.split(own))
            gathered = part.new_empty(each * network.size)
            network.all_gather(gathered, result, self._signature, self._timeout)
            part.copy_(gathered[: part.numel()])

    @_failing_together
    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> None:
        """Combine all ranks' tensors, in rank order, and have the result on ``root``."""
        result = tensor.clone()
        self.all_reduce(result, reduction)
        if self.team.rank == root:
            tensor.copy_(result)

    @_failing_together
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Have what ``root`` has on every rank."""
        host, place = self.team.place_of(root)
        if host == self.team.host:
            self._local.broadcast(tensor, place)
        else:
            self._local.barrier()
        self._between_leaders(
            lambda network: network.broadcast(tensor, host, self._signature, self._timeout)
        )
        if host == self.team.host:
            self._after_leader.barrier()
        else:
            self._after_leader.broadcast(tensor, 0)

    @_failing_together
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Have every rank's tensor, all of one size, on every rank."""
        team, numel = self.team, tensor.numel()
        most = max(map(len, team.hosts))
        # As many places for each host as the largest has ranks: Gloo gathers equal sizes.
        everything = tensor.new_empty(len(team.hosts) * most * numel)
        block = tensor.new_empty(most * numel)
        places = [block[i * numel : (i + 1) * numel] for i in range(team.local.size)]
        self._local.gather(places if team.is_leader else [], tensor)
        self._between_leaders(
            lambda network: network.all_gather(everything, block, self._signature, self._timeout)
        )
        self._after_leader.broadcast(everything, 0)
        for rank, output in enumerate(outputs):
            host, place = team.place_of(rank)
            start = (host * most + place) * numel
            output.copy_(everything[start : start + numel])

    @_failing_together
    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As :meth:`all_gather`, on the rank that gives ``outputs``; the others give none."""
        self.barrier()
        root = self._signature.root or 0
        self.team.everyone.gather(outputs, tensor, root, self._signature, self._timeout)

    @_failing_together
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """Have on rank i the i-th of the tensors, all of one size, that ``root`` gives."""
        self.barrier()
        self.team.everyone.scatter(output, inputs, root, self._signature, self._timeout)

    @_failing_together
    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        """Combine, on rank i, the i-th of each rank's tensors, which may differ in size."""
        self.barrier()
        outgoing = torch.cat(list(inputs))
        if reduction.factor is not None:
            outgoing.mul_(reduction.factor)
        parts = [output.new_empty(output.numel()) for _ in range(self.team.size)]
        self._send_parts(parts, outgoing.split([part.numel() for part in inputs]))
        reduction.into(output, parts)

    @_failing_together
    def all_gather_uneven(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As :meth:`all_gather`, where the ranks' tensors differ in size."""
        self._check_lengths([tensor] * len(outputs), outputs)
        longest = max(map(len, outputs))
        padded = tensor.new_empty(longest)
        padded[: tensor.numel()].copy_(tensor)
        everyone = tensor.new_empty(self.team.size, longest)
        self.all_gather(list(everyone), padded)
        for output, theirs in zip(outputs, everyone, strict=True):
            output.copy_(theirs[: output.numel()])

    @_failing_together
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Have the i-th rank's j-th input as the j-th rank's i-th output."""
        self._check_lengths(inputs, outputs)
        self._send_parts(outputs, inputs)

    def _send_parts(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        incoming = [output.numel() for output in outputs]
        received = outputs[0].new_empty(sum(incoming))
        self.team.everyone.all_to_all(
            received,
            incoming,
            torch.cat(list(inputs)),
            [part.numel() for part in inputs],
            self._signature,
            self._timeout,
        )
        for output, part in zip(outputs, received.split(incoming), strict=True):
            output.copy_(part)

    def _between_leaders(self, exchange: Callable[[Network], None]) -> None:
        """On the leader, make sure that other hosts call the same, and exchange with them."""
        network = self.team.leaders
        if network is None:
            return
        network.agree(self._signature, self._timeout)
        exchange(network)
