"""The device of each rank, on which all ranks agree."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.entries import value_in
from lockstep.errors import BackendUnavailable, RendezvousFailed
from lockstep.world.devices import carried_device, choose_backend, one_kind, usable_device
from lockstep.world.environment import Placement
from lockstep.world.network import addresses, check_nccl_interfaces
from lockstep.world.rendezvous import roll_call

_log = logging.getLogger("lockstep")


class Wanted(NamedTuple):
    """The arguments of ``init()``."""

    backend: str | None
    device: torch.device | None
    timeout: timedelta


def agreed_device(
    place: Placement, local: tuple[int, int], wanted: Wanted, store: dist.Store
) -> torch.device:
    """Return the device of this rank, when all ranks have told theirs.

    Raises:
        BackendUnavailable: On every rank, if one can't have the device that it wants, or if the
            devices have no default backend together, or NCCL, if it is used, has no interface.
    """
    device, trouble, of_nccl = torch.device("cpu"), "", ""
    try:
        device = usable_device(place, local, wanted.device, wanted.backend)
        device = carried_device(device, wanted.backend, is_chosen=wanted.device is None)
    except BackendUnavailable as error:
        trouble = str(error)
    if uses_nccl(wanted.backend or choose_backend(device), device):
        try:
            check_nccl_interfaces(os.environ, addresses())
        except BackendUnavailable as error:
            of_nccl = str(error)  # it doesn't matter if the ranks take the CPU
    note = json.dumps([device.type, wanted.device is None, trouble, of_nccl])
    notes = roll_call(dist.PrefixStore("devices", store), place, wanted.timeout, note)
    kinds, chosen, *troubles = zip(*map(_read, notes), strict=True)
    _raise_first(troubles[0])
    if wanted.backend is None and one_kind(kinds, chosen) is None:
        if place.rank == 0:
            _log.warning(
                "Ranks compute on the CPU: not every host has a device for each of its ranks."
            )
        return torch.device("cpu")
    _raise_first(troubles[1])
    return device


def _read(note: str) -> tuple[str, bool, str, str]:
    try:
        kind, is_chosen, *troubles = value_in(note)
        trouble, of_nccl = map(str, troubles)
        return str(kind), bool(is_chosen), trouble, of_nccl
    except (ValueError, TypeError) as error:
        raise RendezvousFailed(
            "What the ranks tell each other of their devices can't be read: something else than "
            "they writes to their store."
        ) from error


def _raise_first(troubles: Sequence[str]) -> None:
    for rank, told in enumerate(troubles):
        if told:
            raise BackendUnavailable(f"On rank {rank}: {told}")


def uses_nccl(backend: str, device: torch.device) -> bool:
    """Whether tensors on ``device`` are sent by NCCL."""
    return "nccl" in backend and device.type == "cuda"
