"""What ranks tell each other, and collectives that block, through a process group of any kind.

All collectives raise CollectiveFailed if a rank is lost, or doesn't come in time. They call the
group's own methods, not the functions of ``torch.distributed``: a group need not be in torch's
registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lockstep.comm.collectives import sum_sparse
from lockstep.comm.failures import global_rank
from lockstep.comm.shm.memory import bytes_of
from lockstep.comm.started import Started, can_average, start_all_reduce
from lockstep.errors import CollectiveMismatch
from lockstep.spans import span


def device_of_facts(group: ProcessGroup) -> torch.device:
    """The device of small tensors that ``group`` can carry and that are read at once."""
    # The CPU if the group carries CPU tensors: reading a GPU tensor waits for the GPU.
    device = torch.device("cpu")
    if not can_average(group, device) and device not in group._device_types:
        device = group._device_types[0]
    return device


def without_wait(values: Tensor, device: torch.device) -> Tensor:
    """Return ``values``, of the CPU, on ``device``, for which the host doesn't wait.

    It waits for a GPU in copies from memory that isn't pinned.
    """
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):  # not every kind of accelerator pins memory
            values = values.pin_memory()
    return values.to(device, non_blocking=True)


def any_rank(group: ProcessGroup, facts: Sequence[bool]) -> list[bool]:
    """Return which of ``facts`` hold on any rank. All ranks must call it; it blocks."""
    counts = torch.tensor(facts, dtype=torch.int32, device=device_of_facts(group))
    start_all_reduce(group, counts).wait()
    return [count > 0 for count in counts.tolist()]


def have_same(group: ProcessGroup, payload: bytes, device: torch.device) -> bool:
    """Return, on every rank, whether all ranks have the same ``payload``.

    All ranks must call it; it blocks. ``device`` is one whose tensors the group can carry.
    """
    # Not one of OpenSSL's, whose library is a megabyte.
    digest = hashlib.blake2b(payload, digest_size=32).digest()
    # Equal maxima of the digest and of its complement mean equal maximum and minimum.
    mine = [*digest, *(255 - byte for byte in digest)]
    maxima = torch.tensor(mine, dtype=torch.uint8, device=device)
    start_all_reduce(group, maxima, ReduceOp.MAX).wait()
    return maxima.tolist() == mine


def differing_facts(
    group: ProcessGroup, facts: object, device: torch.device | None = None
) -> list[Any]:
    """Return every rank's ``facts``, in rank order, if they differ, and else an empty list.

    All ranks must call it; it blocks. If nothing differs, it costs one all-reduce of 64 bytes.

    Args:
        group: The ranks.
        facts: What JSON can keep; dictionaries differ if their order does.
        device: One whose tensors the group can carry.
    """
    device = device or device_of_facts(group)
    if have_same(group, json.dumps(facts).encode(), device):
        return []
    found: list[Any] = all_gather_json(group, facts, device)
    return found


def check_same_facts(
    group: ProcessGroup,
    call: str,
    by_rank: Sequence[Mapping[str, Any]],
    cure: str = "Give the same on all.",
) -> None:
    """Raise CollectiveMismatch, naming both, if a rank told ``call`` other facts than rank 0."""
    for rank, facts in enumerate(by_rank):
        for name in [*by_rank[0], *facts]:
            first, other = by_rank[0].get(name, "missing"), facts.get(name, "missing")
            if other != first:
                here, there = global_rank(group, rank), global_rank(group, 0)
                text = f"{name} is {other} on rank {here} and {first} on rank {there}."
                raise CollectiveMismatch(f"{call}: {text} {cure}", [here], call)


def all_gather(group: ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Return every rank's ``tensor``, of one shape and dtype, in rank order, on every rank.

    All ranks must call it; it blocks, or on a GPU the current stream does.
    """
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    start = partial(group.allgather, [gathered], [tensor])
    Started(group, "all_gather", start, tensor.nbytes).wait()
    return gathered


def all_gather_bytes(group: ProcessGroup, payload: bytes, device: torch.device) -> Sequence[bytes]:
    """Return every rank's ``payload``, in rank order, on every rank; nothing is unpickled.

    All ranks must call it; it blocks. ``device`` is one whose tensors the group can carry.
    """
    lengths = all_gather(group, torch.tensor([len(payload)], device=device))
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = [part.cpu() for part in all_gather(group, padded.to(device))]
    pairs = zip(gathered, lengths, strict=True)
    return [bytes(bytes_of(part)[: int(length)]) for part, length in pairs]


def all_gather_json(group: ProcessGroup, value: object, device: torch.device | None = None) -> Any:
    """Return a list of every rank's ``value``, which JSON can keep, in rank order.

    All ranks must call it; it blocks. The group can carry tensors of ``device``.
    """
    payload = json.dumps(value).encode()
    by_rank = all_gather_bytes(group, payload, device or device_of_facts(group))
    return [*map(json.loads, by_rank)]


def all_gather_rows(group: ProcessGroup, *tensors: Tensor) -> list[list[Tensor]]:
    """Return every rank's ``tensors``, in rank order, all of which have as many rows on a rank.

    All ranks must call it, and one must have rows at least; it blocks.
    """
    counts = all_gather(group, torch.tensor([len(tensors[0])], device=tensors[0].device))
    most = max(map(int, counts))
    padded = (torch.cat([t, t.new_zeros(most - len(t), *t.shape[1:])]) for t in tensors)
    gathered = [all_gather(group, each) for each in padded]
    return [[each[rank][: int(count)] for each in gathered] for rank, count in enumerate(counts)]


def start_all_to_all(
    group: ProcessGroup,
    received: Tensor,
    incoming: Sequence[int],
    sent: Tensor,
    outgoing: Sequence[int],
) -> Started:
    """Start sending part ``r`` of ``sent`` to rank ``r``, and receiving one of each rank, in order.

    Every rank must call it; it returns at once. Both tensors have one dimension; ``incoming`` and
    ``outgoing`` are the sizes of their parts.
    """
    options = dist.AllToAllOptions()
    start = partial(group.alltoall_base, received, sent, [*incoming], [*outgoing], options)
    return Started(group, "all_to_all", start, sent.nbytes)


def send_and_receive(
    group: ProcessGroup,
    sent: torch.Tensor,
    destination: int,
    received: torch.Tensor,
    source: int,
    tag: int,
) -> None:
    """Send a tensor to one rank, and receive one of another rank; an empty one isn't sent.

    The other ranks have to do their parts of it at the same time; it blocks.
    """
    works = []
    if received.numel():
        start = partial(group.recv, [received], source, tag)
        works.append(Started(group, "recv", start, received.nbytes))
    if sent.numel():
        start = partial(group.send, [sent], destination, tag)
        works.append(Started(group, "send", start, sent.nbytes))
    for work in works:
        work.wait()


def sum_rows(group: ProcessGroup, mine: Tensor, scale: float) -> tuple[Tensor, int]:
    """Return the sum of the ranks' sparse tensors times ``scale``, and the bytes this rank gave.

    See :func:`sum_sparse`.
    """
    num_bytes = 0

    def gathered(rows: Tensor) -> list[Tensor]:
        nonlocal num_bytes
        num_bytes += rows.nbytes
        return all_gather(group, rows)

    size = group.size()
    scaled = mine / size if scale == 1 / size else mine * scale  # with the bits of torch's DDP
    with span("rows"):
        return sum_sparse(gathered, scaled.coalesce()), num_bytes
