"""Packed sequences, taken apart and put together by sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import PackedSequence

from lockstep.nn.replicas.devices import move


def num_sequences(packed: PackedSequence) -> int:
    """How many sequences are in it: as many as have a first element."""
    return int(packed.batch_sizes[0])


def take(packed: PackedSequence, start: int, length: int, device: torch.device) -> PackedSequence:
    """``length`` of the sequences from ``start`` on, in the batch's own order, on ``device``."""
    return _pack(packed.data, _rows(packed)[:, start : start + length], device)


def join(parts: Sequence[PackedSequence], device: torch.device) -> PackedSequence:
    """All sequences of all parts, in the parts' order, on ``device``."""
    if len(parts) == 1:
        return parts[0].to(device)  # type: ignore[arg-type]  # torch gives one of the overloads
    rows, num_rows = [], 0
    for part in parts:
        own = _rows(part)
        rows.append(torch.where(own < 0, own, own + num_rows))
        num_rows += len(part.data)
    longest = max(map(len, rows))
    below = [pad(own, (0, 0, 0, longest - len(own)), value=-1) for own in rows]
    data = torch.cat([move(part.data, device) for part in parts])
    return _pack(data, torch.cat(below, dim=1), device)


def _rows(packed: PackedSequence) -> torch.Tensor:
    """Where in ``packed.data`` the elements are: a column for each sequence, -1 below its end."""
    sizes = packed.batch_sizes
    order = packed.unsorted_indices
    places = torch.arange(num_sequences(packed)) if order is None else order.cpu()
    starts = sizes.cumsum(0) - sizes
    # The longest come first: the sequences that have an element t are the sizes[t] first ones.
    return torch.where(places < sizes[:, None], starts[:, None] + places, -1)


def _pack(data: torch.Tensor, rows: torch.Tensor, device: torch.device) -> PackedSequence:
    there = rows >= 0
    order = there.sum(0).argsort(descending=True, stable=True)
    rows, there = rows[:, order], there[:, order]
    sizes = there.sum(1)
    chosen = data.index_select(0, rows[there].to(data.device))
    return PackedSequence(move(chosen, device), sizes[sizes > 0], order.to(device))
