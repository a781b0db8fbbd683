"""Values that all ranks have alike: one rank's, all ranks' rows, whether a flag is set on any."""

from __future__ import annotations

import functools
import json
import logging
import pickle
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.arguments import as_whole_number, check_flag, refusal
from lockstep.comm import (
    all_gather_json,
    broadcast_tensors,
    bytes_of,
    check_same_facts,
    device_of_facts,
    global_rank,
    start_all_reduce,
    sum_at,
    uncompiled,
)
from lockstep.errors import CollectiveMismatch
from lockstep.metrics import ranks_of_call, reduce
from lockstep.nn import backward_sync_of
from lockstep.tree import Collector, Header, decode, from_flat
from lockstep.world import device_in

__all__ = ["all_gather", "any", "broadcast"]

_log = logging.getLogger("lockstep")
_T = TypeVar("_T")


@uncompiled
def all_gather(tensor: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows of all ranks' ``tensor``, in rank order; gradients flow back to each rank. ::

        everyone, labels = lockstep.all_gather(model(x)), lockstep.all_gather(y)
        loss = F.cross_entropy(everyone @ everyone.T, labels)  # some loss between samples

    Each rank computes the loss of the global batch, and the gradients of a parallel model are those
    of one process. They are, too, if each rank compares its own samples with all, and
    :func:`lockstep.mean` is taken of these losses. Parts may be uneven.

    Every rank must call it, and run a backward through the result if one does; both block. The
    gradient of a row is the sum of those that the ranks' losses have. A number is a row. On one
    rank it returns ``tensor``.

    Args:
        tensor: This rank's rows, along dimension 0: as many as it has samples, or none. The other
            dimensions and the dtype are the same on all ranks.
        process_group: The ranks; by default all of :func:`init`.

    Raises:
        CollectiveMismatch: On every rank, naming one that gives something else.
        CollectiveFailed: If a rank is lost or late, or inside of ``join()``.
        TypeError: If ``tensor`` isn't a tensor.
    """
    group, _ = ranks_of_call("all_gather", process_group)
    if group.size() == 1 and isinstance(tensor, Tensor):
        return tensor if tensor.dim() else tensor.reshape(1)
    count = torch.tensor([len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 1])
    gathered = reduce({"rows": tensor, "counts": count}, "cat", process_group=process_group)
    rows: Tensor = gathered["rows"]
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return rows
    begin = int(gathered["counts"][: group.rank()].sum())
    local = tensor if tensor.dim() else tensor.reshape(1)
    all_rows: Tensor = _Rows.apply(local, rows, begin, group)  # type: ignore[no-untyped-call]
    return all_rows


@uncompiled
class _Rows(torch.autograd.Function):
    """The rows of all ranks, differentiated by those of this rank, in the losses of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, rows: Tensor, begin: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.own, ctx.group = slice(begin, begin + len(local)), group
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        total: Tensor = _SumOverRanks.apply(gradient, ctx.group)  # type: ignore[no-untyped-call]
        return total[ctx.own], None, None, None


@uncompiled
class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, in a loss that is itself the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        backward_sync_of(group).begin_before_collective()
        # Half precision would lose what a small part adds to a sum.
        wide = torch.promote_types(local.dtype, torch.float32)
        total = local.to(device_of_facts(group), wide, copy=True).contiguous()
        if total.numel():
            start_all_reduce(group, total.view(-1)).wait()
        return total.to(local.device, local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _SumOverRanks.apply(gradient, ctx.group)  # type: ignore[no-untyped-call]
        return total, None


def any(flag: bool | Tensor, *, process_group: dist.ProcessGroup | None = None) -> bool:
    """Return, on every rank, whether ``flag`` is true on any of them. ::

        stop = lockstep.any(loss.isnan())  # on all ranks, in the same step

    Every rank must call it; it blocks until all have, and costs one all-reduce of a few bytes.

    Args:
        flag: True or False, or a tensor of one element.
        process_group: The ranks; by default all of :func:`init`.

    Raises:
        CollectiveMismatch: On every rank, if one called something else, or gave no flag.
        CollectiveFailed: If a rank is lost or late, or inside of ``join()``.
        TypeError: If ``flag`` is neither True nor False.
    """
    group, device = ranks_of_call("any", process_group)
    refused: TypeError | None = None
    try:
        check_flag("flag", flag)
    except TypeError as error:
        refused = error
    counts = torch.zeros(1 + group.size(), dtype=torch.int32)
    counts[0] = refused is None and bool(flag)
    counts[1 + group.rank()] = refused is not None
    counts = counts.to(device)
    if group.size() > 1:
        sum_at(group, "any", counts)
    if refused is not None:
        raise refused
    num_true, *are_refused = counts.tolist()
    if 1 in are_refused:
        other = global_rank(group, are_refused.index(1))
        text = f"any: rank {other} gave something else than True or False."
        raise CollectiveMismatch(text, [other], "any")
    return bool(num_true)


def broadcast(
    value: _T,
    src: int = 0,
    *,
    allow_pickle: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> _T:
    """Return, on every rank, the ``value`` that rank ``src`` gave; the others' don't matter. ::

        name = lockstep.broadcast(time.strftime("run-%H%M%S"))

    Every rank must call it, with the same ``src``; it blocks until all have. Rank ``src`` gets back
    what it gave; the others get a copy. Tensors that are on an accelerator there are on that of
    each rank. On one rank nothing is sent.

    Args:
        value: Numbers, strings, bytes, tensors, arrays of NumPy's, None, and lists, tuples, sets
            and dicts of them: nothing of it is pickled.
        src: The number of the rank in ``process_group``.
        allow_pickle: Whether objects of other classes, within the value too, may be pickled there
            and unpickled here, which runs code that ``src`` chooses; each is told to the logger
            "lockstep". The same on every rank.
        process_group: The ranks; by default all of :func:`init`.

    Raises:
        CollectiveMismatch: On every rank, naming one that asks for something else, and for what.
        CollectiveFailed: If a rank is lost or late, or inside of ``join()``.
        TypeError: If ``value`` has an object of another class, and ``allow_pickle`` is false.
        ValueError: If there is no rank ``src``.
    """
    group, device = ranks_of_call("broadcast", process_group)
    sent = _Sent(bool(allow_pickle))
    refused: Exception | None = None
    content = b""
    try:
        check_flag("allow_pickle", allow_pickle)
        wanted = f"a rank from 0 to {group.size() - 1}"
        src = as_whole_number("src", src, wanted, at_least=0)
        if src >= group.size():
            raise ValueError(refusal("src", src, wanted))
        if src == group.rank():
            content = sent.content(value)
        facts = {"call": "broadcast", "src": src, "allow_pickle": bool(allow_pickle)}
    except Exception as error:  # what pickle raises may be of any class
        refused, facts = error, {"call": f"refused ({error})"}
    by_rank = all_gather_json(group, facts | {"bytes": len(content)}, device)
    if refused is not None:
        raise refused
    num_bytes = [told.pop("bytes", 0) for told in by_rank]  # of one rank alone there are any
    check_same_facts(group, "broadcast", by_rank)
    if group.size() == 1:
        return value
    if src == group.rank():
        tensors = [tensor.to(device) for tensor in sent.whole.values()]
        wire = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        broadcast_tensors(group, [wire], src)
        broadcast_tensors(group, tensors, src)
        return value
    wire = torch.empty(num_bytes[src], dtype=torch.uint8, device=device)
    broadcast_tensors(group, [wire], src)
    received = _Received(bytes(bytes_of(wire.cpu())), device)
    broadcast_tensors(group, received.flats.values(), src)
    return cast(_T, received.value(group, src))


class _Sent(Collector):
    """What one rank sends: the tensors in a value, objects in it as bytes, and the rest as JSON."""

    def __init__(self, allow_pickle: bool) -> None:
        super().__init__()
        self._allow_pickle = allow_pickle
        self._devices: dict[str, str] = {}
        self._classes: dict[str, str] = {}  # of what is pickled

    def content(self, value: object) -> bytes:
        """Return ``value`` as JSON, without the elements of its tensors."""
        try:
            tree = self.encode(value, "value")
        except TypeError as error:
            if self._allow_pickle:
                raise
            advice = "With broadcast(..., allow_pickle=True) ranks unpickle it."
            raise TypeError(f"{error} {advice}") from error
        return json.dumps([tree, self.headers, self._devices, self._classes]).encode()

    def encode(self, value: Any, path: str) -> Any:
        """Return ``value`` as JSON keeps it; a pickled object is a tensor of bytes there."""
        try:
            return super().encode(value, path)
        except TypeError:
            if not self._allow_pickle:
                raise
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        name = self.add(pickled, path)
        self._classes[name] = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"tensor": name}

    def add(self, tensor: Tensor, path: str) -> str:
        """Collect a tensor, and return its name."""
        name = super().add(tensor, path)
        if tensor.device.type != "cpu":
            self._devices[name] = tensor.device.type
        return name


class _Received:
    """What :class:`_Sent` made, on another rank.

    Attributes:
        flats: The elements of each tensor, to be filled.
    """

    def __init__(self, content: bytes, device: torch.device) -> None:
        self._tree, headers, self._devices, self._classes = json.loads(content)
        self._headers = {name: Header(*header) for name, header in headers.items()}
        self.flats = {
            name: torch.empty(header.numel, dtype=header.torch_dtype, device=device)
            for name, header in self._headers.items()
        }

    def value(self, group: dist.ProcessGroup, src: int) -> object:
        """Return the value, when ``flats`` are there."""
        local_rank, source = global_rank(group, group.rank()), global_rank(group, src)
        device = device_in(group)

        @functools.cache
        def made(name: str) -> Any:
            if kind := self._classes.get(name):
                pickled = bytes(bytes_of(self.flats[name].cpu()))
                text = f"unpickles {name}, a {kind} of {len(pickled)} bytes, from rank {source}"
                _log.info("Rank %d %s.", local_rank, text)
                try:
                    return pickle.loads(pickled)
                except Exception as error:
                    error.add_note(f"(broadcast: rank {local_rank} {text})")
                    raise
            tensor = from_flat(self.flats[name], self._headers[name])
            there = torch.device(self._devices.get(name, "cpu"))
            is_its_kind = device is not None and device.type == there.type
            return tensor.to(device if is_its_kind else there)

        return decode(self._tree, made)
